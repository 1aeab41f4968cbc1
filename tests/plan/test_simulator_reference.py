"""The simulator against a slow one that is written straight from the rules, on random schedules and costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ssdtune.plan.schedule import Kind, Lane, Schedule
from ssdtune.plan.sharing import IDLE, Sharing, fair_speeds
from ssdtune.plan.simulator import Cost, simulate

EPSILON = 1e-12
RESOURCES = ("ssd", "h2d", "cores", "dram")
LANES = tuple(Lane)

amounts = st.one_of(st.integers(1, 9).map(float), st.floats(0.01, 10))
memory = st.dictionaries(st.sampled_from(("host", "device")), st.integers(0, 9), max_size=2)
Spans = list[tuple[float, float]]


@st.composite
def jobs(draw: st.DrawFn, *, zero: bool = False) -> tuple[Schedule, list[Cost]]:
    """Operations on random lanes that wait for any earlier ones; few different costs, as blocks have."""
    seconds = st.one_of(st.just(0.0), amounts) if zero else amounts
    sets = st.dictionaries(st.sampled_from(RESOURCES), seconds, min_size=0 if zero else 1)
    pool = draw(st.lists(st.builds(Cost, sets, memory, memory), min_size=1, max_size=6))
    schedule, costs = Schedule(), []
    for index in range(draw(st.integers(1, 30))):
        earlier = st.lists(st.integers(0, index - 1), max_size=3) if index else st.just([])
        schedule.add(draw(st.sampled_from(LANES)), Kind.LOAD, after=tuple(draw(earlier)))
        costs.append(draw(st.sampled_from(pool)))
    return schedule, costs


def slow_speeds(costs: Sequence[Cost]) -> list[float]:
    """Raise the speed of all until a resource is full; its users stay, the others go on."""
    speed = [1.0] * len(costs)
    free = {resource: 1.0 for cost in costs for resource in cost.seconds}
    going = {i for i, cost in enumerate(costs) if cost.alone_s > EPSILON}
    while going:
        limits = {}
        for resource, room in free.items():
            shares = [costs[i].seconds.get(resource, 0.0) / costs[i].alone_s for i in going]
            if sum(shares) > EPSILON:
                limits[resource] = max(room, 0.0) / sum(shares)
        tightest = min(limits, key=lambda name: limits[name])
        fixed = {i for i in going if costs[i].seconds.get(tightest, 0.0) > 0}
        for i in fixed:
            speed[i] = limits[tightest]
            for resource, seconds in costs[i].seconds.items():
                free[resource] -= speed[i] * seconds / costs[i].alone_s
        going -= fixed
    return speed


def slow_simulation(
    schedule: Schedule, costs: Sequence[Cost]
) -> tuple[Spans, dict[str, float], dict[str, int]]:
    """Return spans, seconds of each resource and peaks; what takes no time takes 1e-12 s here."""
    operations = schedule.operations
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    left: dict[int, float] = {}
    resource_s: dict[str, float] = {}
    taken: dict[str, int] = {}
    peak: dict[str, int] = {}
    now = 0.0
    while len(end) < len(operations):
        for lane in LANES:
            first = next((o for o in schedule.lane(lane) if o.index not in end), None)
            if first and first.index not in begin and all(other in end for other in first.after):
                begin[first.index], left[first.index] = now, 1.0
                for kind, amount in costs[first.index].acquires.items():
                    taken[kind] = taken.get(kind, 0) + amount
                    peak[kind] = max(peak.get(kind, 0), taken[kind])
        running = list(left)
        speeds = slow_speeds([costs[index] for index in running])
        paces = [
            speed / costs[index].alone_s if costs[index].alone_s > EPSILON else 1 / EPSILON
            for index, speed in zip(running, speeds)
        ]
        step = min(left[index] / pace for index, pace in zip(running, paces))
        now += step
        for index, pace in zip(running, paces):
            for resource, seconds in costs[index].seconds.items():
                used = min(step * pace, left[index]) * seconds
                resource_s[resource] = resource_s.get(resource, 0.0) + used
            left[index] -= step * pace
            if left[index] <= EPSILON:
                del left[index]
                end[index] = now
                for kind, amount in costs[index].releases.items():
                    taken[kind] = taken.get(kind, 0) - amount
    return [(begin[i], end[i]) for i in range(len(operations))], resource_s, peak


def check_alike(schedule: Schedule, costs: list[Cost]) -> dict[str, int]:
    """Compare all but the peaks; return those of the slow simulator."""
    spans, resource_s, peak = slow_simulation(schedule, costs)
    result = simulate(schedule, costs)
    for span, expected in zip(result.spans, spans, strict=True):
        assert tuple(span) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert result.step_s == pytest.approx(max(end for _, end in spans), rel=1e-9, abs=1e-9)
    assert result.resource_s == pytest.approx(resource_s, rel=1e-9, abs=1e-9)
    for lane in {operation.lane for operation in schedule.operations}:
        busy = sum(spans[o.index][1] - spans[o.index][0] for o in schedule.lane(lane))
        assert result.lane_s[lane] == pytest.approx(busy, rel=1e-9, abs=1e-9)
    return peak


@settings(deadline=None, max_examples=100)
@given(jobs())
def test_as_the_slow_simulator(job: tuple[Schedule, list[Cost]]) -> None:
    peak = check_alike(*job)
    assert simulate(*job).peak_bytes == peak


# Without the peaks: at the same time or 1e-12 s later makes a difference to them.
@settings(deadline=None, max_examples=100)
@given(jobs(zero=True))
def test_as_the_slow_simulator_with_operations_that_take_no_time(
    job: tuple[Schedule, list[Cost]],
) -> None:
    check_alike(*job)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(RESOURCES), amounts, min_size=1), min_size=1))
@example([{"ssd": 1.0, "cores": 1e-11}, {"ssd": 1.0, "cores": 1e-13}, {"cores": 1.0}])
def test_speeds_are_fair(seconds: list[dict[str, float]]) -> None:
    """Nobody could be faster without making somebody slower who is no faster (max-min)."""
    demands = [{name: s / max(use.values()) for name, s in use.items()} for use in seconds]
    speeds = fair_speeds(demands)
    used = {
        name: sum(speed * demand.get(name, 0.0) for speed, demand in zip(speeds, demands))
        for name in RESOURCES
    }
    assert all(amount <= 1 + 1e-9 for amount in used.values())
    for speed, demand in zip(speeds, demands):
        assert any(
            used[name] >= 1 - 1e-9
            and all(speed >= other - 1e-9 for other, d in zip(speeds, demands) if name in d)
            for name in demand
        )


def test_what_takes_no_time_is_over_at_once() -> None:
    # The first lane's operations take no time; memory goes back before the next one takes some.
    schedule, costs = Schedule(), []
    for _ in range(1000):
        schedule.add(Lane.SSD_READ, Kind.LOAD)
        costs.append(Cost({"ssd": 0.0}, acquires={"host": 5}, releases={"host": 5}))
    schedule.add(Lane.COMPUTE, Kind.FORWARD, after=(999,))
    costs.append(Cost({"compute": 1.0}))
    result = simulate(schedule, costs)
    assert result.step_s == 1.0 and result.spans[-1] == (0.0, 1.0)
    assert result.peak_bytes == {"host": 5}
    assert result.resource_s == {"ssd": 0.0, "compute": 1.0}


def test_costs_that_are_equal_are_one_kind() -> None:
    sharing = Sharing([{"ssd": 1.0}, {"ssd": 2.0}, {"ssd": 1.0}, {}, {"ssd": 0.0}])
    assert sharing.kinds == [0, 1, 0, 2, 3]
    assert sharing.takes_time == [True, True, False, False]
    assert sharing.paces((0, IDLE, 1)) == [(0, 0.5), (2, 0.25)]
    assert sharing.paces((IDLE, IDLE, IDLE)) == []
    assert sharing.occupied_s() == {"ssd": 4.0}
