"""The memory plan keeps its budget, says what is missing in numbers, and makes use of every byte more."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdtune.errors import CapacityError
from ssdtune.plan.residency import (
    CHUNK_ELEMENT_BYTES,
    CHUNK_SETS,
    RESERVE_BYTES,
    SOURCE_SCRATCH_BYTES,
    ComputeSize,
    MemoryPlan,
    PartSize,
    plan_memory,
)
from ssdtune.units import MIB, format_memory

PAGE = 2048
"""Elements to which parts are padded."""


@dataclass(frozen=True)
class Model:
    """A model's parts, as the layout makes them, and what computing needs."""

    parts: tuple[PartSize, ...]
    num_blocks: int
    compute: ComputeSize
    options: dict[str, Any] = field(default_factory=dict)

    def plan(self, budget_bytes: int, cache_bytes: int | None = None, **more: Any) -> MemoryPlan:
        options = {"clipping": True, "prefetch_depth": 1, "chunk_bytes": MIB} | self.options | more
        return plan_memory(
            self.parts, self.compute, num_blocks=self.num_blocks, base_bytes=0,
            budget_bytes=budget_bytes, cache_bytes=cache_bytes, **options,
        )  # fmt: skip

    def smallest(self) -> int:
        """Return the budget that just does."""
        return self.plan(1 << 50, cache_bytes=0).host_bytes

    def traffic(self, plan: MemoryPlan) -> int:
        """Return the bytes that a step moves: weights once a pass, states and waiting gradients there and back."""
        total = 0
        for part in self.parts:
            passes = 2 if part.stage.startswith("block.") else 1
            if part.name not in plan.resident:
                total += passes * part.weight_bytes
                total += 2 * part.state_bytes if part.trained else 0
            if part.trained and plan.gradients == "ssd":
                total += 2 * 4 * part.numel
        if plan.input_slots:
            inputs = self.compute.num_micro_batches * self.num_blocks
            total += 2 * inputs * self.compute.input_bytes
        return total


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draw a model of equal blocks: fully trained, with adapters, or with adapters in some blocks only."""
    num_blocks, item = draw(st.integers(1, 12)), draw(st.sampled_from([2, 4]))
    kind = draw(st.sampled_from(["full", "lora", "some lora"]))
    pages = {
        "outer": draw(st.integers(1, 4)),
        "embed": draw(st.integers(1, 300)),
        **dict.fromkeys([f"block.{i}" for i in range(num_blocks)], draw(st.integers(1, 100))),
    }
    if draw(st.booleans()):
        pages["head"] = pages["embed"]
    parts = []
    for stage, count in pages.items():
        numel, trained = PAGE * count, kind == "full"
        parts.append(PartSize(stage, stage, item * numel, numel, trained, trained and item == 2))
        number = int(stage.partition(".")[2] or -1)
        if number >= 0 and (kind == "lora" or (kind == "some lora" and number % 3 == 0)):
            parts.append(PartSize(f"{stage}.float32", stage, 4 * PAGE, PAGE, True, False))
    compute = ComputeSize(
        block_bytes=draw(st.integers(0, 5 * MIB)), head_bytes=draw(st.integers(0, 5 * MIB)),
        input_bytes=4096 * draw(st.integers(1, 50)), num_micro_batches=draw(st.integers(1, 8)),
        entry_bytes=4096,
    )  # fmt: skip
    return Model(tuple(parts), num_blocks, compute)


@given(models(), st.integers(0, 100), st.booleans(), st.sampled_from(["auto", "host", "ssd"]))
def test_the_plan_keeps_its_budget(
    model: Model, more_mib: int, clipping: bool, activations: str
) -> None:
    budget = model.smallest() + more_mib * MIB // 8
    options = {"clipping": clipping, "activations": activations}
    for cache_bytes in (None, 0, 1 * MIB):
        try:
            plan = model.plan(budget, cache_bytes, **options)
        except CapacityError:
            assert activations == "host"  # these inputs must find room
            continue
        assert plan.host_bytes == sum(plan.breakdown.values()) <= budget
        assert 1 <= plan.block_slots <= model.num_blocks
        kept = [part for part in model.parts if part.name in plan.resident]
        assert plan.breakdown["resident states"] == sum(part.state_bytes for part in kept)
        assert cache_bytes is None or plan.breakdown["resident states"] <= cache_bytes
        if plan.gradients == "ssd":
            assert not any(part.trained for part in kept)
        assert (plan.gradients == "overlap") == (not clipping)
        if cache_bytes == 0:
            assert not plan.resident
            assert plan.gradients != "host"
        if activations != "auto":
            assert bool(plan.input_slots) == (activations == "ssd")
        assert plan.to_dict()["host_bytes"] == plan.host_bytes


@given(models(), st.booleans())
def test_too_little_is_refused_with_numbers(model: Model, clipping: bool) -> None:
    model.options["clipping"] = clipping
    smallest = model.smallest()
    assert model.plan(smallest).host_bytes <= smallest
    with pytest.raises(CapacityError) as refused:
        model.plan(smallest - 1)
    message = str(refused.value)
    assert f"needs {format_memory(smallest)}" in message
    assert f"the budget is {format_memory(smallest - 1)}" in message
    assert f"reserve {format_memory(RESERVE_BYTES)}" in message
    assert f"reading {format_memory(SOURCE_SCRATCH_BYTES)}" in message
    assert re.search(r"Raise host_memory, or lower .*max_length", message)


@given(models(), st.lists(st.integers(0, 400), min_size=2, max_size=6, unique=True))
def test_more_memory_never_moves_more_bytes(model: Model, extra: list[int]) -> None:
    smallest = model.smallest()
    plans = [model.plan(smallest + MIB * more // 4) for more in sorted(extra)]
    moved = [model.traffic(plan) for plan in plans]
    assert moved == sorted(moved, reverse=True)


@given(models(), st.booleans())
def test_with_plenty_nothing_moves(model: Model, clipping: bool) -> None:
    plan = model.plan(1 << 50, clipping=clipping)
    assert plan.resident == {part.name for part in model.parts}
    assert plan.gradients == ("host" if clipping else "overlap")
    assert plan.input_slots == 0
    assert plan.breakdown["weight slots"] == 0
    assert model.traffic(plan) == 0


def test_prefetch_and_chunks_have_their_price() -> None:
    parts = tuple(
        PartSize(stage, stage, 2 * PAGE, PAGE, True, True)
        for stage in ("outer", "embed", *(f"block.{i}" for i in range(4)))
    )
    model = Model(parts, 4, ComputeSize(0, 0, 4096, 1, 0))
    slots = {
        depth: model.plan(1 << 40, 0, prefetch_depth=depth).breakdown["weight slots"]
        for depth in range(6)
    }
    # outer, embedding, and a slot for each block at work or ahead, never more than there are blocks
    assert slots == {depth: 2 * PAGE * (2 + min(depth + 1, 4)) for depth in range(6)}
    whole = CHUNK_SETS * CHUNK_ELEMENT_BYTES * PAGE
    assert model.plan(1 << 40, 0).breakdown["optimizer chunks"] == whole
    half = model.plan(1 << 40, 0, chunk_bytes=4 * PAGE // 2).breakdown["optimizer chunks"]
    assert half == whole // 2
