"""What a person sees of a run on stderr: a live display, plain lines, or nothing.

The trainer talks to a `Progress` and knows nothing of terminals; `choose_progress` picks the implementation.
Programs read `metrics.jsonl` instead (`ssdtune.report.metrics`), whose keys the `metrics` of `step` have. Every
key may be missing; what is missing isn't shown.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TextIO

from ssdtune.units import format_disk, format_time

_SMOOTHING = 0.9
"""Weight of the past in smoothed loss and step time."""


class Progress:
    """Base of all displays: takes everything in, keeps running figures, shows nothing.

    Use it as a context manager, so that a terminal is left in order whatever happens.
    """

    def __init__(self) -> None:
        self.total_steps = 0
        self.smoothed_loss = _Smoothed()
        self.step_seconds = _Smoothed()

    def start(self, total_steps: int, summary: str = "", *, first_step: int = 1) -> None:
        """Begin a run.

        Args:
            total_steps: Number of the last optimizer step.
            summary: What is going to happen, one or more lines.
            first_step: Number of the first step to run; above 1 when resuming.
        """
        self.total_steps = total_steps
        self.first_step = first_step
        if summary:
            self.note(summary)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Take in one finished optimizer step; `metrics["step"]` is its number."""
        self.smoothed_loss.add(metrics.get("loss"))
        self.step_seconds.add(metrics.get("step_s"))
        self.show_step(metrics)

    def note(self, text: str) -> None:
        """Say something once, such as "checkpoint-500 is complete"."""

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Take in an evaluation's result: `step`, `eval_loss`, perhaps `eval_tokens` and `eval_s`."""
        parts = [f"evaluation at step {metrics.get('step', 0)}"]
        loss = metrics.get("eval_loss")
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
            parts.append(f"perplexity {math.exp(loss) if loss < 700 else math.inf:.4g}")
        if metrics.get("eval_tokens") is not None:
            parts.append(f"{metrics['eval_tokens']} tokens")
        if metrics.get("eval_s") is not None:
            parts.append(format_time(metrics["eval_s"]))
        self.note("  ".join(parts))

    def finish(self, summary: str = "") -> None:
        """End the run; the summary says what was reached and where it lies."""
        self.close()
        if summary:
            self.note(summary)

    def show_step(self, metrics: Mapping[str, Any]) -> None:
        """Show one step; the running figures know it already."""

    def close(self) -> None:
        """Leave the terminal in order. May be called again."""

    def remaining_seconds(self, step: int) -> float | None:
        """Return the expected time after this step, None if no step time is known."""
        seconds = self.step_seconds.value
        return None if seconds is None else seconds * max(0, self.total_steps - step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class PlainProgress(Progress):
    """One line per `logging_steps` steps, and the last one, without colours or cursor movement."""

    def __init__(self, stream: TextIO, *, logging_steps: int = 1) -> None:
        super().__init__()
        self.stream = stream
        self.logging_steps = logging_steps

    def note(self, text: str) -> None:
        """Print the text."""
        print(text, file=self.stream, flush=True)

    def show_step(self, metrics: Mapping[str, Any]) -> None:
        """Print the step's line if it is one of those to be printed."""
        step = metrics["step"]
        if step % self.logging_steps == 0 or step == self.total_steps:
            head = f"step {step}/{self.total_steps}"
            self.note(
                "  ".join(
                    [head, *step_figures(metrics, self.smoothed_loss.value), *self._eta(step)]
                )
            )

    def _eta(self, step: int) -> list[str]:
        remaining = self.remaining_seconds(step)
        return [] if not remaining else [f"{format_time(remaining)} left"]


class LiveProgress(Progress):
    """A bar and the figures of the last step, redrawn in place; notes scroll by above.

    Args:
        console: A `rich.console.Console` on stderr; made here if None.
        auto_refresh: Redraw in the background, so that the elapsed time moves during a long step.
    """

    def __init__(self, console: Any = None, *, auto_refresh: bool = True) -> None:
        from rich.console import Console

        super().__init__()
        self.console = console or Console(stderr=True, highlight=False)
        self._figures = ""
        self._bar = _make_bar(self.console, auto_refresh, lambda: self._figures)
        self._task: Any = None

    def start(self, total_steps: int, summary: str = "", *, first_step: int = 1) -> None:
        """Print the summary and draw the bar."""
        super().start(total_steps, summary, first_step=first_step)
        self._task = self._bar.add_task("", total=total_steps, completed=first_step - 1, eta="")
        self._bar.start()

    def note(self, text: str) -> None:
        """Print the text above the bar."""
        self.console.print(text, markup=False)

    def show_step(self, metrics: Mapping[str, Any]) -> None:
        """Redraw with the step's figures."""
        step = metrics["step"]
        remaining = self.remaining_seconds(step)
        if self._task is not None:
            self._figures = "  ".join(step_figures(metrics, self.smoothed_loss.value))
            self._bar.update(
                self._task,
                completed=step,
                eta=f"{format_time(remaining)} left" if remaining else "",
                refresh=not self._bar.live.auto_refresh,
            )

    def close(self) -> None:
        """Stop redrawing; the last state stays on the screen."""
        if self._task is not None:
            self._bar.stop()
            self._task = None


def choose_progress(
    *,
    quiet: bool = False,
    verbose: bool = False,
    logging_steps: int = 1,
    environ: Mapping[str, str],
    stream: TextIO | None = None,
) -> Progress:
    """Return the display that fits.

    Live only on a terminal, and never with NO_COLOR or CI set, TERM=dumb, or `verbose` (debug lines would
    tear it apart).

    Args:
        environ: The environment variables.
        stream: Where to write; stderr if None.
    """
    stream = stream or sys.stderr
    if quiet:
        return Progress()
    plain = (
        verbose
        or not stream.isatty()
        or bool(environ.get("NO_COLOR"))
        or bool(environ.get("CI"))
        or environ.get("TERM") in ("dumb", "unknown")
    )
    if plain:
        return PlainProgress(stream, logging_steps=logging_steps)
    from rich.console import Console

    return LiveProgress(Console(file=stream, highlight=False))


def step_figures(metrics: Mapping[str, Any], smoothed_loss: float | None = None) -> list[str]:
    """Return a step's figures as short texts, in a fixed order."""

    def figure(key: str, form: str) -> None:
        if metrics.get(key) is not None:
            figures.append(form.format(metrics[key]))

    figures: list[str] = []
    figure("loss", "loss {:.4f}")
    if smoothed_loss is not None and metrics.get("loss") is not None:
        figures[-1] += f" (smoothed {smoothed_loss:.4f})"
    figure("learning_rate", "lr {:.3g}")
    figure("grad_norm", "grad norm {:.3g}")
    figure("tokens_per_s", "{:.4g} tokens/s")
    figure("step_s", "{:.3g} s/step")
    figure("stall_share", "stall {:.0%}")
    for key, word in (("bytes_read", "read"), ("bytes_written", "wrote")):
        if metrics.get(key) is not None:
            figures.append(f"{word} {format_disk(_total(metrics[key]))}")
    return figures


def _make_bar(console: Any, auto_refresh: bool, figures: Callable[[], str]) -> Any:
    """Return rich's progress bar with one more line below it, wrapped where the terminal is narrow."""
    from rich import progress as rich_progress
    from rich.text import Text

    class Bar(rich_progress.Progress):
        def get_renderables(self) -> Iterable[Any]:
            yield from super().get_renderables()
            yield Text(figures())

    return Bar(
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        rich_progress.BarColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("{task.fields[eta]}", markup=False),
        console=console,
        auto_refresh=auto_refresh,
    )


def _total(value: float | Mapping[str, float]) -> float:
    return sum(value.values()) if isinstance(value, Mapping) else value


class _Smoothed:
    """Exponential mean that starts unbiased and passes over values that are missing or not finite."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self._sum = _SMOOTHING * self._sum + (1 - _SMOOTHING) * value
            self._weight = _SMOOTHING * self._weight + (1 - _SMOOTHING)

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None
