"""Schedules of other systems move what their papers say, and are ordered as they say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ssdtune.plan import peers
from ssdtune.plan.compare import own_job, resident_blocks
from ssdtune.plan.ledger import Ledger, ModelShape, TrainingShape
from ssdtune.plan.schedule import Kind
from ssdtune.plan.validate import RATEL_4090

MODEL = ModelShape.gpt(12, 2048)
RATES = [
    "flop_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "drive_read_bytes_per_s",
    "drive_write_bytes_per_s", "ssd_link_bytes_per_s", "dram_bytes_per_s", "adam_elements_per_s",
]  # fmt: skip


def ledger(tokens: int = 8192, model: ModelShape = MODEL) -> Ledger:
    return Ledger(model, TrainingShape(tokens=tokens, sequence=1024, gradient_bytes=2))


def all_jobs(tokens: int = 8192) -> dict[str, peers.Job]:
    shape = ledger(tokens)
    jobs = {
        f"ratel {update}": peers.ratel(shape, RATEL_4090, update=update)
        for update in ("optimized", "naive", "serial")
    }
    jobs["zero-infinity"] = peers.zero_infinity(shape, RATEL_4090)
    jobs["zero-offload"] = peers.zero_offload(shape, RATEL_4090)
    for update in ("overlap", "deferred"):
        jobs[f"ours {update}"] = own_job(shape, update=update)
    jobs["ours spilled"] = own_job(shape, update="deferred", gradients="ssd")
    return jobs


def total(job: peers.Job, name: str, kind: Kind | None = None) -> float:
    pairs = zip(job.schedule.operations, job.work)
    return sum(getattr(work, name) for op, work in pairs if kind in (None, op.kind))


@pytest.mark.parametrize(
    ("name", "read", "written"),
    [("ratel optimized", 16, 14), ("ratel naive", 16, 14), ("ratel serial", 16, 14),
     ("zero-infinity", 18, 16), ("zero-offload", 0, 0), ("ours overlap", 14, 12),
     ("ours deferred", 14, 12), ("ours spilled", 18, 16)],
)  # fmt: skip
def test_bytes_per_parameter(name: str, read: int, written: int) -> None:
    job = all_jobs()[name]
    blocks = [op.stage.startswith("block.") for op in job.schedule.operations]
    moved = [(work.read_bytes, work.write_bytes) for work, block in zip(job.work, blocks) if block]
    parameters = MODEL.num_blocks * MODEL.block_parameters
    # Where forward turns into backward, three blocks are still in their slots.
    saved = 3 * 2 * MODEL.block_parameters if name.startswith("ours") else 0
    assert sum(r for r, _ in moved) == read * parameters - saved
    assert sum(w for _, w in moved) == written * parameters


def test_a_faster_part_never_slows_a_step() -> None:
    for name, job in all_jobs().items():
        before = job.simulate(RATEL_4090).step_s
        for rate in RATES:
            faster = replace(RATEL_4090, **{rate: 1.3 * getattr(RATEL_4090, rate)})
            # Sharing may move the fill and drain of a pipeline a little.
            assert job.simulate(faster).step_s <= before * 1.005, (name, rate)
        more = replace(RATEL_4090, num_drives=24)
        assert job.simulate(more).step_s <= before * 1.005, name


@pytest.mark.parametrize("tokens", [2048, 16384, 131072])
def test_never_faster_than_the_bounds_of_the_method(tokens: int) -> None:
    for name, job in all_jobs(tokens).items():
        result = job.simulate(RATEL_4090)
        compute = total(job, "flop") / RATEL_4090.flop_per_s
        ssd = RATEL_4090.ssd_s(total(job, "read_bytes"), total(job, "write_bytes"))
        adam = total(job, "adam_elements") / RATEL_4090.adam_elements_per_s
        link = total(job, "h2d_bytes") / RATEL_4090.h2d_bytes_per_s
        assert result.step_s >= max(compute, ssd, adam, link) * (1 - 1e-9), name
        if name == "ours overlap":
            # max(F, 2P) + max((2 + r) F, 24 P): forward and backward each bound by compute or drives
            forward = total(job, "flop", Kind.FORWARD) / RATEL_4090.flop_per_s
            backward = total(job, "flop", Kind.BACKWARD) / RATEL_4090.flop_per_s
            parameters = MODEL.num_blocks * MODEL.block_parameters
            first = RATEL_4090.ssd_s(2 * parameters, 0)
            second = RATEL_4090.ssd_s(12 * parameters, 12 * parameters)
            assert result.step_s >= 0.9 * (max(forward, first) + max(backward, second))


def test_overlap_helps_and_is_never_worse() -> None:
    for tokens in (2048, 16384, 131072):
        jobs = all_jobs(tokens)
        times = {name: job.simulate(RATEL_4090).step_s for name, job in jobs.items()}
        assert times["ratel optimized"] <= times["ratel naive"] <= times["ratel serial"] * 1.001
        assert times["ratel serial"] < times["zero-infinity"]
        assert times["ours overlap"] < times["ratel serial"]
        assert times["ours deferred"] <= times["ours spilled"]


def test_updates_begin_after_backward_where_they_are_serial() -> None:
    for name in ("ratel serial", "zero-infinity", "zero-offload"):
        job = all_jobs()[name]
        result = job.simulate(RATEL_4090)
        spans = list(zip(job.schedule.operations, result.spans))
        backward = max(span.end_s for op, span in spans if op.kind != Kind.UPDATE)
        first = min(span.begin_s for op, span in spans if op.kind == Kind.UPDATE)
        assert first >= backward, name


def test_without_slots_nothing_overlaps() -> None:
    job = peers.zero_infinity(ledger(), RATEL_4090)
    result = job.simulate(RATEL_4090)
    serial = sum(RATEL_4090.cost(work).alone_s for work in job.work)
    # Only the embedding's gradient leaves the device while the last block's is written.
    assert result.step_s == pytest.approx(serial, rel=0.01)


def test_slots_on_a_full_device() -> None:
    large = ModelShape.gpt(96, 12288)
    assert peers.weight_slots(ledger(8192, large), RATEL_4090.device_bytes) == 2
    assert peers.weight_slots(ledger(16384, large), RATEL_4090.device_bytes) == 1


def test_swap_volume_of_its_own_cost_model() -> None:
    small = peers.ratel_swap(ledger(1024), RATEL_4090, memory_bytes=1e12)
    assert small.swap_bytes == small.input_bytes  # bound by the drives: as little as possible
    large = peers.ratel_swap(ledger(262144), RATEL_4090, memory_bytes=1e12)
    assert large.input_bytes < large.swap_bytes < large.all_activation_bytes
    assert large.training.swap_to_ssd_bytes == 0
    tight = peers.with_swap(large, large.swap_bytes, 1e9)
    assert tight.training.swap_to_ssd_bytes == pytest.approx(large.swap_bytes - 1e9)


def test_resident_blocks_fill_the_memory_and_are_spread() -> None:
    shape = ledger()
    state = 12 * MODEL.block_parameters
    few = replace(RATEL_4090, host_bytes=int((6 * state + 40 * MODEL.block_parameters + 2e9) / 0.9))
    stages = resident_blocks(shape, few, waiting_gradients=False)
    assert 0 < len(stages) < MODEL.num_blocks
    assert len(set(stages)) == len(stages)
    assert len(resident_blocks(shape, RATEL_4090, waiting_gradients=True)) == MODEL.num_blocks
    assert resident_blocks(shape, replace(few, host_bytes=1), waiting_gradients=True) == []
    cached = own_job(shape, resident=stages).simulate(RATEL_4090).resource_s["ssd"]
    assert cached < own_job(shape).simulate(RATEL_4090).resource_s["ssd"]


def test_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="eager"):
        peers.ratel(ledger(), RATEL_4090, update="eager")
    with pytest.raises(ValueError, match="after"):
        own_job(ledger(), update="after")
    with pytest.raises(ValueError, match="disk"):
        own_job(ledger(), update="deferred", gradients="disk")
