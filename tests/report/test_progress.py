"""The displays of a run: what they print, and where they are chosen. No clocks."""

from __future__ import annotations

import io
import math
import os
import pty
import subprocess
import sys

import pytest
from rich.console import Console

from ssdtune.report.progress import LiveProgress, PlainProgress, Progress, choose_progress

STEP = {
    "step": 1,
    "loss": 2.5,
    "learning_rate": 5e-5,
    "grad_norm": 1.25,
    "tokens_per_s": 1234.0,
    "step_s": 2.0,
    "stall_share": 0.125,
    "bytes_read": {"weights": 3_000_000, "moments": 1_000_000},
    "bytes_written": 2_000_000,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(progress: Progress, steps: int = 5) -> None:
    with progress:
        progress.start(steps, "1.1e9 parameters, all trained")
        for step in range(1, steps + 1):
            progress.step({**STEP, "step": step, "loss": 3.0 - step})
        progress.evaluation({"step": steps, "eval_loss": math.log(2), "eval_tokens": 77})
        progress.note("checkpoint-5 is complete")
        progress.finish("done")


def test_plain_lines() -> None:
    stream = io.StringIO()
    run(PlainProgress(stream, logging_steps=2))
    assert stream.getvalue().splitlines() == [
        "1.1e9 parameters, all trained",
        "step 2/5  loss 1.0000 (smoothed 1.4737)  lr 5e-05  grad norm 1.25  1234 tokens/s  2 s/step"
        "  stall 12%  read 4.00 MB  wrote 2.00 MB  6 s left",
        "step 4/5  loss -1.0000 (smoothed 0.3687)  lr 5e-05  grad norm 1.25  1234 tokens/s  2 s/step"
        "  stall 12%  read 4.00 MB  wrote 2.00 MB  2 s left",
        "step 5/5  loss -2.0000 (smoothed -0.2097)  lr 5e-05  grad norm 1.25  1234 tokens/s  2 s/step"
        "  stall 12%  read 4.00 MB  wrote 2.00 MB",
        "evaluation at step 5  loss 0.6931  perplexity 2  77 tokens",
        "checkpoint-5 is complete",
        "done",
    ]


def test_missing_and_odd_figures() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.start(3, first_step=3)
    progress.step({"step": 1})
    progress.step({"step": 2, "loss": math.nan, "grad_norm": math.inf})
    progress.step({"step": 3, "loss": 1.0})
    progress.evaluation({"step": 3, "eval_loss": 1e6})
    assert stream.getvalue().splitlines() == [
        "step 1/3",
        "step 2/3  loss nan  grad norm inf",
        "step 3/3  loss 1.0000 (smoothed 1.0000)",
        "evaluation at step 3  loss 1000000.0000  perplexity inf",
    ]


def test_live_display_shows_the_same_figures() -> None:
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=True, width=160, highlight=False, color_system=None
    )
    run(LiveProgress(console, auto_refresh=False))
    text = stream.getvalue()
    for part in ("step 5/5", "grad norm 1.25", "stall 12%", "read 4.00 MB", "perplexity 2", "done"):
        assert part in text
    assert text.endswith("done\n")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


def test_live_display_leaves_the_terminal_in_order_after_an_error() -> None:
    stream = io.StringIO()
    progress = LiveProgress(Console(file=stream, force_terminal=True), auto_refresh=False)
    with pytest.raises(RuntimeError), progress:
        progress.start(3)
        raise RuntimeError
    assert "\x1b[?25h" in stream.getvalue()


def test_markup_in_notes_is_text() -> None:
    stream = io.StringIO()
    progress = LiveProgress(Console(file=stream, width=80), auto_refresh=False)
    progress.note("[red]model[/blue]")
    assert stream.getvalue() == "[red]model[/blue]\n"


@pytest.mark.parametrize(
    ("stream", "options", "environ", "kind"),
    [
        (Terminal(), {}, {"TERM": "xterm"}, LiveProgress),
        (Terminal(), {"verbose": True}, {"TERM": "xterm"}, PlainProgress),
        (Terminal(), {"quiet": True}, {"TERM": "xterm"}, Progress),
        (Terminal(), {}, {"TERM": "dumb"}, PlainProgress),
        (Terminal(), {}, {"NO_COLOR": "1"}, PlainProgress),
        (Terminal(), {}, {"NO_COLOR": ""}, LiveProgress),
        (Terminal(), {}, {"CI": "true"}, PlainProgress),
        (io.StringIO(), {}, {"TERM": "xterm"}, PlainProgress),
        (io.StringIO(), {"quiet": True}, {}, Progress),
    ],
)
def test_choice(stream: io.StringIO, options: dict, environ: dict, kind: type) -> None:
    assert type(choose_progress(stream=stream, environ=environ, **options)) is kind


def test_quiet_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    run(choose_progress(quiet=True, environ={}))
    assert capfd.readouterr() == ("", "")


def test_stdout_is_never_touched(capfd: pytest.CaptureFixture[str]) -> None:
    run(choose_progress(environ={}))
    out, err = capfd.readouterr()
    assert out == "" and "step 5/5" in err


def test_on_a_real_terminal() -> None:
    script = (
        "import sys; from ssdtune.report.progress import choose_progress\n"
        "p = choose_progress(environ={'TERM': 'xterm'})\n"
        "with p:\n"
        "    p.start(2, 'plan'); p.step({'step': 1, 'loss': 1.5}); p.note('a note'); p.step({'step': 2})\n"
        "    p.finish('done')\n"
        "print(type(p).__name__)\n"
    )
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stderr=theirs,
        stdout=subprocess.PIPE,
        env=environ,
        text=True,
    )
    os.close(theirs)
    chunks = []
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    text = b"".join(chunks).decode()
    assert out == "LiveProgress\n"
    assert "step 2/2" in text and "a note" in text and text.rstrip().endswith("done")
