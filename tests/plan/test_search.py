"""The search finds what trying everything finds, keeps to the budget and to what the user fixed, and is never worse."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ssdtune.errors import CapacityError
from ssdtune.plan.generate import Piece, StageShape, StepShape, generate_training_step
from ssdtune.plan.hardware import Hardware
from ssdtune.plan.ledger import Ledger, ModelShape, TrainingShape, work_of
from ssdtune.plan.residency import (
    ComputeSize,
    MemoryLimits,
    MemoryPlan,
    PartSize,
    Proportions,
    chunk_numel,
    plan_memory,
)
from ssdtune.plan.search import LEAST_GAIN, Found, choices, search
from ssdtune.plan.simulator import simulate
from ssdtune.units import GIB, MIB

BLOCKS, MICRO_BATCHES, TOKENS = 4, 2, 2048
SHAPE = ModelShape(
    num_blocks=BLOCKS, hidden=1024, block_parameters=12 << 20, embedding_parameters=4 << 20,
    head_parameters=4 << 20, tied=False,
)  # fmt: skip
LEDGER = Ledger(SHAPE, TrainingShape(tokens=TOKENS, sequence=512, micro_batches=MICRO_BATCHES))
COMPUTE = ComputeSize(
    block_bytes=40 * MIB, head_bytes=20 * MIB, input_bytes=2 * MIB, num_micro_batches=MICRO_BATCHES,
    entry_bytes=6 * MIB, kept_bytes=32 * MIB,
)  # fmt: skip
PARTS = [
    PartSize(stage, stage, 2 * numel, numel, trained=True, split=True)
    for stage, numel in {
        "outer": 2048, "embed": 4 << 20, **{f"block.{i}": 12 << 20 for i in range(BLOCKS)}, "head": 4 << 20,
    }.items()
]  # fmt: skip
PLENTY = 64 * GIB

CARD = Hardware(
    name="card", flop_per_s=1e12, h2d_bytes_per_s=20e9, d2h_bytes_per_s=20e9,
    drive_read_bytes_per_s=6e9, drive_write_bytes_per_s=4e9, dram_bytes_per_s=100e9,
    adam_elements_per_s=2e9,
)  # fmt: skip
MACHINES = {
    "balanced": CARD,
    "drives": replace(CARD, drive_read_bytes_per_s=1e9, drive_write_bytes_per_s=0.6e9),
    "compute": replace(CARD, flop_per_s=1e11),
    "adam": replace(CARD, adam_elements_per_s=5e7),
    "cpu": replace(CARD, computes_on_cpu=True, flop_per_s=3e11, adam_elements_per_s=4e8),
}


@dataclass
class Timer:
    """Simulates steps as a run's forecast does, and counts them."""

    hardware: Hardware
    count: int = 0

    def __call__(self, plan: MemoryPlan) -> float:
        self.count += 1
        chunk, stages = chunk_numel(plan.chunk_bytes), {}
        for part in PARTS:
            streamed = part.name not in plan.resident
            size = chunk if streamed else part.numel
            counts = [min(size, part.numel - start) for start in range(0, part.numel, size)]
            pieces = tuple(Piece(count, 2 * count, 10 * count, streamed) for count in counts)
            load = part.weight_bytes if streamed else 0
            stages[part.stage] = StageShape(load, 0, part.weight_bytes, pieces)
        shape = StepShape(
            num_blocks=BLOCKS, num_micro_batches=MICRO_BATCHES, tied=False, stages=stages,
            block_slots=plan.block_slots, gradient_slots=plan.gradient_slots,
            input_slots=plan.input_slots, chunk_slots=plan.chunk_slots, kept=plan.kept,
            deferred=plan.deferred, pending=bool(plan.deferred),
            gradients_on_ssd=plan.gradients_on_ssd, input_bytes=COMPUTE.input_bytes,
        )  # fmt: skip
        schedule = generate_training_step(shape)
        costs = [self.hardware.cost(work) for work in work_of(schedule, shape, LEDGER)]
        return simulate(schedule, costs).step_s


def limits(budget_bytes: int, **changes: Any) -> MemoryLimits:
    return replace(MemoryLimits(base_bytes=0, budget_bytes=budget_bytes), **changes)


def budget(share: float, **changes: Any) -> int:
    """Return a memory between the least that does (0) and all that can be used (1)."""
    smallest = Proportions(block_slots=1, chunk_slots=2, chunk_bytes=4 * MIB)
    least = plan_memory(PARTS, COMPUTE, limits(PLENTY, **changes | {"cache_bytes": 0}), smallest)
    most = plan_memory(PARTS, COMPUTE, limits(PLENTY, **changes))
    return int(least.host_bytes + share * (most.host_bytes - least.host_bytes))


def everything(bounds: MemoryLimits) -> Iterator[MemoryPlan]:
    """Return the different plans of all combinations of proportions."""
    options, seen = choices(PARTS, bounds), set()
    for values in itertools.product(*options.values()):
        try:
            plan = plan_memory(
                PARTS, COMPUTE, bounds, Proportions(**dict(zip(options, values, strict=True)))
            )
        except CapacityError:
            continue
        if plan not in seen:
            seen.add(plan)
            yield plan


def found(bounds: MemoryLimits, hardware: Hardware = CARD, **options: Any) -> Found:
    return search(PARTS, COMPUTE, bounds, Timer(hardware), **options)


@pytest.mark.parametrize("clipping", [True, False], ids=["clipping", "no clipping"])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("name", MACHINES)
def test_nearly_as_good_as_trying_everything(name: str, share: float, clipping: bool) -> None:
    fixed = {"clipping": clipping, "chunk_bytes": 16 * MIB}  # to have fewer combinations
    bounds = limits(budget(share, **fixed), **fixed)
    timer = Timer(MACHINES[name])
    result = found(bounds, MACHINES[name])
    best = min(map(timer, everything(bounds)))
    assert best * 0.99 <= result.step_s <= 1.05 * best


@pytest.mark.parametrize("name", ["drives", "compute"])
def test_pieces_of_every_size_are_tried(name: str) -> None:
    bounds = limits(budget(0.3))
    best = min(map(Timer(MACHINES[name]), everything(bounds)))
    assert best * 0.99 <= found(bounds, MACHINES[name]).step_s <= 1.05 * best


@pytest.mark.parametrize("clipping", [True, False], ids=["clipping", "no clipping"])
@pytest.mark.parametrize("share", [0.0, 0.15, 0.4, 0.9, 1.5])
@pytest.mark.parametrize("name", ["balanced", "compute"])
def test_keeps_to_the_budget_and_is_never_worse_than_usual(
    name: str, share: float, clipping: bool
) -> None:
    bounds = limits(budget(share, clipping=clipping), clipping=clipping)
    timer, same = Timer(MACHINES[name]), Timer(MACHINES[name])
    result = search(PARTS, COMPUTE, bounds, timer)
    assert result.plan.host_bytes <= bounds.budget_bytes == result.plan.budget_bytes
    usual = plan_memory(PARTS, COMPUTE, bounds)
    assert result.step_s <= result.usual_s == same(usual)
    assert result.step_s == same(result.plan)
    assert result.plan == plan_memory(PARTS, COMPUTE, bounds, result.proportions)
    assert result.num_tried == timer.count  # no plan twice
    assert result == search(PARTS, COMPUTE, bounds, same)


def test_where_the_usual_plan_is_best_it_stays() -> None:
    result = found(limits(PLENTY), MACHINES["adam"])
    assert result.proportions == Proportions()
    assert result.step_s == result.usual_s > result.step_s * (1 - LEAST_GAIN)


def test_no_more_steps_are_simulated_than_asked_for() -> None:
    for most in (1, 2, 5):
        timer = Timer(CARD)
        result = search(PARTS, COMPUTE, limits(budget(0.3)), timer, most_steps=most)
        assert timer.count == result.num_tried == most
    assert result.step_s <= result.usual_s


@pytest.mark.parametrize("share", [0.1, 0.6, 1.2])
def test_what_the_user_fixed_stays(share: float) -> None:
    def plan(name: str = "balanced", **changes: Any) -> MemoryPlan:
        return found(limits(budget(share, **changes), **changes), MACHINES[name]).plan

    blocks = {f"block.{i}" for i in range(BLOCKS)}
    assert plan(chunk_bytes=8 * MIB).chunk_bytes == 8 * MIB
    assert not plan("compute", recompute="always").kept
    never = plan(recompute="never")
    assert never.kept == blocks and never.input_slots == 0
    assert plan(activations="host").input_slots == 0
    on_ssd = plan("compute", activations="ssd")
    assert on_ssd.input_slots > 0 and not on_ssd.kept
    streamed = plan(cache_bytes=0)
    assert not streamed.resident and not streamed.kept and not streamed.gradients_in_memory
    cached = plan(cache_bytes=100 * MIB)
    assert cached.breakdown["resident states"] <= 100 * MIB
    assert plan(clipping=True).deferred == {part.stage for part in PARTS}


def test_what_is_open_is_chosen() -> None:
    """Where computing binds, activations are kept and no gradient is made to wait."""
    room = limits(budget(0.6, clipping=False), clipping=False)
    assert found(room, MACHINES["compute"]).plan.kept
    roomy = limits(PLENTY, clipping=False)
    assert found(roomy, MACHINES["drives"]).plan.resident == {part.name for part in PARTS}


def test_too_little_memory_is_refused() -> None:
    least = budget(0.0)
    assert found(limits(least)).plan.host_bytes == least  # smaller pieces where they are left open
    with pytest.raises(CapacityError, match="even with everything streamed the run needs"):
        found(limits(least - 1))
