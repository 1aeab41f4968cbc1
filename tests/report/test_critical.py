"""The critical path of a step: found in spans made by hand, in what lanes really ran, and whatever the order."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdtune.plan.schedule import Kind, Lane, Operation, Schedule
from ssdtune.report.critical import critical_path, verdict
from ssdtune.train.lanes import Lanes, Span


def span(
    index: int, lane: Lane, start: float, end: float, after: tuple[int, ...] = (), *,
    kind: Kind = Kind.LOAD, stage: str = "",
) -> Span:  # fmt: skip
    return Span(Operation(index, lane, kind, stage, after=after), start, end)


def example() -> list[Span]:
    """Compute waits for the second block's weights, the update for the gradient."""
    read, compute, adam = Lane.SSD_READ, Lane.COMPUTE, Lane.ADAM
    return [
        span(0, read, 0.0, 1.0, stage="block.0"),
        span(1, compute, 1.0, 2.0, (0,), kind=Kind.FORWARD, stage="block.0"),
        span(2, read, 1.0, 4.0, stage="block.1"),
        span(3, compute, 4.0, 9.0, (2,), kind=Kind.BACKWARD, stage="block.1"),
        span(4, Lane.SSD_WRITE, 4.0, 6.0, (2,), kind=Kind.SAVE_INPUT, stage="block.1"),
        span(5, adam, 9.5, 10.0, (3,), kind=Kind.UPDATE, stage="block.1"),
    ]


def test_the_path_goes_through_whatever_ended_last() -> None:
    spans = example()
    assert [link.operation.index for link in critical_path(spans)] == [0, 2, 3, 5]
    result = verdict(random.Random(3).sample(spans, len(spans)))
    assert result.step_s == 10.0
    assert result.lane_s == {"compute": 5.0, "ssd-read": 4.0, "adam": 0.5}
    assert result.kind_s["compute"] == {"backward": 5.0}
    assert result.between_s == 0.5
    assert result.busy_s == {"ssd-read": 4.0, "compute": 6.0, "ssd-write": 2.0, "adam": 0.5}
    assert (result.busiest, result.bound_share) == ("compute", 0.6)
    assert result.text() == (
        "a step of 10 s waited for: compute 50% (backward of block.1), ssd-read 40% (load of block.0 to block.1), "
        "adam 5% (update of block.1), gaps 5%; compute, the busiest lane, worked 60% of it"
    )
    assert json.loads(json.dumps(result.to_dict()))["busiest"] == "compute"


def test_operations_without_a_stage_and_stages_without_a_number() -> None:
    spans = [
        span(0, Lane.COMPUTE, 0.0, 9.7, kind=Kind.LOSS, stage="head"),
        span(1, Lane.COMPUTE, 9.7, 10.0, kind=Kind.ENTRY_BACKWARD, stage="embed"),
        span(2, Lane.D2H, 10.0, 11.0, (1,), kind=Kind.CLIP),
    ]
    assert verdict(spans).text().startswith(
        "a step of 11 s waited for: compute 91% (loss of head, embed), d2h 9% (clip); compute,"
    )  # fmt: skip


def test_nothing_ran() -> None:
    assert critical_path([]) == []
    result = verdict([])
    assert (result.step_s, result.busiest, result.bound_share) == (0.0, "", 0.0)
    assert result.text() == "nothing ran"


def test_an_operation_that_is_missing_holds_nothing_up() -> None:
    spans = [span(7, Lane.COMPUTE, 3.0, 4.0, (2, 5))]
    assert verdict(spans).lane_s == {"compute": 1.0}
    assert verdict(spans).between_s == 3.0


@given(st.data())
def test_path_and_gaps_make_up_the_step(data: st.DataObject) -> None:
    """For any schedule and any durations: times add up, and no lane worked longer than the step took."""
    free_at = dict.fromkeys(Lane, 0.0)
    spans: list[Span] = []
    for index in range(data.draw(st.integers(1, 25))):
        lane = data.draw(st.sampled_from(list(Lane)))
        after = (
            tuple(sorted(data.draw(st.sets(st.integers(0, index - 1), max_size=3))))
            if index
            else ()
        )
        start = max([free_at[lane], *(spans[other].end_s for other in after)])
        start += data.draw(st.sampled_from([0.0, 0.25]))
        free_at[lane] = start + data.draw(st.integers(0, 8))
        spans.append(span(index, lane, start, free_at[lane], after))
    result = verdict(spans)
    assert sum(result.lane_s.values()) + result.between_s == pytest.approx(result.step_s)
    assert result.step_s == max(free_at.values())
    assert 0 <= result.bound_share <= 1
    indexes = [link.operation.index for link in critical_path(spans)]
    assert indexes == sorted(set(indexes))


def test_what_lanes_ran_adds_up() -> None:
    schedule = Schedule()
    last: tuple[int, ...] = ()
    for _ in range(10):
        last = tuple(schedule.add(lane, Kind.LOAD, after=last) for lane in Lane)
    with Lanes() as lanes:
        spans = lanes.run(schedule, lambda operation: None)
    result = verdict(spans)
    assert len(critical_path(spans)) >= 10
    assert sum(result.lane_s.values()) + result.between_s == pytest.approx(result.step_s)
