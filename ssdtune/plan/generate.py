"""Write the schedule of a step: vertical order, slots assigned, every wait spelled out.

All micro-batches go through a block before the next block begins, so weights cross the SSD twice a step
whatever the accumulation. Weights live in slots of three classes: `outer` (small weights, one slot),
`ends` (embedding and head, one slot) and `block` (`block_slots` of them). A slot is refilled as soon as its
last user is done; a stage that still lies in a slot isn't read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ssdtune.plan.schedule import Kind, Lane, Schedule

OUTER, EMBED, HEAD = "outer", "embed", "head"


def block_stage(number: int) -> str:
    """Return the name of a block's stage."""
    return f"block.{number}"


@dataclass(frozen=True)
class StepShape:
    """What the generator must know.

    Attributes:
        num_blocks: Blocks of the model, L.
        num_micro_batches: Micro-batches of this step (the last window of an epoch may be smaller).
        tied: Embedding and head are one stage.
        trained: Stages that have trained weights.
        block_slots: Weight slots for blocks, at least 1; one more than the prefetch depth.
        gradient_slots: Gradient slots for blocks, used where gradients don't stay in memory.
        input_slots: Slots for block inputs on their way to or from SSD; 0 keeps all inputs in memory.
        update: When a stage is updated: "overlap" (as soon as its gradient is complete), "after" (once the
            norm of all gradients is known) or "deferred" (the next step begins with it, see `pending`).
        pending: The previous step's updates are still to be made: each stage's before it is loaded.
        gradients: Where complete gradients wait unless updates overlap: "host" or "ssd".
        load_bytes: Bytes read per stage when its weights are loaded; stages kept in memory have 0.
    """

    num_blocks: int
    num_micro_batches: int
    tied: bool
    trained: frozenset[str]
    block_slots: int = 2
    gradient_slots: int = 2
    input_slots: int = 0
    update: str = "after"
    pending: bool = False
    gradients: str = "host"
    load_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def first_backward(self) -> int:
        """Lowest block that gradients must reach: below it nothing is trained. L if they reach none."""
        if {OUTER, EMBED} & self.trained:
            return 0
        return next(
            (n for n in range(self.num_blocks) if block_stage(n) in self.trained), self.num_blocks
        )

    @property
    def head(self) -> str:
        """Stage that holds the output matrix."""
        return EMBED if self.tied else HEAD


@dataclass
class _Slot:
    name: str
    stage: str = ""
    ready: int | None = None
    """UPLOAD of what lies in it."""
    last_use: int | None = None
    last_visit: int = -1


@dataclass(frozen=True)
class _Visit:
    """A stretch of the compute lane that works with one stage's weights."""

    stage: str
    kind: Kind


class _Weights:
    """Assigns weight slots to visits and emits LOAD and UPLOAD in time."""

    def __init__(self, schedule: Schedule, shape: StepShape, visits: list[_Visit]) -> None:
        self.schedule = schedule
        self.shape = shape
        self.visits = visits
        self.emitted = 0
        blocks = [_Slot(f"block.{i}") for i in range(shape.block_slots)]
        self.slots = {"outer": [_Slot("outer")], "ends": [_Slot("ends")], "block": blocks}
        self.held: dict[int, _Slot] = {}
        self.updated: Mapping[str, int] = {}

    def _class(self, stage: str) -> str:
        return "outer" if stage == OUTER else "ends" if stage in (EMBED, HEAD) else "block"

    def _next_visit(self, stage: str, number: int) -> int:
        for later in range(number, len(self.visits)):
            if self.visits[later].stage == stage:
                return later
        return len(self.visits)

    def _choose(self, stage: str, number: int) -> _Slot:
        slots = self.slots[self._class(stage)]
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
            slot = self._choose(visit.stage, self.emitted)
            if slot.stage != visit.stage:
                if slot.last_visit >= computing:
                    return
                self._fill(slot, visit.stage)
            slot.last_visit = self.emitted
            self.held[self.emitted] = slot
            self.emitted += 1

    def _fill(self, slot: _Slot, stage: str) -> None:
        size = self.shape.load_bytes.get(stage, 0)
        load = self.schedule.add(
            Lane.SSD_READ, Kind.LOAD, stage, after=(slot.last_use, self.updated.get(stage)),
            slot=slot.name, num_bytes=size,
        )  # fmt: skip
        slot.ready = self.schedule.add(Lane.H2D, Kind.UPLOAD, stage, after=(load,), slot=slot.name)
        slot.stage, slot.last_use = stage, None


class _Gradients:
    """Assigns gradient slots and emits what happens to a complete gradient."""

    def __init__(self, schedule: Schedule, shape: StepShape) -> None:
        self.schedule = schedule
        self.shape = shape
        self.released: dict[str, int | None] = {}
        self.collected: list[int] = []
        self.saved: dict[str, int] = {}
        self.next_block_slot = 0
        self.current: dict[str, str] = {}

    def slot(self, stage: str) -> str:
        """Return the stage's gradient slot, "" if nothing of it is trained."""
        if stage not in self.shape.trained:
            return ""
        if stage not in self.current:
            if self.shape.update != "overlap" and self.shape.gradients == "host":
                name = stage
            elif stage in (OUTER, EMBED, HEAD):
                name = OUTER if stage == OUTER else "ends"
            else:
                name = f"block.{self.next_block_slot}"
                self.next_block_slot = (self.next_block_slot + 1) % self.shape.gradient_slots
            self.current[stage] = name
        return self.current[stage]

    def free(self, stage: str) -> int | None:
        """Return the operation after which the stage's slot may be written."""
        return self.released.get(self.slot(stage)) if self.slot(stage) else None

    def complete(self, stage: str, last: int) -> None:
        """Emit collection and, by the policy, saving or updating; `last` added the last micro-batch."""
        slot = self.slot(stage)
        if not slot:
            return
        add = self.schedule.add
        done = add(Lane.D2H, Kind.COLLECT_GRADIENT, stage, after=(last,), slot=slot)
        self.collected.append(done)
        if self.shape.update == "overlap":
            done = add(Lane.ADAM, Kind.UPDATE, stage, after=(done,), slot=slot)
        elif self.shape.gradients == "ssd":
            done = add(Lane.SSD_WRITE, Kind.SAVE_GRADIENT, stage, after=(done,), slot=slot)
            self.saved[stage] = done
        self.released[slot] = done

    def finish(self) -> None:
        """Emit the global norm and, where they are still to come, the updates."""
        add = self.schedule.add
        clip = add(Lane.COMPUTE, Kind.CLIP, after=tuple(self.collected))
        if self.shape.update == "after":
            stages = stages_of(self.shape)
            self.update(stages, {stage: (clip, self.saved.get(stage)) for stage in stages})

    def update(
        self, stages: list[str], after: Mapping[str, tuple[int | None, ...]]
    ) -> dict[str, int]:
        """Emit the updates of gradients that waited, and return the operation of each stage."""
        done = {}
        for stage in stages:
            if stage in self.shape.trained:
                slot = self.slot(stage) if self.shape.gradients == "host" else ""
                done[stage] = self.schedule.add(
                    Lane.ADAM, Kind.UPDATE, stage, after=after.get(stage, ()), slot=slot
                )
        return done


class _Inputs:
    """Assigns slots to block inputs that travel to SSD and back."""

    def __init__(self, schedule: Schedule, count: int) -> None:
        self.schedule = schedule
        self.count = count
        self.next = 0
        self.released: dict[str, int] = {}
        self.saved: dict[tuple[str, int], int] = {}
        self.loaded: dict[tuple[str, int], tuple[int, str]] = {}

    def take(self) -> str:
        """Return the next slot in turn, "" if inputs stay in memory."""
        if not self.count:
            return ""
        slot = f"input.{self.next}"
        self.next = (self.next + 1) % self.count
        return slot

    def save(self, stage: str, micro_batch: int, slot: str, after: int) -> None:
        """Emit the write of the input that `after` left in the slot."""
        if slot:
            done = self.schedule.add(
                Lane.SSD_WRITE,
                Kind.SAVE_INPUT,
                stage,
                after=(after,),
                micro_batch=micro_batch,
                slot=slot,
            )
            self.released[slot] = self.saved[stage, micro_batch] = done

    def load(self, stage: str, micro_batch: int) -> None:
        """Emit the read of the input into the next slot."""
        if self.count:
            slot = self.take()
            after = (self.saved[stage, micro_batch], self.released.get(slot))
            done = self.schedule.add(
                Lane.SSD_READ,
                Kind.LOAD_INPUT,
                stage,
                after=after,
                micro_batch=micro_batch,
                slot=slot,
            )
            self.loaded[stage, micro_batch] = (done, slot)


def generate_training_step(shape: StepShape) -> Schedule:
    """Return the schedule of one optimizer step."""
    return _generate(shape, training=True)


def generate_evaluation(shape: StepShape) -> Schedule:
    """Return the schedule of one forward pass that only computes losses."""
    return _generate(shape, training=False)


def generate_flush(shape: StepShape) -> Schedule:
    """Return the schedule that makes pending updates without a step after them."""
    schedule = Schedule()
    _Gradients(schedule, shape).update(stages_of(shape), {})
    return schedule


def _visits(shape: StepShape, training: bool) -> list[_Visit]:
    blocks = blocks_of(shape)
    visits = [_Visit(OUTER, Kind.ENTRY_FORWARD), _Visit(EMBED, Kind.ENTRY_FORWARD)]
    visits += [_Visit(block, Kind.FORWARD) for block in blocks]
    visits += [_Visit(shape.head, Kind.LOSS)]
    if training:
        visits += [
            _Visit(block, Kind.BACKWARD) for block in reversed(blocks[shape.first_backward :])
        ]
    return visits


def _generate(shape: StepShape, *, training: bool) -> Schedule:
    schedule, visits = Schedule(), _visits(shape, training)
    goes_back = {visit.stage for visit in visits if visit.kind == Kind.BACKWARD}
    weights = _Weights(schedule, shape, visits)
    gradients = _Gradients(schedule, shape)
    inputs = _Inputs(schedule, shape.input_slots if training else 0)
    micro_batches = range(shape.num_micro_batches)
    outer_ready: int | None = None
    add = schedule.add
    if training and shape.pending:
        weights.updated = gradients.update(stages_of(shape), {})

    for number, visit in enumerate(visits):
        stage = visit.stage
        weights.emit_until(number, number)
        slot = weights.held[number]
        if visit.kind == Kind.BACKWARD:
            for m in micro_batches[: shape.input_slots]:
                inputs.load(stage, m)
        weights.emit_until(number + shape.block_slots - 1, number)
        if stage == OUTER:
            outer_ready = slot.ready
            continue
        ready = (slot.ready, outer_ready)
        last = -1
        for m in micro_batches:
            if visit.kind == Kind.FORWARD:
                place = inputs.take() if stage in goes_back else ""
                after = (*ready, inputs.released.get(place))
                last = add(
                    Lane.COMPUTE, visit.kind, stage, after=after, micro_batch=m, input_slot=place
                )
                inputs.save(stage, m, place, last)
            elif visit.kind == Kind.BACKWARD:
                if inputs.count and m >= shape.input_slots:
                    inputs.load(stage, m)
                loaded, place = inputs.loaded.get((stage, m), (None, ""))
                last = add(
                    Lane.COMPUTE, visit.kind, stage, after=(*ready, loaded, gradients.free(stage)),
                    micro_batch=m, slot=gradients.slot(stage), input_slot=place,
                )  # fmt: skip
                if place:
                    inputs.released[place] = last
            else:
                place = gradients.slot(stage) if training and visit.kind == Kind.LOSS else ""
                last = add(Lane.COMPUTE, visit.kind, stage, after=ready, micro_batch=m, slot=place)
        slot.last_use = last
        is_complete = visit.kind == Kind.BACKWARD or (visit.kind == Kind.LOSS and not shape.tied)
        if training and is_complete:
            gradients.complete(stage, last)

    if training:
        for m in micro_batches:
            last = add(
                Lane.COMPUTE, Kind.ENTRY_BACKWARD, EMBED, after=(gradients.free(EMBED),),
                micro_batch=m, slot=gradients.slot(EMBED),
            )  # fmt: skip
        gradients.complete(EMBED, last)
        gradients.complete(OUTER, last)
        gradients.finish()
    return schedule


def stages_of(shape: StepShape) -> list[str]:
    """Return all stages in the order in which a step loads them."""
    return [OUTER, EMBED, *blocks_of(shape), *([] if shape.tied else [HEAD])]


def blocks_of(shape: StepShape) -> list[str]:
    """Return the block stages in order."""
    return [block_stage(number) for number in range(shape.num_blocks)]
