"""`ssdtune profile` as a whole: flags, what is kept, the display, and an end in the middle."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ssdtune.cli.main import main
from ssdtune.cli.profile_command import Display
from tests.hardware.tiny import TINY

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("ssdtune.hardware.measure.QUICK", TINY)


def test_kept_figures_are_shown_again(tmp_path, capsys, monkeypatch, quick):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "drive"
    folder.mkdir()
    assert main(["profile", str(folder), "--quick", "--json"]) == 0
    out, err = capsys.readouterr()
    first = json.loads(out)
    kept = tmp_path / "cache/ssdtune/profile.json"
    assert first == json.loads(kept.read_text())
    assert "profile: " in err and str(kept) in err
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "drive", "--quick"]) == 0  # the same folder by another name
    out, err = capsys.readouterr()
    assert first["measured_at"] in out and "What limits full fine-tuning here:" in out
    assert "profile: " not in err
    assert main(["profile", str(folder), "--quick", "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == first and err == ""
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drive-seconds", "0"], "--drive-seconds must be above 0"),
        (["--largest-file", "much"], '--largest-file: "much" is not a size'),
        (["--largest-file", "1MiB"], "--largest-file must be at least 128MiB"),
        (["--model", "missing"], "missing does not exist. Name a model folder"),
    ],
)
def test_bad_flags(tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["profile", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_flags_reach_the_effort(tmp_path, monkeypatch):
    seen = []

    def profile(folders, **options):
        seen.append(options["effort"])
        raise KeyboardInterrupt

    monkeypatch.setattr("ssdtune.api.profile", profile)
    assert (
        main(["profile", str(tmp_path), "--drive-seconds", "90", "--largest-file", "1GiB"]) == 130
    )
    assert (seen[0].drive_s, seen[0].drives_s, seen[0].largest_file_bytes) == (90, 90, 1 << 30)


def test_ctrl_c_in_the_middle_leaves_nothing(tmp_path):
    folder = tmp_path / "drive"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "ssdtune", "profile", str(folder), "--output", str(tmp_path / "kept.json")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "in flight" in line or "requests of" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, "".join(lines) + err
    assert out == "" and err.rstrip().endswith("error: interrupted")
    assert [path.name for path in tmp_path.rglob("*")] == ["drive"]


def test_display_on_a_terminal_and_elsewhere():
    live, plain, quiet = io.StringIO(), io.StringIO(), io.StringIO()
    for stream, options in (
        (live, {"quiet": False, "live": True}),
        (plain, {"quiet": False, "live": False}),
        (quiet, {"quiet": True, "live": True}),
    ):
        stream.fileno = lambda: -1
        with Display(stream, **options) as display:
            display.show("/swap: io_uring, requests of 128 KiB", 0.25)
            display.show("/swap: io_uring, requests of 512 KiB", 0.5)
            display.show("memory", 1.0)
    assert "[#####...............]  25%  /swap: io_uring, requests of 128 KiB" in live.getvalue()
    assert live.getvalue().endswith("\r\x1b[K")
    assert plain.getvalue() == "profile: /swap: io_uring, requests of 128 KiB\nprofile: memory\n"
    assert quiet.getvalue() == ""


def test_the_data_sheet_of_a_machine_is_shown_to_be_changed(tmp_path, capsys):
    from ssdtune.hardware.datasheet import read_sheet

    assert main(["profile", "--show", "t4"]) == 0
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
    machine = read_sheet(tmp_path / "mine.toml")
    assert main(["profile", "--show", "t4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(json.dumps(machine.to_dict())) | {
        "machine": {**machine.machine, "file": "t4"}
    }
    assert main(["profile", "--show", "all"]) == 2
    assert "only of a100-80gb, h200, " in capsys.readouterr().err
