"""Write the schedule of a step: vertical order, slots assigned, every wait spelled out.

All micro-batches go through a block before the next block begins, so weights cross the SSD twice a step
whatever the accumulation. Weights live in slots of three classes: `outer` (small weights, one slot),
`ends` (embedding and head, one slot; two where one of them is divided into chunks of rows) and `block`
(`block_slots` of them). A slot is refilled as soon as its last user is done; a stage that still lies in a slot
isn't read again.

A divided embedding is read chunk by chunk, and only the rows that are needed stay. A divided head is read twice:
once for the losses (SCORE), once, in the other direction, for the gradients (LOSS). Where both are one matrix, its gradient is
complete only after the embedding's backward pass; so it is made in a third pass (ROWS_BACKWARD).

Where the update of a divided embedding is pending, a step begins with the rows that it needs (UPDATE_ROWS); the chunks follow when
the drives have time for them.

The optimizer works on the weights where they lie, so an update that follows the backward pass finds them in
their slot, and the forward pass that follows a pending update finds the new ones there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ssdtune.plan.schedule import Keeps, Kind, Lane, Schedule

OUTER, EMBED, HEAD = "outer", "embed", "head"


def end_stages(name: str, chunks: int) -> list[str]:
    """Return the stages of the embedding or the head: one, or one for each chunk of its rows."""
    return [name] if chunks == 1 else [f"{name}.{number}" for number in range(chunks)]


def stage_class(stage: str) -> str:
    """Return the class of slots that a stage uses: "outer", "ends" or "block"."""
    name = stage.partition(".")[0]
    return "ends" if name in (EMBED, HEAD) else name


def end_slots(stages: Iterable[str]) -> list[str]:
    """Return the slots of the class `ends`: two where a stage is a chunk, to read one while the other computes."""
    divided = any("." in stage for stage in stages if stage_class(stage) == "ends")
    return ["ends", "ends.1"] if divided else ["ends"]


def block_stage(number: int) -> str:
    """Return the name of a block's stage."""
    return f"block.{number}"


@dataclass(frozen=True)
class Piece:
    """A piece of a stage's trained weights and states that is updated at once.

    Attributes:
        numel: Elements.
        weight_bytes: Its weights; `state_bytes` what else is read and written of it.
        streamed: It lies on SSD; else it stays in memory.
    """

    numel: int = 0
    weight_bytes: int = 0
    state_bytes: int = 0
    streamed: bool = True


@dataclass(frozen=True)
class StageShape:
    """Sizes of a stage.

    Attributes:
        load_bytes: Weights that are read whenever the stage is loaded: all that don't stay in memory.
        frozen_bytes: Those of them that are never updated.
        upload_bytes: Weights that go to the device from host memory.
        straight_bytes: Of the frozen ones, those that go there straight from the drives.
        pieces: Its trained states.
    """

    load_bytes: int = 0
    frozen_bytes: int = 0
    upload_bytes: int = 0
    pieces: tuple[Piece, ...] = ()
    straight_bytes: int = 0

    @cached_property
    def trained_numel(self) -> int:
        """Trained elements."""
        return sum(piece.numel for piece in self.pieces)


def merged(stage: StageShape, size: int) -> StageShape:
    """Return a stage in which so many neighbouring pieces are one, their sum: a coarser schedule."""
    streamed = [piece for piece in stage.pieces if piece.streamed]
    groups = [streamed[i : i + size] for i in range(0, len(streamed), size)]
    sums = [
        Piece(
            sum(piece.numel for piece in group),
            sum(piece.weight_bytes for piece in group),
            sum(piece.state_bytes for piece in group),
        )
        for group in groups
    ]
    kept = [piece for piece in stage.pieces if not piece.streamed]
    return replace(stage, pieces=(*kept, *sums))


@dataclass(frozen=True)
class StepShape:
    """What the generator must know.

    Attributes:
        num_blocks: Blocks of the model, L.
        num_micro_batches: Micro-batches of this step (the last window of an epoch may be smaller).
        tied: Embedding and head are one matrix.
        embed_chunks, head_chunks: Into how many stages they are divided; the second counts only if they are not tied.
        stages: Sizes of all stages.
        block_slots: Weight slots for blocks, at least 1: one computes, the others are read ahead or updated.
        gradient_slots: Gradient slots for blocks whose update follows at once, or whose gradient goes to SSD.
        device_gradient_slots: Those for blocks on a device with memory of its own; 0 if gradients are summed up in
            host memory.
        input_slots: Slots for block inputs and activations that leave and come back; 0 keeps all where it was computed.
        inputs_stay: Inputs stay all the same; the slots are for activations.
        in_host: Blocks of which what leaves a card waits in host memory; that of others goes to SSD.
        chunk_slots: Slots for pieces of optimizer states: read ahead, computed, being written.
        kept: Blocks that keep what their backward pass needs; `swapped` ones let it leave and come back; the
            others are run again from their input.
        partly: Those of `kept` and `swapped` that keep only their input and the results of matrix products and attention.
        deferred: Stages whose update waits for the next step (see `pending`): all of them if gradients are
            clipped by the norm of all. Others are updated as soon as their gradient is complete.
        speculative: Deferred stages that are updated as soon as their gradient is complete all the same, as if it were
            not clipped. Their gradient waits until that is known; if it was clipped, so does their update.
        pending: The previous step's deferred updates are still to be made: each before its stage is loaded; except
            those of `settled` stages, for which the previous step was right to speculate.
        rows_first: Chunks of the embedding of whose pending update a step begins with the rows that it needs; see `late`.
        gradients_on_ssd: Deferred stages whose gradient waits on SSD, not in memory.
        input_bytes: One block's input of one micro-batch; `products_bytes` with results of its products;
            `kept_bytes` all that its backward pass needs.
    """

    num_blocks: int
    num_micro_batches: int
    tied: bool
    embed_chunks: int = 1
    head_chunks: int = 1
    stages: Mapping[str, StageShape] = field(default_factory=dict)
    block_slots: int = 3
    gradient_slots: int = 2
    device_gradient_slots: int = 0
    input_slots: int = 0
    chunk_slots: int = 4
    inputs_stay: bool = False
    in_host: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    swapped: frozenset[str] = frozenset()
    partly: frozenset[str] = frozenset()
    deferred: frozenset[str] = frozenset()
    speculative: frozenset[str] = frozenset()
    pending: bool = False
    settled: frozenset[str] = frozenset()
    rows_first: frozenset[str] = frozenset()
    gradients_on_ssd: frozenset[str] = frozenset()
    input_bytes: int = 0
    products_bytes: int = 0
    kept_bytes: int = 0

    def moves(self, block: str) -> bool:
        """Say whether a block's input, or its activations, leave and come back."""
        return self.input_slots > 0 and (
            block in self.swapped or (block not in self.kept and not self.inputs_stay)
        )

    def keeps(self, block: str) -> Keeps:
        """Return what a block keeps for its backward pass, wherever it waits."""
        if block not in self.kept and block not in self.swapped:
            return Keeps.INPUT
        return Keeps.PRODUCTS if block in self.partly else Keeps.ALL

    def waiting_bytes(self, keeps: Keeps) -> int:
        """Return what waits of a block for the backward pass of one micro-batch."""
        match keeps:
            case Keeps.ALL:
                return self.kept_bytes
            case Keeps.PRODUCTS:
                return self.products_bytes
            case _:
                return self.input_bytes

    @property
    def owed(self) -> frozenset[str]:
        """Stages that the previous step did not update, if it left anything `pending`."""
        return self.deferred - self.settled

    @cached_property
    def late(self) -> list[str]:
        """Stages whose pending update doesn't come before the forward pass, in which the rows that are needed do."""
        owed = self.rows_first & self.owed if self.pending else frozenset[str]()
        return [stage for stage in self.embed_stages if stage in owed]

    @property
    def late_backward(self) -> bool:
        """Say whether late updates come beside the backward pass; else beside the forward pass.

        A tied matrix has to be whole before the losses. Else they come where the drives have less to do: in the
        backward pass if the updates of all blocks are pending too, and so come in the forward pass.
        """
        return not self.tied and self.owed.issuperset(blocks_of(self))

    @property
    def trained(self) -> frozenset[str]:
        """Stages that have trained weights."""
        return frozenset(name for name, stage in self.stages.items() if stage.pieces)

    @property
    def first_backward(self) -> int:
        """Lowest block that gradients must reach: below it nothing is trained. L if they reach none."""
        if {OUTER, *self.embed_stages} & self.trained:
            return 0
        return next(
            (n for n in range(self.num_blocks) if block_stage(n) in self.trained), self.num_blocks
        )

    @cached_property
    def embed_stages(self) -> list[str]:
        """Stages of the embedding."""
        return end_stages(EMBED, self.embed_chunks)

    @cached_property
    def head_stages(self) -> list[str]:
        """Stages that hold the output matrix."""
        return self.embed_stages if self.tied else end_stages(HEAD, self.head_chunks)

    @property
    def end_slots(self) -> list[str]:
        """Slots of embedding and head."""
        return end_slots([*self.embed_stages, *self.head_stages])

    def stage(self, name: str) -> StageShape:
        """Return a stage's sizes."""
        return self.stages.get(name, _NOTHING)


_NOTHING = StageShape()


@dataclass
class _Slot:
    name: str
    stage: str = ""
    ready: int | None = None
    """UPLOAD of what lies in it."""
    uses: list[int] = field(default_factory=list)
    """What must be over before something else is put there."""
    last_visit: int = -1


@dataclass(frozen=True)
class _Visit:
    """A stretch of the compute lane that works with one stage's weights; without `loads` they need not be there."""

    stage: str
    kind: Kind
    loads: bool = True


class _Updates:
    """Assigns chunk slots and emits the updates of stages, piece by piece."""

    def __init__(self, schedule: Schedule, shape: StepShape) -> None:
        self.schedule = schedule
        self.shape = shape
        self.next = 0
        self.released: dict[str, int] = {}

    def emit(
        self,
        stage: str,
        slot: _Slot,
        *,
        with_weights: bool,
        gradient_slot: str,
        readable: Iterable[int | None] = (),
        complete: int | None = None,
        speculative: bool = False,
        pieces: Iterable[int] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Emit a stage's update.

        Args:
            slot: Where its weights lie, or are brought `with_weights`.
            gradient_slot: Where its gradient lies; "" if on SSD.
            readable: What must be over before states (and weights) are read.
            complete: What must be over before the gradient is used.
            pieces: Only these, by number.

        Returns:
            What must be over before the new weights are used, and before the slot is used again.
        """
        add, computed, written = self.schedule.add, [], []
        readable = tuple(readable)
        every = self.shape.stage(stage).pieces
        for number in range(len(every)) if pieces is None else pieces:
            piece = every[number]
            if not piece.streamed:
                done = add(
                    Lane.ADAM, Kind.UPDATE, stage, after=(complete,), piece=number,
                    gradient_slot=gradient_slot, num_elements=piece.numel,
                )  # fmt: skip
                computed.append(done)
                continue
            chunk = self._take_slot()
            common = {
                "piece": number, "slot": chunk, "weight_slot": slot.name, "gradient_slot": gradient_slot,
                "num_elements": piece.numel, "speculative": speculative,
            }  # fmt: skip
            read = piece.state_bytes + (piece.weight_bytes if with_weights else 0)
            read += 0 if gradient_slot else 4 * piece.numel
            loaded = add(
                Lane.STATES_READ, Kind.LOAD_STATES, stage, after=(*readable, self.released.get(chunk)),
                with_weights=with_weights, num_bytes=read, **common,
            )  # fmt: skip
            done = add(Lane.ADAM, Kind.UPDATE, stage, after=(loaded, complete), **common)
            saved = add(
                Lane.STATES_WRITE, Kind.SAVE_STATES, stage, after=(done,),
                num_bytes=piece.state_bytes + piece.weight_bytes, **common,
            )  # fmt: skip
            self.released[chunk] = saved
            computed.append(done)
            written.append(saved)
        # Lanes are serial: when the last is over, all are.
        return computed[-1:], written[-1:]

    def emit_rows(self, stage: str) -> int:
        """Emit the update of the rows that the step needs of a stage, for the step alone; nothing comes before."""
        chunk = self._take_slot()
        done = self.schedule.add(
            Lane.ADAM, Kind.UPDATE_ROWS, stage, slot=chunk, gradient_slot=gradient_slot(self.shape, stage)
        )  # fmt: skip
        self.released[chunk] = done
        return done

    def _take_slot(self) -> str:
        chunk = f"chunk.{self.next}"
        self.next = (self.next + 1) % self.shape.chunk_slots
        return chunk


class _Weights:
    """Assigns weight slots to visits and emits LOAD and UPLOAD, and pending updates, in time."""

    def __init__(
        self, schedule: Schedule, shape: StepShape, visits: list[_Visit], updates: _Updates
    ) -> None:
        self.schedule = schedule
        self.shape = shape
        self.visits = visits
        self.updates = updates
        self.emitted = 0
        blocks = [_Slot(f"block.{i}") for i in range(shape.block_slots)]
        ends = [_Slot(name) for name in shape.end_slots]
        self.slots = {"outer": [_Slot("outer")], "ends": ends, "block": blocks}
        self.held: dict[int, _Slot] = {}
        self.first_load: dict[str, int] = {}
        """It may import the stage, so that nothing of it is in the store before."""
        self.updated: dict[str, list[int]] = {}
        """Pending updates: what must be over before the stage is read from the store again."""
        self.late: dict[str, tuple[_Slot, list[int]]] = {}
        """Stages that are updated late: the slot of each, and what must be over before it is used."""

    def _next_visit(self, stage: str, number: int) -> int:
        for later in range(number, len(self.visits)):
            if self.visits[later].stage == stage and self.visits[later].loads:
                return later
        return len(self.visits)

    def _choose(self, stage: str, number: int) -> _Slot:
        slots = self.slots[stage_class(stage)]
        for slot in slots:
            if slot.stage == stage:
                return slot
        # The content needed again last makes room (Belady); never the one in use unless it's the only one.
        candidates = [slot for slot in slots if slot.last_visit < number - 1] or slots
        return max(candidates, key=lambda s: (self._next_visit(s.stage, number), -s.last_visit))

    def emit_until(self, number: int, computing: int) -> None:
        """Emit the loads of visits up to `number` whose slot is free before visit `computing` begins."""
        while self.emitted <= min(number, len(self.visits) - 1):
            visit = self.visits[self.emitted]
            if not visit.loads:
                self.emitted += 1
                continue
            slot = self._choose(visit.stage, self.emitted)
            if slot.stage != visit.stage:
                if slot.last_visit >= computing:
                    return
                self._fill(slot, visit.stage)
            slot.last_visit = self.emitted
            self.held[self.emitted] = slot
            self.emitted += 1

    def _fill(self, slot: _Slot, stage: str) -> None:
        shape, sizes = self.shape, self.shape.stage(stage)
        free, reads = slot.uses, False
        here: list[int] = []
        updates = shape.pending and stage in shape.owed and stage not in self.updated
        slot.stage, slot.uses = stage, []
        if updates:
            gradient = gradient_slot(shape, stage)
            here, written = self.updates.emit(
                stage, slot, with_weights=True, gradient_slot=gradient, readable=free
            )
            self.updated[stage] = written
            slot.uses += written
            reads = bool(written)
        if not updates or sizes.frozen_bytes:
            waits = [*free, *([] if updates else self.updated.get(stage, []))]
            load = self.schedule.add(
                Lane.SSD_READ, Kind.LOAD, stage, after=waits, slot=slot.name, with_weights=not updates,
                num_bytes=sizes.frozen_bytes if updates else sizes.load_bytes,
            )  # fmt: skip
            here, reads = [*here, load], True
            self.first_load.setdefault(stage, load)
        # Where all of it stays in memory only the device's side of the slot is filled.
        after = here if reads else [*here, *free]
        slot.ready = self.schedule.add(Lane.H2D, Kind.UPLOAD, stage, after=after, slot=slot.name)

    def update(
        self, stage: str, gradient: str, complete: int, *, speculative: bool = False
    ) -> list[int]:
        """Emit the update of a stage whose gradient is complete, and return when the gradient has served."""
        slots = self.slots[stage_class(stage)]
        holder = next((slot for slot in slots if slot.stage == stage), None)
        slot = holder or self._choose(stage, len(self.visits))
        # The first load may import the stage; a pending update wrote what this one reads.
        there = [self.first_load.get(stage), *self.updated.get(stage, [])]
        readable = [*there, *([] if holder else slot.uses)]
        computed, written = self.updates.emit(
            stage, slot, with_weights=holder is None, gradient_slot=gradient, readable=readable,
            complete=complete, speculative=speculative,
        )  # fmt: skip
        if holder is None:  # the next one of this class takes another slot
            slot.last_visit = max(other.last_visit for other in slots) + 1
        slot.stage = stage
        slot.uses += written
        return computed

    def update_late(self, stage: str, pieces: list[int]) -> list[int]:
        """Emit some pieces of a stage's late update, and return when their gradient has served.

        The slots of its class must be free.
        """
        if stage not in self.late:
            slots = self.slots[stage_class(stage)]
            slot = slots[len(self.late) % len(slots)]
            slot.stage = ""
            self.late[stage] = (slot, list(slot.uses))
        slot, free = self.late[stage]
        computed, written = self.updates.emit(
            stage, slot, with_weights=True, gradient_slot=gradient_slot(self.shape, stage),
            readable=free, pieces=pieces,
        )  # fmt: skip
        slot.uses += written
        self.updated[stage] = written
        return computed


class _Gradients:
    """Assigns gradient slots and emits what happens to a complete gradient."""

    def __init__(self, schedule: Schedule, shape: StepShape, weights: _Weights) -> None:
        self.schedule = schedule
        self.shape = shape
        self.weights = weights
        self.trained = shape.trained
        self.released: dict[str, list[int]] = {}
        self.left: dict[str, int] = {}
        """Of each slot on the device, when its gradient has left it for the host."""
        self.collected: list[int] = []
        self.next_slot: dict[str, int] = {}
        self.current: dict[str, str] = {}
        self.used: dict[str, list[int]] = {}
        """Late updates: what must be over before the gradient that they use may be overwritten."""

    def slot(self, stage: str) -> str:
        """Return the stage's gradient slot, "" if nothing of it is trained."""
        if stage not in self.trained:
            return ""
        if stage not in self.current:
            name = gradient_slot(self.shape, stage)
            if not name:
                kind = stage_class(stage)
                passing = [passing_slot(number) for number in range(self.shape.gradient_slots)]
                slots = {"outer": [OUTER], "ends": self.shape.end_slots, "block": passing}[kind]
                number = self.next_slot.get(kind, 0)
                name, self.next_slot[kind] = slots[number], (number + 1) % len(slots)
            self.current[stage] = name
        return self.current[stage]

    def free(self, stage: str) -> list[int]:
        """Return the operations after which the stage's gradient may be computed: there is room where it is summed up."""
        # A pending update has used the stage's old gradient before its weights are used.
        slot, count = self.slot(stage), self.shape.device_gradient_slots
        if not count:
            return self.released.get(slot, [])
        left = self.left.get(device_gradient_slot(stage, count))
        return [] if left is None or not slot else [left]

    def complete(self, stage: str, last: int) -> None:
        """Emit collection and, by the policy, saving or updating; `last` added the last micro-batch."""
        slot = self.slot(stage)
        if not slot:
            return
        add, shape = self.schedule.add, self.shape
        free = self.released.get(slot, []) if shape.device_gradient_slots else []
        done = add(Lane.D2H, Kind.COLLECT_GRADIENT, stage, after=(last, *free), slot=slot)
        self.collected.append(done)
        if shape.device_gradient_slots:
            self.left[device_gradient_slot(stage, shape.device_gradient_slots)] = done
        over = [done]
        if stage not in shape.deferred:
            over = self.weights.update(stage, slot, done)
        elif stage in shape.gradients_on_ssd:
            size = 4 * shape.stage(stage).trained_numel
            over = [
                add(
                    Lane.SSD_WRITE,
                    Kind.SAVE_GRADIENT,
                    stage,
                    after=[*over, *self.used.get(stage, [])],
                    slot=slot,
                    num_bytes=size,
                )
            ]
        if stage in shape.speculative:
            over = [*over, *self.weights.update(stage, slot, done, speculative=True)]
        self.released[slot] = over

    def finish(self) -> None:
        """Emit the global norm."""
        self.schedule.add(Lane.COMPUTE, Kind.CLIP, after=self.collected)


class _Late:
    """Spreads late updates, piece by piece, over the visits of blocks in one direction."""

    def __init__(self, shape: StepShape, weights: _Weights, gradients: _Gradients) -> None:
        self.shape = shape
        self.weights = weights
        self.gradients = gradients
        self.todo = [
            (stage, piece)
            for stage in shape.late
            for piece in range(len(shape.stage(stage).pieces))
        ]
        self.at_once = -(-len(self.todo) // max(1, shape.num_blocks - shape.block_slots))

    def emit(self, count: int | None = None) -> None:
        """Emit so many pieces, those of a visit by default."""
        count = self.at_once if count is None else count
        now, self.todo = self.todo[:count], self.todo[count:]
        for stage in dict.fromkeys(stage for stage, _ in now):
            pieces = [piece for other, piece in now if other == stage]
            self.gradients.used[stage] = self.weights.update_late(stage, pieces)
            slot = gradient_slot(self.shape, stage)
            if slot:
                self.gradients.released[slot] = self.gradients.used[stage]


def gradient_slot(shape: StepShape, stage: str) -> str:
    """Return the slot in which a stage's gradient waits for the next step; "" if it doesn't wait in memory."""
    return stage if stage in shape.deferred - shape.gradients_on_ssd else ""


def device_gradient_slot(stage: str, count: int) -> str:
    """Return the slot on the device in which a stage's gradient is summed up; blocks take turns in `count` of them."""
    number = int(stage.partition(".")[2] or 0)
    if stage_class(stage) == "ends":  # chunks take turns, too
        return ("ends", "ends.1")[number % 2]
    return stage if stage == OUTER or not count else f"block.{number % count}"


def passing_slot(number: int) -> str:
    """Return the name of a slot for gradients of blocks that don't wait in memory."""
    return f"passing.{number}"  # not that of a block's stage, whose gradient may wait meanwhile


class _Inputs:
    """Assigns slots to what blocks let go until their backward pass, to SSD or from a card to host memory.

    On the way out a slot is taken until its content has left, on the way back until compute is done with it. As much comes
    back ahead of its use as there are slots.

    Args:
        returning: What comes back, in that order: blocks and micro-batches.
    """

    def __init__(
        self, schedule: Schedule, shape: StepShape, returning: list[tuple[str, int]]
    ) -> None:
        self.schedule = schedule
        self.shape = shape
        self.returning = returning[::-1]
        self.next = 0
        self.released: dict[str, int] = {}
        self.saved: dict[tuple[str, int], int] = {}
        self.loaded: dict[tuple[str, int], tuple[int, str]] = {}

    def take(self) -> str:
        """Return the next slot in turn."""
        slot = f"input.{self.next}"
        self.next = (self.next + 1) % self.shape.input_slots
        return slot

    def save(self, stage: str, micro_batch: int, slot: str, after: int) -> None:
        """Emit that what `after` put into the slot leaves it."""
        lane = Lane.D2H if stage in self.shape.in_host else Lane.SSD_WRITE
        done = self.schedule.add(
            lane, Kind.SAVE_INPUT, stage, after=(after,), micro_batch=micro_batch, slot=slot,
            num_bytes=self._size(stage),
        )  # fmt: skip
        self.released[slot] = self.saved[stage, micro_batch] = done

    def _size(self, stage: str) -> int:
        return self.shape.waiting_bytes(self.shape.keeps(stage))

    def load(self) -> None:
        """Emit what comes back next, as far as there are slots."""
        while self.returning and len(self.loaded) < self.shape.input_slots:
            stage, micro_batch = self.returning.pop()
            lane = Lane.H2D if stage in self.shape.in_host else Lane.SSD_READ
            slot = self.take()
            done = self.schedule.add(
                lane, Kind.LOAD_INPUT, stage, micro_batch=micro_batch, slot=slot,
                after=(self.saved[stage, micro_batch], self.released.get(slot)), num_bytes=self._size(stage),
            )  # fmt: skip
            self.loaded[stage, micro_batch] = (done, slot)

    def release(self, stage: str, micro_batch: int, after: int) -> None:
        """Note that `after` is the last to use what came back: the next may come."""
        _, slot = self.loaded.pop((stage, micro_batch))
        self.released[slot] = after
        self.load()


def generate_training_step(shape: StepShape) -> Schedule:
    """Return the schedule of one optimizer step."""
    return _generate(shape, training=True)


def generate_evaluation(shape: StepShape) -> Schedule:
    """Return the schedule of one forward pass that only computes losses."""
    return _generate(replace(shape, pending=False), training=False)


def generate_flush(shape: StepShape) -> Schedule:
    """Return the schedule that makes pending updates without a step after them."""
    schedule = Schedule()
    weights = _Weights(schedule, shape, [], _Updates(schedule, shape))
    for number, stage in enumerate(s for s in stages_of(shape) if s in shape.owed):
        slots = weights.slots[stage_class(stage)]
        slot = slots[number % len(slots)]
        _, written = weights.updates.emit(
            stage, slot, with_weights=True, gradient_slot=gradient_slot(shape, stage),
            readable=slot.uses,
        )  # fmt: skip
        slot.uses += written
    return schedule


def _visits(shape: StepShape, training: bool) -> list[_Visit]:
    blocks, embed, head = blocks_of(shape), shape.embed_stages, shape.head_stages
    visits = [_Visit(OUTER, Kind.LOAD)]
    if len(embed) > 1:
        visits += [_Visit(chunk, Kind.GATHER_ROWS) for chunk in embed if chunk not in shape.late]
        visits += [_Visit(OUTER, Kind.ENTRY_FORWARD)]
    else:
        visits += [_Visit(EMBED, Kind.ENTRY_FORWARD)]
    visits += [_Visit(block, Kind.FORWARD) for block in blocks]
    if len(head) > 1:
        visits += [_Visit(chunk, Kind.SCORE) for chunk in reversed(head)]
    if len(head) == 1 or training:
        visits += [_Visit(chunk, Kind.LOSS) for chunk in head]
    if not training:
        return visits
    visits += [_Visit(block, Kind.BACKWARD) for block in reversed(blocks[shape.first_backward :])]
    if len(embed) == 1:
        return [*visits, _Visit(EMBED, Kind.ENTRY_BACKWARD, loads=False)]
    visits += [_Visit(OUTER, Kind.ENTRY_BACKWARD, loads=False)]
    # An untied embedding's gradient needs no weights.
    return visits + [
        _Visit(chunk, Kind.ROWS_BACKWARD, loads=shape.tied)
        for chunk in reversed(embed)
        if chunk in shape.trained
    ]


def _generate(shape: StepShape, *, training: bool) -> Schedule:
    schedule, visits = Schedule(), _visits(shape, training)
    updates = _Updates(schedule, shape)
    rows = [updates.emit_rows(stage) for stage in shape.late]
    weights = _Weights(schedule, shape, visits, updates)
    gradients = _Gradients(schedule, shape, weights)
    late = _Late(shape, weights, gradients)
    micro_batches = range(shape.num_micro_batches)
    back = dict.fromkeys(visit.stage for visit in visits if visit.kind == Kind.BACKWARD)
    returning = [(stage, m) for stage in back if shape.moves(stage) for m in micro_batches]
    inputs = _Inputs(schedule, shape, returning)
    outer_ready: int | None = None
    beside = Kind.BACKWARD if shape.late_backward else Kind.FORWARD
    kinds = [visit.kind for visit in visits]
    due = kinds.index(beside) + shape.num_blocks if late.todo else 0
    add = schedule.add

    for number, visit in enumerate(visits):
        stage = visit.stage
        weights.emit_until(number, number)
        slot = weights.held.get(number)
        returns = stage in back
        keeps = shape.keeps(stage) if returns else Keeps.INPUT
        moves = returns and shape.moves(stage)
        if visit.kind == Kind.BACKWARD and moves:
            inputs.load()
        ahead = number + shape.block_slots - 1
        if late.todo and ahead + 1 >= due:  # what comes then takes the slots of late updates
            if visit.kind == beside:
                late.emit(len(late.todo))
            else:
                ahead = min(ahead, due - 1)
        weights.emit_until(ahead, number)
        if visit.kind == beside:
            late.emit()
        if visit.kind == Kind.LOAD:
            assert slot is not None
            outer_ready = slot.ready
            continue
        ready = [slot.ready, outer_ready] if slot else []
        if visit.kind == Kind.ENTRY_FORWARD:
            ready += rows
        adds = training and _adds_gradient(visit, shape)
        last = -1
        for m in micro_batches:
            if visit.kind == Kind.FORWARD:
                place = inputs.take() if moves else ""
                last = add(
                    Lane.COMPUTE, visit.kind, stage, after=(*ready, inputs.released.get(place)),
                    micro_batch=m, input_slot=place, keeps=keeps,
                )  # fmt: skip
                if moves:
                    inputs.save(stage, m, place, last)
            elif visit.kind == Kind.BACKWARD:
                loaded, place = inputs.loaded.get((stage, m), (None, ""))
                last = add(
                    Lane.COMPUTE, visit.kind, stage, after=(*ready, loaded, *gradients.free(stage)),
                    micro_batch=m, slot=gradients.slot(stage), input_slot=place, keeps=keeps,
                )  # fmt: skip
                if moves:
                    inputs.release(stage, m, last)
            else:
                place, free = "", []
                if adds:
                    place, free = gradients.slot(stage), gradients.free(stage)
                last = add(
                    Lane.COMPUTE,
                    visit.kind,
                    stage,
                    after=(*ready, *free),
                    micro_batch=m,
                    slot=place,
                )
        if slot:
            slot.uses.append(last)
        if adds and not (visit.kind == Kind.LOSS and shape.tied):
            gradients.complete(stage, last)
    if training:
        gradients.complete(OUTER, last)
        gradients.finish()
    return schedule


def _adds_gradient(visit: _Visit, shape: StepShape) -> bool:
    """Say whether a visit of a training step adds to the gradient of the stage's own weights."""
    if visit.kind == Kind.LOSS:
        return not (shape.tied and shape.embed_chunks > 1)
    backward = (Kind.BACKWARD, Kind.ENTRY_BACKWARD, Kind.ROWS_BACKWARD)
    return visit.kind in backward and visit.stage != OUTER


def stages_of(shape: StepShape) -> list[str]:
    """Return all stages in the order in which a step loads them."""
    head = [] if shape.tied else shape.head_stages
    return [OUTER, *shape.embed_stages, *blocks_of(shape), *head]


def blocks_of(shape: StepShape) -> list[str]:
    """Return the block stages in order."""
    return [block_stage(number) for number in range(shape.num_blocks)]
