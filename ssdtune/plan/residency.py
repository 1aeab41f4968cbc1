"""What stays in memory and what is streamed: plain numbers in, a `MemoryPlan` out.

Order of preference for the host memory that is left after the buffers that every run needs: block inputs,
then gradients, then the states of parts (those whose every byte saves most traffic first).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ssdtune.errors import CapacityError
from ssdtune.units import MIB, format_memory

SOURCE_SCRATCH_BYTES = 32 * MIB
CHUNK_SETS = 3
"""Chunks of the optimizer in flight: one read, one computed, one written."""
CHUNK_ELEMENT_BYTES = 16
"""Bytes of one element in a chunk: master weight and gradient 4 each, moments 8."""
RESERVE_BYTES = 192 * MIB
"""Kernels that torch loads at their first use, small allocations, threads, allocator slack: 171 MiB measured at 134M."""


@dataclass(frozen=True)
class PartSize:
    """What a part of a stage takes.

    Attributes:
        weight_bytes: The weights it computes with.
        numel: Elements; a trained part has `numel` fp32 gradients and its optimizer states.
        split: The master weight is split (bf16 and int16 halves).
    """

    name: str
    stage: str
    weight_bytes: int
    numel: int
    trained: bool
    split: bool

    @property
    def state_bytes(self) -> int:
        """Weights and optimizer state, all of which a resident part keeps in memory."""
        return self.weight_bytes + (self.numel * (10 if self.split else 8) if self.trained else 0)


@dataclass(frozen=True)
class ComputeSize:
    """Memory that computing needs, in bytes.

    Attributes:
        block_bytes: Peak of a block's backward pass: saved activations and temporary gradients.
        head_bytes: Peak of a chunk's logits and of the head's temporary gradient.
        input_bytes: One block input of one micro-batch, rounded up for direct I/O.
        num_micro_batches: Micro-batches of a step.
        entry_bytes: What the embedding's graph and the recorded arguments of one micro-batch keep.
    """

    block_bytes: int
    head_bytes: int
    input_bytes: int
    num_micro_batches: int
    entry_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """The choices, and the host memory they take.

    Attributes:
        resident: Parts that stay in memory.
        gradients: Where gradients wait for the norm of all, "host" or "ssd"; "overlap" if they need not.
        input_slots: 0 keeps block inputs in memory, else the slots through which they go to SSD and back.
        breakdown: Host bytes by purpose.
    """

    resident: frozenset[str]
    gradients: str
    block_slots: int
    gradient_slots: int
    input_slots: int
    budget_bytes: int
    breakdown: dict[str, int] = field(default_factory=dict)

    @property
    def host_bytes(self) -> int:
        """Planned peak of host memory."""
        return sum(self.breakdown.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "resident": sorted(self.resident), "host_bytes": self.host_bytes}


def plan_memory(
    parts: Sequence[PartSize],
    compute: ComputeSize,
    *,
    num_blocks: int,
    base_bytes: int,
    budget_bytes: int,
    cache_bytes: int | None,
    chunk_bytes: int,
    prefetch_depth: int,
    clipping: bool,
    activations: str = "auto",
) -> MemoryPlan:
    """Choose what stays in memory.

    Args:
        base_bytes: Resident memory of the process before any buffer (interpreter, torch, tokenized rows).
        budget_bytes: The most the whole process may take.
        cache_bytes: Limit for resident parts, and 0 also sends gradients and block inputs to SSD; None for
            what is left.
        chunk_bytes: Bytes of an fp32 state that the optimizer works on at once.
        clipping: Gradients must wait for the global norm.

    Raises:
        CapacityError: Even with everything streamed it does not fit.
    """
    streaming = cache_bytes == 0
    block_slots = min(prefetch_depth + 1, num_blocks)
    trained_numel = sum(part.numel for part in parts if part.trained)
    gradient_bytes = 4 * trained_numel
    inputs_bytes = compute.input_bytes * compute.num_micro_batches * num_blocks
    largest_chunk = min(chunk_bytes // 4, max((p.numel for p in parts if p.trained), default=0))
    fixed = {
        "process": base_bytes,
        "reserve": RESERVE_BYTES,
        "reading": SOURCE_SCRATCH_BYTES,
        "optimizer chunks": CHUNK_SETS * largest_chunk * CHUNK_ELEMENT_BYTES,
        "compute": max(compute.block_bytes, compute.head_bytes)
        + compute.num_micro_batches * (compute.entry_bytes + 2 * compute.input_bytes),
    }

    def total(resident: frozenset[str], gradients: str, input_slots: int) -> dict[str, int]:
        kept = sum(part.state_bytes for part in parts if part.name in resident)
        if gradients == "host":
            waiting = gradient_bytes
        else:
            waiting = _gradient_slot_bytes(parts, num_blocks)
        moving = input_slots * compute.input_bytes if input_slots else inputs_bytes
        return {
            **fixed,
            "weight slots": weight_slot_bytes(parts, resident, block_slots),
            "gradients": waiting,
            "block inputs": moving,
            "resident states": kept,
        }

    def fits(figures: dict[str, int]) -> bool:
        return sum(figures.values()) <= budget_bytes

    nothing: frozenset[str] = frozenset()
    input_slots = 0 if activations == "host" else 2
    smallest = total(nothing, "ssd", input_slots)
    if not fits(smallest):
        details = ", ".join(
            f"{name} {format_memory(size)}" for name, size in smallest.items() if size
        )
        raise CapacityError(
            f"host memory: even with everything streamed the run needs {format_memory(sum(smallest.values()))} "
            f"({details}); the budget is {format_memory(budget_bytes)}. Raise host_memory, or lower "
            "per_device_train_batch_size, max_length or io.chunk_bytes."
        )
    if not streaming and activations == "auto" and fits(total(nothing, "ssd", 0)):
        input_slots = 0
    if not clipping:
        gradients = "overlap"
    elif not streaming and fits(total(nothing, "host", input_slots)):
        gradients = "host"
    else:
        gradients = "ssd"
    resident = nothing
    limit = budget_bytes if cache_bytes is None else cache_bytes
    # A byte of trained states that stays saves more traffic than one of frozen weights; small parts first, since
    # each costs a request. Trained parts must find their gradient in memory.
    for part in sorted(parts, key=lambda p: (not p.trained, p.weight_bytes)):
        if part.trained and gradients == "ssd":
            continue
        wider = resident | {part.name}
        figures = total(wider, gradients, input_slots)
        if fits(figures) and figures["resident states"] <= limit:
            resident = wider
    figures = total(resident, gradients, input_slots)
    return MemoryPlan(resident, gradients, block_slots, 2, input_slots, budget_bytes, figures)


def weight_slot_bytes(parts: Sequence[PartSize], resident: frozenset[str], block_slots: int) -> int:
    """Return the host bytes of all weight slots; see `ssdtune.plan.generate` for their classes."""
    by_stage: dict[str, int] = {}
    for part in parts:
        if part.name not in resident:
            by_stage[part.stage] = by_stage.get(part.stage, 0) + part.weight_bytes
    blocks = [size for stage, size in by_stage.items() if stage.startswith("block.")]
    ends = [by_stage.get("embed", 0), by_stage.get("head", 0)]
    return by_stage.get("outer", 0) + max(ends) + block_slots * max(blocks, default=0)


def _gradient_slot_bytes(parts: Sequence[PartSize], num_blocks: int) -> int:
    by_stage: dict[str, int] = {}
    for part in parts:
        if part.trained:
            by_stage[part.stage] = by_stage.get(part.stage, 0) + 4 * part.numel
    blocks = [size for stage, size in by_stage.items() if stage.startswith("block.")]
    ends = [by_stage.get("embed", 0), by_stage.get("head", 0)]
    return by_stage.get("outer", 0) + max(ends) + 2 * max(blocks, default=0)
