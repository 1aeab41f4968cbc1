"""The simulator against cases worked out by hand, and against bounds that no schedule can beat."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtune.plan.generate import EMBED, StepShape, generate_training_step
from ssdtune.plan.ledger import Ledger, ModelShape, TrainingShape
from ssdtune.plan.schedule import Kind, Lane, Schedule
from ssdtune.plan.simulator import Cost, simulate

from .test_generate import shapes

RESOURCES = ("ssd", "h2d", "d2h", "compute", "cores", "dram")


def build(*operations: tuple[Lane, tuple[int, ...]]) -> Schedule:
    schedule = Schedule()
    for lane, after in operations:
        schedule.add(lane, Kind.LOAD, after=after)
    return schedule


def costs(*seconds: dict[str, float]) -> list[Cost]:
    return [Cost(seconds=each) for each in seconds]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Schedule, list[Cost]]:
    schedule = generate_training_step(draw(shapes()))
    kinds: dict[str, Cost] = {}
    for kind in Kind:
        amounts = draw(
            st.dictionaries(st.sampled_from(RESOURCES), st.integers(0, 9).map(float), max_size=3)
        )
        kinds[kind] = Cost(seconds=amounts)
    return schedule, [kinds[operation.kind] for operation in schedule.operations]


# By hand


def test_nothing_takes_no_time() -> None:
    result = simulate(Schedule(), [])
    assert result.step_s == 0
    assert result.binding == "" and result.share("ssd") == 0


def test_one_lane_is_the_sum() -> None:
    schedule = build((Lane.SSD_READ, ()), (Lane.SSD_READ, ()), (Lane.SSD_READ, ()))
    result = simulate(schedule, costs({"ssd": 1.0}, {"ssd": 2.0}, {"compute": 4.0}))
    assert result.step_s == 7.0
    assert [(span.begin_s, span.end_s) for span in result.spans] == [(0, 1), (1, 3), (3, 7)]
    assert result.lane_s == {"ssd-read": 7.0}
    assert result.resource_s == {"ssd": 3.0, "compute": 4.0}


def test_lanes_without_a_common_resource_run_side_by_side() -> None:
    schedule = build((Lane.SSD_READ, ()), (Lane.COMPUTE, ()))
    assert simulate(schedule, costs({"ssd": 3.0}, {"compute": 5.0})).step_s == 5.0


def test_a_wait_is_kept_across_lanes() -> None:
    schedule = build((Lane.SSD_READ, ()), (Lane.COMPUTE, (0,)), (Lane.SSD_READ, ()))
    result = simulate(schedule, costs({"ssd": 2.0}, {"compute": 3.0}, {"ssd": 1.0}))
    assert [(span.begin_s, span.end_s) for span in result.spans] == [(0, 2), (2, 5), (2, 3)]


def test_a_blocked_head_holds_up_its_lane() -> None:
    # The second read could start at once, but the first one waits for the computation.
    schedule = build((Lane.COMPUTE, ()), (Lane.SSD_READ, (0,)), (Lane.SSD_READ, ()))
    result = simulate(schedule, costs({"compute": 4.0}, {"ssd": 1.0}, {"ssd": 1.0}))
    assert result.spans[2].begin_s == 5.0


def test_read_and_write_share_the_drives() -> None:
    # Half each until the shorter one is over at 4; the other has 2 of its 4 seconds left then.
    schedule = build((Lane.SSD_READ, ()), (Lane.SSD_WRITE, ()))
    result = simulate(schedule, costs({"ssd": 2.0}, {"ssd": 4.0}))
    assert [span.end_s for span in result.spans] == [4.0, 6.0]
    assert result.resource_s == {"ssd": pytest.approx(6.0)}
    assert result.lane_s == {"ssd-read": 4.0, "ssd-write": 6.0}


def test_an_update_runs_at_the_pace_of_its_tightest_resource() -> None:
    # Alone 3 s because of the cores; the drives are busy for 2 s of it.
    schedule = build((Lane.ADAM, ()))
    result = simulate(schedule, costs({"ssd": 2.0, "cores": 3.0}))
    assert result.step_s == 3.0
    assert result.resource_s == {"ssd": pytest.approx(2.0), "cores": pytest.approx(3.0)}


def test_sharing_slows_all_users_alike_and_leaves_the_rest_to_others() -> None:
    # The update uses 2/3 of the drives alone, a read all of them: both run at x with x (2/3 + 1) = 1, so x is 0.6.
    # The read (3 s alone) is over after 5 s, as is the update. Computing is not slowed down.
    schedule = build((Lane.ADAM, ()), (Lane.SSD_READ, ()), (Lane.COMPUTE, ()))
    result = simulate(schedule, costs({"ssd": 2.0, "cores": 3.0}, {"ssd": 3.0}, {"compute": 5.0}))
    assert [span.end_s for span in result.spans] == pytest.approx([5.0, 5.0, 5.0])
    assert result.share("ssd") == pytest.approx(1.0)


def test_room_that_one_user_cannot_take_goes_to_another() -> None:
    # Memory bandwidth: the copy takes 1/4 of it at full pace, Adam all of it: x (1/4 + 1) = 1, x = 0.8. The cores
    # are used by Adam alone. The copy (4 s) ends at 5; Adam has 6 - 4 left then and goes on at full pace.
    schedule = build((Lane.H2D, ()), (Lane.ADAM, ()))
    result = simulate(schedule, costs({"h2d": 4.0, "dram": 1.0}, {"dram": 6.0, "cores": 2.0}))
    assert [span.end_s for span in result.spans] == pytest.approx([5.0, 7.0])


def test_memory_rises_and_falls() -> None:
    schedule = build((Lane.COMPUTE, ()), (Lane.COMPUTE, ()), (Lane.COMPUTE, ()))
    work = [
        Cost({"compute": 1.0}, acquires={"host": 30}),
        Cost({"compute": 1.0}, acquires={"host": 20, "device": 7}, releases={"host": 50}),
        Cost({"compute": 1.0}, acquires={"host": 10}),
    ]
    result = simulate(schedule, work, held_bytes={"host": 100})
    assert result.peak_bytes == {"host": 150, "device": 7}


def test_misuse_is_refused() -> None:
    schedule = build((Lane.COMPUTE, ()))
    with pytest.raises(ValueError, match="0 costs for 1 operations"):
        simulate(schedule, [])
    with pytest.raises(ValueError, match=r"takes .* seconds"):
        simulate(schedule, costs({"compute": -1.0}))
    with pytest.raises(ValueError, match=r"takes .* seconds"):
        simulate(schedule, costs({"compute": float("nan")}))
    with pytest.raises(ValueError, match="waits for"):
        simulate(build((Lane.COMPUTE, (0,))), costs({"compute": 1.0}))


# Of any schedule


@settings(deadline=None, max_examples=60)
@given(jobs())
def test_never_faster_than_any_resource_lane_or_chain(job: tuple[Schedule, list[Cost]]) -> None:
    schedule, work = job
    result = simulate(schedule, work)
    tolerance = 1 + 1e-9
    for resource in RESOURCES:
        total = sum(cost.seconds.get(resource, 0.0) for cost in work)
        assert result.step_s * tolerance >= total
        assert result.resource_s.get(resource, 0.0) == pytest.approx(total, abs=1e-6)
    finish: list[float] = []
    last: dict[str, float] = {}
    for operation, cost in zip(schedule.operations, work):
        ready = max([finish[i] for i in operation.after] + [last.get(operation.lane, 0.0)])
        finish.append(ready + cost.alone_s)
        last[operation.lane] = finish[-1]
    assert result.step_s * tolerance >= max(finish)
    assert result.step_s <= sum(cost.alone_s for cost in work) * tolerance + 1e-9
    for operation, span in zip(schedule.operations, result.spans):
        assert all(result.spans[i].end_s <= span.begin_s + 1e-9 for i in operation.after)


@settings(deadline=None, max_examples=30)
@given(jobs(), st.floats(0.1, 10))
def test_scales_with_all_rates(job: tuple[Schedule, list[Cost]], factor: float) -> None:
    schedule, work = job
    slower = [
        replace(cost, seconds={k: v * factor for k, v in cost.seconds.items()}) for cost in work
    ]
    once = simulate(schedule, work).step_s
    assert simulate(schedule, slower).step_s == pytest.approx(once * factor, rel=1e-6, abs=1e-9)


@settings(deadline=None, max_examples=30)
@given(jobs())
def test_one_resource_for_all_is_a_serial_machine(job: tuple[Schedule, list[Cost]]) -> None:
    schedule, work = job
    serial = [Cost({"all": cost.alone_s}) for cost in work]
    total = sum(cost.alone_s for cost in work)
    assert simulate(schedule, serial).step_s == pytest.approx(total, abs=1e-9)


def test_a_hundred_blocks() -> None:
    pieces = 10
    ledger = Ledger(
        ModelShape(num_blocks=100, hidden=8, block_parameters=1000),
        TrainingShape(tokens=8, sequence=8),
    )
    blocks = {name: stage for name, stage in ledger.stages(pieces=pieces).items() if name != EMBED}
    schedule = generate_training_step(StepShape(100, 4, True, stages=blocks))
    kinds = {
        Kind.LOAD: {"ssd": 1.0}, Kind.UPLOAD: {"h2d": 0.5}, Kind.FORWARD: {"compute": 0.5},
        Kind.BACKWARD: {"compute": 1.5}, Kind.UPDATE: {"cores": 0.2},
        Kind.LOAD_STATES: {"ssd": 0.7}, Kind.SAVE_STATES: {"ssd": 0.5},
    }  # fmt: skip
    work = [Cost(kinds.get(operation.kind, {})) for operation in schedule.operations]
    result = simulate(schedule, work)
    updates = sum(operation.kind == Kind.UPDATE for operation in schedule.operations)
    loads = sum(operation.kind == Kind.LOAD for operation in schedule.operations)
    assert updates == 100 * pieces
    assert result.binding == "ssd"
    assert result.resource_s["ssd"] == pytest.approx(1.2 * updates + loads)
    # Forward is bound by computing (2 s a block), backward by the drives.
    assert result.step_s == pytest.approx(result.resource_s["ssd"] + 100, rel=0.05)
