"""The schedule of a step spells out every wait: no two operations that share memory can run at once.

`_accesses` says what each operation reads and writes, as the engine, the swap manager and the optimizer do it.
Two checks then cover every possible timing of the lanes: operations that share something, one of them writing,
are ordered by waits and lanes (`races`), and run in list order each finds what it needs (`replay`).
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdtune.plan.generate import (
    EMBED,
    HEAD,
    OUTER,
    Piece,
    StageShape,
    StepShape,
    device_gradient_slot,
    end_stages,
    generate_evaluation,
    generate_flush,
    generate_training_step,
    gradient_slot,
    passing_slot,
    stage_class,
)
from ssdtune.plan.schedule import Keeps, Kind, Lane, Operation, Schedule
from ssdtune.plan.times import COMPUTING

PREVIOUS = -1
"""Stands for the micro-batches of the step before."""
CELLS = 6
"""Into which a slot's memory is divided: pieces of one stage lie apart, those of different stages overlap."""


def stages_of(num_blocks: int, tied: bool, chunks: tuple[int, int] = (1, 1)) -> list[str]:
    embed, head = end_stages(EMBED, chunks[0]), end_stages(HEAD, chunks[1])
    return [OUTER, *embed, *(f"block.{i}" for i in range(num_blocks)), *([] if tied else head)]


def stage_shape(index: int, streamed: tuple[bool, ...], frozen: bool) -> StageShape:
    """Return a stage with trained pieces that are streamed or stay in memory."""
    frozen_bytes = 100 + index if frozen else 0
    pieces = tuple(Piece(1, 1, 10, one) for one in streamed)
    load = frozen_bytes + sum(piece.weight_bytes for piece in pieces if piece.streamed)
    return StageShape(load, frozen_bytes, load, pieces)


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    num_blocks, tied = draw(st.integers(1, 8)), draw(st.booleans())
    chunks = draw(st.sampled_from([(1, 1), (1, 1), (1, 3), (3, 1), (2, 2), (4, 3), (3, 5)]))
    names = stages_of(num_blocks, tied, chunks)
    stages: dict[str, StageShape] = {}
    for index, name in enumerate(names):
        first = name.partition(".")[0] + ".0"
        if stage_class(name) == "ends" and first in stages:  # chunks are alike
            stages[name] = stages[first]
            continue
        pieces = draw(st.lists(st.booleans(), max_size=3)) if draw(st.booleans()) else [True]
        stages[name] = stage_shape(index, tuple(pieces), not pieces or draw(st.booleans()))
    trained = [name for name, stage in stages.items() if stage.pieces]
    blocks = [name for name in names if name.startswith("block.")]
    deferred = draw(st.sampled_from([[], trained, trained[: len(trained) // 2]]))
    input_slots = draw(st.integers(0, 3))
    streamed = [name for name in deferred if all(piece.streamed for piece in stages[name].pieces)]
    some = st.sampled_from([[], streamed, streamed[1::2], streamed[::3]])
    speculative = frozenset(draw(some))
    apart = [
        name
        for name in streamed
        if name.startswith("embed.") and not stages[name].frozen_bytes and name not in speculative
    ]
    return StepShape(
        num_blocks=num_blocks,
        num_micro_batches=draw(st.integers(1, 4)),
        tied=tied,
        embed_chunks=chunks[0],
        head_chunks=chunks[1],
        stages=stages,
        block_slots=draw(st.integers(1, 4)),
        gradient_slots=draw(st.integers(1, 3)),
        device_gradient_slots=draw(st.integers(0, 2)),
        input_slots=input_slots,
        chunk_slots=draw(st.integers(1, 4)),
        inputs_stay=draw(st.booleans()),
        in_host=frozenset(
            draw(st.sampled_from([[], blocks, blocks[1::2], blocks[num_blocks // 2 :]]))
        ),
        kept=frozenset(blocks[(split := draw(st.integers(0, num_blocks))) :]),
        swapped=frozenset(blocks[: draw(st.integers(0, split))]) if input_slots else frozenset(),
        partly=frozenset(draw(st.sampled_from([[], blocks, blocks[::2]]))),
        deferred=frozenset(deferred),
        speculative=speculative,
        settled=frozenset(draw(some)),
        pending=bool(deferred) and draw(st.booleans()),
        rows_first=frozenset(draw(st.sampled_from([[], apart, apart, apart[1:]]))),
        gradients_on_ssd=frozenset(draw(st.sampled_from([[], streamed, streamed[::2]]))),
        input_bytes=7,
        products_bytes=35,
        kept_bytes=70,
    )


# What operations touch

Access = tuple[str | int, ...]


def accesses(
    schedule: Schedule, shape: StepShape
) -> list[tuple[Operation, set[Access], set[Access]]]:
    """Return each operation with what it reads and what it writes."""
    slots: dict[str, str] = {}
    seen: set[str] = set()
    found = []
    for operation in schedule.operations:
        first = operation.stage not in seen and operation.with_weights and not shape.pending
        reads, writes = _accesses(operation, shape, slots, first=first)
        if operation.kind == Kind.LOAD:
            seen.add(operation.stage)
        found.append((operation, reads, writes))
    return found


def _weights(shape: StepShape, stage: str, slot: str, piece: int | None = None) -> set[Access]:
    """Return the cells of a weight slot that a stage takes, or one of its pieces."""
    count = len(shape.stage(stage).pieces)
    cells = range(CELLS)
    if piece is not None:
        cells = range(piece * CELLS // count, (piece + 1) * CELLS // count)
    found: set[Access] = {("host weights", slot, cell) for cell in cells}
    return found if piece is not None else found | {("host weights", slot, "frozen")}


def _states(shape: StepShape, stage: str) -> set[Access]:
    return {("states", stage, piece) for piece in range(len(shape.stage(stage).pieces))}


def _accesses(
    operation: Operation, shape: StepShape, slots: dict[str, str], *, first: bool
) -> tuple[set[Access], set[Access]]:
    """Say what one operation reads and writes; `slots` is where each stage's weights are."""
    kind, stage, slot = operation.kind, operation.stage, operation.slot
    piece, weights = operation.piece, operation.weight_slot
    reads: set[Access] = set()
    writes: set[Access] = set()
    unit = f"{stage} {operation.micro_batch}"
    old = stage in shape.deferred and not operation.speculative
    """The gradient is that of the previous step."""
    match kind:
        case Kind.LOAD if operation.with_weights:
            reads, writes = _states(shape, stage), _weights(shape, stage, slot)
            if (
                first
            ):  # an import writes the states, makes halves in a gradient slot, or fills memory
                writes |= {*_states(shape, stage), ("gradient", _scratch(stage, shape))}
        case Kind.LOAD:
            writes = {("host weights", slot, "frozen")}
        case Kind.UPLOAD:
            slots[stage] = slot
            reads = _weights(shape, stage, slot) | _resident(shape, stage)
            writes = {("device weights", slot), ("slot of", stage)}
        case Kind.FORWARD:
            writes = {("input", operation.input_slot)} if operation.input_slot else set()
            writes |= {("graph", unit)} if operation.keeps != Keeps.INPUT else set()
        case Kind.SAVE_INPUT:
            reads, writes = {("input", slot)}, {("stored input", unit)}
        case Kind.LOAD_INPUT:
            reads, writes = {("stored input", unit)}, {("input", slot)}
        case Kind.BACKWARD:
            reads = {("input", operation.input_slot)} if operation.input_slot else set()
            reads |= {("graph", unit)} if operation.keeps != Keeps.INPUT else set()
        case Kind.COLLECT_GRADIENT:
            reads, writes = {("present", stage)}, {("gradient", slot), ("squares", stage)}
            reads |= _on_device(stage, shape)
        case Kind.SAVE_GRADIENT:
            reads, writes = {("gradient", slot)}, {("stored gradient", stage)}
        case Kind.CLIP:
            reads, writes = {("squares", s) for s in shape.trained}, {("scale",)}
        case Kind.LOAD_STATES:
            reads, writes = {("states", stage, piece)}, {("chunk", slot)}
            writes |= _weights(shape, stage, weights, piece) if operation.with_weights else set()
            reads |= set() if operation.gradient_slot else {("stored gradient", stage)}
        case Kind.UPDATE_ROWS:
            reads, writes = _states(shape, stage), {("chunk", slot), ("rows", stage)}
            reads |= (
                {("gradient", operation.gradient_slot)}
                if operation.gradient_slot
                else {("stored gradient", stage)}
            )
        case Kind.UPDATE:
            reads = set() if old else {("present", stage)}
            reads |= {("gradient", operation.gradient_slot)} if operation.gradient_slot else set()
            writes = {("states", stage, piece)}
            if weights:
                writes = {("chunk", slot), *_weights(shape, stage, weights, piece)}
        case Kind.SAVE_STATES:
            reads = {("chunk", slot), *_weights(shape, stage, weights, piece)}
            writes = {("states", stage, piece)}
            if operation.speculative:
                writes = {("states beside", stage, piece)}
    if kind == Kind.ENTRY_FORWARD:
        reads = {("rows", late) for late in shape.late}
    if kind in COMPUTING:
        for one in _used(operation, shape):
            # on the CPU host memory is computed on in place, of resident parts the states themselves
            reads |= {("slot of", one), ("device weights", slots[one])}
            reads |= _weights(shape, one, slots[one]) | _resident(shape, one)
        if slot:
            writes |= {("present", stage)} | (_on_device(stage, shape) or {("gradient", slot)})
        if kind in (Kind.LOSS, Kind.ENTRY_BACKWARD) and OUTER in shape.trained:
            writes |= {("present", OUTER)} | (_on_device(OUTER, shape) or {("gradient", OUTER)})
    return reads, writes


def _used(operation: Operation, shape: StepShape) -> set[str]:
    """Return the stages whose weights an operation computes with."""
    kind, stage = operation.kind, operation.stage
    if kind == Kind.ENTRY_BACKWARD:
        return {OUTER}  # its graph has the outer weights, of the embedding only copied rows
    if kind == Kind.ROWS_BACKWARD:
        return {OUTER, stage} if shape.tied else set()
    return {OUTER, stage} if kind in (Kind.ENTRY_FORWARD, Kind.SCORE, Kind.LOSS) else {stage}


def _on_device(stage: str, shape: StepShape) -> set[Access]:
    """Return where a gradient is summed up on a device with memory of its own; nothing elsewhere."""
    count = shape.device_gradient_slots
    return {("device gradient", device_gradient_slot(stage, count))} if count else set()


def _resident(shape: StepShape, stage: str) -> set[Access]:
    pieces = enumerate(shape.stage(stage).pieces)
    return {("states", stage, number) for number, piece in pieces if not piece.streamed}


def _scratch(stage: str, shape: StepShape) -> str:
    if gradient_slot(shape, stage) or stage == OUTER:
        return stage
    return "ends" if stage_class(stage) == "ends" else passing_slot(0)


# The checks


def before(schedule: Schedule) -> list[int]:
    """Return for each operation the set (bits) of those that are over when it begins, whatever the timing."""
    closure: list[int] = []
    last: dict[Lane, int] = {}
    for operation in schedule.operations:
        bits = 0
        previous = last.get(operation.lane)
        for other in (*operation.after, *(() if previous is None else (previous,))):
            bits |= closure[other] | 1 << other
        closure.append(bits)
        last[operation.lane] = operation.index
    return closure


def races(schedule: Schedule, shape: StepShape) -> list[str]:
    """Return the pairs of operations that share something and may run at once or in either order."""
    closure, found = before(schedule), []
    users: dict[Access, list[tuple[int, bool]]] = defaultdict(list)
    for operation, reads, writes in accesses(schedule, shape):
        for access in reads | writes:
            for other, wrote in users[access]:
                if (wrote or access in writes) and not closure[operation.index] >> other & 1:
                    found.append(
                        f"{access}: {schedule.operations[other]} and {operation} are not ordered"
                    )
            users[access].append((operation.index, access in writes))
    return found


@dataclasses.dataclass
class _Content:
    """What lies in a weight slot: pieces of a stage's trained weights, and its frozen ones."""

    stage: str
    pieces: set[int] = dataclasses.field(default_factory=set)
    frozen: bool = False

    def is_whole(self, stage: str, shape: StepShape) -> bool:
        sizes = shape.stage(stage)
        wanted = {n for n, piece in enumerate(sizes.pieces) if piece.streamed}
        return (
            self.stage == stage
            and self.pieces == wanted
            and (self.frozen or not sizes.frozen_bytes)
        )


def replay(order: list[Operation], shape: StepShape) -> list[str]:
    """Run operations on a machine that only knows what lies where, and return what went wrong."""
    host: dict[str, _Content] = {}
    device: dict[str, str] = {}
    slot_of: dict[str, str] = {}
    gradient: dict[str, list[tuple[str, int]]] = defaultdict(list)
    summed: dict[Access, list[tuple[str, int]]] = defaultdict(list)
    """What a device with memory of its own has of gradients."""
    inputs: dict[str, tuple[str, int]] = {}
    stored: set[tuple[str, int]] = set()
    saved: dict[str, list[tuple[str, int]]] = {}
    forwarded: dict[tuple[str, int], Keeps] = {}
    collected: dict[str, list[tuple[str, int]]] = {}
    chunks: dict[str, tuple[str, int, str]] = {}
    updated: dict[str, set[int]] = defaultdict(set)
    gathered: set[tuple[str, int]] = set()
    written: dict[str, set[int]] = defaultdict(set)
    guessed: dict[str, set[int]] = defaultdict(set)
    """Updated speculatively."""
    beside: dict[str, set[int]] = defaultdict(set)
    pending = shape.owed if shape.pending and any(op.kind == Kind.UPDATE for op in order) else ()
    for stage in pending:
        place = saved if stage in shape.gradients_on_ssd else gradient
        place[stage] = [(stage, PREVIOUS)]
    wrong: list[str] = []
    first_trained = first_trained_block(shape)
    for op in order:
        stage, slot, m, piece = op.stage, op.slot, op.micro_batch, op.piece
        pieces = set(range(len(shape.stage(stage).pieces)))

        def check(good: bool, what: str, op: Operation = op) -> None:
            if not good:
                wrong.append(f"{op}: {what}")

        def make_room(target: str, one: str, check: Callable[[bool, str], None] = check) -> None:
            if (one, PREVIOUS) in gradient[target]:
                all_pieces = set(range(len(shape.stage(one).pieces)))
                check(updated[one] == all_pieces, "overwrites the previous step's gradient")
                gradient[target] = []
            if any(other != one for other, _ in gradient[target]):
                gone = gradient[target]
                served = {o for o in updated if o not in pending and updated[o]}
                served |= {o for o in saved if saved[o] == gone}
                served -= {o for o in shape.speculative if not guessed[o]}
                check(served.issuperset(o for o, _ in gone), f"overwrites {gone}")
                gradient[target] = []

        if op.kind in COMPUTING and op.kind != Kind.ENTRY_BACKWARD:
            for one in _used(op, shape):
                place = slot_of.get(one, "nowhere")
                check(device.get(place) == one, f"{one} is not on the device")
                here = host.get(place)
                check(here is not None and here.is_whole(one, shape), f"{one} is not in memory")
                new = set(range(len(shape.stage(one).pieces))) if one in pending else set()
                check(updated[one] == new, f"{one} is updated too early or late")
                check(not guessed[one], f"{one} is updated speculatively")
        match op.kind:
            case Kind.LOAD:
                if op.with_weights:
                    others = (content.stage for content in host.values())
                    check(stage not in others, "is in a slot already")
                    check(
                        stage not in pending or written[stage] >= _streamed(shape, stage), "is old"
                    )
                    host[slot] = _Content(stage, _streamed(shape, stage), True)
                else:
                    host[slot] = _turned(host.get(slot), stage)
                    host[slot].frozen = True
            case Kind.UPLOAD:
                if stage in pending and not shape.stage(stage).load_bytes:
                    host[slot] = _Content(stage)
                content = host.get(slot)
                check(content is not None and content.is_whole(stage, shape), "is not in the slot")
                device[slot], slot_of[stage] = stage, slot
            case Kind.GATHER_ROWS:
                gathered.add((stage, m))
            case Kind.ENTRY_FORWARD if shape.embed_chunks > 1:
                there = all((chunk, m) in gathered for chunk in shape.embed_stages)
                check(there, "some rows are missing")
            case Kind.FORWARD:
                forwarded[stage, m] = op.keeps
                if op.input_slot:
                    inputs[op.input_slot] = (stage, m)
                goes_back = int(stage.partition(".")[2]) >= first_trained
                keeps = op.keeps == shape.keeps(stage) and goes_back
                check(keeps or op.keeps == Keeps.INPUT, "is kept for nothing")
                wanted = shape.moves(stage) and goes_back
                check(bool(op.input_slot) == wanted, "wrong kind of input")
            case Kind.SAVE_INPUT:
                check(inputs.get(slot) == (stage, m), "is not in the slot")
                stored.add((stage, m))
            case Kind.LOAD_INPUT:
                check((stage, m) in stored, "was not saved")
                inputs[slot] = (stage, m)
            case Kind.BACKWARD:
                check(forwarded.get((stage, m)) == op.keeps, "had another forward pass")
                check(op.keeps == shape.keeps(stage), "keeps something else")
                if shape.moves(stage):
                    check(inputs.get(op.input_slot) == (stage, m), "its input is not in the slot")
            case Kind.COLLECT_GRADIENT:
                for place in _on_device(stage, shape):
                    make_room(slot, stage)
                    gradient[slot] = summed[place]
                collected[stage] = gradient[slot]
                check(all(one == stage for one, _ in gradient[slot]), f"found {gradient[slot]}")
            case Kind.SAVE_GRADIENT:
                if saved.get(stage) == [(stage, PREVIOUS)]:
                    check(updated[stage] == pieces, "overwrites the previous step's gradient")
                saved[stage] = gradient[slot]
                check(stage in collected, "was not collected")
            case Kind.CLIP:
                check(set(collected) == shape.trained, "not all gradients are collected")
            case Kind.LOAD_STATES:
                if op.speculative and stage in pending:
                    check(piece in written[stage], "is old")
                check(chunks.get(slot, ("", 0, "written"))[2] == "written", "overwrites a chunk")
                chunks[slot] = (stage, piece, "read")
                if op.with_weights:
                    host[op.weight_slot] = _turned(host.get(op.weight_slot), stage)
                    host[op.weight_slot].pieces.add(piece)
                if not op.gradient_slot:
                    check(saved.get(stage) == [(stage, PREVIOUS)], "its gradient is not on SSD")
            case Kind.UPDATE_ROWS:
                check(stage in pending and not updated[stage], "is not pending")
                check(chunks.get(slot, ("", 0, "written"))[2] == "written", "overwrites a chunk")
                here = gradient[op.gradient_slot] if op.gradient_slot else saved.get(stage)
                check(here == [(stage, PREVIOUS)], "its gradient is gone")
                gathered |= {(stage, number) for number in range(shape.num_micro_batches)}
            case Kind.UPDATE:
                if op.weight_slot:
                    check(chunks.get(slot) == (stage, piece, "read"), "its states are not here")
                    chunks[slot] = (stage, piece, "updated")
                    content = host.get(op.weight_slot)
                    there = content is not None and content.stage == stage
                    check(there and piece in content.pieces, "its weights are not here")
                if op.gradient_slot:
                    content = gradient[op.gradient_slot]
                    old = stage in pending and not op.speculative
                    wanted = [(stage, PREVIOUS)] if old else collected.get(stage)
                    check(content == wanted, f"found {content}")
                done = guessed if op.speculative else updated
                check(piece not in done[stage], "was updated before")
                done[stage].add(piece)
            case Kind.SAVE_STATES:
                check(chunks.get(slot) == (stage, piece, "updated"), "is not updated")
                content = host.get(op.weight_slot)
                check(content is not None and content.stage == stage, "its weights are gone")
                chunks[slot] = (stage, piece, "written")
                (beside if op.speculative else written)[stage].add(piece)
        if op.kind in (Kind.LOSS, Kind.BACKWARD, Kind.ENTRY_BACKWARD, Kind.ROWS_BACKWARD):
            targets = {slot: stage} if slot else {}
            if op.kind in (Kind.LOSS, Kind.ENTRY_BACKWARD) and OUTER in shape.trained:
                targets[OUTER] = OUTER
            for target, one in targets.items():
                if place := next(iter(_on_device(one, shape)), None):
                    if any(other != one for other, _ in summed[place]):
                        left = all(other in collected for other, _ in summed[place])
                        check(left, f"overwrites {summed[place]} on the device")
                        summed[place] = []
                    summed[place] = [*summed[place], (one, m)]
                    continue
                make_room(target, one)
                gradient[target] = [*gradient[target], (one, m)]
    if any(op.kind == Kind.CLIP for op in order):
        back = {op.stage for op in order if op.kind == Kind.BACKWARD}
        if back != {f"block.{n}" for n in range(first_trained, shape.num_blocks)}:
            wrong.append(f"the gradient goes through {sorted(back)}")
        due = (shape.trained - shape.deferred) | set(pending)
        for stage in shape.trained:
            pieces = set(range(len(shape.stage(stage).pieces))) if stage in due else set()
            streamed = _streamed(shape, stage) if stage in due else set()
            if (updated[stage], written[stage]) != (pieces, streamed):
                wrong.append(f"{stage}: updated {updated[stage]}, written {written[stage]}")
            guesses = _streamed(shape, stage) if stage in shape.speculative else set()
            if not guessed[stage] == beside[stage] == guesses:
                wrong.append(f"{stage}: guessed {guessed[stage]}, written {beside[stage]}")
        for stage, content in collected.items():
            times = 2 if stage == EMBED and shape.tied else 1
            times = 1 + len(shape.head_stages) if stage == OUTER else times
            wanted = sorted([(stage, m) for m in range(shape.num_micro_batches)] * times)
            if sorted(content) != wanted:
                wrong.append(f"{stage}: collected {content}")
    return wrong


def _turned(content: _Content | None, stage: str) -> _Content:
    """Return a slot's content once something of a stage is put there."""
    return content if content is not None and content.stage == stage else _Content(stage)


def _streamed(shape: StepShape, stage: str) -> set[int]:
    return {n for n, piece in enumerate(shape.stage(stage).pieces) if piece.streamed}


def first_trained_block(shape: StepShape) -> int:
    """Return the lowest block whose backward pass is of any use."""
    if OUTER in shape.trained or shape.embed_stages[0] in shape.trained:
        return 0
    numbers = [
        int(stage.partition(".")[2]) for stage in shape.trained if stage_class(stage) == "block"
    ]
    return min(numbers, default=shape.num_blocks)


def by_lanes(schedule: Schedule, seed: int) -> list[Operation]:
    """Run lanes with random timing and return the order in which operations ended."""
    generator = random.Random(seed)
    waiting = {lane: schedule.lane(lane) for lane in Lane}
    done: set[int] = set()
    order = []
    while any(waiting.values()):
        ready = [lane for lane, rest in waiting.items() if rest and done.issuperset(rest[0].after)]
        assert ready, f"nothing can go on: {[rest[:1] for rest in waiting.values()]}"
        operation = waiting[generator.choice(ready)].pop(0)
        done.add(operation.index)
        order.append(operation)
    return order


# The tests


@given(shapes(), st.integers(0, 2**32))
def test_every_timing_gives_the_same(shape: StepShape, seed: int) -> None:
    for schedule in (generate_training_step(shape), generate_evaluation(shape)):
        for index, operation in enumerate(schedule.operations):
            assert operation.index == index
            assert all(other < index for other in operation.after)
        assert races(schedule, shape) == []
        forward_only = dataclasses.replace(shape, input_slots=0)
        checked = shape if schedule.lane(Lane.D2H) else forward_only
        assert replay(schedule.operations, checked) == []
        assert replay(by_lanes(schedule, seed), checked) == []


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("last", ["block.0", "block.1", "block.2"])
def test_a_gradient_that_passes_leaves_alone_those_that_wait(pending: bool, last: str) -> None:
    """Some on SSD, some in memory: each slot for those that pass is no block's own."""
    names = stages_of(8, True)
    on_ssd = frozenset(["block.6", "block.4", "block.3", last])
    shape = StepShape(
        num_blocks=8, num_micro_batches=2, tied=True, deferred=frozenset(names), pending=pending,
        stages={name: stage_shape(index, (True,), False) for index, name in enumerate(names)},
        gradients_on_ssd=on_ssd,
    )  # fmt: skip
    schedule = generate_training_step(shape)
    assert replay(schedule.operations, shape) == []
    used = {op.slot: op.stage for op in schedule.operations if op.kind == Kind.COLLECT_GRADIENT}
    assert set(used) - on_ssd == (set(names) - on_ssd) | {passing_slot(0), passing_slot(1)}


@given(shapes())
def test_flush_updates_once_every_stage_that_waits(shape: StepShape) -> None:
    shape = dataclasses.replace(shape, pending=True)
    schedule = generate_flush(shape)
    updated = [op.stage for op in schedule.operations if op.kind == Kind.UPDATE]
    assert sorted(updated) == sorted(s for s in shape.owed for _ in shape.stage(s).pieces)
    assert replay(schedule.operations, shape) == []
    assert races(schedule, shape) == []


@given(shapes())
def test_weights_cross_the_drive_at_most_twice(shape: StepShape) -> None:
    """Once for forward and once for backward, the optimizer included: it works on what lies in a slot."""
    schedule = generate_training_step(shape)
    read: dict[str, int] = defaultdict(int)
    for op in schedule.operations:
        sizes = shape.stage(op.stage)
        if op.kind == Kind.LOAD:
            assert op.num_bytes == (sizes.load_bytes if op.with_weights else sizes.frozen_bytes)
            read[op.stage] += op.num_bytes
        elif op.kind == Kind.LOAD_STATES and op.with_weights:
            read[op.stage] += sizes.pieces[op.piece].weight_bytes
    # When the backward pass begins, the last blocks are still in their slots.
    again = max(0, shape.num_blocks - first_trained_block(shape) - shape.block_slots)
    at_once = shape.trained - shape.deferred | shape.speculative
    for stage, num_bytes in read.items():
        sizes, number = shape.stage(stage), int(stage.partition(".")[2] or -1)
        if stage in shape.embed_stages and 0 < len(shape.late) < shape.embed_chunks:
            continue  # chunks drive each other out of their slots
        if stage_class(stage) == "ends":
            times = _times_read(stage, shape)
        else:
            first = first_trained_block(shape)
            times = 1 + (first <= number < first + again)
        wanted = times * sizes.load_bytes
        stays = shape.head_chunks == 1 < shape.embed_chunks == number + 1
        if stage.startswith(EMBED) and not shape.tied and stage in at_once and not stays:
            # the head lies in the slot when the embedding's gradient is complete
            wanted += sum(piece.weight_bytes for piece in sizes.pieces if piece.streamed)
        assert num_bytes == wanted, stage


def _times_read(stage: str, shape: StepShape) -> int:
    """Return how often the weights of an end of the model are read: two chunks still lie in a slot when a pass turns."""
    name, _, number = stage.partition(".")
    if not number:
        return 1
    later = int(number) > 1
    if name == HEAD or not shape.tied:
        return 1 + (later and name == HEAD)
    earlier = int(number) < shape.embed_chunks - 2
    again = earlier or stage in shape.late  # whose update leaves nothing in a slot
    return 1 + again + later + (earlier and stage in shape.trained)


@given(shapes())
def test_evaluation_loads_everything_once_and_changes_nothing(shape: StepShape) -> None:
    schedule = generate_evaluation(shape)
    kinds = {op.kind for op in schedule.operations}
    wanted = {Kind.LOAD, Kind.UPLOAD, Kind.ENTRY_FORWARD, Kind.FORWARD}
    wanted |= {Kind.GATHER_ROWS} if len(shape.embed_stages) > 1 else set()
    assert kinds == wanted | {Kind.SCORE if len(shape.head_stages) > 1 else Kind.LOSS}
    loaded = [op.stage for op in schedule.operations if op.kind == Kind.LOAD]
    stages = stages_of(shape.num_blocks, shape.tied, (shape.embed_chunks, shape.head_chunks))
    twice = shape.embed_stages[:-2] if shape.tied else []
    assert sorted(loaded) == sorted([*stages, *twice])
    assert not any(op.input_slot for op in schedule.operations)


@given(shapes())
def test_prefetch_needs_no_wait_for_the_block_before(shape: StepShape) -> None:
    """With a second slot the next block is read while one computes."""
    schedule = generate_training_step(dataclasses.replace(shape, block_slots=2, input_slots=0))
    closure = before(schedule)
    forward = {
        op.stage: op.index
        for op in schedule.operations
        if op.kind == Kind.FORWARD and op.micro_batch == 0
    }
    for op in schedule.operations:
        number = int(op.stage.partition(".")[2] or 0) if stage_class(op.stage) == "block" else 0
        if op.kind == Kind.LOAD and number >= 1 and op.index < forward[f"block.{number - 1}"]:
            assert not closure[op.index] >> forward[f"block.{number - 1}"] & 1


def _shape(
    num_blocks: int, m: int, tied: bool, slots: int, input_slots: int, mode: tuple[str, str, bool], kind: str,
    chunks: tuple[int, int] = (1, 1),
) -> StepShape:  # fmt: skip
    names = stages_of(num_blocks, tied, chunks)
    pieces = {"streamed": (True, True), "resident": (False,), "adapters": (True,)}.get(
        kind, (True,)
    )
    stages = {
        name: stage_shape(index, pieces, kind == "adapters") for index, name in enumerate(names)
    }
    if kind == "frozen head" and not tied:
        stages[HEAD] = stage_shape(0, (), True)
        names = names[:-1]
    update, gradients, pending = mode
    deferred = frozenset(names) if update != "overlap" else frozenset()
    speculates = update == "speculative" and kind != "resident"
    return StepShape(
        num_blocks=num_blocks, num_micro_batches=m, tied=tied, embed_chunks=chunks[0], head_chunks=chunks[1],
        stages=stages, block_slots=slots,
        gradient_slots=1, device_gradient_slots=slots - 1, input_slots=input_slots, chunk_slots=slots, deferred=deferred,
        pending=pending, speculative=deferred if speculates else frozenset(),
        gradients_on_ssd=deferred if gradients == "ssd" and kind != "resident" else frozenset(),
    )  # fmt: skip


MODES = (
    ("overlap", "", False),
    ("deferred", "host", False),
    ("deferred", "ssd", False),
    ("deferred", "host", True),
    ("deferred", "ssd", True),
    ("speculative", "host", False),
    ("speculative", "host", True),
    ("speculative", "ssd", True),
)
"""When updates are made, where gradients wait, and whether the previous step's are still to be made."""
SHAPES = [
    _shape(*values)
    for values in product(
        (1, 4),
        (1, 3),
        (True, False),
        (1, 2),
        (0, 2),
        MODES,
        ("streamed", "resident", "adapters", "frozen head"),
    )
]

DIVIDED = [
    _shape(1, 2, *values, (3, 3))
    for values in product(
        (True, False), (1, 2), (0,), MODES[::2], ("streamed", "resident", "adapters")
    )
]

IN_HOST = [
    dataclasses.replace(
        _shape(4, m, True, 2, 2, mode, "streamed"),
        in_host=frozenset(f"block.{i}" for i in range(4)),
    )
    for m, mode in product((1, 3), MODES[:2])
]
LINK = (Lane.D2H, Lane.H2D)


def _late(shape: StepShape) -> StepShape:
    """Return the shape where steps begin with rows of the embedding, after one that was right to speculate, if any."""
    blocks = frozenset(f"block.{number}" for number in range(shape.num_blocks))
    chunks = frozenset(shape.embed_stages)
    settled = blocks | {OUTER} if shape.speculative else frozenset[str]()
    speculative = shape.speculative - chunks
    return dataclasses.replace(shape, rows_first=chunks, settled=settled, speculative=speculative)


LATE = [
    _late(_shape(num_blocks, 2, tied, slots, 0, mode, "streamed", (3, 3)))
    for num_blocks, tied, slots, mode in product((1, 3), (True, False), (1, 2), MODES)
    if mode[2]
]


Edge = tuple[str, str]
"""A kind of wait, by `name_of`: what is waited for, who waits."""


def name_of(operation: Operation) -> str:
    """Return what an operation does; what waits in host memory is told from what goes to SSD."""
    crosses = operation.kind in (Kind.SAVE_INPUT, Kind.LOAD_INPUT) and operation.lane in LINK
    return f"{operation.kind}-{operation.lane}" if crosses else operation.kind.value


def edges(schedule: Schedule) -> set[Edge]:
    """Return every kind of wait in a schedule."""
    operations = schedule.operations
    return {(name_of(operations[other]), name_of(op)) for op in operations for other in op.after}


def _by_edge() -> dict[Edge, list[StepShape]]:
    found: dict[Edge, list[StepShape]] = defaultdict(list)
    for shape in (*SHAPES, *DIVIDED, *LATE, *IN_HOST):
        for edge in edges(generate_training_step(shape)):
            found[edge].append(shape)
    return dict(sorted(found.items()))


BY_EDGE = _by_edge()
"""Every kind of wait, with the shapes whose schedules have it."""


@pytest.mark.parametrize("edge", BY_EDGE, ids=lambda edge: f"{edge[1]}-waits-for-{edge[0]}")
def test_no_wait_can_be_left_out(edge: Edge) -> None:
    """The checks see it when one kind of wait is missing: this tests the checks, and that no wait is idle."""
    for shape in BY_EDGE[edge]:
        if races(without_edge(generate_training_step(shape), edge), shape):
            return
    pytest.fail("not noticed")


def without_edge(schedule: Schedule, edge: Edge) -> Schedule:
    """Return the schedule without one kind of wait."""
    operations = []
    for op in schedule.operations:
        waited = {o: (name_of(schedule.operations[o]), name_of(op)) for o in op.after}
        after = tuple(o for o in op.after if waited[o] != edge)
        operations.append(op._replace(after=after))
    return Schedule(operations)
