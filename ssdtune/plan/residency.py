"""What stays in memory and what is streamed: plain numbers in, a `MemoryPlan` out.

Order of preference for the host memory that is left after the buffers that every run needs: block inputs (on a card
those that find no room there), then gradients, then the states of parts (those whose every byte saves most traffic
first), then what blocks need for their backward pass. `ssdtune.plan.search` tries other proportions on the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ssdtune.errors import CapacityError
from ssdtune.plan.device_memory import (
    GRADIENT_SLOTS,
    DeviceLimits,
    class_bytes,
    device_bytes,
    refusal,
)
from ssdtune.plan.states import CODE_BLOCK, StateShape, chunk_numel, chunk_slot_bytes, states_of
from ssdtune.units import MIB, format_memory

SOURCE_SCRATCH_BYTES = 32 * MIB
CHUNK_SLOTS = 4
"""Pieces of optimizer states in flight: one read ahead, one complete, one computed, one written."""
CHUNK_BYTES = 16 * MIB
"""Of an fp32 state, where neither user nor planner chose."""
LEAST_CHUNK_BYTES = 4 * MIB
"""Of an fp32 state, where memory is so short that the planner makes pieces smaller by itself."""
RESERVE_BYTES = 24 * MIB
"""What kernels take at their first use: their code, read from its files, and threads. Measured: 17 to 28 MiB with models
of up to 3 million parameters."""
SLACK_SHARE = 1 / 10
"""Of all weights, what the allocator and kernels that rearrange matrices take on top, up to
`MOST_SLACK_BYTES`; measured at 0.13 to 1.1 billion parameters (docs/benchmarks.md)."""
MOST_SLACK_BYTES = 24 * MIB
CARD_RESERVE_BYTES = 192 * MIB
"""The same where a card computes: its driver and libraries take host memory too."""


@dataclass(frozen=True)
class PartSize:
    """What a part of a stage takes.

    Attributes:
        weight_bytes: The weights it computes with.
        numel: Elements; a trained part has `numel` fp32 gradients and its optimizer states.
        split: The master weight is split (bf16 and int16 halves).
        coded: Moments have 8 bits.
        row_numel: Of a chunk of the embedding, the elements of a row; else 0.
        stored_as_is: Frozen, and the model's files have its bytes as they are computed with.
    """

    name: str
    stage: str
    weight_bytes: int
    numel: int
    trained: bool
    split: bool
    coded: bool = False
    stored_as_is: bool = False
    row_numel: int = 0

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Its states on SSD; none of a frozen part."""
        if not self.trained:
            return ()
        return states_of(self.weight_bytes // self.numel, split=self.split, coded=self.coded)

    @property
    def rows_apart(self) -> bool:
        """Say whether rows can be updated by themselves: with moments of 8 bits only whole blocks of elements can."""
        whole_blocks = not self.coded or self.row_numel % CODE_BLOCK == 0
        return self.trained and self.row_numel > 0 and whole_blocks

    @property
    def state_bytes(self) -> int:
        """Weights and optimizer state, all of which a resident part keeps in memory."""
        sizes = [state.size(self.numel) for state in self.states]
        return sum(sizes) if self.trained else self.weight_bytes


@dataclass(frozen=True)
class ComputeSize:
    """Memory that computing needs, in bytes.

    Attributes:
        block_bytes: Peak of a block's backward pass: saved activations and temporary gradients.
        head_bytes: Peak of a chunk's logits and of the head's temporary gradient.
        input_bytes: One block input of one micro-batch, rounded up for direct I/O.
        num_micro_batches: Micro-batches of a step.
        entry_bytes: What the embedding's graph and the recorded arguments of one micro-batch keep.
        kept_bytes: What a block keeps for the backward pass of one micro-batch if it isn't run again.
        products_bytes: The same if only matrix products and attention aren't computed again, its input included; 0 if unknown.
        gap_bytes, kept_gap_bytes: Where memory of freed tensors stays with the process, what it takes more than is in use
            at once: in any step, and for each block and micro-batch that keeps its activations.
    """

    block_bytes: int
    head_bytes: int
    input_bytes: int
    num_micro_batches: int
    entry_bytes: int
    kept_bytes: int = 0
    products_bytes: int = 0
    gap_bytes: int = 0
    kept_gap_bytes: int = 0

    @property
    def saves_partly(self) -> bool:
        """Say whether keeping only results of products takes less memory than keeping all."""
        return 0 < self.products_bytes < self.kept_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """The choices, and the memory they take.

    Attributes:
        resident: Parts that stay in memory with their states.
        deferred: Stages that are updated at the beginning of the next step: all if gradients are clipped.
        gradients_on_ssd: Deferred stages whose gradient waits on SSD; the others' wait in memory.
        speculative: Deferred stages that are updated at once all the same, beside their live version, as if nothing
            were clipped.
        rows_first: Chunks of the embedding of whose deferred update a step begins with the rows that it needs.
        kept: Blocks that keep what their backward pass needs; `swapped` ones let it leave and come back; the
            others are run again from their input.
        partly: Those of `kept` and `swapped` that keep only their input and the results of matrix products and attention,
            from which the rest is made again; the others keep all.
        block_slots: Weight slots for blocks; `gradient_slots` those for gradients that don't wait in memory.
        input_slots: Slots through which block inputs and activations leave and come back; 0 if none do.
        inputs_stay: Block inputs stay all the same; the slots are for activations.
        in_host: Blocks of which what leaves a card waits in host memory; that of others goes to SSD.
        chunk_slots: Slots for pieces of optimizer states of `chunk_bytes` for an fp32 state.
        keeps_freed_memory: On a CPU, memory of freed tensors stays with the process, gaps included; else it goes back
            to the system, and computing is slower.
        breakdown: Host bytes by purpose.
        straight: Parts that go from the drives to a card without a place in host memory, if they aren't resident.
        device_io: So do block inputs and activations that go to SSD and back.
        device_gradient_slots: Gradient slots for blocks on a card; 0 on a CPU, as for the other figures of a device.
        device_budget_bytes: The most that a run may take of the card.
        device_breakdown: Bytes of the card by purpose.
    """

    resident: frozenset[str]
    deferred: frozenset[str] = frozenset()
    gradients_on_ssd: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    swapped: frozenset[str] = frozenset()
    partly: frozenset[str] = frozenset()
    speculative: frozenset[str] = frozenset()
    rows_first: frozenset[str] = frozenset()
    block_slots: int = 3
    gradient_slots: int = 2
    input_slots: int = 0
    inputs_stay: bool = False
    in_host: frozenset[str] = frozenset()
    chunk_slots: int = CHUNK_SLOTS
    chunk_bytes: int = CHUNK_BYTES
    keeps_freed_memory: bool = False
    budget_bytes: int = 0
    breakdown: dict[str, int] = field(default_factory=dict, hash=False)
    straight: frozenset[str] = frozenset()
    device_io: bool = False
    device_gradient_slots: int = 0
    device_budget_bytes: int = 0
    device_breakdown: dict[str, int] = field(default_factory=dict, hash=False)

    @property
    def device_bytes(self) -> int:
        """Planned peak of a card's memory, CUDA's own included; 0 on a CPU."""
        return sum(self.device_breakdown.values())

    @property
    def host_bytes(self) -> int:
        """Planned peak of host memory."""
        return sum(self.breakdown.values())

    @property
    def least_bytes(self) -> int:
        """Host memory in which it runs too, more slowly: without gaps between freed tensors."""
        return self.host_bytes - self.breakdown["gaps"]

    @property
    def gradients_in_memory(self) -> frozenset[str]:
        """Stages whose complete gradient waits in memory."""
        return self.deferred - self.gradients_on_ssd

    def input_slot_bytes(self, compute: ComputeSize) -> int:
        """Return the size of a slot for block inputs and activations."""
        whole = compute.kept_bytes if self.swapped - self.partly else 0
        partly = compute.products_bytes if self.swapped & self.partly else 0
        return max(whole, partly, compute.input_bytes)

    def held_bytes(self, compute: ComputeSize) -> int:
        """Return what blocks keep in memory for the backward pass of one micro-batch, besides inputs."""
        partly = len(self.kept & self.partly)
        return (len(self.kept) - partly) * compute.kept_bytes + partly * compute.products_bytes

    def staying_inputs(self, num_blocks: int) -> int:
        """Return the number of blocks whose input stays where it was computed."""
        again = num_blocks - len(self.kept) - len(self.swapped)
        # What comes out of a block whose graph is there stays, and so does its input, though its activations leave.
        graphs = len(self.swapped - self.partly)
        return graphs + (again if self.inputs_stay or not self.input_slots else 0)

    def moved_bytes(self, block: str, compute: ComputeSize) -> int:
        """Return what of a block leaves for one micro-batch: its activations, its input, or nothing."""
        if block in self.swapped:
            return compute.products_bytes if block in self.partly else compute.kept_bytes
        stays = not self.input_slots or self.inputs_stay or block in self.kept
        return 0 if stays else compute.input_bytes

    def stored_bytes(self, block: str, compute: ComputeSize) -> int:
        """Return what of that goes to SSD: all, unless it waits in host memory."""
        return 0 if block in self.in_host else self.moved_bytes(block, compute)

    def stored_inputs(self, num_blocks: int) -> int:
        """Return the number of blocks whose input goes to SSD."""
        stay = not self.input_slots or self.inputs_stay
        return 0 if stay else num_blocks - len(self.kept | self.swapped | self.in_host)

    def shared_slots(self, num_blocks: int) -> int:
        """Return the number of slots that are in host memory too: what goes to SSD passes through them."""
        stored = self.stored_inputs(num_blocks) + len(self.swapped - self.in_host)
        return 0 if self.device_io or (self.in_host and not stored) else self.input_slots

    def waiting_bytes(self, compute: ComputeSize) -> int:
        """Return the host memory that what left a card takes while it waits there."""
        inputs, partly = self.in_host - self.swapped, self.in_host & self.swapped & self.partly
        whole = len(self.in_host) - len(inputs) - len(partly)
        each = len(inputs) * compute.input_bytes + len(partly) * compute.products_bytes
        return compute.num_micro_batches * (each + whole * compute.kept_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        sets = (
            "resident", "deferred", "gradients_on_ssd", "kept", "swapped", "partly", "in_host", "speculative",
            "straight", "rows_first",
        )  # fmt: skip
        plain = {name: sorted(getattr(self, name)) for name in sets}
        return {
            **asdict(self), **plain, "host_bytes": self.host_bytes, "device_bytes": self.device_bytes,
        }  # fmt: skip


@dataclass(frozen=True)
class Proportions:
    """What takes its share of the memory before the rest is filled by preference.

    Attributes:
        kept_blocks: Blocks, the last ones, that keep all that their backward pass needs; None for those that find
            room in the end, at least for the results of their products.
        partly_blocks: Blocks before these that keep only results of products.
        swapped_blocks: Blocks, the first ones, that let results of products leave and come back; `swapped_whole` all.
        input_slots: Slots for what leaves and comes back.
        block_slots, chunk_slots: At most; fewer if memory is short.
        deferred_stages: Without clipping, so many stages, the first ones of a step, are updated in the next step.
        inputs_leave: Block inputs leave though they would find room.
        host_blocks: On a card, of so many of the blocks of which something leaves, the last ones, it waits in host memory,
            of the others on SSD; None for those for which there is room.
        chunk_bytes: Where the limits leave it open.
        speculative: With clipping, stages whose states are on SSD are updated before it is known whether gradients are
            clipped, and again if they are.
    """

    kept_blocks: int | None = None
    partly_blocks: int = 0
    swapped_blocks: int = 0
    swapped_whole: bool = False
    input_slots: int = 2
    block_slots: int = 3
    chunk_slots: int = CHUNK_SLOTS
    deferred_stages: int = 0
    inputs_leave: bool = False
    host_blocks: int | None = None
    chunk_bytes: int = CHUNK_BYTES
    speculative: bool = False


@dataclass(frozen=True)
class MemoryLimits:
    """What a plan has to keep to.

    Attributes:
        base_bytes: Resident memory of the process before any buffer (interpreter, torch, tokenized rows).
        budget_bytes: The most the whole process may take.
        cache_bytes: Limit for resident parts, and 0 also sends gradients and block inputs to SSD and keeps no
            activations; None for what is left.
        chunk_bytes: Bytes of an fp32 state that the optimizer works on at once; None leaves it open.
        clipping: Gradients must wait for the global norm.
        activations: Where block inputs wait: "auto", "device", "host" or "ssd". On a CPU "device" and "host" are the same.
        recompute: Whether blocks are run again in backward: "auto", "always", "never", or "cheap", all but their products.
        device: What may be taken of a card; None on a CPU, whose memory is the host's.
        kernel_bytes: On a CPU, what is compiled for further lengths of rows.
        straight: The I/O backend for the model's own files moves bytes to the card; `device_io` that for activations does.
    """

    base_bytes: int
    budget_bytes: int
    cache_bytes: int | None = None
    chunk_bytes: int | None = None
    clipping: bool = True
    activations: str = "auto"
    recompute: str = "auto"
    device: DeviceLimits | None = None
    kernel_bytes: int = 0
    straight: bool = False
    device_io: bool = False


def plan_memory(
    parts: Sequence[PartSize],
    compute: ComputeSize,
    limits: MemoryLimits,
    proportions: Proportions | None = None,
) -> MemoryPlan:
    """Choose what stays in memory.

    Raises:
        CapacityError: Even with everything streamed it does not fit.
    """
    return _Planner(parts, compute, limits, proportions or Proportions()).plan()


class _Planner:
    def __init__(
        self,
        parts: Sequence[PartSize],
        compute: ComputeSize,
        limits: MemoryLimits,
        proportions: Proportions,
    ) -> None:
        self.parts = parts
        self.compute = compute
        self.limits = limits
        self.proportions = proportions
        stages = list(dict.fromkeys(part.stage for part in parts))
        self.blocks = [stage for stage in stages if stage.startswith("block.")]
        self.gradient_bytes: dict[str, int] = {}
        self.alike: dict[tuple[int, int, bool, bool], list[PartSize]] = {}
        """Trained parts by what their pieces take: blocks are alike, and a plan is priced very often."""
        self.device_needs: dict[tuple[object, ...], dict[str, int]] = {}
        self.by_stage: dict[str, list[PartSize]] = {}
        for part in parts:
            self.by_stage.setdefault(part.stage, []).append(part)
            if part.trained:
                size = self.gradient_bytes.get(part.stage, 0) + 4 * part.numel
                self.gradient_bytes[part.stage] = size
                kind = (part.numel, part.weight_bytes, part.split, part.coded)
                self.alike.setdefault(kind, []).append(part)
        self.trained = list(self.gradient_bytes)
        self.state_bytes = {part.name: part.state_bytes for part in parts}
        self.coded = any(part.coded for part in parts)
        self.straight = frozenset(p.name for p in parts if p.stored_as_is and limits.straight)
        # A read that is smaller than the scratch buffers does not touch all of them.
        by_stage: dict[str, int] = {}
        for part in parts:
            by_stage[part.stage] = by_stage.get(part.stage, 0) + 4 * part.numel
        self.reading_bytes = min(SOURCE_SCRATCH_BYTES, max(by_stage.values(), default=0))
        weights = sum(part.weight_bytes for part in parts)
        slack = min(MOST_SLACK_BYTES, int(SLACK_SHARE * weights))
        self.reserve_bytes = CARD_RESERVE_BYTES if limits.device else RESERVE_BYTES + slack

    def plan(self) -> MemoryPlan:
        limits, wanted = self.limits, self.proportions
        streaming = limits.cache_bytes == 0
        deferred = frozenset(
            self.trained if limits.clipping else self.trained[: wanted.deferred_stages]
        )
        every, none = frozenset(self.blocks), frozenset[str]()
        keeps, on_card = limits.recompute in ("cheap", "never"), limits.device is not None
        to_host = on_card and limits.activations == "host"
        leaves = to_host or limits.activations == "ssd"
        stays = not leaves and (keeps or limits.activations != "auto")
        plan = MemoryPlan(
            none, deferred, deferred,
            kept=every if keeps and not leaves else none,
            swapped=every if keeps and leaves else none,
            partly=every if limits.recompute == "cheap" else none,
            in_host=every if to_host else none,
            input_slots=0 if stays else wanted.input_slots,
            chunk_bytes=limits.chunk_bytes or wanted.chunk_bytes, budget_bytes=limits.budget_bytes,
            device_budget_bytes=limits.device.budget_bytes if limits.device else 0,
            straight=self.straight, device_io=limits.device_io,
        )  # fmt: skip
        candidates = [plan]
        if keeps and on_card and limits.activations == "auto":
            candidates.append(
                replace(
                    plan, kept=none, swapped=every, in_host=every, input_slots=wanted.input_slots
                )
            )
        plan = self._with_slots(candidates)
        if streaming:
            return self._priced(plan)
        if self._may_keep:
            if to_host or limits.activations == "auto":
                first = frozenset(self.blocks[: wanted.swapped_blocks])
                whole = wanted.swapped_whole or not self.compute.saves_partly
                partly = none if whole else first
                plan = self._if_fits(plan, swapped=first, partly=partly)
            plan = self._keep(plan, wanted.kept_blocks or 0)
            plan = self._keep_partly(plan, wanted.partly_blocks)
        if limits.activations == "auto" and not wanted.inputs_leave:
            if plan.swapped:
                plan = self._if_fits(plan, inputs_stay=True)
            else:
                plan = self._if_fits(plan, input_slots=0)
        if on_card:  # what is kept there takes nothing of host memory, and needn't wait there
            plan = self._keep_all(plan)
            if limits.activations == "auto":
                plan = self._wait_in_host(plan)
        # What did not fit of one stage is not tried again for those that are alike: there are many of them.
        refused: list[object] = []
        for stage in self.trained:
            alike: object = (_class(stage), self.gradient_bytes[stage])
            if alike not in refused:
                wider = self._if_fits(plan, gradients_on_ssd=plan.gradients_on_ssd - {stage})
                plan, refused = wider, [*refused, alike] if wider is plan else []
        # A byte of trained states that stays saves more traffic than one of frozen weights; small parts first, since
        # each costs a request. Trained parts must find their gradient in memory.
        for part in sorted(self.parts, key=lambda p: (not p.trained, p.weight_bytes)):
            if part.trained and part.stage in plan.gradients_on_ssd:
                continue
            here = [(p.weight_bytes, p.name in plan.resident) for p in self.by_stage[part.stage]]
            alike = (_class(part.stage), part.numel, part.states, here)
            if alike not in refused:
                wider = self._if_fits(plan, resident=plan.resident | {part.name})
                plan, refused = wider, [*refused, alike] if wider is plan else []
        return self._priced(plan if on_card else self._keep_all(plan))

    def _with_slots(self, candidates: Sequence[MemoryPlan]) -> MemoryPlan:
        """Return the first plan that fits, with as many slots as it may have.

        Raises:
            CapacityError: None does.
        """
        for plan in candidates:
            for block_slots, chunk_slots, chunk_bytes, gradient_slots in self._slots():
                plan = replace(
                    plan, block_slots=block_slots, chunk_slots=chunk_slots, chunk_bytes=chunk_bytes,
                    device_gradient_slots=gradient_slots,
                )  # fmt: skip
                if self._fits(plan):
                    return plan
        raise self._refusal(plan)

    @property
    def _may_keep(self) -> bool:
        return self.limits.recompute == "auto" and self.limits.activations != "ssd"

    def _slots(self) -> list[tuple[int, int, int, int]]:
        """Return numbers of weight slots and of chunk slots, bytes of a chunk and a card's gradient slots.

        The wanted ones come first.
        """
        wanted, limits = self.proportions, self.limits
        most = min(wanted.block_slots, max(1, len(self.blocks)))
        chunk = limits.chunk_bytes or wanted.chunk_bytes
        least = limits.chunk_bytes or min(chunk, LEAST_CHUNK_BYTES)
        fewest = min(wanted.chunk_slots, 2)
        two, one = (GRADIENT_SLOTS, 1) if limits.device else (0, 0)
        found = [
            (most, wanted.chunk_slots, chunk, two), (min(most, 2), min(wanted.chunk_slots, 3), chunk, two),
            (min(most, 2), min(wanted.chunk_slots, 3), chunk, one), (1, fewest, chunk, one), (1, fewest, least, one),
        ]  # fmt: skip
        return list(dict.fromkeys(found))

    def _wait_in_host(self, plan: MemoryPlan) -> MemoryPlan:
        """Let what leaves the card wait in host memory as far as there is room.

        The last blocks' comes first, for it comes back soonest.
        """
        leaving = [name for name in self.blocks if plan.moved_bytes(name, self.compute)]

        def waiting(number: int) -> MemoryPlan:
            return replace(plan, in_host=frozenset(leaving[len(leaving) - number :]))

        wanted = self.proportions.host_blocks
        count = len(leaving) if wanted is None else min(wanted, len(leaving))
        # All may fit where all but one don't: nothing passes through slots then.
        return waiting(count) if self._fits(waiting(count)) else self._most(count, waiting)

    def _keep_all(self, plan: MemoryPlan) -> MemoryPlan:
        """Let as many blocks as fit keep something in the end, if nobody said how many."""
        if self.proportions.kept_blocks is None and self._may_keep:
            plan = self._keep_partly(plan, len(self.blocks))
            plan = self._keep(plan, len(self.blocks))
        return plan

    def _keep(self, plan: MemoryPlan, count: int) -> MemoryPlan:
        """Let the last blocks keep their activations, as many as fit: they hold them for the shortest time."""

        def keeping(number: int) -> MemoryPlan:
            last = self.blocks[len(self.blocks) - number :]
            return replace(
                plan, kept=plan.kept.union(last), partly=plan.partly.difference(last),
                in_host=plan.in_host.difference(last),
            )  # fmt: skip

        return self._most(min(count, len(self.blocks) - len(plan.swapped)), keeping)

    def _keep_partly(self, plan: MemoryPlan, count: int) -> MemoryPlan:
        """Let the blocks before those keep the results of their products, as many as fit."""
        free = [name for name in self.blocks if name not in plan.kept and name not in plan.swapped]

        def keeping(number: int) -> MemoryPlan:
            last = free[len(free) - number :]
            return replace(
                plan, kept=plan.kept.union(last), partly=plan.partly.union(last),
                in_host=plan.in_host.difference(last),
            )  # fmt: skip

        return self._most(min(count, len(free)), keeping) if self.compute.saves_partly else plan

    def _most(self, count: int, keeping: Callable[[int], MemoryPlan]) -> MemoryPlan:
        """Return the plan for the largest number of blocks, up to `count`, that fits."""
        low, high = 0, count
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(keeping(middle)) else (low, middle - 1)
        return keeping(low)

    def _if_fits(self, plan: MemoryPlan, **changes: Any) -> MemoryPlan:
        wider = replace(plan, **changes)
        return wider if self._fits(wider) else plan

    def _fits(self, plan: MemoryPlan) -> bool:
        need = self.need(plan)
        cache = self.limits.cache_bytes
        if cache and need["resident states"] > cache:
            return False
        return sum(need.values()) <= self.limits.budget_bytes and self._fits_on_device(plan)

    def _fits_on_device(self, plan: MemoryPlan) -> bool:
        limits = self.limits.device
        return limits is None or sum(self._device_need(plan).values()) <= limits.budget_bytes

    def _device_need(self, plan: MemoryPlan) -> dict[str, int]:
        if self.limits.device is None:
            return {}
        # What stays in host memory makes no difference, and that is most of what is tried.
        shape = (
            plan.block_slots, plan.device_gradient_slots, plan.input_slots, plan.inputs_stay, plan.kept,
            plan.swapped, plan.partly,
        )  # fmt: skip
        if shape not in self.device_needs:
            self.device_needs[shape] = device_bytes(self.parts, self.compute, plan)
        return self.device_needs[shape]

    def _priced(self, plan: MemoryPlan) -> MemoryPlan:
        if self.limits.device is None:
            plan = self._if_fits(plan, keeps_freed_memory=True)
        plan = replace(plan, rows_first=rows_first(self.parts, plan))
        speculative = frozenset[str]()
        if self.limits.clipping and self.proportions.speculative:
            speculative = speculative_stages(self.parts, plan)
        return replace(
            plan,
            speculative=speculative,
            breakdown=self.need(plan),
            device_breakdown=self._device_need(plan),
        )

    def need(self, plan: MemoryPlan) -> dict[str, int]:
        """Return host bytes by purpose; what computing needs is on the card if there is one."""
        compute, on_card = self.compute, self.limits.device is not None
        chunk, chunks = chunk_numel(plan.chunk_bytes, coded=self.coded), []
        for parts in self.alike.values():
            streamed = [part for part in parts if part.name not in plan.resident]
            waits = any(part.stage in plan.gradients_on_ssd for part in streamed)
            if streamed:
                numel = min(chunk, streamed[0].numel)
                chunks.append(chunk_slot_bytes(streamed[0].states, numel, with_gradient=waits))
        stay = (
            plan.staying_inputs(len(self.blocks)) * compute.num_micro_batches * compute.input_bytes
        )
        slots = plan.shared_slots(len(self.blocks)) * plan.input_slot_bytes(compute)
        computing = max(compute.block_bytes, compute.head_bytes)
        computing += compute.num_micro_batches * (compute.entry_bytes + 2 * compute.input_bytes)
        kept = compute.num_micro_batches * plan.held_bytes(compute)
        gaps = compute.gap_bytes + kept * compute.kept_gap_bytes // max(1, compute.kept_bytes)
        return {
            "process": self.limits.base_bytes,
            "reserve": self.reserve_bytes,
            "reading": self.reading_bytes,
            "kernels": 0 if on_card else self.limits.kernel_bytes,
            "optimizer chunks": plan.chunk_slots * max(chunks, default=0),
            "compute": 0 if on_card else computing,
            "gaps": gaps if plan.keeps_freed_memory else 0,
            "weight slots": weight_slot_bytes(
                self.parts, plan.resident | plan.straight, plan.block_slots
            ),
            "gradients": self._gradients(plan),
            "block inputs": slots + plan.waiting_bytes(compute) + (0 if on_card else stay),
            "kept activations": 0 if on_card else kept,
            "resident states": sum(self.state_bytes[name] for name in plan.resident),
        }

    def _gradients(self, plan: MemoryPlan) -> int:
        by_stage, waiting = self.gradient_bytes, plan.gradients_in_memory
        passing = {stage: size for stage, size in by_stage.items() if stage not in waiting}
        return sum(by_stage[s] for s in waiting) + class_bytes(passing, plan.gradient_slots)

    def _refusal(self, plan: MemoryPlan) -> CapacityError:
        if self.limits.device and not self._fits_on_device(plan):
            return refusal(self._device_need(plan), self.limits.device)
        need = self.need(plan)
        details = ", ".join(f"{name} {format_memory(size)}" for name, size in need.items() if size)
        return CapacityError(
            f"host memory: even with everything streamed the run needs {format_memory(sum(need.values()))} "
            f"({details}); the budget is {format_memory(self.limits.budget_bytes)}. Raise host_memory, or lower "
            "per_device_train_batch_size, max_length or io.chunk_bytes."
        )


def rows_first(parts: Sequence[PartSize], plan: MemoryPlan) -> frozenset[str]:
    """Return the chunks of the embedding whose deferred update needn't be waited for, if the rows of a step come first.

    What is in memory is updated soon enough.
    """
    apart = (part for part in parts if part.rows_apart and part.name not in plan.resident)
    return plan.deferred.intersection(part.stage for part in apart)


def speculative_stages(parts: Sequence[PartSize], plan: MemoryPlan) -> frozenset[str]:
    """Return the stages that may be updated before it is known whether gradients are clipped.

    What is in memory can't be updated beside itself, and waits for the norm at little cost; so does the embedding if the rows
    of a step come first: its gradient is the last one, and nothing would be left that its update could hide behind.
    """
    stay = {part.stage for part in parts if part.trained and part.name in plan.resident}
    return plan.deferred - stay - plan.rows_first


def _class(stage: str) -> str:
    return "block" if stage.startswith("block.") else stage


def weight_slot_bytes(
    parts: Sequence[PartSize], elsewhere: frozenset[str], block_slots: int
) -> int:
    """Return the host bytes of all weight slots; see `ssdtune.plan.generate` for their classes.

    Args:
        elsewhere: Parts that have no place in them.
    """
    by_stage: dict[str, int] = {}
    for part in parts:
        if part.name not in elsewhere:
            by_stage[part.stage] = by_stage.get(part.stage, 0) + part.weight_bytes
    return class_bytes(by_stage, block_slots)
