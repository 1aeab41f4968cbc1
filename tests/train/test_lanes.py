"""Lanes run every operation once, in order, and stop all together: after a failure nothing is still running."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from ssdtune.plan.schedule import Kind, Lane, Operation, Schedule
from ssdtune.train import lanes as lanes_module
from ssdtune.train.lanes import Lanes

PATIENCE_S = 30
"""How long a test waits for what must happen; nobody waits for it to pass."""


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    before = set(threading.enumerate())
    with Lanes() as opened:
        yield opened
    assert set(threading.enumerate()) <= before


def fan(num_rounds: int = 20) -> Schedule:
    """Return rounds in which every lane waits for all lanes of the round before."""
    schedule = Schedule()
    last: tuple[int, ...] = ()
    for _ in range(num_rounds):
        last = tuple(schedule.add(lane, Kind.LOAD, after=last) for lane in Lane)
    return schedule


def test_every_operation_runs_once_after_what_it_waits_for(lanes: Lanes) -> None:
    schedule = fan()
    begun: list[int] = []
    ended: set[int] = set()

    def execute(operation: Operation) -> None:
        assert ended.issuperset(operation.after)
        begun.append(operation.index)
        ended.add(operation.index)

    for _ in range(3):  # the threads are used again
        begun.clear()
        ended.clear()
        spans = lanes.run(schedule, execute)
        assert sorted(begun) == list(range(len(schedule.operations)))
        assert sorted(span.operation.index for span in spans) == sorted(begun)
        assert all(0 <= span.start_s <= span.end_s for span in spans)
        for lane in Lane:
            own = [span for span in spans if span.operation.lane == lane]
            assert [span.operation for span in own] == schedule.lane(lane)
            assert all(one.end_s <= other.start_s for one, other in pairwise(own))


def test_the_compute_lane_runs_in_the_calling_thread(lanes: Lanes) -> None:
    threads: dict[Lane, set[str]] = {lane: set() for lane in Lane}
    lanes.run(fan(), lambda op: threads[op.lane].add(threading.current_thread().name))
    assert threads[Lane.COMPUTE] == {threading.current_thread().name}
    others = [threads[lane] for lane in Lane if lane != Lane.COMPUTE]
    assert all(len(names) == 1 for names in others)
    assert len(set.union(*others)) == len(others)


def test_an_empty_schedule(lanes: Lanes) -> None:
    assert lanes.run(Schedule(), lambda op: None) == []


@pytest.mark.parametrize("lane", Lane)
def test_a_failure_stops_all_lanes_and_is_raised(lanes: Lanes, lane: Lane) -> None:
    schedule = fan()
    failing = schedule.lane(lane)[5]
    begun: list[Operation] = []
    running: set[int] = set()

    def execute(operation: Operation) -> None:
        running.add(operation.index)
        begun.append(operation)
        try:
            if operation is failing:
                raise OSError("drive is gone")
        finally:
            running.discard(operation.index)

    with pytest.raises(OSError, match="drive is gone"):
        lanes.run(schedule, execute)
    assert not running
    # the others may finish the round, but not begin the next one
    assert max(op.index for op in begun) < 6 * len(Lane)
    # and the lanes can be used again
    assert len(lanes.run(fan(2), lambda op: None)) == 2 * len(Lane)


def test_the_first_of_several_failures_is_raised(lanes: Lanes) -> None:
    """All other lanes fail too, while the first one's failure is known already."""
    schedule = Schedule()
    for lane in Lane:
        schedule.add(lane, Kind.LOAD)
    all_begun = threading.Barrier(len(Lane), timeout=PATIENCE_S)
    first_failed = threading.Event()

    def execute(operation: Operation) -> None:
        all_begun.wait()
        if operation.lane != Lane.ADAM:
            assert first_failed.wait(PATIENCE_S)
            raise ValueError("a consequence")
        raise OSError("the cause")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes_module._Run, "fail", _announcing(first_failed))
        with pytest.raises(OSError, match="the cause"):
            lanes.run(schedule, execute)


@pytest.mark.parametrize("computing", [True, False])
def test_an_interrupt_while_waiting_stops_all_lanes(lanes: Lanes, computing: bool) -> None:
    """The main thread waits for an operation (computing), or for the last ones of the other lanes."""
    schedule = Schedule()
    first = schedule.add(Lane.ADAM, Kind.UPDATE)
    schedule.add(Lane.ADAM, Kind.UPDATE)
    if computing:
        schedule.add(Lane.COMPUTE, Kind.LOSS, after=(first,))
    failed = threading.Event()
    ended: list[int] = []

    def execute(operation: Operation) -> None:
        assert operation.index == first
        signals = 0
        while not failed.wait(
            0.05
        ):  # a signal that comes just before a thread waits does not wake it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            signals += 1
            assert signals < 20 * PATIENCE_S
        ended.append(operation.index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes_module._Run, "fail", _announcing(failed))
        with pytest.raises(KeyboardInterrupt):
            lanes.run(schedule, execute)
    assert ended == [first]


def test_an_interrupt_while_lanes_are_started(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = lanes._threads.submit, []

    def interrupted(*args: object) -> object:
        if calls:
            raise KeyboardInterrupt
        calls.append(args)
        return submit(*args)

    monkeypatch.setattr(lanes._threads, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lanes.run(fan(), lambda op: None)


def _announcing(event: threading.Event):
    """Return `_Run.fail`, setting an event once the failure is known to all lanes."""
    original = lanes_module._Run.fail

    def fail(run: lanes_module._Run, error: BaseException) -> None:
        original(run, error)
        event.set()

    return fail
