"""What a run takes of a card, in plain numbers: what is counted, what is given up first, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ssdtune.errors import CapacityError
from ssdtune.plan.device_memory import (
    CONTEXT_BYTES,
    FREE_SHARE,
    SMALL_BYTES,
    WORKSPACE_BYTES,
    DeviceLimits,
    device_bytes,
    device_limits,
    tensor_bytes,
)
from ssdtune.plan.residency import (
    ComputeSize,
    MemoryLimits,
    MemoryPlan,
    PartSize,
    Proportions,
    plan_memory,
)
from ssdtune.units import GIB, MIB

BLOCK, ENDS, OUTER = 100 * MIB, 30 * MIB, MIB
"""Elements."""
COMPUTE = ComputeSize(
    block_bytes=300 * MIB, head_bytes=200 * MIB, input_bytes=8 * MIB, num_micro_batches=4,
    entry_bytes=MIB, kept_bytes=250 * MIB,
)  # fmt: skip
PLENTY = 1 << 50
FIXED = CONTEXT_BYTES + WORKSPACE_BYTES + SMALL_BYTES


def parts(num_blocks: int = 8) -> list[PartSize]:
    sizes = {"outer": OUTER, "embed": ENDS, "head": ENDS - 1}
    sizes |= {f"block.{i}": BLOCK for i in range(num_blocks)}
    return [
        PartSize(f"{stage}.weights", stage, 2 * numel, numel, True, split=True)
        for stage, numel in sizes.items()
    ]


def planned(card_bytes: int, proportions: Proportions | None = None, **more: object) -> MemoryPlan:  # fmt: skip
    limits = MemoryLimits(
        base_bytes=0, budget_bytes=PLENTY, device=DeviceLimits(card_bytes, "cuda:0")
    )
    return plan_memory(parts(), COMPUTE, replace(limits, **more), proportions)  # type: ignore[arg-type]


def test_every_byte_is_counted_once() -> None:
    plan = planned(PLENTY, Proportions(kept_blocks=3, block_slots=3), recompute="always")
    assert not plan.kept
    plan = replace(plan, kept=frozenset({"block.7"}))
    found = device_bytes(parts(), COMPUTE, plan)
    moving = 300 * MIB + 4 * (MIB + 2 * 8 * MIB) + 7 * 4 * 8 * MIB + 4 * 250 * MIB
    assert found.pop("slack") == SMALL_BYTES + moving // 16
    assert found == {
        "CUDA itself": CONTEXT_BYTES,
        "workspaces": WORKSPACE_BYTES,
        "weight slots": 2 * (OUTER + ENDS + 3 * BLOCK),
        "gradients": 4 * (OUTER + ENDS + 2 * BLOCK),
        "compute": 300 * MIB + 4 * (MIB + 2 * 8 * MIB),
        "block inputs": 7 * 4 * 8 * MIB,
        "kept activations": 4 * 250 * MIB,
        "on their way to the host": 0,
    }


def test_what_goes_to_ssd_takes_its_slots_and_as_much_on_its_way() -> None:
    plan = planned(PLENTY, Proportions(input_slots=3), activations="ssd")
    found = plan.device_breakdown
    assert plan.input_slots == 3
    assert found["block inputs"] == found["on their way to the host"] == 3 * 8 * MIB
    plan = planned(PLENTY, Proportions(input_slots=2, swapped_blocks=2), recompute="auto")
    found = plan.device_breakdown
    assert len(plan.swapped) == 2 and plan.inputs_stay
    again = 8 - len(plan.kept) - 2
    assert found["block inputs"] == 2 * 250 * MIB + (2 + again) * 4 * 8 * MIB
    assert found["on their way to the host"] == 2 * 250 * MIB


def test_what_waits_in_host_memory_takes_a_place_there_for_each_micro_batch() -> None:
    plan = planned(PLENTY, Proportions(input_slots=3), activations="host", recompute="always")
    assert len(plan.in_host) == 8 and plan.input_slots == 3
    assert plan.breakdown["block inputs"] == 8 * 4 * 8 * MIB  # nothing passes through slots
    found = plan.device_breakdown
    assert found["block inputs"] == found["on their way to the host"] == 3 * 8 * MIB
    assert [plan.stored_bytes(f"block.{i}", COMPUTE) for i in range(8)] == [0] * 8
    whole = planned(PLENTY, activations="host", recompute="never")
    assert whole.in_host == whole.swapped and len(whole.swapped) == 8 and not whole.kept
    assert whole.breakdown["block inputs"] == 8 * 4 * 250 * MIB
    assert not planned(PLENTY, activations="device", recompute="always").input_slots


def test_what_finds_no_room_on_the_card_waits_in_host_memory_and_then_on_ssd() -> None:
    """The inputs of the last blocks stay in host memory longest, before anything else that could be there."""
    away = planned(PLENTY, Proportions(inputs_leave=True), recompute="always")
    card = away.device_bytes
    least = planned(card, cache_bytes=0, recompute="always").host_bytes
    seen = []
    for more in range(0, 8 * 4 * 8 + 1, 8):
        plan = planned(card, budget_bytes=least + more * MIB)
        assert plan.host_bytes <= least + more * MIB and plan.device_bytes <= card
        assert plan.in_host == {f"block.{i}" for i in range(8 - len(plan.in_host), 8)}
        stored = plan.stored_inputs(8)
        assert stored == 8 - len(plan.in_host)
        slots = plan.input_slots * 8 * MIB if stored else 0
        assert plan.breakdown["block inputs"] == slots + len(plan.in_host) * 4 * 8 * MIB
        seen.append(len(plan.in_host))
    assert seen == sorted(seen) and set(range(7)) | {8} <= set(seen)
    few = planned(card, Proportions(host_blocks=2))
    assert few.in_host == {"block.6", "block.7"}


def test_activations_that_must_be_kept_wait_in_host_memory_where_the_card_is_short() -> None:
    kept = planned(PLENTY, recompute="never")
    assert len(kept.kept) == 8 and not kept.in_host
    plan = planned(kept.device_bytes - GIB, recompute="never")
    assert len(plan.swapped) == len(plan.in_host) == 8 and not plan.kept
    with pytest.raises(CapacityError, match="GPU memory"):
        planned(kept.device_bytes - GIB, recompute="never", activations="device")


def test_what_the_card_holds_is_not_counted_on_the_host() -> None:
    card, cpu = planned(PLENTY), plan_memory(parts(), COMPUTE, MemoryLimits(0, PLENTY))
    assert card.kept == cpu.kept and len(card.kept) == 8
    assert cpu.device_breakdown == {} and cpu.device_bytes == cpu.device_gradient_slots == 0
    for purpose in ("compute", "kept activations"):
        assert card.breakdown[purpose] == 0 < cpu.breakdown[purpose]
    for purpose in ("weight slots", "gradients", "resident states"):
        assert card.breakdown[purpose] == cpu.breakdown[purpose]


def test_less_memory_takes_activations_then_inputs_then_slots() -> None:
    """Down to one block at a time; every plan keeps its budget, and a byte less than the least is refused."""
    seen: list[tuple[int, bool, int, int]] = []
    budget = planned(PLENTY).device_bytes
    while True:
        try:
            plan = planned(budget)
        except CapacityError as error:
            text = str(error)
            break
        assert plan.device_bytes <= budget == plan.device_budget_bytes
        seen.append(
            (len(plan.kept), not plan.input_slots, plan.block_slots, plan.device_gradient_slots)
        )
        budget = plan.device_bytes - 1
    assert list(dict.fromkeys(one[2:] for one in seen)) == [(3, 2), (2, 2), (2, 1), (1, 1)]
    with_three = [one[1] for one in seen if one[2] == 3]
    assert with_three == sorted(with_three, reverse=True) and set(with_three) == {True, False}
    assert [one[0] for one in seen[:9]] == list(range(8, -1, -1))
    assert text.startswith("GPU memory: even with one block at a time the run needs ")
    assert "of cuda:0 (" in text and "gradients 500 MiB" not in text
    for word in ("gradients", "weight slots", "CUDA itself 512 MiB", "gpu_memory", "max_length"):
        assert word in text


def test_host_memory_that_is_short_takes_no_slots_of_the_card() -> None:
    least = planned(PLENTY, cache_bytes=0).host_bytes
    plan = planned(PLENTY, budget_bytes=least - BLOCK)
    assert plan.block_slots == 2 and plan.device_gradient_slots == 2


def test_the_budget_is_what_is_free_or_given() -> None:
    free = 20 * GIB
    assert device_limits(free).budget_bytes == int(free * FREE_SHARE) + CONTEXT_BYTES
    assert device_limits(free, 8 * GIB).budget_bytes == 8 * GIB
    assert device_limits(free, 24 * GIB).budget_bytes == free + CONTEXT_BYTES
    assert tensor_bytes(None) is None
    assert tensor_bytes(8 * GIB) == 8 * GIB - CONTEXT_BYTES
    assert tensor_bytes(1) == MIB


@pytest.mark.parametrize("trained", [True, False])
def test_frozen_parts_take_no_gradients(trained: bool) -> None:
    mixed = [
        *(replace(part, trained=False) for part in parts()),
        *(
            PartSize(f"block.{i}.adapter", f"block.{i}", 5000, 2500, trained, trained)
            for i in range(8)
        ),
    ]
    limits = MemoryLimits(0, PLENTY, device=DeviceLimits(PLENTY))
    found = plan_memory(mixed, COMPUTE, limits).device_breakdown
    assert found["gradients"] == (2 * 4 * 2500 if trained else 0)
    assert found["weight slots"] == 2 * (OUTER + ENDS) + 3 * (2 * BLOCK + 2 * 4096)
    assert sum(found.values()) > FIXED
