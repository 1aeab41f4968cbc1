"""What held a step up: the chain of operations that it was waiting for, from the step's end back to its begin.

An operation begins when the one before it on its lane and all that it waits for are over. So the last of those to end
is what it was held up by; following these from the operation that ended last gives the critical path, and its times
by lane say what a faster part of the machine would bring. Plain data in, words and dictionaries out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ssdtune.units import format_time

NOTABLE_SHARE = 0.01
"""Lanes that hold up less of a step are left out of the words."""


class Operated(Protocol):
    """What is needed of an operation (`ssdtune.plan.schedule.Operation`)."""

    @property
    def index(self) -> int:
        """Position in the schedule; lanes run their operations in this order."""

    @property
    def lane(self) -> str:
        """Which resource ran it."""

    @property
    def kind(self) -> str:
        """What it did."""

    @property
    def stage(self) -> str:
        """Which part of the model it worked on, or ""."""

    @property
    def after(self) -> Sequence[int]:
        """Indexes of lower operations that it waited for."""


class Measured(Protocol):
    """What is needed of a span (`ssdtune.train.lanes.Span`): seconds since the step began."""

    @property
    def operation(self) -> Operated:
        """What ran."""

    @property
    def start_s(self) -> float:
        """When it began."""

    @property
    def end_s(self) -> float:
        """When it was over."""


@dataclass(frozen=True)
class Link:
    """One operation of the critical path and the seconds of the step that it accounts for."""

    operation: Operated
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What bound a step.

    Attributes:
        step_s: From the step's begin to the end of its last operation.
        lane_s: Seconds on the critical path by lane, the largest first.
        kind_s: The same by lane and kind of operation.
        stages: By lane, the stages that its part of the path worked on, in order and without repeats.
        between_s: Seconds between an operation of the path and the next: threads waking up.
        busy_s: All seconds that each lane worked, on the path or not.
    """

    step_s: float
    lane_s: dict[str, float]
    kind_s: dict[str, dict[str, float]]
    stages: dict[str, tuple[str, ...]]
    between_s: float
    busy_s: dict[str, float]

    @property
    def busiest(self) -> str:
        """The lane that worked longest: no order of the same operations could be faster than it. "" if none did."""
        return max(self.busy_s, key=lambda lane: self.busy_s[lane], default="")

    @property
    def bound_share(self) -> float:
        """The busiest lane's work by the step's time: 1 if the step could not be faster with these lanes."""
        return self.busy_s[self.busiest] / self.step_s if self.step_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            "step_s": self.step_s,
            "critical_lane_s": self.lane_s,
            "critical_kind_s": self.kind_s,
            "between_s": self.between_s,
            "busy_s": self.busy_s,
            "busiest": self.busiest,
            "bound_share": self.bound_share,
        }

    def text(self) -> str:
        """Return one line for people."""
        if self.step_s <= 0:
            return "nothing ran"
        parts = [
            f"{lane} {seconds / self.step_s:.0%}{self._what(lane)}"
            for lane, seconds in self.lane_s.items()
            if seconds >= NOTABLE_SHARE * self.step_s
        ]
        if self.between_s >= NOTABLE_SHARE * self.step_s:
            parts.append(f"gaps {self.between_s / self.step_s:.0%}")
        return (
            f"a step of {format_time(self.step_s)} waited for: {', '.join(parts)}; "
            f"{self.busiest}, the busiest lane, worked {self.bound_share:.0%} of it"
        )

    def _what(self, lane: str) -> str:
        """Return the kinds and the stages that make up a lane's part, in parentheses."""
        kinds, total = self.kind_s[lane], self.lane_s[lane]
        main = [kind for kind, seconds in kinds.items() if seconds >= 0.1 * total]
        stages = _summary(self.stages[lane])
        return f" ({', '.join(main)}{f' of {stages}' if stages else ''})"


def critical_path(spans: Iterable[Measured]) -> list[Link]:
    """Return the operations that a step was waiting for, the first one first.

    The seconds of a link end where those of the next begin; what is missing to the next one's start was spent between
    the two. An operation that waits for one that is not among the spans is taken to wait for nothing there.
    """
    return _walk(list(spans))[0]


def verdict(spans: Iterable[Measured]) -> Verdict:
    """Say what bound a step, from when its operations ran."""
    measured = list(spans)
    path, between = _walk(measured)
    lanes: dict[str, float] = defaultdict(float)
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    stages: dict[str, list[str]] = defaultdict(list)
    for link in path:
        lane = str(link.operation.lane)
        lanes[lane] += link.seconds
        kinds[lane][str(link.operation.kind)] += link.seconds
        stages[lane].append(link.operation.stage)
    busy: dict[str, float] = defaultdict(float)
    for span in measured:
        busy[str(span.operation.lane)] += span.end_s - span.start_s
    return Verdict(
        max((span.end_s for span in measured), default=0.0),
        _largest_first(lanes),
        {lane: _largest_first(found) for lane, found in kinds.items()},
        {lane: tuple(dict.fromkeys(name for name in found if name)) for lane, found in stages.items()},
        between,
        dict(busy),
    )  # fmt: skip


def _walk(spans: list[Measured]) -> tuple[list[Link], float]:
    """Return the critical path and the seconds between its operations; both together are the step."""
    by_index = {span.operation.index: span for span in spans}
    before: dict[int, Measured] = {}
    last_of_lane: dict[str, Measured] = {}
    for index in sorted(by_index):
        span = by_index[index]
        lane = str(span.operation.lane)
        if lane in last_of_lane:
            before[index] = last_of_lane[lane]
        last_of_lane[lane] = span
    current = max(spans, key=lambda span: span.end_s, default=None)
    path: list[Link] = []
    between, cursor = 0.0, current.end_s if current else 0.0
    while current is not None:
        operation = current.operation
        end, start = min(current.end_s, cursor), min(current.start_s, cursor)
        path.append(Link(operation, end - start))
        between += cursor - end
        cursor = start
        held_by = [by_index[index] for index in operation.after if index in by_index]
        if operation.index in before:
            held_by.append(before[operation.index])
        current = max(held_by, key=lambda span: span.end_s, default=None)
    return path[::-1], between + cursor


def _largest_first(values: dict[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))


def _summary(stages: Sequence[str]) -> str:
    """Write `head, block.3, block.4, block.7` as `head, block.3 to block.7`."""
    groups: dict[str, list[int]] = {}
    for stage in stages:
        name, _, number = stage.partition(".")
        groups.setdefault(name, []).extend([int(number)] if number else [])
    return ", ".join(
        name
        if not numbers
        else f"{name}.{min(numbers)}" + (f" to {name}.{max(numbers)}" if len(numbers) > 1 else "")
        for name, numbers in sorted(groups.items(), key=lambda item: item[0] != "block")
    )
