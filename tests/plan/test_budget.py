"""Needs of a run, against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ssdtune.plan.budget import (
    RunShape,
    disk_need,
    rewritten_bytes,
    run_written_bytes,
    save_traffic,
    state_bytes,
    step_traffic,
)
from ssdtune.plan.estimate import estimate, run_cost
from ssdtune.plan.residency import PartSize

# TinyLlama-1.1B: q and o 2048 × 2048, k and v 2048 × 256, three matrices 2048 × 5632, two norms; 22 blocks;
# embedding and head 32000 × 2048 each; final norm 2048.
BLOCK = 44_044_288
END = 65_536_000
PARAMETERS = 1_100_048_384


def trained(name: str, numel: int, *, split: bool = True) -> PartSize:
    return PartSize(name, name, numel * (2 if split else 4), numel, True, split)


def tiny_llama(*, split: bool = True) -> list[PartSize]:
    sizes = {"outer": 2048, "embed": END, **{f"block.{i}": BLOCK for i in range(22)}, "head": END}
    return [trained(name, numel, split=split) for name, numel in sizes.items()]


def stages(parts: list[PartSize]) -> frozenset[str]:
    return frozenset(part.stage for part in parts)


def only_blocks(*, split: bool = True) -> list[PartSize]:
    return [trained("block.0", 2048, split=split), trained("block.1", 4096, split=split)]


def lora() -> list[PartSize]:
    """Three blocks of 1e6 frozen and 2048 trained bf16 elements each, and a frozen head."""
    parts = []
    for i in range(3):
        parts.append(PartSize(f"block.{i}", f"block.{i}", 2_000_000, 1_000_000, False, False))
        parts.append(PartSize(f"block.{i}.adapter", f"block.{i}", 4096, 2048, True, True))
    return [*parts, PartSize("head", "head", 500_000, 250_000, False, False)]


def test_size_of_the_model() -> None:
    assert sum(part.numel for part in tiny_llama()) == PARAMETERS


@pytest.mark.parametrize("split", [True, False])
def test_states_take_12_bytes_per_parameter(split: bool) -> None:
    need = disk_need(tiny_llama(split=split), RunShape(export_bytes=2_200_000_000))
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
        stored_inputs=22,
        num_micro_batches=3,
        input_bytes=2 * 100 * 2048 * 2,  # 2 × 100 tokens in bf16; a multiple of 4096
        gradients_on_ssd=stages(tiny_llama()),
    )
    need = disk_need(tiny_llama(), run)
    assert need.gradients == 4 * PARAMETERS
    assert need.activations == 819_200 * 22 * 3
    traffic = step_traffic(tiny_llama(), run)
    assert traffic.read["gradients"] == traffic.written["gradients"] == 4 * PARAMETERS
    assert traffic.read["activations"] == traffic.written["activations"] == 819_200 * 66


def test_odd_sizes_are_rounded_up_per_state() -> None:
    assert state_bytes(trained("x", 1)) == dict.fromkeys(
        ("weights", "low", "exp_avg", "exp_avg_sq"), 4096
    )
    assert state_bytes(trained("x", 1025, split=False)) == dict.fromkeys(
        ("weights", "exp_avg", "exp_avg_sq"), 8192
    )
    assert state_bytes(PartSize("x", "x", 14, 7, False, False)) == {}
    run = RunShape(stored_inputs=3, num_micro_batches=2, input_bytes=1)
    assert disk_need([], run).activations == 3 * 2 * 4096


def test_a_block_moves_14_bytes_in_and_12_out_per_parameter() -> None:
    traffic = step_traffic(only_blocks(), RunShape())
    assert traffic.read == {
        "weights": 4 * 6144,
        "master": 2 * 6144,
        "moments": 8 * 6144,
        "gradients": 0,
        "activations": 0,
    }
    assert traffic.written == {**traffic.read, "weights": 2 * 6144}
    assert (traffic.read_bytes, traffic.written_bytes) == (14 * 6144, 12 * 6144)


def test_a_block_in_fp32_moves_16_in_and_12_out() -> None:
    traffic = step_traffic(only_blocks(split=False), RunShape())
    assert (traffic.read_bytes, traffic.written_bytes) == (16 * 6144, 12 * 6144)
    assert traffic.read["master"] == traffic.written["master"] == 0


def test_gradients_that_wait_on_ssd_move_4_and_4() -> None:
    run = RunShape(gradients_on_ssd=frozenset({"block.0"}))
    traffic = step_traffic(only_blocks(), run)
    assert traffic.read_bytes == 14 * 6144 + 4 * 2048
    assert traffic.written_bytes == 12 * 6144 + 4 * 2048


def test_embedding_and_head_are_loaded_once_unless_tied() -> None:
    untied = step_traffic(tiny_llama(), RunShape())
    assert untied.read["weights"] == 2 * (2 * 22 * BLOCK + 2 * END + 2048)
    assert untied.written_bytes == 12 * PARAMETERS
    tied = step_traffic(tiny_llama()[:-1], RunShape())
    assert tied.read["weights"] == 2 * (2 * 22 * BLOCK + 2 * END + 2048)


def test_resident_parts_do_not_move() -> None:
    run = RunShape(num_steps=10, num_checkpoints=2, export_bytes=5)
    parts = tiny_llama()
    everything = frozenset(part.name for part in parts)
    traffic = step_traffic(parts, run, everything)
    assert (traffic.read_bytes, traffic.written_bytes) == (0, 0)
    # but checkpoints hold them, and the export is written
    assert run_written_bytes(parts, run, everything) == 2 * 12 * PARAMETERS + 5
    # streamed weights come to the drives first: both halves of their masters
    assert run_written_bytes(parts, run) == (4 + 10 * 12) * PARAMETERS + 5
    assert disk_need(parts, run).states == 12 * PARAMETERS

    streamed, kept = step_traffic(parts, run), step_traffic(parts, run, {"block.3"})
    assert streamed.read_bytes - kept.read_bytes == 14 * BLOCK
    assert streamed.written_bytes - kept.written_bytes == 12 * BLOCK


def test_lora_reads_the_frozen_weights_and_never_writes_them() -> None:
    traffic = step_traffic(lora(), RunShape())
    assert traffic.read == {
        "weights": 3 * (2 * 2_000_000 + 2 * 4096) + 500_000,
        "master": 3 * 4096,
        "moments": 3 * 16384,
        "gradients": 0,
        "activations": 0,
    }
    assert traffic.written_bytes == 3 * 12 * 2048
    assert disk_need(lora(), RunShape(checkpoints_kept=0)).total == 3 * 12 * 2048
    kept = step_traffic(lora(), RunShape(), {"block.0", "block.1", "block.2", "head"})
    assert kept.read["weights"] == 3 * 2 * 4096


def test_speculation_takes_room_and_saves_reading_gradients() -> None:
    parts = only_blocks()
    deferred = RunShape(deferred=stages(parts), gradients_on_ssd=stages(parts))
    speculative = replace(deferred, speculative=frozenset({"block.1"}))
    one, other = disk_need(parts, deferred), disk_need(parts, speculative)
    assert (one.speculation, other.speculation) == (0, one.states)
    assert other.swap_bytes == one.swap_bytes + one.states
    before, after = step_traffic(parts, deferred), step_traffic(parts, speculative)
    assert after.written == before.written
    assert after.read == {**before.read, "gradients": before.read["gradients"] - 4 * 4096}


def test_clipped_steps_after_speculating_count_as_often_as_they_may_happen() -> None:
    parts = only_blocks()
    run = RunShape(
        deferred=stages(parts), speculative=frozenset({"block.0", "block.1"}), clipped_share=0.25,
        num_steps=8,
    )  # fmt: skip
    assert rewritten_bytes(parts, run, {"block.0"}) == 12 * 4096
    unclipped = replace(run, clipped_share=0.0)
    for resident in ((), ("block.0",)):
        more = run_written_bytes(parts, run, resident) - run_written_bytes(
            parts, unclipped, resident
        )
        assert more == 2 * rewritten_bytes(parts, run, resident)


def test_a_save_writes_what_is_in_memory_and_the_updates_that_wait() -> None:
    parts = only_blocks()
    plain = save_traffic(parts, RunShape(), {"block.0"})
    assert (plain.read_bytes, plain.written_bytes) == (0, 12 * 2048)
    run = RunShape(deferred=stages(parts), gradients_on_ssd=frozenset({"block.1"}))
    waiting = save_traffic(parts, run, {"block.0"})
    assert waiting.written == {
        "weights": 2 * 6144,
        "master": 2 * 6144,
        "moments": 8 * 6144,
        "gradients": 0,
        "activations": 0,
    }
    assert waiting.read_bytes == (12 + 4) * 4096
    speculative = replace(run, speculative=frozenset({"block.1"}))
    less = save_traffic(parts, speculative, {"block.0"})
    assert waiting.written_bytes - less.written_bytes == 12 * 4096
    assert waiting.read_bytes - less.read_bytes == (12 + 4) * 4096
    only_first = RunShape(deferred=frozenset({"block.0"}))
    assert save_traffic(parts, only_first).written_bytes == 12 * 2048
    assert save_traffic(lora()[:1], RunShape(deferred=frozenset({"block.0"}))).written_bytes == 0


def test_mean_block_inputs_are_what_moves_and_the_longest_what_needs_room() -> None:
    run = RunShape(
        stored_inputs=3,
        num_micro_batches=2,
        input_bytes=8192,
        step_inputs_bytes=5000,
    )
    assert disk_need([], run).activations == 3 * 2 * 8192
    assert step_traffic([], run).written == step_traffic([], run).read
    assert step_traffic([], run).written_bytes == 3 * 5000
    assert step_traffic([], replace(run, stored_inputs=2)).written_bytes == 2 * 5000
    assert disk_need([], replace(run, stored_inputs=2)).activations == 2 * 2 * 8192
    swapped = replace(run, stored_inputs=1, swapped_bytes=2 * 102_400)
    assert disk_need([], swapped).activations == 2 * (2 * 102_400 + 8192)


def test_estimate_in_words_and_as_json() -> None:
    run = RunShape(num_steps=100, steps_per_epoch=50, num_checkpoints=2, export_bytes=2_200_096_768)
    result = estimate(tiny_llama(), run)
    assert result.text().splitlines() == [
        "trained   1.10B parameters",
        "drives    28.6 GB: states 13.2 GB, checkpoints 13.2 GB, export 2.20 GB",
        "per step  15.1 GB read, 13.2 GB written (13.8 and 12 bytes per parameter)",
        "wear      13.2 GB written per step, 660 GB per epoch, 1.33 TB in this run: 0.221 % of the 600 TB "
        "that the drives are rated for; it lasts 45.5k such steps",
    ]
    values = json.loads(json.dumps(result.to_dict()))
    assert values["disk_bytes"]["total"] == result.disk.total
    assert values["step_bytes_read"]["moments"] == 8 * PARAMETERS
    assert values["wear"]["run_bytes"] == 1204 * PARAMETERS + 2_200_096_768
    assert values["wear"]["num_steps"] == 100


def test_cost_of_a_run() -> None:
    run = RunShape(num_steps=100, num_checkpoints=2, deferred=stages(tiny_llama()))
    figures = estimate(tiny_llama(), run)
    without = run_cost(figures, 819_200)
    assert without.text() == "run       100 steps, 819k tokens"
    assert without.seconds is None and without.save_s is None
    cost = run_cost(figures, 819_200, step_s=30.0, read_bytes_per_s=2e9, write_bytes_per_s=1e9)
    assert cost.save_s == pytest.approx(12 * PARAMETERS * (1 / 2e9 + 1 / 1e9))
    assert cost.seconds == pytest.approx(3000 + 2 * cost.save_s)
    assert cost.text() == (
        "run       100 steps, 819k tokens, about 50 min 40 s with 2 saves of 19.8 s"
    )
    assert cost.written_bytes == 1204 * PARAMETERS
    values = json.loads(json.dumps(cost.to_dict()))
    assert values["life_share"] == figures.wear.share
    never = estimate(tiny_llama(), RunShape(num_steps=100))
    assert (
        run_cost(never, 1, step_s=1.0, read_bytes_per_s=1e9, write_bytes_per_s=1e9)
        .text()
        .endswith("about 1 min 40 s with no saves")
    )


def test_estimate_of_an_adapter() -> None:
    text = estimate(lora(), RunShape()).text()
    assert "6.14k parameters, 6.50 MB frozen" in text
    assert "per parameter" not in text
