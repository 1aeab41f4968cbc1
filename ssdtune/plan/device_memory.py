"""What a run takes of a card's own memory: plain numbers in, bytes by purpose out.

On a CPU the device's memory is the host's, and all this is nothing. `ssdtune.plan.residency` asks here whether a plan
fits on the card; `ssdtune.swap.manager` allocates what is fixed (`slot_bytes`), torch the rest while it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssdtune.errors import CapacityError
from ssdtune.plan.generate import EMBED, HEAD, OUTER, end_slots
from ssdtune.plan.states import extent_bytes
from ssdtune.units import MIB, format_memory

if TYPE_CHECKING:
    from ssdtune.plan.residency import ComputeSize, MemoryPlan, PartSize

CONTEXT_BYTES = 512 * MIB
"""What CUDA keeps for a program on a card: its context and torch's kernels. From 250 MiB on old cards to 550 MiB."""
WORKSPACE_BYTES = 72 * MIB
"""torch gives cuBLAS 32 MiB on Hopper (8 MiB elsewhere) and cuBLASLt 1 MiB, once for the thread that runs forward and
once for autograd's; flash attention and reductions need little more."""
SMALL_BYTES = 64 * MIB
"""Rows, rotary tables, norms, and what torch's allocator rounds up: it takes 2 MiB at a time for small tensors."""
LOSS_BYTES = 3 * 28 * MIB
"""What losses take more than on a CPU, for they are taken by larger slices (`ssdtune.model.loss`); with few logits less."""
SLACK_SHARE = 1 / 16
"""Gaps between tensors that come and go; with expandable segments the allocator has few."""
FREE_SHARE = 0.95
"""Of what is free on a card; the rest is for a display and other programs' growth."""
GRADIENT_SLOTS = 2
"""One is added to while the other leaves for the host."""


@dataclass(frozen=True)
class DeviceLimits:
    """What a plan may take of a card.

    Attributes:
        budget_bytes: All of it, CUDA's own memory included.
        name: Of the card, for messages.
    """

    budget_bytes: int
    name: str = "the card"


def device_limits(
    free_bytes: int, wanted_bytes: int | None = None, name: str = "the card"
) -> DeviceLimits:
    """Return the budget of a card.

    Args:
        free_bytes: What tensors could take there; CUDA's own memory comes on top.
        wanted_bytes: The setting `gpu_memory`; None for what is free.
    """
    available = int(free_bytes * FREE_SHARE) + CONTEXT_BYTES
    if wanted_bytes is None:
        return DeviceLimits(available, name)
    return DeviceLimits(min(wanted_bytes, free_bytes + CONTEXT_BYTES), name)


def tensor_bytes(wanted_bytes: int | None) -> int | None:
    """Return what of the setting `gpu_memory` is left for tensors."""
    return None if wanted_bytes is None else max(wanted_bytes - CONTEXT_BYTES, MIB)


def slot_bytes(parts: Sequence[PartSize], compute: ComputeSize, plan: MemoryPlan) -> dict[str, int]:
    """Return the memory of a card that is allocated once for all, by purpose."""
    weights: dict[str, int] = {}
    gradients: dict[str, int] = {}
    for part in parts:
        # Every part begins on a page.
        weights[part.stage] = weights.get(part.stage, 0) + extent_bytes(part.weight_bytes)
        if part.trained:
            gradients[part.stage] = gradients.get(part.stage, 0) + 4 * part.numel
    return {
        "weight slots": class_bytes(weights, plan.block_slots),
        "gradients": class_bytes(gradients, plan.device_gradient_slots),
        "block inputs": plan.input_slots * plan.input_slot_bytes(compute),
    }


def device_bytes(
    parts: Sequence[PartSize], compute: ComputeSize, plan: MemoryPlan
) -> dict[str, int]:
    """Return the memory of a card that a step takes at its peak, by purpose.

    Block inputs and kept activations are on the card until their block's backward pass, unless they leave.
    """
    blocks = len({part.stage for part in parts if part.stage.startswith("block.")})
    micro_batches, hidden = compute.num_micro_batches, compute.input_bytes
    slots = slot_bytes(parts, compute, plan)
    stay = plan.staying_inputs(blocks)
    leaving = plan.input_slots * plan.input_slot_bytes(compute)
    head = compute.head_bytes + min(LOSS_BYTES, 3 * compute.head_bytes)
    moving = {
        # hidden states of all micro-batches going forward, their gradients coming back
        "compute": max(compute.block_bytes, head)
        + micro_batches * (compute.entry_bytes + 2 * hidden),
        "block inputs": stay * micro_batches * hidden,
        "kept activations": micro_batches * plan.held_bytes(compute),
        "on their way to the host": leaving,
    }
    moving["block inputs"] += slots.pop("block inputs")
    return {
        "CUDA itself": CONTEXT_BYTES,
        "workspaces": WORKSPACE_BYTES,
        **slots,
        **moving,
        "slack": SMALL_BYTES + int(sum(moving.values()) * SLACK_SHARE),
    }


def class_bytes(by_stage: dict[str, int], block_slots: int) -> int:
    """Return the bytes of slots for each class of stages: one for `outer`, one or two for both ends, some for blocks."""
    blocks = [size for stage, size in by_stage.items() if stage.startswith("block.")]
    ends = {stage: size for stage, size in by_stage.items() if stage.startswith((EMBED, HEAD))}
    ends_bytes = len(end_slots(ends)) * max(ends.values(), default=0)
    return by_stage.get(OUTER, 0) + ends_bytes + block_slots * max(blocks, default=0)


def refusal(need: dict[str, int], limits: DeviceLimits) -> CapacityError:
    """Return the error of a run that does not fit on a card whatever is streamed."""
    sizes: Iterable[tuple[str, int]] = sorted(need.items(), key=lambda item: -item[1])
    details = ", ".join(f"{name} {format_memory(size)}" for name, size in sizes if size)
    return CapacityError(
        f"GPU memory: even with one block at a time the run needs {format_memory(sum(need.values()))} of "
        f"{limits.name} ({details}); the budget is {format_memory(limits.budget_bytes)}. Lower "
        "per_device_train_batch_size (and raise gradient_accumulation_steps) or max_length, let activations wait in host "
        "memory or on SSD (activations: host, or ssd), raise gpu_memory or end other programs on the card, or use "
        "--device cpu."
    )
