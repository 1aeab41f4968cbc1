"""The schedule of a step spells out every wait: no two operations that share memory can run at once.

`_accesses` says what each operation reads and writes, as the engine, the swap manager and the optimizer do it.
Two checks then cover every possible timing of the lanes: operations that share something, one of them writing,
are ordered by waits and lanes (`races`), and run in list order each finds what it needs (`replay`).
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdtune.plan.generate import (
    EMBED,
    HEAD,
    OUTER,
    StepShape,
    generate_evaluation,
    generate_flush,
    generate_training_step,
)
from ssdtune.plan.schedule import Kind, Lane, Operation, Schedule

COMPUTE = (Kind.ENTRY_FORWARD, Kind.FORWARD, Kind.LOSS, Kind.BACKWARD, Kind.ENTRY_BACKWARD)
MODES = (
    ("after", "host", False),
    ("after", "ssd", False),
    ("overlap", "overlap", False),
    ("deferred", "host", False),
    ("deferred", "ssd", False),
    ("deferred", "host", True),
    ("deferred", "ssd", True),
)
"""When updates are made, where gradients wait, and whether the previous step's are still to be made."""
PREVIOUS = -1
"""Stands for the micro-batches of the step before."""


def stages_of(num_blocks: int, tied: bool) -> list[str]:
    return [OUTER, EMBED, *(f"block.{i}" for i in range(num_blocks)), *([] if tied else [HEAD])]


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    num_blocks, tied = draw(st.integers(1, 8)), draw(st.booleans())
    stages = stages_of(num_blocks, tied)
    some = st.sets(st.sampled_from(stages), min_size=1)
    update, gradients, pending = draw(st.sampled_from(MODES))
    return StepShape(
        num_blocks=num_blocks,
        num_micro_batches=draw(st.integers(1, 4)),
        tied=tied,
        trained=frozenset(draw(st.just(set(stages)) | some)),
        block_slots=draw(st.integers(1, 4)),
        gradient_slots=draw(st.integers(1, 3)),
        input_slots=draw(st.integers(0, 3)),
        update=update,
        gradients=gradients,
        pending=pending,
        load_bytes={stage: 1 + index for index, stage in enumerate(stages)},
    )


# What operations touch

Access = tuple[str, ...]


def accesses(
    schedule: Schedule, shape: StepShape
) -> list[tuple[Operation, set[Access], set[Access]]]:
    """Return each operation with what it reads and what it writes."""
    slots: dict[str, str] = {}
    seen: set[str] = set()
    found = []
    for operation in schedule.operations:
        reads, writes = _accesses(operation, shape, slots, first=operation.stage not in seen)
        if operation.kind == Kind.LOAD:
            seen.add(operation.stage)
        found.append((operation, reads, writes))
    return found


def _accesses(
    operation: Operation, shape: StepShape, slots: dict[str, str], *, first: bool
) -> tuple[set[Access], set[Access]]:
    """Say what one operation reads and writes; `slots` is where each stage's weights are."""
    kind, stage, slot = operation.kind, operation.stage, operation.slot
    reads: set[Access] = set()
    writes: set[Access] = set()
    unit = f"{stage} {operation.micro_batch}"
    match kind:
        case Kind.LOAD:
            reads = {("states", stage)}
            writes = {("host weights", slot)}
            if (
                first
            ):  # an import writes the states, makes halves in a gradient slot, or fills memory
                writes |= {("states", stage), ("gradient", _scratch(stage, shape))}
        case Kind.UPLOAD:
            slots[stage] = slot
            reads = {("host weights", slot), ("states", stage)}
            writes = {("device weights", slot), ("slot of", stage)}
        case Kind.FORWARD:
            writes = {("input", operation.input_slot)} if operation.input_slot else set()
        case Kind.SAVE_INPUT:
            reads, writes = {("input", slot)}, {("stored input", unit)}
        case Kind.LOAD_INPUT:
            reads, writes = {("stored input", unit)}, {("input", slot)}
        case Kind.BACKWARD:
            reads = {("input", operation.input_slot)} if operation.input_slot else set()
        case Kind.COLLECT_GRADIENT:
            reads, writes = {("present", stage)}, {("gradient", slot), ("squares", stage)}
        case Kind.SAVE_GRADIENT:
            reads, writes = {("gradient", slot)}, {("stored gradient", stage)}
        case Kind.CLIP:
            reads, writes = {("squares", s) for s in shape.trained}, {("scale",)}
        case Kind.UPDATE:
            reads = {("gradient", slot) if slot else ("stored gradient", stage)}
            reads |= set() if shape.pending else {("present", stage)}
            reads |= {("scale",)} if shape.update == "after" else set()
            writes = {("states", stage)}
    if kind in COMPUTE:
        used = {OUTER, stage} if kind in (Kind.ENTRY_FORWARD, Kind.LOSS) else {stage}
        if kind == Kind.ENTRY_BACKWARD:
            used = {OUTER}  # its graph has the outer weights, of the embedding only copied rows
        for one in used:
            # on the CPU host memory is computed on in place, of resident parts the states themselves
            reads |= {("slot of", one), ("states", one)}
            reads |= {("host weights", slots[one]), ("device weights", slots[one])}
        if slot:
            writes |= {("gradient", slot), ("present", stage)}
        if kind in (Kind.LOSS, Kind.ENTRY_BACKWARD) and OUTER in shape.trained:
            writes |= {("gradient", OUTER), ("present", OUTER)}
    return reads, writes


def _scratch(stage: str, shape: StepShape) -> str:
    if shape.gradients == "host" or stage == OUTER:
        return stage
    return "ends" if stage in (EMBED, HEAD) else "block.0"


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


def replay(order: list[Operation], shape: StepShape) -> list[str]:
    """Run operations on a machine that only knows what lies where, and return what went wrong."""
    host: dict[str, str] = {}
    device: dict[str, str] = {}
    slot_of: dict[str, str] = {}
    gradient: dict[str, list[tuple[str, int]]] = defaultdict(list)
    inputs: dict[str, tuple[str, int]] = {}
    stored: set[tuple[str, int]] = set()
    saved: dict[str, list[tuple[str, int]]] = {}
    kept: set[tuple[str, int]] = set()
    collected: dict[str, list[tuple[str, int]]] = {}
    updated: list[str] = []
    clipped = False
    pending = shape.pending and any(op.kind == Kind.UPDATE for op in order)
    if pending:
        for stage in shape.trained:
            (gradient if shape.gradients == "host" else saved)[stage] = [(stage, PREVIOUS)]
    wrong: list[str] = []
    first_trained = first_trained_block(shape)
    for op in order:
        stage, slot, m = op.stage, op.slot, op.micro_batch

        def check(good: bool, what: str, op: Operation = op) -> None:
            if not good:
                wrong.append(f"{op}: {what}")

        if op.kind in (Kind.ENTRY_FORWARD, Kind.FORWARD, Kind.LOSS, Kind.BACKWARD):
            for one in {stage, OUTER} if op.kind in (Kind.ENTRY_FORWARD, Kind.LOSS) else {stage}:
                place = slot_of.get(one, "nowhere")
                check(device.get(place) == one, f"{one} is not on the device")
                check(host.get(place) == one, f"{one} is not in host memory")
                if pending:
                    check(one in updated or one not in shape.trained, f"{one} is not updated yet")
                else:
                    check(one not in updated, f"{one} is updated already")
        match op.kind:
            case Kind.LOAD:
                check(stage not in host.values(), "is in a slot already")
                host[slot] = stage
            case Kind.UPLOAD:
                check(host.get(slot) == stage, "is not in the host slot")
                device[slot], slot_of[stage] = stage, slot
            case Kind.FORWARD:
                kept.add((stage, m))
                if op.input_slot:
                    inputs[op.input_slot] = (stage, m)
                goes_back = int(stage.partition(".")[2]) >= first_trained
                check(
                    bool(op.input_slot) == (bool(shape.input_slots) and goes_back),
                    "wrong kind of input",
                )
            case Kind.SAVE_INPUT:
                check(inputs.get(slot) == (stage, m), "is not in the slot")
                stored.add((stage, m))
            case Kind.LOAD_INPUT:
                check((stage, m) in stored, "was not saved")
                inputs[slot] = (stage, m)
            case Kind.BACKWARD:
                check((stage, m) in kept, "had no forward pass")
                if shape.input_slots:
                    check(inputs.get(op.input_slot) == (stage, m), "its input is not in the slot")
            case Kind.COLLECT_GRADIENT:
                collected[stage] = gradient[slot]
                check(all(one == stage for one, _ in gradient[slot]), f"found {gradient[slot]}")
            case Kind.SAVE_GRADIENT:
                if saved.get(stage) == [(stage, PREVIOUS)]:
                    check(stage in updated, "overwrites the previous step's gradient")
                saved[stage] = gradient[slot]
                check(stage in collected, "was not collected")
            case Kind.CLIP:
                check(set(collected) == shape.trained, "not all gradients are collected")
                clipped = True
            case Kind.UPDATE:
                content = gradient[slot] if slot else saved.get(stage, [])
                wanted = [(stage, PREVIOUS)] if pending else collected.get(stage)
                check(content == wanted, f"found {content}")
                check(clipped or shape.update != "after", "the norm is not known")
                updated.append(stage)
        if op.kind in (Kind.LOSS, Kind.BACKWARD, Kind.ENTRY_BACKWARD):
            targets = {slot: stage} if slot else {}
            if op.kind != Kind.BACKWARD and OUTER in shape.trained:
                targets[OUTER] = OUTER
            for target, one in targets.items():
                if (one, PREVIOUS) in gradient[target]:
                    check(one in updated, "overwrites the previous step's gradient")
                    gradient[target] = []
                if any(other != one for other, _ in gradient[target]):
                    gone = gradient[target]
                    check(
                        all(saved.get(o) == gone or o in updated for o, _ in gone),
                        f"overwrites {gone}",
                    )
                    gradient[target] = []
                gradient[target] = [*gradient[target], (one, m)]
    if any(op.kind == Kind.CLIP for op in order):
        back = {op.stage for op in order if op.kind == Kind.BACKWARD}
        if back != {f"block.{n}" for n in range(first_trained, shape.num_blocks)}:
            wrong.append(f"the gradient goes through {sorted(back)}")
        makes_updates = shape.update != "deferred" or pending
        if sorted(updated) != (sorted(shape.trained) if makes_updates else []):
            wrong.append(f"updated {updated}, trained {sorted(shape.trained)}")
        for stage, content in collected.items():
            times = 2 if stage == OUTER or (stage == EMBED and shape.tied) else 1
            wanted = sorted([(stage, m) for m in range(shape.num_micro_batches)] * times)
            if sorted(content) != wanted:
                wrong.append(f"{stage}: collected {content}")
    return wrong


def first_trained_block(shape: StepShape) -> int:
    """Return the lowest block whose backward pass is of any use."""
    if OUTER in shape.trained or EMBED in shape.trained:
        return 0
    numbers = [int(stage.partition(".")[2]) for stage in shape.trained if "." in stage]
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


@given(shapes())
def test_flush_updates_every_trained_stage_once(shape: StepShape) -> None:
    shape = dataclasses.replace(shape, update="deferred", gradients="host", pending=True)
    schedule = generate_flush(shape)
    assert {op.kind for op in schedule.operations} == {Kind.UPDATE}
    assert sorted(op.stage for op in schedule.operations) == sorted(shape.trained)
    assert replay(schedule.operations, shape) == []


@given(shapes())
def test_weights_cross_the_drive_at_most_twice(shape: StepShape) -> None:
    schedule = generate_training_step(shape)
    loads = [op for op in schedule.operations if op.kind == Kind.LOAD]
    per_stage: dict[str, int] = defaultdict(int)
    for op in loads:
        per_stage[op.stage] += 1
        assert op.num_bytes == shape.load_bytes[op.stage]
    for stage, count in per_stage.items():
        assert count <= (2 if stage.startswith("block.") else 1), stage
    # When the backward pass begins, the last blocks are still in their slots.
    again = max(0, shape.num_blocks - first_trained_block(shape) - shape.block_slots)
    blocks = sum(count for stage, count in per_stage.items() if stage.startswith("block."))
    assert blocks == shape.num_blocks + again


@given(shapes())
def test_evaluation_loads_everything_once_and_changes_nothing(shape: StepShape) -> None:
    schedule = generate_evaluation(shape)
    kinds = {op.kind for op in schedule.operations}
    assert kinds == {Kind.LOAD, Kind.UPLOAD, Kind.ENTRY_FORWARD, Kind.FORWARD, Kind.LOSS}
    loaded = [op.stage for op in schedule.operations if op.kind == Kind.LOAD]
    assert sorted(loaded) == sorted(stages_of(shape.num_blocks, shape.tied))
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
        number = int(op.stage.partition(".")[2] or 0)
        if op.kind == Kind.LOAD and number >= 1 and op.index < forward[f"block.{number - 1}"]:
            assert not closure[op.index] >> forward[f"block.{number - 1}"] & 1


SHAPES = [
    StepShape(
        num_blocks=num_blocks, num_micro_batches=m, tied=tied, block_slots=block_slots,
        gradient_slots=gradient_slots, input_slots=input_slots, update=mode[0], gradients=mode[1],
        pending=mode[2], trained=frozenset(stages_of(num_blocks, tied)),
    )
    for num_blocks, m, tied, block_slots, gradient_slots, input_slots, mode in product(
        (1, 4), (1, 3), (True, False), (1, 2), (1, 2), (0, 2), MODES
    )
]  # fmt: skip


def edges(shapes: Iterable[StepShape]) -> list[tuple[Kind, Kind]]:
    """Return every kind of wait in some schedules: (what is waited for, who waits)."""
    return sorted(
        {
            (schedule.operations[other].kind, op.kind)
            for schedule in map(generate_training_step, shapes)
            for op in schedule.operations
            for other in op.after
        }
    )


@pytest.mark.parametrize("edge", edges(SHAPES), ids=lambda edge: f"{edge[1]}-waits-for-{edge[0]}")
def test_no_wait_can_be_left_out(edge: tuple[Kind, Kind]) -> None:
    """The checks see it when one kind of wait is missing: this tests the checks, and that no wait is idle."""
    for shape in SHAPES:
        schedule = generate_training_step(shape)
        if races(without_edge(schedule, edge), shape):
            return
    pytest.fail("not noticed")


def without_edge(schedule: Schedule, edge: tuple[Kind, Kind]) -> Schedule:
    """Return the schedule without one kind of wait."""
    operations = []
    for op in schedule.operations:
        after = tuple(o for o in op.after if (schedule.operations[o].kind, op.kind) != edge)
        operations.append(dataclasses.replace(op, after=after))
    return Schedule(operations)
