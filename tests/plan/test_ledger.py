"""Bytes and FLOP of models in training, and the laws that turn them into seconds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from ssdtune.errors import ConfigError
from ssdtune.plan.generate import StepShape, generate_training_step
from ssdtune.plan.hardware import Hardware, Work
from ssdtune.plan.ledger import REST_SHARE, Ledger, ModelShape, TrainingShape, work_of
from ssdtune.plan.schedule import Kind

SMALL = ModelShape.gpt(4, 64, vocabulary=100, positions=32)
UNTIED = replace(SMALL, tied=False)
MACHINE = Hardware(
    name="test",
    flop_per_s=1e12,
    drive_read_bytes_per_s=2e9,
    drive_write_bytes_per_s=1e9,
    adam_elements_per_s=1e9,
)


def shape_of(
    ledger: Ledger,
    *,
    deferred: bool = False,
    on_ssd: bool = False,
    resident: Collection[str] = (),
    pieces: int = 1,
    **more: Any,
) -> StepShape:
    """Return a step in the middle of a run: with `deferred` the updates of the step before come first."""
    stages = ledger.stages(resident, pieces)
    waiting = frozenset(name for name, stage in stages.items() if stage.pieces and deferred)
    return StepShape(
        num_blocks=ledger.model.num_blocks,
        num_micro_batches=ledger.training.micro_batches,
        tied=ledger.model.tied,
        stages=stages,
        deferred=waiting,
        pending=deferred,
        gradients_on_ssd=waiting if on_ssd else frozenset(),
        input_bytes=int(
            ledger.input_bytes / ledger.model.num_blocks / ledger.training.micro_batches
        ),
        **more,
    )


def step(
    ledger: Ledger, *, requests_per_state: float = 0, **arguments: Any
) -> dict[Kind, list[Work]]:
    shape = shape_of(ledger, **arguments)
    schedule = generate_training_step(shape)
    result: dict[Kind, list[Work]] = {}
    works = work_of(schedule, shape, ledger, requests_per_state=requests_per_state)
    for operation, work in zip(schedule.operations, works, strict=True):
        result.setdefault(operation.kind, []).append(work)
    return result


def total(kinds: dict[Kind, list[Work]], name: str) -> float:
    return sum(getattr(work, name) for works in kinds.values() for work in works)


@pytest.mark.parametrize(
    ("blocks", "hidden", "billions"),
    [(28, 4096, 5.85), (40, 5120, 12.85), (48, 7168, 29.97), (80, 8192, 64.85), (96, 12288, 174.6)],
)
def test_parameters_of_known_models(blocks: int, hidden: int, billions: float) -> None:
    assert ModelShape.gpt(blocks, hidden).parameters / 1e9 == pytest.approx(billions, rel=6e-4)


def test_forward_flop() -> None:
    # 2 P T + 4 S D L T, without positions and biases' worth of a difference
    model = ModelShape.gpt(40, 5120)
    ledger = Ledger(model, TrainingShape(tokens=8192, sequence=1024))
    expected = 8192 * (2 * model.parameters + 4 * 1024 * 5120 * 40)
    assert ledger.forward_flop == pytest.approx(expected, rel=1e-3)


FORMATS = {
    "bf16": (TrainingShape(tokens=64, sequence=16), 14, 12, 2),
    "fp32": (TrainingShape(tokens=64, sequence=16, weight_bytes=4, split_master=False), 16, 12, 4),
}
"""How a model is trained, bytes read and written of each parameter in a step, and bytes of its weight."""


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("model", [SMALL, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_a_full_step_are_those_of_the_table(
    name: str, model: ModelShape, pieces: int
) -> None:
    training, read, written, weight = FORMATS[name]
    ledger = Ledger(model, training)
    parameters = model.num_blocks * model.block_parameters
    ends = model.parameters - parameters
    # In backward the last blocks still lie in their slots; embedding and head are passed once.
    saved = weight * (3 * model.block_parameters + ends)
    for deferred in (False, True):
        again = (
            0  # without clipping the embedding is updated at the end, when its slot holds the head
        )
        if not deferred and not model.tied:
            again = weight * model.embedding_parameters
        kinds = step(ledger, deferred=deferred, pieces=pieces)
        total_read = total(kinds, "read_bytes")
        assert total_read == read * (parameters + ends) - saved + again
        assert total_read <= read * (parameters + ends)
        assert total(kinds, "write_bytes") == written * (parameters + ends)
        assert total(kinds, "adam_elements") == parameters + ends
        on_ssd = step(ledger, deferred=True, on_ssd=True, pieces=pieces)
        assert total(on_ssd, "read_bytes") == total_read - again + 4 * (parameters + ends)
        assert total(on_ssd, "write_bytes") == (written + 4) * (parameters + ends)


def test_one_slot_saves_no_read_but_the_turn() -> None:
    """With a single slot every block but the last is read twice."""
    ledger = Ledger(SMALL, TrainingShape(tokens=64, sequence=16))
    kinds = step(ledger, block_slots=1)
    block, ends = SMALL.block_parameters, SMALL.embedding_parameters
    assert total(kinds, "read_bytes") == 14 * 4 * block - 2 * block + 12 * ends


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_an_update_moves(name: str, deferred: bool) -> None:
    """Moments and low half there and back; weights only where they are in no slot."""
    training, read, written, weight = FORMATS[name]
    kinds = step(Ledger(SMALL, training), deferred=deferred)
    loads, updates, saves = (
        kinds[kind] for kind in (Kind.LOAD_STATES, Kind.UPDATE, Kind.SAVE_STATES)
    )
    assert len(loads) == len(updates) == len(saves) == 1 + SMALL.num_blocks
    states = read - 2 * weight
    for load, update, save in zip(loads, updates, saves, strict=True):
        elements = update.adam_elements
        assert load.read_bytes == (states + weight * deferred) * elements
        assert save.write_bytes == written * elements
        assert update.read_bytes == update.write_bytes == 0
        assert update.dram_bytes == 28 * elements


def test_requests_count_states() -> None:
    """Weights, low half, two moments and a gradient from SSD, each in so many transfers."""
    ledger = Ledger(SMALL, TrainingShape(tokens=64, sequence=16))
    stages = 1 + SMALL.num_blocks

    def requests(*, pieces: int = 1, **arguments: Any) -> dict[Kind, float]:
        kinds = step(ledger, requests_per_state=4, pieces=pieces, **arguments)
        return {kind: sum(work.requests for work in works) for kind, works in kinds.items()}

    for pieces in (1, 2):
        overlap = requests(pieces=pieces)
        assert overlap[Kind.LOAD_STATES] == 3 * 4 * stages
        assert overlap[Kind.SAVE_STATES] == 4 * 4 * stages
        deferred = requests(pieces=pieces, deferred=True)
        assert deferred[Kind.LOAD_STATES] == deferred[Kind.SAVE_STATES] == 4 * 4 * stages
        on_ssd = requests(pieces=pieces, deferred=True, on_ssd=True)
        assert on_ssd[Kind.LOAD_STATES] == 5 * 4 * stages
        assert on_ssd[Kind.SAVE_GRADIENT] == 4 * stages


def test_kept_blocks_are_not_run_again() -> None:
    ledger = Ledger(SMALL, TrainingShape(tokens=64, sequence=16, micro_batches=2))
    again = step(ledger)
    for count in range(5):
        names = frozenset(f"block.{i}" for i in range(SMALL.num_blocks - count, SMALL.num_blocks))
        kinds = step(ledger, kept=names)
        recomputed = total(again, "flop") - total(kinds, "flop")
        assert recomputed == pytest.approx(count * ledger.block_forward_flop)
        for name in ("read_bytes", "write_bytes", "adam_elements"):
            assert total(kinds, name) == total(again, name)
        held = sum(size for work in kinds[Kind.FORWARD] for _, size in work.acquires_bytes)
        given = sum(size for work in kinds[Kind.BACKWARD] for _, size in work.releases_bytes)
        each = ledger.all_activation_bytes / SMALL.num_blocks
        inputs = ledger.input_bytes / SMALL.num_blocks
        assert held == given == count * each + (SMALL.num_blocks - count) * inputs
        # only what is no product is made again, from 11 hidden states
        kinds = step(ledger, kept=names, partly=names)
        saved = total(again, "flop") - total(kinds, "flop")
        assert saved == pytest.approx(count * (1 - REST_SHARE) * ledger.block_forward_flop)
        held = sum(size for work in kinds[Kind.FORWARD] for _, size in work.acquires_bytes)
        assert held == (11 * count + SMALL.num_blocks - count) * inputs
    # none is run again: three times a forward pass
    kinds = step(ledger, kept=names)
    flop = sum(work.flop for work in kinds[Kind.FORWARD] + kinds[Kind.BACKWARD])
    assert flop == pytest.approx(3 * SMALL.num_blocks * ledger.block_forward_flop)


def test_activations_that_were_counted_count() -> None:
    training = TrainingShape(tokens=64, sequence=16, activation_bytes=123_456)
    ledger = Ledger(SMALL, training)
    assert ledger.all_activation_bytes == 123_456
    kinds = step(ledger, kept=frozenset(["block.3"]))
    held = [dict(work.acquires_bytes)["host"] for work in kinds[Kind.FORWARD]]
    assert held == [2 * 64 * 64] * 3 + [123_456 // 4]


def test_inputs_on_ssd_go_there_and_back() -> None:
    ledger = Ledger(SMALL, TrainingShape(tokens=64, sequence=16, micro_batches=2))
    plain, moved = step(ledger), step(ledger, input_slots=2)
    for name in ("read_bytes", "write_bytes"):
        assert total(moved, name) - total(plain, name) == ledger.input_bytes
    assert not any(work.acquires_bytes for work in moved[Kind.FORWARD])
    some = step(ledger, input_slots=2, kept=frozenset(["block.2", "block.3"]))
    assert total(some, "write_bytes") - total(plain, "write_bytes") == ledger.input_bytes / 2


def test_inputs_in_host_memory_cross_the_link_and_no_drive() -> None:
    ledger = Ledger(SMALL, TrainingShape(tokens=64, sequence=16, micro_batches=2))
    last = frozenset(["block.2", "block.3"])
    plain, moved = step(ledger), step(ledger, input_slots=2, in_host=last)
    for name in ("read_bytes", "write_bytes"):
        assert total(moved, name) - total(plain, name) == ledger.input_bytes / 2
    for name in ("h2d_bytes", "d2h_bytes"):
        assert total(moved, name) - total(plain, name) == ledger.input_bytes
    held = [bool(work.acquires_bytes) for work in moved[Kind.FORWARD]]
    assert held == [False] * 4 + [True] * 4
    released = [bool(work.releases_bytes) for work in moved[Kind.BACKWARD]]
    assert released == held[::-1]


def test_gradients_that_wait_occupy_memory() -> None:
    ledger = Ledger(SMALL, TrainingShape(tokens=64, sequence=16))

    def held(kinds: dict[Kind, list[Work]]) -> tuple[int, int]:
        taken = [dict(work.acquires_bytes).get("host", 0) for work in kinds[Kind.COLLECT_GRADIENT]]
        given = [dict(work.releases_bytes).get("host", 0) for work in kinds[Kind.UPDATE]]
        return sum(taken), sum(given)

    parameters = SMALL.num_blocks * SMALL.block_parameters + SMALL.embedding_parameters
    assert held(step(ledger, deferred=True)) == (4 * parameters, 4 * parameters)
    assert held(step(ledger)) == held(step(ledger, deferred=True, on_ssd=True)) == (0, 0)


def test_bytes_do_not_depend_on_accumulation_but_flop_grows_with_tokens() -> None:
    once = step(Ledger(SMALL, TrainingShape(tokens=64, sequence=16)))
    four = step(Ledger(SMALL, TrainingShape(tokens=256, sequence=16, micro_batches=4)))
    for name in ("read_bytes", "write_bytes"):
        assert total(four, name) == total(once, name)
    assert total(four, "flop") == pytest.approx(4 * total(once, "flop"))


def test_lora_writes_only_the_adapter() -> None:
    training = TrainingShape(tokens=64, sequence=16, adapter_parameters=100)
    ledger = Ledger(SMALL, training)
    kinds = step(ledger)
    assert total(kinds, "write_bytes") == 12 * 100 * SMALL.num_blocks
    assert total(kinds, "adam_elements") == 100 * SMALL.num_blocks
    full = Ledger(SMALL, replace(training, adapter_parameters=0))
    # Forward once for itself, once again, and once for the gradients of the hidden states.
    assert ledger.backward().flop / ledger.forward().flop == pytest.approx(2, rel=0.02)
    assert full.backward().flop / full.forward().flop == pytest.approx(3)


def test_experts_count_as_bytes_but_only_active_ones_as_flop() -> None:
    experts = replace(SMALL, active_block_parameters=SMALL.block_parameters // 4)
    training = TrainingShape(tokens=64, sequence=16)
    sparse, dense = Ledger(experts, training), Ledger(SMALL, training)
    assert total(step(sparse), "read_bytes") == total(step(dense), "read_bytes")
    assert sparse.block_forward_flop < 0.3 * dense.block_forward_flop + 4 * 16 * 64 * 64


def test_resident_stages_move_nothing() -> None:
    ledger = Ledger(SMALL, TrainingShape(tokens=64, sequence=16))
    stages = ["outer", "embed", *(f"block.{i}" for i in range(SMALL.num_blocks))]
    for deferred in (False, True):
        kinds = step(ledger, resident=stages, requests_per_state=4, deferred=deferred)
        assert total(kinds, "read_bytes") == total(kinds, "write_bytes") == 0
        assert total(kinds, "requests") == 0
        assert total(kinds, "h2d_bytes") > 0
        assert total(kinds, "adam_elements") == SMALL.parameters
    half = step(ledger, resident=stages[:4], deferred=True)
    assert total(half, "write_bytes") == 12 * 2 * SMALL.block_parameters


def test_block_inputs_occupy_host_memory_until_backward() -> None:
    ledger = Ledger(SMALL, TrainingShape(tokens=64, sequence=16, micro_batches=2))
    kinds = step(ledger)
    taken = sum(size for work in kinds[Kind.FORWARD] for _, size in work.acquires_bytes)
    given = sum(size for work in kinds[Kind.BACKWARD] for _, size in work.releases_bytes)
    assert taken == given == ledger.input_bytes == 2 * 64 * 64 * 4


@pytest.mark.parametrize("skips", [False, True])
def test_recomputation_falls_as_more_is_kept(skips: bool) -> None:
    def share(volume: float) -> float:
        training = TrainingShape(tokens=64, sequence=16, swap_bytes=volume, skips_last_matrix=skips)
        return Ledger(SMALL, training).recompute_share

    ledger = Ledger(SMALL, TrainingShape(tokens=64, sequence=16))
    volumes = [ledger.all_activation_bytes * i / 32 for i in range(33)]
    shares = [share(volume) for volume in volumes]
    assert shares == sorted(shares, reverse=True)
    matrices = 2 * SMALL.active
    last = matrices / 3 / (matrices + 4 * 16 * 64)
    assert shares[0] == pytest.approx(1 - last if skips else 1)
    assert shares[-1] == pytest.approx(0, abs=1e-12)
    # Swapping more than there is, or less than the inputs, changes nothing.
    assert share(10 * volumes[-1]) == shares[-1]
    assert share(1.0) == shares[0]


def test_law_of_the_drives() -> None:
    assert MACHINE.ssd_s(2e9, 1e9) == pytest.approx(2.0)  # reads and writes take turns
    assert replace(MACHINE, num_drives=2).ssd_s(2e9, 1e9) == pytest.approx(1.0)
    added = replace(MACHINE, ssd_link_bytes_per_s=3e9)
    assert added.ssd_s(2e9, 1e9) == pytest.approx(3.0)
    assert replace(added, ssd_overlap=2.0).ssd_s(2e9, 1e9) == pytest.approx(5**0.5)
    assert replace(added, ssd_overlap=100.0).ssd_s(2e9, 1e9) == pytest.approx(2.0)
    assert replace(MACHINE, request_s=0.5).ssd_s(2e9, 0, 3) == pytest.approx(2.5)
    assert MACHINE.ssd_s(0, 0) == 0


def test_cost_by_resource() -> None:
    machine = replace(MACHINE, h2d_bytes_per_s=4e9, dram_bytes_per_s=10e9, compute_overhead_s=0.25)
    work = Work(read_bytes=2e9, h2d_bytes=4e9, flop=1e12, adam_elements=2e9, dram_bytes=4e9)
    assert machine.cost(work).seconds == {
        "ssd": 1.0, "h2d": 1.0, "compute": 1.25, "cores": 2.0, "adam": 2.0, "dram": 1.0,
    }  # fmt: skip
    on_cpu = replace(machine, computes_on_cpu=True).cost(work).seconds
    assert "compute" not in on_cpu and on_cpu["cores"] == 3.25
    assert machine.cost(Work()).seconds == {}


def test_what_takes_only_some_cores() -> None:
    """The optimizer's own threads set its pace; the other cores are free for blocks."""
    machine = replace(
        MACHINE,
        adam_core_share=0.25,
        io_core_share=0.125,
        dram_bytes_per_s=10e9,
        computes_on_cpu=True,
    )
    assert machine.cost(Work(adam_elements=2e9)).seconds == {"cores": 0.5, "adam": 2.0}
    assert machine.cost(Work(read_bytes=2e9)).seconds["cores"] == 0.125
    # gradients added up: by the cores where they compute, else by the device, whose time includes it
    assert machine.cost(Work(copied_bytes=5e9)).seconds == {"cores": 0.5}
    assert replace(machine, computes_on_cpu=False).cost(Work(copied_bytes=5e9)).seconds == {}
    assert machine.cost(Work(aside_bytes=5e9)).seconds == {"cores": 1.0}
    one_thread = replace(machine, copy_bytes_per_s=4e9)
    assert one_thread.cost(Work(aside_bytes=5e9)).seconds == {"cores": 2.5}


def test_gradients_are_copied_once_and_then_added_up() -> None:
    """Each element: a weight's width read, 4 written, and from the second micro-batch on 4 read; 4 for the norm."""
    block = SMALL.block_parameters
    for micro_batches in (1, 3):
        training = TrainingShape(tokens=96, sequence=16, micro_batches=micro_batches)
        kinds = step(Ledger(SMALL, training))
        copied = sum(work.copied_bytes for work in kinds[Kind.BACKWARD])
        assert copied == SMALL.num_blocks * block * (6 + 10 * (micro_batches - 1))
        collected = sum(work.copied_bytes for work in kinds[Kind.COLLECT_GRADIENT])
        assert collected == 4 * (SMALL.num_blocks * block + SMALL.embedding_parameters)


@pytest.mark.parametrize(
    "wrong",
    [{"flop_per_s": 0.0}, {"adam_elements_per_s": float("nan")}, {"num_drives": 0},
     {"ssd_overlap": 0.5}, {"request_s": -1.0}],
)  # fmt: skip
def test_absurd_hardware_is_refused(wrong: dict[str, float]) -> None:
    named = "negative" if "request_s" in wrong else next(iter(wrong))
    with pytest.raises(ConfigError, match=named):
        replace(MACHINE, **wrong)


def test_what_goes_straight_to_a_card_is_read_across_the_link_and_not_uploaded() -> None:
    training = TrainingShape(tokens=64, sequence=16, adapter_parameters=100)
    ledger = Ledger(SMALL, training)
    shape = shape_of(ledger)
    frozen = shape.stages["block.0"].frozen_bytes
    assert frozen > 0

    def moved(straight: int) -> dict[Kind, Work]:
        stages = {
            name: replace(
                stage, straight_bytes=straight, upload_bytes=stage.upload_bytes - straight
            )
            for name, stage in shape.stages.items()
            if name == "block.0"
        }
        other = replace(shape, stages={**shape.stages, **stages})
        schedule = generate_training_step(other)
        works = work_of(schedule, other, ledger)
        return {
            op.kind: work for op, work in zip(schedule.operations, works) if op.stage == "block.0"
        }

    host, straight = moved(0), moved(frozen)
    assert straight[Kind.LOAD].read_bytes == host[Kind.LOAD].read_bytes == frozen
    assert (straight[Kind.LOAD].h2d_bytes, straight[Kind.LOAD].aside_bytes) == (frozen, 0)
    assert host[Kind.LOAD].aside_bytes == frozen
    assert straight[Kind.UPLOAD].h2d_bytes == host[Kind.UPLOAD].h2d_bytes - frozen


def test_streams_have_their_own_pace_on_the_drives() -> None:
    machine = replace(MACHINE, source_bytes_per_s=1e9, activation_pace=2.0)
    assert machine.cost(Work(read_bytes=2e9)).seconds["ssd"] == 1.0
    assert machine.cost(Work(read_bytes=2e9, source_bytes=1e9)).seconds["ssd"] == 1.5
    faster = replace(machine, source_bytes_per_s=4e9)
    assert faster.cost(Work(read_bytes=2e9, source_bytes=1e9)).seconds["ssd"] == 0.75
    moved = Work(read_bytes=2e9, write_bytes=1e9, activation_bytes=3e9)
    assert machine.cost(moved).seconds["ssd"] == 1.0
    assert replace(machine, activation_pace=0.5).cost(moved).seconds["ssd"] == 4.0
