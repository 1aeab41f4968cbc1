"""bf16 compute over exact float32 masters.

What can be said exactly is asserted exactly: the export of a bf16 checkpoint is the stated rounding of the
masters. Against the in-memory reference (same masters, same rounding, bf16 modules) only the order of
sums differs: the head works on chunks of tokens, the embedding on the batch's rows. A bf16 number has 8 bits,
so one rounding that falls the other way changes an activation by 2^-8 of itself.

The tolerance is twice the distance of two honest runs, the reference with the same windows cut into
other micro-batches: losses up to 1.8e-3 apart, gradient norms 1.0e-2 relative (mixtral 5e-3 and 1.2e-2:
there a rounding can send a token to another expert). For weights, Adam turns a gradient that is mostly noise into
a full step, so single elements may differ by as much as they moved; what must agree is the movement as a
whole (`_movement_error`): honest runs differ by 0.02 (mixtral 0.12), weights without masters by about 1.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.equality.harness import NUM_ROWS, TRAINING, assert_close, stream
from tests.equality.reference import round_half_up, train_in_memory
from tests.toy import make_checkpoint, make_rows

# grouped matrix products in bf16 want rows of multiples of 16 bytes
SIZES = {"mixtral": {"intermediate_size": 40}}

TOLERANCE = (4e-3, 2e-2, 0.05)
TOLERANCE_MOE = (1e-2, 2.5e-2, 0.25)
"""Loss (absolute), gradient norm (relative), movement."""


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "gpt2", "mixtral"])
def test_bf16_follows_the_reference(tmp_path: Path, arch: str, method: str) -> None:
    sizes = SIZES.get(arch, {})
    model_dir = make_checkpoint(tmp_path / "model", arch, dtype="bfloat16", **sizes)
    rows = make_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    settings = {"dtype": "bf16", "method": method, "max_grad_norm": 2.5}
    reference = train_in_memory(model_dir, rows, TRAINING | settings)
    streamed = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", settings)
    assert streamed.series("learned_tokens") == reference.learned_tokens
    loss_atol, norm_rtol, movement = TOLERANCE_MOE if arch == "mixtral" else TOLERANCE
    assert_close("losses", streamed.series("loss"), reference.losses, atol=loss_atol)
    assert_close("norms", streamed.series("grad_norm"), reference.grad_norms, rtol=norm_rtol)
    state = streamed.state()
    assert sorted(state) == sorted(reference.state)
    if method == "lora":  # the export of a full run is rounded to bf16: see the next test
        assert _movement_error(state, reference.state, reference.initial) < movement


def test_small_steps_reach_the_masters(tmp_path: Path) -> None:
    """At 1e-5, a fiftieth of what bf16 can hold, weights without masters would hardly ever move."""
    model_dir = make_checkpoint(tmp_path / "model", "llama")  # float32: the export is the masters
    rows = make_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    settings = {"dtype": "bf16", "learning_rate": 1e-5, "weight_decay": 0.0}
    reference = train_in_memory(model_dir, rows, TRAINING | settings)
    streamed = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", settings)
    assert _movement_error(streamed.state(), reference.state, reference.initial) < 0.05


def test_export_rounds_the_masters_half_up(tmp_path: Path) -> None:
    """The same values once as a bf16 and once as a float32 checkpoint: same run, export rounded or exact."""
    rounded_dir = make_checkpoint(
        tmp_path / "bf16", "mixtral", dtype="bfloat16", **SIZES["mixtral"]
    )
    exact_dir = _widen(rounded_dir, tmp_path / "fp32")
    make_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    settings = {"dtype": "bf16", "max_steps": 5}
    rounded = stream(rounded_dir, tmp_path / "rows.jsonl", tmp_path / "out", settings)
    exact = stream(exact_dir, tmp_path / "rows.jsonl", tmp_path / "out-exact", settings)
    assert rounded.series("loss") == exact.series("loss")
    masters = load_file(exact.output_dir / "model.safetensors")
    for name, tensor in load_file(rounded.output_dir / "model.safetensors").items():
        assert tensor.dtype == torch.bfloat16, name
        assert masters[name].dtype == torch.float32, name
        assert torch.equal(tensor, round_half_up(masters[name])), name


def _widen(source: Path, target: Path) -> Path:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(target)
    return target


def _movement_error(
    got: dict[str, Tensor], wanted: dict[str, Tensor], initial: dict[str, Tensor]
) -> float:
    """Return the distance of two results as a share of the distance that the wanted one moved."""
    miss = sum((got[name] - wanted[name]).square().sum().item() for name in wanted)
    moved = sum((wanted[name] - initial[name]).square().sum().item() for name in wanted)
    return (miss / moved) ** 0.5
