"""Needs of a run, against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ssdtune.plan.budget import (
    ModelShape,
    RunShape,
    UnitShape,
    disk_need,
    memory_need,
    run_written_bytes,
    state_element_bytes,
    step_traffic,
    unit_state_bytes,
)
from ssdtune.plan.estimate import Wear, estimate

# TinyLlama-1.1B: q and o 2048 × 2048, k and v 2048 × 256, three matrices 2048 × 5632, two norms; 22 blocks;
# embedding and head 32000 × 2048 each; final norm 2048.
BLOCK = 44_044_288
END = 65_536_000
PARAMETERS = 1_100_048_384


def tiny_llama(*, all_loads: int | None = None) -> ModelShape:
    blocks = [
        UnitShape(f"block.{i}", BLOCK, largest_tensor_elements=2048 * 5632) for i in range(22)
    ]
    one = all_loads or 1
    return ModelShape(
        (
            UnitShape("outer", 2048, largest_tensor_elements=2048, loads=one),
            UnitShape("embed", END, largest_tensor_elements=END, loads=one),
            *blocks,
            UnitShape("head", END, largest_tensor_elements=END, loads=one),
        ),
        hidden_size=2048,
        num_blocks=22,
        vocab_size=32000,
    )


def lora() -> ModelShape:
    return ModelShape(tuple(UnitShape(f"block.{i}", 1024, 1_000_001) for i in range(3)), 64, 3, 100)


def test_size_of_the_model() -> None:
    assert tiny_llama().trained_elements == PARAMETERS


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_states_take_12_bytes_per_parameter(dtype: str) -> None:
    assert sum(state_element_bytes(dtype).values()) == 12
    run = RunShape(dtype=dtype, checkpoints_kept=1, export_bytes=2_200_000_000)
    need = disk_need(tiny_llama(), run)
    assert need.states == need.checkpoints == 12 * PARAMETERS == 13_200_580_608
    assert (need.gradients, need.activations) == (0, 0)
    assert need.swap_bytes == 26_401_161_216
    assert need.total == 28_601_161_216


@pytest.mark.parametrize(("kept", "copies"), [(0, 1), (1, 2), (3, 4)])
def test_every_checkpoint_kept_costs_the_states_once_more(kept: int, copies: int) -> None:
    need = disk_need(tiny_llama(), RunShape(checkpoints_kept=kept))
    assert need.swap_bytes == copies * 12 * PARAMETERS


def test_gradients_and_inputs_on_ssd() -> None:
    run = RunShape(
        gradients="ssd", activations="ssd", micro_batch=2, sequence_length=100, num_micro_batches=3
    )
    need = disk_need(tiny_llama(), run)
    assert need.gradients == 4 * PARAMETERS
    # 2 × 100 tokens × 2048 × 2 bytes = 819200, a multiple of 4096
    assert need.activations == 819_200 * 22 * 3
    assert disk_need(tiny_llama(), replace(run, update="overlap")).gradients == 0


def test_odd_sizes_are_rounded_up_per_state() -> None:
    assert unit_state_bytes(UnitShape("x", 1), "bf16") == {
        "weights": 4096,
        "low": 4096,
        "exp_avg": 4096,
        "exp_avg_sq": 4096,
    }
    assert unit_state_bytes(UnitShape("x", 1025), "fp32") == {
        "weights": 8192,
        "exp_avg": 8192,
        "exp_avg_sq": 8192,
    }
    assert unit_state_bytes(UnitShape("x", 0, frozen_bytes=7), "bf16") == {}


def test_step_moves_14_bytes_in_and_12_out_per_parameter() -> None:
    model = tiny_llama(all_loads=2)
    traffic = step_traffic(model, RunShape(update="overlap", update_reads_weights=False))
    assert traffic.read_bytes == 14 * PARAMETERS
    assert traffic.written_bytes == 12 * PARAMETERS
    assert traffic.read == {
        "weights": 4 * PARAMETERS,
        "master": 2 * PARAMETERS,
        "moments": 8 * PARAMETERS,
        "gradients": 0,
        "activations": 0,
    }
    assert traffic.written["weights"] == 2 * PARAMETERS


def test_step_in_fp32_moves_16_in_and_12_out() -> None:
    run = RunShape(dtype="fp32", update="overlap", update_reads_weights=False)
    traffic = step_traffic(tiny_llama(all_loads=2), run)
    assert (traffic.read_bytes, traffic.written_bytes) == (16 * PARAMETERS, 12 * PARAMETERS)
    assert traffic.read["master"] == traffic.written["master"] == 0


def test_two_phase_update_reads_weights_again_and_spilled_gradients_move_4_and_4() -> None:
    run = RunShape(gradients="ssd")
    traffic = step_traffic(tiny_llama(), run)
    assert traffic.read["gradients"] == traffic.written["gradients"] == 4 * PARAMETERS
    # blocks in forward, backward and update; embedding, head and norm once less
    assert traffic.read["weights"] == 2 * (3 * 22 * BLOCK + 2 * (2 * END + 2048))
    assert traffic.written_bytes == 16 * PARAMETERS


def test_resident_states_do_not_move() -> None:
    run = RunShape(num_steps=10, num_checkpoints=2, export_bytes=5)
    model = tiny_llama()
    everything = [
        (unit.name, state) for unit in model.units for state in state_element_bytes("bf16")
    ]
    traffic = step_traffic(model, run, everything)
    assert (traffic.read_bytes, traffic.written_bytes) == (0, 0)
    # but checkpoints hold them, and the export is written
    assert run_written_bytes(model, run, everything) == 2 * 12 * PARAMETERS + 5
    assert run_written_bytes(model, run) == 10 * 12 * PARAMETERS + 5

    one = [("block.3", "exp_avg")]
    streamed, kept = step_traffic(model, run), step_traffic(model, run, one)
    assert streamed.read["moments"] - kept.read["moments"] == 4 * BLOCK
    assert streamed.written["moments"] - kept.written["moments"] == 4 * BLOCK
    assert streamed.read["weights"] == kept.read["weights"]


def test_lora_reads_the_frozen_weights_and_never_writes_them() -> None:
    run = RunShape(method="lora", activations="ssd", sequence_length=32)
    traffic = step_traffic(lora(), run)
    # 32 tokens × 64 × 2 bytes = 4096 for each block's input
    assert traffic.read == {
        "weights": 3 * (2 * 1_000_001 + 3 * 4096),  # 1024 × 2 bytes take a page of 4096
        "master": 3 * 4096,
        "moments": 3 * 2 * 4096,
        "gradients": 0,
        "activations": 3 * 4096,
    }
    assert traffic.written == {
        "weights": 3 * 4096,
        "master": 3 * 4096,
        "moments": 3 * 2 * 4096,
        "gradients": 0,
        "activations": 3 * 4096,
    }
    kept = [(f"block.{i}", "frozen") for i in range(3)]
    assert step_traffic(lora(), run, kept).read["weights"] == 3 * 3 * 4096


def test_memory() -> None:
    model = tiny_llama()
    run = RunShape(num_micro_batches=2, sequence_length=128, block_activation_bytes=7, chunks=2)
    need = memory_need(model, run)
    assert need.weights == 2 * (2 * BLOCK + END + 2048)
    assert need.gradients == 4 * PARAMETERS
    assert need.block_inputs == 22 * 2 * 128 * 2048 * 2
    assert need.hidden_states == 2 * 128 * 2048 * 2
    assert need.block_activations == 7
    assert need.loss == 12 * 128 * 32000
    assert need.optimizer == 2 * (16 << 20) * 4  # 12 bytes of states and 4 of gradient per 4
    assert need.total == sum(vars(need).values())

    streamed = memory_need(model, replace(run, gradients="ssd", activations="ssd"))
    assert streamed.gradients == 4 * (2 * BLOCK + END + 2048)
    assert streamed.block_inputs == 2 * 128 * 2048 * 2
    assert memory_need(model, replace(run, update="overlap")).gradients == streamed.gradients


def test_memory_of_a_frozen_model() -> None:
    frozen = ModelShape(
        (UnitShape("block.0", frozen_bytes=10), UnitShape("head", frozen_bytes=3)), 8, 1, 5
    )
    need = memory_need(frozen, RunShape())
    assert (need.weights, need.gradients, need.optimizer) == (2 * 10 + 3, 0, 0)


def test_unknown_words() -> None:
    with pytest.raises(ValueError, match='unknown dtype "fp8"'):
        disk_need(tiny_llama(), RunShape(dtype="fp8"))
    with pytest.raises(ValueError, match="gradients is 'disk'"):
        RunShape(gradients="disk")
    with pytest.raises(ValueError, match=r"unknown states \['moments'\]"):
        step_traffic(tiny_llama(), RunShape(), [("block.0", "moments")])


def test_wear() -> None:
    wear = Wear(12 * 10**9, 12 * 10**12, 60 * 10**12, 600 * 10**12)
    assert wear.share == 0.1
    assert wear.text() == (
        "12.0 GB written per step, 12.0 TB per epoch, 60.0 TB in this run: 10 % of the 600 TB that the "
        "drives are rated for"
    )
    assert wear.warning(0.1) is None
    assert "60.0 TB, 10 %" in (wear.warning(0.05) or "")


def test_estimate_in_words_and_as_json() -> None:
    run = RunShape(num_steps=100, steps_per_epoch=50, num_checkpoints=2, export_bytes=2_200_096_768)
    result = estimate(tiny_llama(all_loads=2), run)
    assert result.text().splitlines() == [
        "trained   1.1e+09 parameters",
        "drives    28.6 GB: states 13.2 GB, checkpoints 13.2 GB, export 2.20 GB",
        "per step  17.6 GB read, 13.2 GB written (16 and 12 bytes per parameter)",
        "memory    5.03 GiB and what is cached: weights 293 MiB, gradients 4.10 GiB, block inputs 88.0 MiB, "
        "hidden states 4.00 MiB, loss 375 MiB, optimizer 192 MiB",
        "wear      13.2 GB written per step, 660 GB per epoch, 1.32 TB in this run: 0.22 % of the 600 TB "
        "that the drives are rated for",
    ]
    values = json.loads(json.dumps(result.to_dict()))
    assert values["disk_bytes"]["total"] == result.disk.total
    assert values["step_bytes_read"]["moments"] == 8 * PARAMETERS
    assert values["wear"]["run_bytes"] == 1200 * PARAMETERS + 2_200_096_768
