"""One optimizer step as plain data: operations in order on lanes, with what each waits for.

The generator (`ssdtune.plan.generate`) writes a schedule, the engine (`ssdtune.train.engine`) runs it. An
operation names the stage, micro-batch and slots it works on, so a schedule can be checked, drawn and
simulated without a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class Lane(StrEnum):
    """A resource that runs its operations one after the other."""

    SSD_READ = "ssd-read"
    SSD_WRITE = "ssd-write"
    H2D = "h2d"
    D2H = "d2h"
    COMPUTE = "compute"
    ADAM = "adam"


class Kind(StrEnum):
    """What an operation does. Stages are `outer`, `embed`, `block.N` and `head`."""

    LOAD = "load"
    """SSD to host slot: the weights of a stage."""
    UPLOAD = "upload"
    """Host slot to device."""
    ENTRY_FORWARD = "entry-forward"
    """What the model does before its first block, for one micro-batch."""
    FORWARD = "forward"
    """One block on one micro-batch; keeps the block's input."""
    SAVE_INPUT = "save-input"
    LOAD_INPUT = "load-input"
    LOSS = "loss"
    """Final norm, head and loss, forward and (in training) backward."""
    BACKWARD = "backward"
    """One block on one micro-batch: forward again with gradients, then backward."""
    ENTRY_BACKWARD = "entry-backward"
    COLLECT_GRADIENT = "collect-gradient"
    """A stage's gradient is complete: bring it to the host and take its norm."""
    SAVE_GRADIENT = "save-gradient"
    """Host to SSD, where the gradient waits for the update."""
    CLIP = "clip"
    """All gradients are complete: global norm and clipping coefficient."""
    UPDATE = "update"
    """AdamW over all chunks of a stage: read, compute, write."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One piece of work.

    Attributes:
        index: Position in the schedule; operations wait only for lower ones.
        slot: Weight slot (LOAD, UPLOAD), gradient slot (backward and what follows), input slot
            (SAVE_INPUT, LOAD_INPUT), or "" where none is used.
        input_slot: Slot of the block's input (FORWARD, BACKWARD) if inputs go to SSD.
        after: Indexes of the operations that must be over first.
        num_bytes: Bytes moved between SSD and host.
    """

    index: int
    lane: Lane
    kind: Kind
    stage: str = ""
    micro_batch: int = -1
    slot: str = ""
    input_slot: str = ""
    after: tuple[int, ...] = ()
    num_bytes: int = 0


@dataclass
class Schedule:
    """The operations of one step (or of one evaluation pass), in an order that can be run serially."""

    operations: list[Operation] = field(default_factory=list)

    def add(self, lane: Lane, kind: Kind, stage: str = "", *, after: Iterator[int | None] | tuple[int | None, ...] = (),
            micro_batch: int = -1, slot: str = "", input_slot: str = "", num_bytes: int = 0) -> int:  # fmt: skip
        """Append an operation and return its index. `after` may hold None for "nothing to wait for"."""
        index = len(self.operations)
        waits = tuple(sorted({other for other in after if other is not None}))
        self.operations.append(
            Operation(index, lane, kind, stage, micro_batch, slot, input_slot, waits, num_bytes)
        )
        return index

    def lane(self, lane: Lane) -> list[Operation]:
        """Return the operations of one lane, in order."""
        return [operation for operation in self.operations if operation.lane == lane]
