"""The swap manager: where every part of the model is, and how it gets to where it is needed.

It carries out the loading, uploading and gradient operations of a schedule; it decides nothing. A
stage's weights are read into a weight slot (streamed parts) or are in memory already (resident parts), and
brought to the device from there. The first read of a part comes from the original checkpoint; trained parts
then go to the store at once (imported), frozen ones never do.

What waits for the backward pass is `ssdtune.swap.inputs`, the optimizer's pass over the states `ssdtune.swap.update`,
what lies on the drives `ssdtune.store`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ssdtune.device.base import Device, Event, Pin
from ssdtune.io.backend import ALIGNMENT
from ssdtune.io.buffers import Buffer, BufferPool, aligned_size
from ssdtune.io.device_bytes import Memory
from ssdtune.io.tickets import Tickets
from ssdtune.model.build import base_name
from ssdtune.model.layout import ModelLayout, Part, Stage, TensorSpec
from ssdtune.model.source import WeightSource
from ssdtune.plan.generate import (
    block_stage,
    device_gradient_slot,
    end_slots,
    passing_slot,
    stage_class,
)
from ssdtune.plan.residency import ComputeSize, MemoryPlan
from ssdtune.store.layout import StateSpec, UnitSpec
from ssdtune.store.store import Store
from ssdtune.swap.inputs import InputSlots, input_unit
from ssdtune.swap.states import Precision, State

Split = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
Join = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Undo = Callable[[], None]


def unit_specs(
    layout: ModelLayout,
    plan: MemoryPlan,
    compute: ComputeSize,
    precision: Precision | None = None,
) -> list[UnitSpec]:
    """Return what the store must have room for.

    Args:
        compute: What block inputs and activations take, and the micro-batches of a step.
    """
    units, precision = [], precision or Precision()
    for part in layout.trained_parts:
        states = [
            StateSpec(state.name, state.nbytes(part.numel), state.kind, True)
            for state in precision.states(part).values()
        ]
        if part.stage in plan.gradients_on_ssd:
            states.append(StateSpec("gradient", part.numel * 4, "gradients", False))
        units.append(UnitSpec(part.name, tuple(states)))
    for number in range(layout.num_blocks):
        stage = block_stage(number)
        if size := plan.stored_bytes(stage, compute):
            inputs = StateSpec("inputs", size, "activations", False)
            units += [
                UnitSpec(input_unit(stage, m), (inputs,)) for m in range(compute.num_micro_batches)
            ]
    return units


@dataclass
class _WeightSlot:
    host: torch.Tensor
    place: torch.Tensor | None
    stage: str = ""
    on_device: dict[str, torch.Tensor] = field(default_factory=dict)
    used: Event | None = None
    """The last compute that reads it."""


@dataclass
class ResidentPart:
    """A part whose states are all in memory, each a flat tensor [N]."""

    states: dict[str, torch.Tensor]


class SwapManager:
    """Moves parts and gradients between SSD, host and device.

    Args:
        layout: The model's stages and parts.
        plan: What is resident, and how many slots there are.
        source: Reads original weights.
        initial: First values of parameters that the original checkpoint lacks, by name.
        split: Makes (high, low) halves of fp32 masters; `join` is the inverse.
        store: Holds the states of trained parts.
        pool: All buffers come from it, at construction.
        compute: What block inputs and activations take.
        precision: Which states trained parts have.
        register: Prepares device memory that drives reach for many transfers (`Backend.register`).

    Attributes:
        fresh: Trained parts that never had an optimizer step: their moments are zero and nowhere stored.
        inputs: Moves block inputs and activations.
    """

    def __init__(
        self,
        layout: ModelLayout,
        plan: MemoryPlan,
        *,
        source: WeightSource,
        initial: Mapping[str, torch.Tensor],
        split: Split,
        join: Join,
        store: Store,
        device: Device,
        pool: BufferPool,
        compute: ComputeSize,
        precision: Precision | None = None,
        register: Callable[[Memory], Undo] | None = None,
    ) -> None:
        self.layout = layout
        self.plan = plan
        self.store = store
        self.device = device
        self.precision = precision or Precision()
        self.fresh: set[str] = {part.name for part in layout.trained_parts}
        self._source = source
        self._initial = initial
        self._split = split
        self._join = join
        self._pool = pool
        self._resident: dict[str, ResidentPart] = {}
        self._buffers: list[Buffer] = []
        self._pins: list[Pin] = []
        self._weights = self._make_weight_slots()
        self._gradients = self._make_gradient_slots()
        self._device_gradients = self._make_device_gradients()
        self.inputs = InputSlots(
            plan, compute, layout.num_blocks, store=store, device=device,
            take=lambda size: self._buffer(size, "block inputs"),
        )  # fmt: skip
        self._registered: list[Undo] = []
        if register is not None:
            places = [slot.place for slot in self._weights.values()] if plan.straight else []
            places += self.inputs.places if plan.device_io else []
            for place in places:
                if place is not None and place.numel():
                    self._registered.append(register(device.file_memory(place, "registered")))

    def _buffer(self, num_bytes: int, purpose: str) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        buffer = self._pool.take(num_bytes, purpose)
        self._buffers.append(buffer)
        self._pins.append(self.device.pin(buffer.view))
        return _bytes_of(buffer)

    def _stages_by_class(self) -> dict[str, list[Stage]]:
        classes: dict[str, list[Stage]] = {"outer": [], "ends": [], "block": []}
        for stage in self.layout.stages.values():
            classes[stage_class(stage.name)].append(stage)
        return classes

    def _slots(self, kind: str, of_blocks: list[str]) -> list[str]:
        """Return the names of the slots of a class of stages."""
        others = {"outer": ["outer"], "ends": end_slots(self.layout.stages)}
        return of_blocks if kind == "block" else others[kind]

    def _make_weight_slots(self) -> dict[str, _WeightSlot]:
        slots = {}
        for name, stages in self._stages_by_class().items():
            streamed = max(
                sum(p.weight_bytes for p in s.parts if self._has_place(p)) for s in stages
            )
            whole = max(sum(aligned_size(p.weight_bytes) for p in s.parts) for s in stages)
            for slot in self._slots(name, [f"block.{i}" for i in range(self.plan.block_slots)]):
                host = self._buffer(streamed, f"weights of {name}")
                slots[slot] = _WeightSlot(host, self.device.allocate(whole, "weight slots"))
        return slots

    def _make_gradient_slots(self) -> dict[str, torch.Tensor]:
        sizes: dict[str, int] = {}
        for name, stages in self._stages_by_class().items():
            passing = [s for s in stages if s.name not in self.plan.gradients_in_memory]
            numel = max((_gradient_numel(stage) for stage in passing), default=0)
            names = self._slots(name, [passing_slot(i) for i in range(self.plan.gradient_slots)])
            sizes |= dict.fromkeys(names, numel)
        for stage in self.layout.stages.values():
            if stage.name in self.plan.gradients_in_memory:
                sizes[stage.name] = _gradient_numel(stage)
        return {
            name: self._buffer(4 * numel, "gradients").view(torch.float32)
            for name, numel in sizes.items()
        }

    def _make_device_gradients(self) -> dict[str, torch.Tensor]:
        """Return where gradients are summed up on a device with memory of its own; nothing elsewhere."""
        sizes: dict[str, int] = {}
        count = self.plan.device_gradient_slots
        assert count or not self.device.own_memory, "the memory of the device was not planned"
        for name, stages in self._stages_by_class().items():
            numel = max(_gradient_numel(stage) for stage in stages)
            names = self._slots(name, [f"block.{i}" for i in range(count)])
            sizes |= dict.fromkeys(names if numel else (), numel)
        places = {
            name: self.device.allocate(4 * numel, "gradients") for name, numel in sizes.items()
        }
        return {
            name: place.view(torch.float32) for name, place in places.items() if place is not None
        }

    def _streams(self, part: Part) -> bool:
        return part.name not in self.plan.resident

    def _goes_straight(self, part: Part) -> bool:
        return self._streams(part) and part.name in self.plan.straight

    def _has_place(self, part: Part) -> bool:
        """Say whether a part has a place in the slots in host memory."""
        return self._streams(part) and not self._goes_straight(part)

    # Weights

    def load(self, stage_name: str, slot_name: str, *, with_trained: bool = True) -> None:
        """Bring a stage's weights into host memory, streamed parts into the slot; some straight to the device. Blocks.

        Args:
            with_trained: Not only frozen parts; trained ones are there already after an update.
        """
        with Tickets() as tickets:
            for part in self.layout.stages[stage_name].parts:
                if part.trained and not with_trained:
                    continue
                if not self._streams(part):
                    self.resident(part)
                    continue
                if self._goes_straight(part):
                    self._read_straight(part, slot_name)
                    continue
                weights = self.host_weights(part, slot_name)
                if not part.trained:
                    self._read_original(part, weights)
                elif self.store.version(part.name) is None:
                    self._import(part, weights)
                else:
                    tickets.add(self.store.read(part.name, "weights", as_bytes(weights)))

    def host_weights(self, part: Part, slot_name: str) -> torch.Tensor:
        """Return where a streamed part's weights [N] lie in a slot, in host memory."""
        offset = 0
        for other in self.layout.stages[part.stage].parts:
            if other is part:
                piece = self._weights[slot_name].host[offset : offset + part.weight_bytes]
                return piece.view(part.dtype)
            offset += other.weight_bytes if self._has_place(other) else 0
        raise ValueError(f"{part.name} is not a part of {part.stage}")

    def loaded(self, part: Part, slot_name: str) -> torch.Tensor:
        """Return a loaded part's weights [N] where they are: resident, in the slot, or on the device."""
        if not self._streams(part):
            return self.resident(part).states["weights"]
        place = self._place(part, slot_name) if self._goes_straight(part) else None
        return self.host_weights(part, slot_name) if place is None else place.view(part.dtype)

    def upload(self, stage_name: str, slot_name: str) -> None:
        """Bring a loaded stage to the device. Blocks until the copy is done."""
        slot = self._weights[slot_name]
        slot.stage = stage_name
        slot.on_device.clear()
        events = []
        for part in self.layout.stages[stage_name].parts:
            place = self._place(part, slot_name)
            if self._goes_straight(part):
                assert place is not None
                slot.on_device[part.name] = place.view(part.dtype)
                continue
            weights = self.loaded(part, slot_name).view(torch.uint8)
            there, event = self.device.upload(weights, place, slot.used)
            slot.on_device[part.name] = there.view(part.dtype)
            events.append(event)
        for event in events:
            event.wait()

    def _place(self, part: Part, slot_name: str) -> torch.Tensor | None:
        """Return where a part's bytes lie in a slot on the device; None if host memory is used in place."""
        place, offset = self._weights[slot_name].place, 0
        if place is None:
            return None
        for other in self.layout.stages[part.stage].parts:
            if other is part:
                break
            offset += aligned_size(other.weight_bytes)
        return place[offset : offset + part.weight_bytes]

    def mark_used(self, slot_name: str, event: Event) -> None:
        """Note the last compute that reads a slot's weights on the device."""
        self._weights[slot_name].used = event

    def weights(self, stage_name: str, slot_name: str) -> dict[str, torch.Tensor]:
        """Return an uploaded stage's parameters by name: views on the device, valid until the slot is reused."""
        slot = self._weights[slot_name]
        assert slot.stage == stage_name, f"slot {slot_name} holds {slot.stage}, not {stage_name}"
        # .data gives each its own version counter: peft's parametrizations touch that of their parameter, and
        # with one counter for the slot autograd would take it for a change of all.
        return {
            spec.name: part.view(slot.on_device[part.name], spec).data
            for part in self.layout.stages[stage_name].parts
            for spec in part.tensors
        }

    def memory(self, slot_name: str) -> torch.Tensor:
        """Return the bytes that compute reads a slot's weights from."""
        slot = self._weights[slot_name]
        return slot.host if slot.place is None else slot.place

    def _read_original(self, part: Part, weights: torch.Tensor) -> None:
        into = {}
        for spec in part.tensors:
            if spec.first_row is None:
                into[base_name(spec.name)] = part.view(weights, spec)
            else:
                self._source.load_range(
                    base_name(spec.name), spec.first_row, part.view(weights, spec)
                )
        self._source.load(list(into), into)

    def _read_straight(self, part: Part, slot_name: str) -> None:
        place = self._place(part, slot_name)
        assert place is not None, "only a device with memory of its own is read into"
        used = self._weights[slot_name].used
        if used is not None:
            used.wait()
        weights = place.view(part.dtype)
        into = {base_name(spec.name): part.view(weights, spec) for spec in part.tensors}
        self._source.load_straight(
            list(into), into, lambda memory: self.device.file_memory(memory, "read into"),
            {base_name(s.name): s.first_row for s in part.tensors if s.first_row is not None},
        )  # fmt: skip

    def _first_values(self, part: Part, weights: torch.Tensor, low: torch.Tensor | None) -> None:
        """Fill a trained part from the original checkpoint or from its initial values."""
        stored = [
            spec
            for spec in part.tensors
            if spec.name not in self._initial and spec.first_row is None
        ]
        high = {base_name(spec.name): part.view(weights, spec) for spec in stored}
        if low is None:
            self._source.load(list(high), high)
        else:
            lows = {base_name(spec.name): part.view(low, spec) for spec in stored}
            self._source.load_split(list(high), high, lows, self._split)
        for spec in part.tensors:
            if spec.first_row is not None:
                lower = None if low is None else (part.view(low, spec), self._split)
                self._source.load_range(
                    base_name(spec.name), spec.first_row, part.view(weights, spec), lower
                )
            elif spec.name in self._initial:
                if low is None:
                    part.view(weights, spec).copy_(self._initial[spec.name])
                else:
                    halves = (part.view(half, spec).view(-1) for half in (weights, low))
                    self._split(self._initial[spec.name].reshape(-1), *halves)

    def _import(self, part: Part, weights: torch.Tensor) -> None:
        """Read a trained part for the first time and write it to the store.

        The low half is made in the part's gradient slot, which nothing uses before the first backward pass.
        """
        low = None
        if self.precision.is_split(part):
            low = self.gradient(part, self.gradient_slot(part.stage))[0].view(torch.int16)[
                : part.numel
            ]
        self._first_values(part, weights, low)
        states = {"weights": weights} if low is None else {"weights": weights, "low": low}
        with Tickets() as tickets:
            for name, state in states.items():
                tickets.add(self.store.write(part.name, name, as_bytes(state)))
        self.store.commit(part.name, states=tuple(states))

    def resident(self, part: Part) -> ResidentPart:
        """Return a part that stays in memory; the first call fills it."""
        if part.name not in self._resident:
            kinds = self.precision.states(part)
            if not part.trained:
                kinds = {"weights": kinds["weights"]}
            states = {}
            for state in kinds.values():
                buffer = self._pool.take(state.nbytes(part.numel), f"{state.name} of {part.name}")
                if state.name == "weights" and self._weights:  # uploaded from where they are
                    self._pins.append(self.device.pin(buffer.view))
                states[state.name] = _bytes_of(buffer).view(state.dtype)
            if not part.trained:
                self._read_original(part, states["weights"])
            elif self.store.version(part.name) is None:
                self._first_values(part, states["weights"], states.get("low"))
                for name, state in states.items():
                    if name.startswith("exp_avg"):
                        state.zero_()
            else:
                with Tickets() as tickets:
                    for name, state in states.items():
                        tickets.add(self.store.read(part.name, name, as_bytes(state)))
            self._resident[part.name] = ResidentPart(states)
        return self._resident[part.name]

    def is_resident(self, part: Part) -> bool:
        """Say whether a part stays in memory."""
        return not self._streams(part)

    def flush(self) -> None:
        """Write the trained resident parts to the store, so that it holds the whole state."""
        for part in self.layout.trained_parts:
            if part.name in self._resident:
                with Tickets() as tickets:
                    for name, state in self._resident[part.name].states.items():
                        tickets.add(self.store.write(part.name, name, as_bytes(state)))
                self.store.commit(part.name)

    def read_tensor(self, part: Part, spec: TensorSpec, *, high_only: bool = False) -> torch.Tensor:
        """Return one trained parameter as it is now: fp32, joined from its halves if it has two.

        Args:
            high_only: Return the bf16 half of a split master, which is its rounding.
        """
        weights = self._read_range(part, "weights", spec)
        if high_only or not self.precision.is_split(part):
            return weights.view(spec.shape)
        return self._join(weights, self._read_range(part, "low", spec)).view(spec.shape)

    def _read_range(self, part: Part, state: str, spec: TensorSpec) -> torch.Tensor:
        if self.is_resident(part):
            return self.resident(part).states[state][spec.offset : spec.offset + spec.numel]
        return read_stored(self.store, part, self.precision.states(part)[state], spec)

    def free_slots(self) -> None:
        """Give the memory of all slots back; only `read_tensor` and `flush` work from then on."""
        for undo in self._registered:
            undo()
        self._registered.clear()
        for name in list(self._weights):
            del self._weights[name]
        self._gradients.clear()
        self._device_gradients.clear()
        self.inputs.free()
        for pin in self._pins:
            pin.close()
        self._pins.clear()
        for buffer in self._buffers:
            self._pool.give(buffer)
        self._buffers.clear()

    # Gradients

    def gradient_slot(self, stage_name: str) -> str:
        """Return a gradient slot that is large enough for the stage, for use outside of a schedule."""
        if stage_name in self.plan.gradients_in_memory or stage_name == "outer":
            return stage_name
        return "ends" if stage_class(stage_name) == "ends" else passing_slot(0)

    def gradient(self, part: Part, slot_name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a trained part's gradient in a slot, fp32 [N]: on the host, and where it is summed up."""
        host, offset = self._gradients[slot_name], 0
        on_device = self._device_gradients.get(
            device_gradient_slot(part.stage, self.plan.device_gradient_slots), host
        )
        for other in self.layout.stages[part.stage].parts:
            if other is part:
                end = offset + part.numel
                return host[offset:end], on_device[offset:end]
            offset += other.numel if other.trained else 0
        raise ValueError(f"{part.name} is not a part of {part.stage}")

    def save_gradient(self, stage_name: str, slot_name: str) -> None:
        """Write a stage's complete gradient to SSD. Blocks."""
        with Tickets() as tickets:
            for part in self.layout.stages[stage_name].parts:
                if part.trained:
                    gradient, _ = self.gradient(part, slot_name)
                    tickets.add(self.store.write(part.name, "gradient", as_bytes(gradient)))


def read_stored(
    store: Store, part: Part, state: State, spec: TensorSpec, piece_bytes: int = ALIGNMENT
) -> torch.Tensor:
    """Return one tensor's elements [N] of a state with a number for each, as they are in the store. Blocks.

    Args:
        piece_bytes: Whole pieces of this size are read, a multiple of 4096.
    """
    dtype = state.dtype
    start, stop = spec.offset * dtype.itemsize, (spec.offset + spec.numel) * dtype.itemsize
    first = start // piece_bytes * piece_bytes
    end = min(-(-stop // piece_bytes) * piece_bytes, aligned_size(part.numel * dtype.itemsize))
    raw = _bytes_of(Buffer(end - first))
    store.read(part.name, state.name, as_bytes(raw), offset=first).wait()
    return raw[start - first : stop - first].view(dtype)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes."""
    return memoryview(tensor.view(torch.uint8).numpy())


def _bytes_of(buffer: Buffer) -> torch.Tensor:
    return torch.frombuffer(buffer.view, dtype=torch.uint8)


def _gradient_numel(stage: Stage) -> int:
    return sum(part.numel for part in stage.parts if part.trained)
