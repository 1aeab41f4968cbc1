"""Run a schedule on a clock: step time, busy times, spans of operations, peak memory.

Discrete events. A lane runs its operations in order, one at a time; an operation starts once it is at the head
of its lane and all that it waits for is over. While it runs it uses **resources** (drives, link, cores, memory
bandwidth), which lanes share: its cost says for how many seconds it would occupy each resource alone. How fast
operations are side by side is `ssdtune.plan.sharing`'s.

Plain numbers only. What an operation moves is `ssdtune.plan.ledger`'s, how long that takes `ssdtune.plan.hardware`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ssdtune.plan.schedule import Schedule
from ssdtune.plan.sharing import EPSILON, IDLE, Sharing


@dataclass(frozen=True)
class Cost:
    """What one operation takes.

    Attributes:
        seconds: Seconds for which it occupies each resource if it runs alone.
        acquires: Bytes of each kind of memory that it takes when it starts.
        releases: Bytes of each kind of memory that it gives back when it is over.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    acquires: Mapping[str, int] = field(default_factory=dict)
    releases: Mapping[str, int] = field(default_factory=dict)

    @property
    def alone_s(self) -> float:
        """Seconds that it takes alone."""
        return max(self.seconds.values(), default=0.0)

    def followed_by(self, other: Cost, times: int) -> Cost:
        """Return the cost of this and so many others taken as one operation."""

        def summed(mine: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
            names = {**mine, **others}
            return {name: mine.get(name, 0) + times * others.get(name, 0) for name in names}

        return Cost(
            summed(self.seconds, other.seconds),
            summed(self.acquires, other.acquires),
            summed(self.releases, other.releases),
        )


class Span(NamedTuple):
    """When an operation ran, in seconds from the start of the step."""

    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """What came out.

    Attributes:
        step_s: Seconds until the last operation is over.
        lane_s: Seconds for which each lane had an operation running, waiting for shared resources included.
        resource_s: Seconds for which each resource was occupied; never more than `step_s`.
        spans: When each operation ran, in the order of the schedule.
        peak_bytes: Highest sum of each kind of memory, what is held throughout included.
    """

    step_s: float
    lane_s: dict[str, float]
    resource_s: dict[str, float]
    spans: tuple[Span, ...]
    peak_bytes: dict[str, int]

    def share(self, resource: str) -> float:
        """Return the share of the step for which a resource was occupied."""
        return self.resource_s.get(resource, 0.0) / self.step_s if self.step_s else 0.0

    @property
    def binding(self) -> str:
        """Name of the resource that was occupied longest."""
        return max(self.resource_s, key=lambda name: self.resource_s[name], default="")


def simulate(
    schedule: Schedule, costs: Sequence[Cost], *, held_bytes: Mapping[str, int] | None = None
) -> Simulation:
    """Run the schedule.

    Args:
        costs: One for each operation, in the order of the schedule.
        held_bytes: Memory of each kind that is taken throughout.

    Raises:
        ValueError: The numbers of costs and operations differ, an operation waits for a later one, or a
            cost is negative.
    """
    operations = schedule.operations
    if len(costs) != len(operations):
        raise ValueError(f"{len(costs)} costs for {len(operations)} operations")
    sharing = Sharing([cost.seconds for cost in costs])
    kinds = sharing.kinds
    names: dict[str, int] = {}
    lane_of = [names.setdefault(operation.lane, len(names)) for operation in operations]
    takes_time, known = sharing.takes_time, sharing.known
    acquires = [cost.acquires for cost in costs]
    releases = [cost.releases for cost in costs]
    followers, waiting = _dependencies(schedule)
    queues: list[list[int]] = [[] for _ in names]  # of each lane, the next operation last
    for index in range(len(operations) - 1, -1, -1):
        queues[lane_of[index]].append(index)

    current = [IDLE] * len(names)  # what each lane runs, and its kind
    running = [IDLE] * len(names)
    left = [0.0] * len(names)  # share of it that is still to be done
    begin, end = [0.0] * len(operations), [0.0] * len(operations)
    lane_s = [0.0] * len(names)
    memory = _Memory(held_bytes or {})
    now = 0.0
    candidates = list(range(len(names)))  # lanes whose next operation may have become ready
    while True:
        finished = []
        for lane in candidates:
            queue = queues[lane]
            if current[lane] != IDLE or not queue or waiting[queue[-1]]:
                continue
            current[lane] = index = queue.pop()
            begin[index] = now
            if acquires[index]:
                memory.take(acquires[index])
            if takes_time[kinds[index]]:
                running[lane] = kinds[index]
                left[lane] = 1.0
            else:
                finished.append(lane)  # what takes no time is over at once
        if not finished:
            side_by_side = tuple(running)
            paces = known.get(side_by_side) or sharing.paces(side_by_side)
            if not paces:
                break
            step = min([left[lane] / pace for lane, pace in paces])
            now += step
            for lane, pace in paces:
                left[lane] = rest = left[lane] - step * pace
                if rest <= EPSILON:
                    finished.append(lane)
                    running[lane] = IDLE
        candidates = finished.copy()
        for lane in finished:
            index = current[lane]
            current[lane] = IDLE
            end[index] = now
            lane_s[lane] += now - begin[index]
            if releases[index]:
                memory.give(releases[index])
            for follower in followers[index]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    candidates.append(lane_of[follower])
    return Simulation(
        step_s=now,
        lane_s={str(name): seconds for name, seconds in zip(names, lane_s)},
        resource_s=sharing.occupied_s(),
        spans=tuple(map(Span, begin, end)),
        peak_bytes=memory.peak,
    )


def _dependencies(schedule: Schedule) -> tuple[list[list[int]], list[int]]:
    """Return for each operation who waits for it, and how many it waits for."""
    followers: list[list[int]] = [[] for _ in schedule.operations]
    waiting = []
    for index, operation in enumerate(schedule.operations):
        after = operation.after
        waiting.append(len(after))
        for other in after:
            if other >= index:
                raise ValueError(f"operation {index} waits for {after}, not before")
            followers[other].append(index)
    return followers, waiting


class _Memory:
    def __init__(self, held: Mapping[str, int]) -> None:
        self.taken = dict(held)
        self.peak = dict(held)

    def take(self, amounts: Mapping[str, int]) -> None:
        for kind, amount in amounts.items():
            self.taken[kind] = self.taken.get(kind, 0) + amount
            self.peak[kind] = max(self.peak.get(kind, 0), self.taken[kind])

    def give(self, amounts: Mapping[str, int]) -> None:
        for kind, amount in amounts.items():
            self.taken[kind] = self.taken.get(kind, 0) - amount
