"""How far a forecast was right: prediction against measurement, lane by lane, and a correction while a run goes on.

Plain numbers in, words and dictionaries out: nothing is simulated here (`ssdtune.train.forecast`) and nothing is
measured (`ssdtune.train.trainer`). What held a step up is in `ssdtune.report.critical`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ssdtune.units import format_time

TOLERANCE = 0.15
"""Steps that differ by more than this from what was said are worth a correction."""
RECENT_STEPS = 7
"""Steps whose median is compared: three outliers among them change nothing."""
LEAST_STEPS = 3
"""Steps that are compared at the beginning, where there are not more yet: one outlier changes nothing."""
QUIET_STEPS = 20
"""Steps between two corrections, at least."""
NOTABLE_SHARE = 0.01
"""Lanes that work for less of a step are left out of the words."""


@dataclass(frozen=True)
class Figure:
    """One time, as it was predicted and as it was; both in seconds."""

    expected_s: float
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """Measured by expected; None if nothing was expected."""
        return self.measured_s / self.expected_s if self.expected_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True)
class Accuracy:
    """A forecast beside what came.

    Attributes:
        step: Of a whole step; the median of all that count.
        lanes: Busy time of each lane in a step, the same way.
        num_steps: Steps that count: all but the first, which reads the original weights. If there was only
            that one, it counts, and `first_step_only` says so.
    """

    step: Figure
    lanes: dict[str, Figure]
    num_steps: int
    first_step_only: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            "step_s": self.step.to_dict(),
            "lane_s": {lane: figure.to_dict() for lane, figure in self.lanes.items()},
            "num_steps": self.num_steps,
            "first_step_only": self.first_step_only,
        }

    def text(self) -> str:
        """Return one sentence for people: the step, then every lane that matters."""
        parts = [
            f"steps took {format_time(self.step.measured_s)}, {_expected(self.step)}"
            f"{_difference(self.step)}"
        ]
        least = NOTABLE_SHARE * max(self.step.measured_s, self.step.expected_s)
        parts += [
            f"{lane} was busy {format_time(figure.measured_s)}, {_expected(figure)}"
            for lane, figure in self.lanes.items()
            if max(figure.measured_s, figure.expected_s) >= least
        ]
        if self.first_step_only:
            parts.append("only the first step ran, which also reads the original weights")
        return "; ".join(parts)


def compare(
    expected_step_s: float,
    expected_lane_s: Mapping[str, float],
    step_s: Sequence[float],
    lane_s: Sequence[Mapping[str, float]],
) -> Accuracy | None:
    """Compare a forecast with the steps that ran.

    Args:
        expected_step_s, expected_lane_s: Seconds of a step, and of each lane in it (`Forecast`).
        step_s, lane_s: The same of every step that this process ran, in order (`metrics.jsonl`).

    Returns:
        None if no step ran.

    Raises:
        ValueError: There are not as many lane times as steps.
    """
    if len(step_s) != len(lane_s):
        raise ValueError(f"{len(step_s)} steps but {len(lane_s)} times of lanes")
    if not step_s:
        return None
    first_only = len(step_s) == 1
    steps, lanes = (step_s, lane_s) if first_only else (step_s[1:], lane_s[1:])
    names = list(dict.fromkeys([*expected_lane_s, *(name for step in lanes for name in step)]))
    return Accuracy(
        Figure(expected_step_s, statistics.median(steps)),
        {
            name: Figure(
                expected_lane_s.get(name, 0.0),
                statistics.median(step.get(name, 0.0) for step in lanes),
            )
            for name in names
        },
        len(steps),
        first_only,
    )


class Drift:
    """Notices when steps take another time than was said, and says what the rest of the run will take.

    The median of the last `RECENT_STEPS` steps is compared, so single outliers change nothing, and the first
    step that is fed is passed over: it reads the original weights. After a correction, its figure is what later
    steps are compared with.

    Args:
        expected_s: Predicted seconds of a step.
        total_steps: Number of the run's last step.
        tolerance: Relative difference from which something is said.
        quiet_steps: Steps after a correction in which nothing is said.
    """

    def __init__(
        self,
        expected_s: float,
        total_steps: int,
        *,
        tolerance: float = TOLERANCE,
        quiet_steps: int = QUIET_STEPS,
    ) -> None:
        if not (math.isfinite(expected_s) and expected_s > 0):
            raise ValueError(f"expected_s must be a finite time above 0, not {expected_s}")
        self.expected_s = expected_s
        self.step_s = expected_s
        """Seconds of a step by the newest figure: the prediction, or what replaced it."""
        self._total = total_steps
        self._tolerance = tolerance
        self._quiet = quiet_steps
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._fed = 0
        self._said_at: int | None = None

    def add(self, step: int, seconds: float) -> str | None:
        """Take in a finished step; return a sentence for people if the figures must be corrected.

        Args:
            step: Number of the step, counted from 1.
        """
        self._fed += 1
        if self._fed == 1 or not math.isfinite(seconds):
            return None
        self._recent.append(seconds)
        if len(self._recent) < LEAST_STEPS:
            return None
        median = statistics.median(self._recent)
        if abs(median / self.step_s - 1) <= self._tolerance:
            return None
        if self._said_at is not None and self._fed - self._said_at < self._quiet:
            return None
        before, self.step_s, self._said_at = self.step_s, median, self._fed
        return self._sentence(before, step)

    def remaining_s(self, step: int) -> float:
        """Return the seconds of all steps after this one, by the newest figure."""
        return self.step_s * max(0, self._total - step)

    def _sentence(self, before: float, step: int) -> str:
        now = Figure(self.expected_s, self.step_s)
        text = f"steps now take {format_time(self.step_s)}, "
        if before != self.expected_s:
            text += f"{format_time(before)} before and "
        text += f"{_expected(now)}{_difference(now)}"
        remaining = self._total - step
        if remaining > 0:
            text += f"; the other {remaining} take about {format_time(self.remaining_s(step))}"
        return text


def _expected(figure: Figure) -> str:
    return f"{format_time(figure.expected_s)} expected"


def _difference(figure: Figure) -> str:
    """Return how much more or less was measured, in parentheses; "" if it is hardly anything."""
    if figure.ratio is None or abs(figure.ratio - 1) < 0.005:
        return ""
    if figure.ratio >= 2:
        return f" ({figure.ratio:.3g} times that)"
    more = "more" if figure.ratio > 1 else "less"
    return f" ({abs(figure.ratio - 1):.0%} {more})"
