"""One optimizer step as plain data: operations in order on lanes, with what each waits for.

The generator (`ssdtune.plan.generate`) writes a schedule, the engine (`ssdtune.train.engine`) runs it. An
operation names the stage, micro-batch and slots it works on, so a schedule can be checked, drawn and
simulated without a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class Lane(StrEnum):
    """A resource that runs its operations one after the other."""

    SSD_READ = "ssd-read"
    SSD_WRITE = "ssd-write"
    H2D = "h2d"
    D2H = "d2h"
    COMPUTE = "compute"
    STATES_READ = "states-read"
    """Optimizer states; apart from weights, which must not queue behind states that are read ahead."""
    ADAM = "adam"
    STATES_WRITE = "states-write"


class Kind(StrEnum):
    """What an operation does. Stages are `outer`, `embed`, `block.N` and `head`; see `ssdtune.model.layout`."""

    LOAD = "load"
    """SSD to host slot: the weights of a stage."""
    UPLOAD = "upload"
    """Host slot to device."""
    GATHER_ROWS = "gather-rows"
    """A chunk of the embedding gives a micro-batch the rows of its tokens."""
    ENTRY_FORWARD = "entry-forward"
    """What the model does before its first block, for one micro-batch."""
    FORWARD = "forward"
    """One block on one micro-batch; keeps the block's input, or more."""
    SAVE_INPUT = "save-input"
    """A block's input, or its activations, leave for SSD (on `SSD_WRITE`) or from a card for host memory (on `D2H`)."""
    LOAD_INPUT = "load-input"
    """They come back into a slot, on `SSD_READ` or `H2D`."""
    SCORE = "score"
    """What a chunk of the head contributes to the losses of a micro-batch; the last one completes them."""
    LOSS = "loss"
    """Final norm, head and loss, forward and (in training) backward; of a chunk of the head, after SCORE, only backward."""
    BACKWARD = "backward"
    """One block on one micro-batch: forward again with gradients as far as it is not kept, then backward."""
    ENTRY_BACKWARD = "entry-backward"
    """What comes before the first block, backward; of a divided embedding only to the rows."""
    ROWS_BACKWARD = "rows-backward"
    """The gradient that a micro-batch gives to a chunk of the embedding: of its rows and, if tied, of the chunk's logits."""
    COLLECT_GRADIENT = "collect-gradient"
    """A stage's gradient is complete: bring it to the host and take its norm."""
    SAVE_GRADIENT = "save-gradient"
    """Host to SSD, where the gradient waits for the update."""
    CLIP = "clip"
    """All gradients are complete: global norm and clipping coefficient."""
    LOAD_STATES = "load-states"
    """SSD to chunk slot: one piece of a stage's optimizer states; weights that are in no slot go there too."""
    UPDATE = "update"
    """AdamW on one piece, its weights in their slot."""
    UPDATE_ROWS = "update-rows"
    """What a pending update will make of the rows of a chunk of the embedding that the step needs: read and computed for its
    forward pass alone, before the update itself."""
    SAVE_STATES = "save-states"
    """The updated piece, weights and states, to SSD."""


class Keeps(StrEnum):
    """What a block keeps of its forward pass for its backward pass, so that it needn't be computed again."""

    INPUT = "input"
    """Its input: it is run again whole."""
    PRODUCTS = "products"
    """Its input and the results of matrix products and attention: the rest is made again."""
    ALL = "all"
    """All that its backward pass needs: it isn't run again."""


class Operation(NamedTuple):
    """One piece of work; a tuple, since schedules have many and a search makes many schedules.

    Attributes:
        index: Position in the schedule; operations wait only for lower ones.
        piece: Which of the stage's pieces an update works on (LOAD_STATES, UPDATE, SAVE_STATES).
        slot: Weight slot (LOAD, UPLOAD), gradient slot (backward and what follows), input slot
            (SAVE_INPUT, LOAD_INPUT), chunk slot (LOAD_STATES, UPDATE, UPDATE_ROWS, SAVE_STATES), or "" where none is used.
        input_slot: Slot of the block's input or activations (FORWARD, BACKWARD) if they leave and come back.
        weight_slot: Where the weights of a piece lie; "" if its states stay in memory.
        gradient_slot: Where the gradient of a piece, or of rows, lies; "" if it is read from SSD.
        with_weights: LOAD: also the trained parts, which are in the slot already after a pending update;
            LOAD_STATES: also the weights, which are in the slot already after a backward pass.
        speculative: LOAD_STATES, UPDATE, SAVE_STATES: before it is known whether gradients are clipped, as if they were
            not; what is written counts only once that turns out right.
        keeps: FORWARD, BACKWARD: what the block keeps for its backward pass.
        after: Indexes of the operations that must be over first.
        num_bytes: Bytes moved between SSD and host; of SAVE_INPUT and LOAD_INPUT also between host and device.
        num_elements: Elements that an update works on.
    """

    index: int  # type: ignore[assignment]  # tuples have a method of this name
    lane: Lane
    kind: Kind
    stage: str = ""
    micro_batch: int = -1
    piece: int = -1
    slot: str = ""
    input_slot: str = ""
    weight_slot: str = ""
    gradient_slot: str = ""
    with_weights: bool = True
    speculative: bool = False
    keeps: Keeps = Keeps.INPUT
    after: tuple[int, ...] = ()
    num_bytes: int = 0
    num_elements: int = 0


@dataclass
class Schedule:
    """The operations of one step (or of one evaluation pass), in an order that can be run serially."""

    operations: list[Operation] = field(default_factory=list)

    def add(
        self,
        lane: Lane,
        kind: Kind,
        stage: str = "",
        *,
        after: Iterable[int | None] = (),
        **fields: Any,
    ) -> int:
        """Append an operation and return its index. `after` may hold None for "nothing to wait for"."""
        index = len(self.operations)
        waits = tuple([other for other in after if other is not None])
        if len(waits) > 1:
            waits = tuple(sorted(set(waits)))
        self.operations.append(Operation(index, lane, kind, stage, after=waits, **fields))
        return index

    def lane(self, lane: Lane) -> list[Operation]:
        """Return the operations of one lane, in order."""
        return [operation for operation in self.operations if operation.lane == lane]
