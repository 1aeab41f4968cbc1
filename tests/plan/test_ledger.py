"""Bytes and FLOP of models in training, and the laws that turn them into seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ssdtune.errors import ConfigError
from ssdtune.plan.generate import StepShape, generate_training_step
from ssdtune.plan.hardware import Hardware, Work
from ssdtune.plan.ledger import Ledger, ModelShape, TrainingShape, work_of
from ssdtune.plan.schedule import Kind

SMALL = ModelShape.gpt(4, 64, vocabulary=100, positions=32)
MACHINE = Hardware(
    name="test",
    flop_per_s=1e12,
    drive_read_bytes_per_s=2e9,
    drive_write_bytes_per_s=1e9,
    adam_elements_per_s=1e9,
)


def step(ledger: Ledger, update: str = "overlap", **arguments) -> dict[Kind, list[Work]]:
    stages = ["embed", *(f"block.{i}" for i in range(ledger.model.num_blocks))]
    schedule = generate_training_step(
        StepShape(
            ledger.model.num_blocks,
            ledger.training.micro_batches,
            ledger.model.tied,
            frozenset(stage for stage in stages if ledger.trained(stage)),
            update=update,
            gradients="host" if arguments.get("resident_gradients", True) else "ssd",
        )
    )
    result: dict[Kind, list[Work]] = {}
    for operation, work in zip(
        schedule.operations, work_of(schedule, ledger, update=update, **arguments)
    ):
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


def test_bytes_of_a_full_step_are_those_of_the_table() -> None:
    ledger = Ledger(SMALL, TrainingShape(tokens=64, sequence=16))
    parameters = SMALL.num_blocks * SMALL.block_parameters
    ends = SMALL.embedding_parameters
    kinds = step(ledger)
    # The block where forward turns into backward, and the embedding, still lie in their slots.
    most = 14 * (parameters + ends)
    assert most - 4 * SMALL.block_parameters - 2 * ends <= total(kinds, "read_bytes") <= most
    assert total(kinds, "write_bytes") == 12 * (parameters + ends)
    after = step(ledger, "after")
    difference = total(after, "read_bytes") - total(kinds, "read_bytes")
    assert difference == 2 * (parameters + ends)
    waiting = step(ledger, "after", resident_gradients=False)
    assert total(waiting, "write_bytes") == 16 * (parameters + ends)
    assert total(waiting, "adam_elements") == parameters + ends


def test_fp32_moves_16_and_12() -> None:
    training = TrainingShape(tokens=64, sequence=16, weight_bytes=4, split_master=False)
    kinds = step(Ledger(SMALL, training))
    update = kinds[Kind.UPDATE][0]
    assert update.read_bytes == 8 * update.adam_elements
    assert update.write_bytes == 12 * update.adam_elements


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
    stages = ["embed", *(f"block.{i}" for i in range(SMALL.num_blocks))]
    kinds = step(ledger, resident=stages)
    assert total(kinds, "read_bytes") == total(kinds, "write_bytes") == 0
    assert total(kinds, "requests") == 0
    assert total(kinds, "h2d_bytes") > 0


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
        "ssd": 1.0, "h2d": 1.0, "compute": 1.25, "cores": 2.0, "dram": 1.0,
    }  # fmt: skip
    on_cpu = replace(machine, computes_on_cpu=True).cost(work).seconds
    assert "compute" not in on_cpu and on_cpu["cores"] == 3.25
    assert machine.cost(Work()).seconds == {}


@pytest.mark.parametrize(
    "wrong",
    [{"flop_per_s": 0.0}, {"adam_elements_per_s": float("nan")}, {"num_drives": 0},
     {"ssd_overlap": 0.5}, {"request_s": -1.0}],
)  # fmt: skip
def test_absurd_hardware_is_refused(wrong: dict[str, float]) -> None:
    named = "negative" if "request_s" in wrong else next(iter(wrong))
    with pytest.raises(ConfigError, match=named):
        replace(MACHINE, **wrong)
