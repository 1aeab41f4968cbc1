"""Run a schedule on a clock: step time, busy times, spans of operations, peak memory.

Discrete events. A lane runs its operations in order, one at a time; an operation starts once it is at the head
of its lane and all that it waits for is over. While it runs it uses **resources** (drives, link, cores, memory
bandwidth), which lanes share: its cost says for how many seconds it would occupy each resource alone. All of
these are used at the same pace, as a pipeline of small chunks does, so alone it takes as long as its largest
figure. Where a resource is short, everybody that uses it runs at the same fraction of their own pace (max-min
fair sharing); what others leave unused is taken up.

Plain numbers only. What an operation moves is `ssdtune.plan.ledger`'s, how long that takes `ssdtune.plan.hardware`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ssdtune.plan.schedule import Schedule

EPSILON = 1e-12
"""Shares of an operation, and of a resource, below this count as nothing."""


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


@dataclass(frozen=True)
class Span:
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
    _check(schedule, costs)
    lanes: dict[str, list[int]] = {}
    followers: list[list[int]] = [[] for _ in operations]
    waiting = [len(set(operation.after)) for operation in operations]
    for operation in operations:
        lanes.setdefault(operation.lane, []).append(operation.index)
        for other in set(operation.after):
            followers[other].append(operation.index)
    head = dict.fromkeys(lanes, 0)
    begin, end = [0.0] * len(operations), [0.0] * len(operations)
    left: dict[int, float] = {}
    lane_s = dict.fromkeys(lanes, 0.0)
    resource_s: dict[str, float] = {}
    memory = _Memory(held_bytes or {})
    now = 0.0

    def start_ready() -> None:
        for lane, order in lanes.items():
            place = head[lane]
            if place < len(order) and order[place] not in left and not waiting[order[place]]:
                index = order[place]
                begin[index] = now
                left[index] = 1.0
                memory.take(costs[index].acquires)

    start_ready()
    while left:
        paces = _paces([costs[index] for index in left])
        running = list(zip(left, paces))
        step = min(left[index] / pace for index, pace in running)
        now += step
        finished = []
        for index, pace in running:
            done = step * pace
            for resource, seconds in costs[index].seconds.items():
                share = min(done, left[index]) * seconds
                resource_s[resource] = resource_s.get(resource, 0.0) + share
            left[index] -= done
            if left[index] <= EPSILON:
                finished.append(index)
        for index in finished:
            del left[index]
            end[index] = now
            lane = operations[index].lane
            lane_s[lane] += end[index] - begin[index]
            head[lane] += 1
            memory.give(costs[index].releases)
            for follower in followers[index]:
                waiting[follower] -= 1
        start_ready()
    spans = tuple(Span(b, e) for b, e in zip(begin, end))
    return Simulation(now, {str(k): v for k, v in lane_s.items()}, resource_s, spans, memory.peak)


def _check(schedule: Schedule, costs: Sequence[Cost]) -> None:
    if len(costs) != len(schedule.operations):
        raise ValueError(f"{len(costs)} costs for {len(schedule.operations)} operations")
    for operation, cost in zip(schedule.operations, costs):
        if any(other >= operation.index for other in operation.after):
            raise ValueError(f"operation {operation.index} waits for {operation.after}, not before")
        if any(not 0 <= seconds < float("inf") for seconds in cost.seconds.values()):
            raise ValueError(f"operation {operation.index} takes {dict(cost.seconds)} seconds")


def _paces(costs: Sequence[Cost]) -> list[float]:
    """Return the share of each operation that gets done in a second.

    All speed up together, each relative to its pace alone, until a resource is used up. Its users stay at
    that speed, the others go on.
    """
    speed = [1.0] * len(costs)
    alone = [cost.alone_s for cost in costs]
    free = {resource: 1.0 for cost in costs for resource in cost.seconds}
    open_ = {i for i, seconds in enumerate(alone) if seconds > EPSILON}
    while open_:
        limits = {}
        for resource, room in free.items():
            use = sum(costs[i].seconds.get(resource, 0.0) / alone[i] for i in open_)
            if use > EPSILON:
                limits[resource] = max(room, 0.0) / use
        tightest = min(limits, key=lambda name: limits[name])
        level = limits[tightest]
        fixed = {i for i in open_ if costs[i].seconds.get(tightest, 0.0) > 0}
        for i in fixed:
            speed[i] = level
            for resource, seconds in costs[i].seconds.items():
                free[resource] -= level * seconds / alone[i]
        open_ -= fixed
    # What takes no time is over at once: any large pace does.
    return [s / a if a > EPSILON else 1 / EPSILON for s, a in zip(speed, alone)]


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
