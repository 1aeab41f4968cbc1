"""Block inputs, and activations, that leave where they were computed and come back for their block's backward pass.

They wait on SSD, or, if they were computed on a card, in host memory. On SSD each is a unit of the store, and passes
through one of a few slots that all share. In host memory each has a place of its own, so it only crosses the link. Both
come back into the slots' places on the device. Which block's wait where is the plan's business
(`ssdtune.plan.residency`), when they move the schedule's; what of a block is copied is in `ssdtune.swap.activations`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ssdtune.device.base import Device, Event, FileUse
from ssdtune.io.buffers import aligned_size
from ssdtune.io.device_bytes import Memory
from ssdtune.plan.residency import ComputeSize, MemoryPlan
from ssdtune.store.store import Store
from ssdtune.swap.activations import Leaving

Unit = tuple[str, int]
"""A block's stage and a micro-batch."""


def input_unit(stage: str, micro_batch: int) -> str:
    """Return the name of the store's unit that holds one block input."""
    return f"{stage}.input.{micro_batch}"


class InputSlots:
    """Moves block inputs and activations away and back.

    Args:
        plan: How many slots there are, and what waits where.
        compute: What block inputs and activations take, and the micro-batches of a step.
        num_blocks: Blocks of the model.
        take: Returns pinned host memory of this size, as bytes (uint8 [N]).

    Attributes:
        places: On a device with memory of its own, the memory into which they come back; None elsewhere.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        compute: ComputeSize,
        num_blocks: int,
        *,
        store: Store,
        device: Device,
        take: Callable[[int], torch.Tensor],
    ) -> None:
        self._plan = plan
        self._compute = compute
        self._store = store
        self._device = device
        size = plan.input_slot_bytes(compute)
        self.places = [device.allocate(size, "block inputs") for _ in range(plan.input_slots)]
        self._slots = (
            [place for place in self.places if place is not None]
            if plan.device_io
            else [take(size) for _ in range(plan.shared_slots(num_blocks))]
        )
        """Where what goes to SSD and back lies in between; with `device_io` these are the places on the device."""
        self._waiting = {
            stage: take(compute.num_micro_batches * plan.moved_bytes(stage, compute))
            for stage in sorted(plan.in_host)
        }
        """Host memory of what waits there, by block: a place for each micro-batch."""
        self._shapes: dict[Unit, tuple[torch.Size, torch.dtype]] = {}
        self._content: dict[str, Unit] = {}
        """What came back into each slot."""
        self._uploads: dict[str, Event] = {}
        self._downloads: dict[str, Event] = {}
        self._used: dict[str, Event] = {}

    def free(self) -> None:
        """Forget all memory."""
        self.places.clear()
        self._slots.clear()
        self._waiting.clear()

    # Away

    def stage(self, stage: str, micro_batch: int, slot: str, hidden: torch.Tensor) -> None:
        """Start bringing a block input [B, S, D] to where it waits, or to its slot on the way there."""
        flat = hidden.reshape(-1)
        target = self._target(stage, micro_batch, slot)[: flat.numel() * flat.element_size()]
        self._shapes[stage, micro_batch] = (hidden.shape, hidden.dtype)
        self._downloads[slot] = self._device.download(flat, target.view(flat.dtype))

    def leaving(self, stage: str, micro_batch: int, slot: str) -> Leaving:
        """Return what takes a block's activations; see `stage_activations`."""
        return Leaving(self._device, self._target(stage, micro_batch, slot))

    def stage_activations(self, stage: str, micro_batch: int, slot: str, leaving: Leaving) -> None:
        """Note what left, once the copies of all of it are under way."""
        self._shapes[stage, micro_batch] = (torch.Size([leaving.used]), torch.uint8)
        self._downloads[slot] = leaving

    def save(self, stage: str, micro_batch: int, slot: str) -> None:
        """Wait until it has left the device, and write it to SSD if it waits there. Blocks."""
        self._downloads.pop(slot).wait()
        if stage not in self._waiting:
            memory = self._file_memory(stage, micro_batch, slot, "written")
            self._store.write(input_unit(stage, micro_batch), "inputs", memory).wait()

    def _target(self, stage: str, micro_batch: int, slot: str) -> torch.Tensor:
        if stage in self._waiting:  # its last content came back in the step before
            return self._place_in_host(stage, micro_batch)
        self._wait_for_upload(slot)
        return self._slots[_number(slot)]

    def _place_in_host(self, stage: str, micro_batch: int) -> torch.Tensor:
        size = self._plan.moved_bytes(stage, self._compute)
        return self._waiting[stage][micro_batch * size : (micro_batch + 1) * size]

    # And back

    def load(self, stage: str, micro_batch: int, slot: str) -> None:
        """Bring it back into a slot: from SSD, or from host memory onto the device. Blocks."""
        self._content[slot] = (stage, micro_batch)
        used = self._used.get(slot)
        if stage in self._waiting:
            place, num_bytes = self.places[_number(slot)], self._num_bytes(stage, micro_batch)
            assert place is not None, "only what was computed on a card waits in host memory"
            waiting = self._place_in_host(stage, micro_batch)[:num_bytes]
            self._device.upload(waiting, place[:num_bytes], used)[1].wait()
            return
        self._wait_for_upload(slot)
        if self._plan.device_io and used:
            used.wait()
        memory = self._file_memory(stage, micro_batch, slot, "read into")
        self._store.read(input_unit(stage, micro_batch), "inputs", memory).wait()

    def take(self, slot: str) -> torch.Tensor:
        """Return what came back on the device, valid until the slot is reused; see `mark_used`."""
        stage, micro_batch = self._content[slot]
        shape, dtype = self._shapes[stage, micro_batch]
        num_bytes, place = self._num_bytes(stage, micro_batch), self.places[_number(slot)]
        there = None if place is None else place[:num_bytes]
        if there is None or not (self._plan.device_io or stage in self._waiting):
            host = self._slots[_number(slot)][:num_bytes]
            there, event = self._device.upload(host, there, self._used.get(slot))
            self._device.compute_waits(event)
            self._uploads[slot] = event
        return there.view(dtype).view(shape)

    def mark_used(self, slot: str, event: Event) -> None:
        """Note the last compute that reads a slot's content on the device."""
        self._used[slot] = event

    def _wait_for_upload(self, slot: str) -> None:
        """Wait until the slot's last content has left it for the device: compute waits for that there only."""
        if event := self._uploads.pop(slot, None):
            event.wait()

    def _num_bytes(self, stage: str, micro_batch: int) -> int:
        shape, dtype = self._shapes[stage, micro_batch]
        return shape.numel() * dtype.itemsize

    def _file_memory(self, stage: str, micro_batch: int, slot: str, use: FileUse) -> Memory:
        memory = self._slots[_number(slot)][: aligned_size(self._num_bytes(stage, micro_batch))]
        if self._plan.device_io:
            return self._device.file_memory(memory, use)
        return memoryview(memory.numpy())


def _number(slot: str) -> int:
    return int(slot.removeprefix("input."))
