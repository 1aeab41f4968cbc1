"""The memory plan keeps its budget, says what is missing in numbers, and makes use of every byte more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdtune.errors import CapacityError
from ssdtune.plan.generate import Piece, StageShape, StepShape, generate_training_step
from ssdtune.plan.residency import (
    CHUNK_SLOTS,
    MOST_SLACK_BYTES,
    RESERVE_BYTES,
    SOURCE_SCRATCH_BYTES,
    ComputeSize,
    MemoryLimits,
    MemoryPlan,
    PartSize,
    Proportions,
    plan_memory,
)
from ssdtune.plan.states import check_bytes_of, chunk_numel, chunk_slot_bytes
from ssdtune.units import MIB, format_memory

PAGE = 2048
"""Elements to which parts are padded."""
PLENTY = 1 << 50
SMALLEST = Proportions(block_slots=1, chunk_slots=2)


@dataclass(frozen=True)
class Model:
    """A model's parts, as the layout makes them, and what computing needs."""

    parts: tuple[PartSize, ...]
    num_blocks: int
    compute: ComputeSize
    options: dict[str, Any] = field(default_factory=dict)

    def plan(
        self,
        budget_bytes: int,
        cache_bytes: int | None = None,
        proportions: Proportions | None = None,
        **more: Any,
    ) -> MemoryPlan:
        limits = MemoryLimits(
            base_bytes=0, budget_bytes=budget_bytes, cache_bytes=cache_bytes,
            **({"chunk_bytes": MIB} | self.options | more),
        )  # fmt: skip
        return plan_memory(self.parts, self.compute, limits, proportions)

    def smallest(self, proportions: Proportions = SMALLEST, **more: Any) -> int:
        """Return the budget that just does, by default with as few slots as can be."""
        return self.plan(PLENTY, 0, proportions, **more).least_bytes

    @property
    def trained(self) -> list[str]:
        """Stages that have trained parts."""
        return list(dict.fromkeys(part.stage for part in self.parts if part.trained))

    @property
    def blocks(self) -> list[str]:
        return [f"block.{i}" for i in range(self.num_blocks)]

    def traffic(self, plan: MemoryPlan) -> int:
        """Return the bytes that a step in the middle of a run moves, by its schedule."""
        stages: dict[str, StageShape] = {}
        for part in self.parts:
            before, streamed = stages.get(part.stage, StageShape()), part.name not in plan.resident
            load = part.weight_bytes if streamed else 0
            states = part.state_bytes - part.weight_bytes
            piece = Piece(part.numel, part.weight_bytes, states, streamed)
            stages[part.stage] = StageShape(
                before.load_bytes + load,
                before.frozen_bytes + (0 if part.trained else load),
                before.upload_bytes + part.weight_bytes,
                (*before.pieces, piece) if part.trained else before.pieces,
            )
        shape = StepShape(
            num_blocks=self.num_blocks,
            num_micro_batches=self.compute.num_micro_batches,
            tied="head" not in stages,
            stages=stages,
            block_slots=plan.block_slots,
            gradient_slots=plan.gradient_slots,
            input_slots=plan.input_slots,
            chunk_slots=plan.chunk_slots,
            kept=plan.kept,
            deferred=plan.deferred,
            pending=bool(plan.deferred),
            gradients_on_ssd=plan.gradients_on_ssd,
            input_bytes=self.compute.input_bytes,
        )
        return sum(op.num_bytes for op in generate_training_step(shape).operations)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draw a model of equal blocks: fully trained, with adapters, or with adapters in some blocks only."""
    num_blocks, item = draw(st.integers(1, 12)), draw(st.sampled_from([2, 4]))
    masters, coded = draw(st.booleans()), draw(st.booleans())
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
        split = trained and item == 2 and masters
        parts.append(PartSize(stage, stage, item * numel, numel, trained, split, coded))
        number = int(stage.partition(".")[2] or -1)
        if number >= 0 and (kind == "lora" or (kind == "some lora" and number % 3 == 0)):
            parts.append(PartSize(f"{stage}.float32", stage, 4 * PAGE, PAGE, True, False, coded))
    input_bytes = 4096 * draw(st.integers(1, 50))
    compute = ComputeSize(
        block_bytes=draw(st.integers(0, 5 * MIB)), head_bytes=draw(st.integers(0, 5 * MIB)),
        input_bytes=input_bytes, num_micro_batches=draw(st.integers(1, 8)), entry_bytes=4096,
        kept_bytes=input_bytes * draw(st.integers(2, 20)),
        products_bytes=input_bytes * draw(st.integers(1, 20)), gap_bytes=draw(st.integers(0, 5 * MIB)),
        kept_gap_bytes=input_bytes,
    )  # fmt: skip
    return Model(tuple(parts), num_blocks, compute)


def proportions() -> st.SearchStrategy[Proportions]:
    """Draw what a search over plans might try."""
    return st.builds(
        Proportions,
        kept_blocks=st.none() | st.integers(0, 14),
        partly_blocks=st.integers(0, 14),
        swapped_blocks=st.integers(0, 14),
        swapped_whole=st.booleans(),
        input_slots=st.integers(2, 4),
        block_slots=st.integers(1, 14),
        chunk_slots=st.integers(2, 8),
        deferred_stages=st.integers(0, 16),
    )


def limits() -> st.SearchStrategy[dict[str, Any]]:
    """Draw what users may ask for."""
    return st.fixed_dictionaries(
        {
            "clipping": st.booleans(),
            "activations": st.sampled_from(["auto", "device", "host", "ssd"]),
            "recompute": st.sampled_from(["auto", "always", "cheap", "never"]),
            "cache_bytes": st.sampled_from([None, 0, MIB]),
        }
    )


# Budgets


@given(models(), st.integers(0, 400), limits(), proportions())
def test_the_plan_keeps_its_budget_and_orders(
    model: Model, more_mib: int, asked: dict[str, Any], wanted: Proportions
) -> None:
    budget = model.smallest() + more_mib * MIB // 8
    keeps = asked["recompute"] in ("cheap", "never")
    try:
        plan = model.plan(budget, proportions=wanted, **asked)
    except CapacityError:
        # these inputs or activations must find room, or these slots are more than the fewest
        more_slots = wanted.input_slots > SMALLEST.input_slots
        assert asked["activations"] in ("device", "host") or keeps or more_slots
        return
    blocks, cache_bytes = set(model.blocks), asked["cache_bytes"]
    kept = [part for part in model.parts if part.name in plan.resident]
    assert plan.host_bytes == sum(plan.breakdown.values()) <= budget
    assert min(plan.breakdown.values()) >= 0
    assert not plan.in_host
    assert 1 <= plan.block_slots <= min(model.num_blocks, wanted.block_slots)
    assert 2 <= plan.chunk_slots <= wanted.chunk_slots
    assert plan.breakdown["resident states"] == sum(part.state_bytes for part in kept)
    assert cache_bytes is None or plan.breakdown["resident states"] <= cache_bytes
    # updates
    deferred = model.trained if asked["clipping"] else model.trained[: wanted.deferred_stages]
    assert plan.deferred == set(deferred)
    assert plan.gradients_on_ssd <= plan.deferred
    assert plan.gradients_in_memory == plan.deferred - plan.gradients_on_ssd
    assert not any(part.trained and part.stage in plan.gradients_on_ssd for part in kept)
    # activations
    saves = model.compute.products_bytes < model.compute.kept_bytes
    if asked["recompute"] == "always":
        assert not plan.kept | plan.swapped
    elif keeps:
        on_ssd = asked["activations"] == "ssd"
        assert (plan.swapped if on_ssd else plan.kept) == blocks
        assert bool(plan.input_slots) == on_ssd
        assert plan.partly == (blocks if asked["recompute"] == "cheap" else set())
    else:
        assert plan.kept == set(model.blocks[model.num_blocks - len(plan.kept) :])
        assert plan.swapped <= set(model.blocks[: wanted.swapped_blocks]) - plan.kept
        whole, partly = plan.kept - plan.partly, plan.kept & plan.partly
        assert whole == set(model.blocks[model.num_blocks - len(whole) :])
        if wanted.kept_blocks is not None:
            assert len(whole) <= wanted.kept_blocks and len(partly) <= wanted.partly_blocks
        assert plan.swapped & plan.partly == (
            plan.swapped if saves and not wanted.swapped_whole else set()
        )
        assert plan.partly <= plan.kept | plan.swapped and (saves or not plan.partly)
        assert not (plan.kept and asked["activations"] == "ssd")
    if asked["activations"] != "auto" and not keeps:
        assert bool(plan.input_slots) == (asked["activations"] == "ssd")
    held = len(plan.kept - plan.partly) * model.compute.kept_bytes
    held += len(plan.kept & plan.partly) * model.compute.products_bytes
    assert plan.breakdown["kept activations"] == held * model.compute.num_micro_batches
    if cache_bytes == 0:
        assert not plan.resident
        assert not plan.gradients_in_memory
        assert bool(plan.kept | plan.swapped) == keeps
    assert plan.to_dict()["host_bytes"] == plan.host_bytes


@given(models(), st.booleans(), st.sampled_from([None, 0]))
def test_too_little_is_refused_with_numbers(
    model: Model, clipping: bool, cache_bytes: int | None
) -> None:
    model.options["clipping"] = clipping
    smallest = model.smallest()
    assert model.plan(smallest, cache_bytes).host_bytes <= smallest
    with pytest.raises(CapacityError) as refused:
        model.plan(smallest - 1, cache_bytes)
    message = str(refused.value)
    assert f"needs {format_memory(smallest)}" in message
    assert f"the budget is {format_memory(smallest - 1)}" in message
    smallest_plan = model.plan(smallest, 0, SMALLEST).breakdown
    assert RESERVE_BYTES <= smallest_plan["reserve"] <= RESERVE_BYTES + MOST_SLACK_BYTES
    assert smallest_plan["reading"] <= SOURCE_SCRATCH_BYTES
    for name in ("reserve", "reading"):
        assert f"{name} {format_memory(smallest_plan[name])}" in message
    assert re.search(r"Raise host_memory, or lower .*max_length", message)


@given(models(), proportions())
def test_slots_are_given_up_before_a_run_is_refused(model: Model, wanted: Proportions) -> None:
    """And come back as soon as there is room for them."""
    fewer = list(_slots(model, wanted))
    needs = [model.smallest(replace(wanted, block_slots=b, chunk_slots=c)) for b, c in fewer]
    assert needs == sorted(needs, reverse=True)
    for need, slots in zip(needs, fewer, strict=True):
        plan = model.plan(need, proportions=wanted)
        assert (plan.block_slots, plan.chunk_slots) == next(
            s for n, s in zip(needs, fewer, strict=True) if n <= need
        ), slots
    with pytest.raises(CapacityError):
        model.plan(needs[-1] - 1, proportions=wanted)


def _slots(model: Model, wanted: Proportions) -> Iterator[tuple[int, int]]:
    most = min(wanted.block_slots, model.num_blocks)
    for blocks, chunks in ((most, wanted.chunk_slots), (2, 3), (1, 2)):
        yield min(most, blocks), min(wanted.chunk_slots, chunks)


@given(models(), limits())
def test_freed_memory_stays_where_there_is_room_for_gaps(model: Model, given: Any) -> None:
    plan = model.plan(PLENTY, **given)
    gaps = plan.breakdown["gaps"]
    compute = model.compute
    held = compute.num_micro_batches * plan.held_bytes(compute)
    assert plan.keeps_freed_memory
    assert gaps == compute.gap_bytes + held * compute.kept_gap_bytes // compute.kept_bytes


# What memory is worth


@given(
    models(),
    st.lists(st.integers(0, 400), min_size=2, max_size=6, unique=True),
    limits(),
)
def test_more_memory_never_moves_more_bytes(
    model: Model, extra: list[int], asked: dict[str, Any]
) -> None:
    """Up to one part's weights: those that find room are taken in a fixed order, not the best set of all."""
    smallest = model.smallest(
        Proportions(), **{name: asked[name] for name in asked if name != "cache_bytes"}
    )
    plans = [model.plan(smallest + MIB * more // 4, **asked) for more in sorted(extra)]
    moved = [model.traffic(plan) for plan in plans]
    slack = max(part.weight_bytes for part in model.parts)
    assert all(
        more <= least + slack
        for least, more in zip(accumulate(moved, min), moved[1:], strict=False)
    ), moved


@given(models(), st.booleans())
def test_keeping_activations_costs_no_traffic(model: Model, clipping: bool) -> None:
    """By default they take what states leave, and moving states is dearer than computing again."""
    least = model.smallest(Proportions())  # more than all in memory takes where slots are large
    budget = max(least, (least + model.plan(PLENTY).host_bytes) // 2)
    auto, never = (
        model.plan(budget, clipping=clipping, recompute=recompute)
        for recompute in ("auto", "always")
    )
    assert model.traffic(auto) <= model.traffic(never)  # their inputs don't travel either
    assert auto.resident == never.resident
    if len(auto.kept) < model.num_blocks:
        compute = model.compute
        least = min(compute.kept_bytes, compute.products_bytes)
        each = compute.num_micro_batches * least
        inputs = 0 if auto.input_slots else compute.num_micro_batches * compute.input_bytes
        assert auto.host_bytes + each - inputs > budget, "one more block would have found room"


@given(models(), st.integers(0, 12), st.integers(0, 400))
def test_blocks_that_must_keep_come_first(model: Model, count: int, extra: int) -> None:
    """What a search asks for is given if it fits beside the buffers, whatever states then find no room."""
    budget = model.smallest(Proportions()) + extra * MIB // 8
    plan = model.plan(budget, proportions=Proportions(kept_blocks=count))
    assert len(plan.kept) <= min(count, model.num_blocks)
    if len(plan.kept) < min(count, model.num_blocks):
        nothing_else = model.plan(budget, 0, Proportions())
        each = model.compute.num_micro_batches * model.compute.kept_bytes
        assert nothing_else.host_bytes + each * (len(plan.kept) + 1) > budget


@given(models(), st.booleans())
def test_with_plenty_nothing_moves(model: Model, clipping: bool) -> None:
    plan = model.plan(PLENTY, clipping=clipping)
    assert plan.resident == {part.name for part in model.parts}
    assert plan.gradients_in_memory == (set(model.trained) if clipping else set())
    assert not plan.gradients_on_ssd
    assert plan.input_slots == 0
    assert plan.kept == set(model.blocks) and not plan.partly
    assert plan.breakdown["weight slots"] == plan.breakdown["optimizer chunks"] == 0
    assert plan.breakdown["block inputs"] == 0
    assert model.traffic(plan) == 0


@given(models(), st.integers(0, 400))
def test_every_stage_whose_gradient_finds_room_keeps_it(model: Model, extra: int) -> None:
    """Gradients go to SSD stage by stage, not all or none."""
    plan = model.plan(model.smallest(Proportions()) + extra * MIB // 8, MIB // 64)
    left = (
        plan.budget_bytes
        - plan.host_bytes
        - sum(part.state_bytes for part in model.parts if part.name in plan.resident)
    )
    # Slots for pieces shrink once the gradient of the largest stays in memory; earlier stages aren't asked again.
    left -= plan.chunk_slots * 4 * max(part.numel for part in model.parts)
    for stage in plan.gradients_on_ssd:
        size = sum(4 * part.numel for part in model.parts if part.trained and part.stage == stage)
        assert size > left, stage


def test_gradients_wait_where_there_is_room() -> None:
    """Four equal blocks and a small rest: each gradient that fits beside the slots stays in memory."""
    parts = tuple(
        PartSize(stage, stage, 2 * size, size, True, True)
        for stage, size in (("outer", PAGE), ("embed", PAGE), *((f"block.{i}", 64 * PAGE) for i in range(4)))
    )  # fmt: skip
    model = Model(parts, 4, ComputeSize(0, 0, 4096, 1, 0, kept_bytes=1 << 40))
    # small ones and inputs in memory, all blocks' gradients on SSD
    least = model.smallest(Proportions()) + MIB // 2
    block = 4 * 64 * PAGE
    waiting = [
        len(
            [
                s
                for s in model.plan(least + block * n, 1).gradients_in_memory
                if s.startswith("block")
            ]
        )
        for n in range(5)
    ]
    # the last one gives the two slots back through which gradients go to SSD, so it is the cheapest
    assert waiting == [0, 1, 2, 4, 4]


@pytest.mark.parametrize("clipping", [True, False])
def test_only_what_comes_first_in_a_step_may_be_deferred(clipping: bool) -> None:
    parts = tuple(
        PartSize(stage, stage, 2 * PAGE, PAGE, True, True)
        for stage in ("outer", "embed", *(f"block.{i}" for i in range(4)), "head")
    )
    model = Model(parts, 4, ComputeSize(0, 0, 4096, 1, 0))
    plan = model.plan(PLENTY, 0, Proportions(deferred_stages=4), clipping=clipping)
    some = {"outer", "embed", "block.0", "block.1"}
    assert plan.deferred == plan.gradients_on_ssd == (set(model.trained) if clipping else some)


# Prices


def test_slots_and_chunks_have_their_price() -> None:
    size = 2 * PAGE
    parts = tuple(
        PartSize(stage, stage, 2 * size, size, True, True)
        for stage in ("outer", "embed", *(f"block.{i}" for i in range(4)))
    )
    model = Model(parts, 4, ComputeSize(0, 0, 4096, 1, 0))

    def part_of(
        purpose: str, *, chunk_bytes: int = MIB, clipping: bool = True, **wanted: int
    ) -> int:
        plan = model.plan(
            1 << 40, 0, Proportions(**wanted), chunk_bytes=chunk_bytes, clipping=clipping
        )
        return plan.breakdown[purpose]

    # outer, embedding, and a slot for each block at work or ahead, never more than there are blocks
    slots = {count: part_of("weight slots", block_slots=count) for count in range(1, 7)}
    assert slots == {count: 2 * size * (2 + min(count, 4)) for count in range(1, 7)}
    # moments, low half, gradient from SSD; a piece is no larger than a part
    whole = CHUNK_SLOTS * (8 + 2 + 4) * size
    assert part_of("optimizer chunks") == part_of("optimizer chunks", chunk_bytes=1 << 30) == whole
    assert part_of("optimizer chunks", chunk_bytes=4 * size // 2) == whole // 2
    assert part_of("optimizer chunks", clipping=False) == CHUNK_SLOTS * (8 + 2) * size
    assert part_of("optimizer chunks", chunk_slots=7) == whole // CHUNK_SLOTS * 7


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
def test_states_of_a_piece(split: bool, coded: bool, gradient: bool) -> None:
    """What is not exact takes less; scales of 8-bit moments fill whole pages."""
    numel = 1 << 20
    part = PartSize("block.0", "block.0", 2 * numel, numel, True, split, coded)
    each = 2 * split + (2 + 2 * 4 / 256 if coded else 8)
    assert part.state_bytes == (2 + each) * numel
    for size in (numel, numel // 4):
        wanted = (each + 4 * gradient) * size
        assert chunk_slot_bytes(part.states, size, with_gradient=gradient) == wanted
    scales = 2 * 4096 if coded else 0
    small = chunk_slot_bytes(part.states, 2 * PAGE, with_gradient=False)
    assert small == 2 * PAGE * (2 * split + (2 if coded else 8)) + scales


@given(st.integers(4096, 1 << 28), st.booleans(), st.none() | st.integers(4096, 1 << 26))
def test_pieces_end_where_checksums_do(chunk_bytes: int, coded: bool, other: int | None) -> None:
    """For states of all widths, with the checksums of this chunk size or of another run's."""
    check = check_bytes_of(other or chunk_bytes, coded=coded)
    numel = chunk_numel(chunk_bytes, check if other else None, coded=coded)
    assert check % 4096 == 0
    narrowest = numel * 4 // 256 if coded else numel * 2
    assert narrowest % check == 0
    assert chunk_bytes <= 4 * numel < chunk_bytes + 4 * (check * 64 if coded else check // 2) + 4
