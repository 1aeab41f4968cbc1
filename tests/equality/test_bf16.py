"""bf16 compute over exact float32 masters.

What can be said exactly is asserted exactly: the export of a bf16 checkpoint is the stated rounding of the
masters. The in-memory reference has the same masters and the same rounding and runs the same modules on the
same micro-batches; only the order of some float32 sums differs, for the head works on chunks of tokens. Mostly
that changes nothing (losses equal to 5e-7 were seen), but once in a while it may tip a rounding to bf16,
and one such flip changes an activation by 2^-8 of itself.

So the tolerance is what one must be able to tell apart. The reference with the same windows cut into other
micro-batches, an honest bf16 run that rounds elsewhere, is 0.7e-3 to 6e-3 away in losses, 1.3e-3 to 3e-2 in
norms and 0.012 to 0.05 in movement; one without bf16 at all is as far, one without masters at 1.0. The
limits below are at or under the smallest of these. Movement: Adam turns a gradient that is mostly noise
into a full step, so single weights say little; `_movement_error` compares the change of all of them.

Adapters, whose few numbers pass everything on, magnify a flip: a run has the reference's very bits for 4 to 30 steps, then a
flip, and is up to 3e-3 away in losses and 6e-3 in norms within ten steps. So their first steps are held to the bits.
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

LOSS_ATOL = 7e-4
NORM_RTOL = 1e-3
MOVEMENT = 0.01
ADAPTER_LOSS_ATOL, ADAPTER_NORM_RTOL = 4e-3, 8e-3
EXACT_STEPS = 3
"""Steps before the earliest flip that was seen; two of them after an update."""


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
    lora = method == "lora"
    losses, norms = streamed.series("loss"), streamed.series("grad_norm")
    loss_atol, norm_rtol = LOSS_ATOL, NORM_RTOL
    if lora:
        loss_atol, norm_rtol = ADAPTER_LOSS_ATOL, ADAPTER_NORM_RTOL
        first = slice(0, EXACT_STEPS)
        assert_close("first losses", losses[first], reference.losses[first], atol=2e-6)
        assert_close("first norms", norms[first], reference.grad_norms[first], rtol=1e-6)
    assert_close("losses", losses, reference.losses, atol=loss_atol)
    assert_close("norms", norms, reference.grad_norms, rtol=norm_rtol)
    state = streamed.state()
    assert sorted(state) == sorted(reference.state)
    if lora:  # the export of a full run is rounded to bf16: see the next test
        assert _movement_error(state, reference.state, reference.initial) < MOVEMENT


def test_small_steps_reach_the_masters(tmp_path: Path) -> None:
    """At 1e-5, a fiftieth of what bf16 can hold, weights without masters would hardly ever move."""
    model_dir = make_checkpoint(tmp_path / "model", "llama")  # float32: the export is the masters
    rows = make_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    settings = {"dtype": "bf16", "learning_rate": 1e-5, "weight_decay": 0.0}
    reference = train_in_memory(model_dir, rows, TRAINING | settings)
    streamed = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", settings)
    assert _movement_error(streamed.state(), reference.state, reference.initial) < MOVEMENT


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_export_rounds_the_masters_half_up(tmp_path: Path, compute: str) -> None:
    """The same values once as a bf16 and once as a float32 checkpoint: same run, export rounded or exact.

    The vocabulary is large so that some of the million masters lie just between two bf16 numbers.
    """
    sizes = SIZES["mixtral"] | {"vocab_size": 20_000}
    rounded_dir = make_checkpoint(tmp_path / "bf16", "mixtral", dtype="bfloat16", **sizes)
    exact_dir = _widen(rounded_dir, tmp_path / "fp32")
    make_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    settings = {"dtype": compute, "max_steps": 4}
    rounded = stream(rounded_dir, tmp_path / "rows.jsonl", tmp_path / "out", settings)
    exact = stream(exact_dir, tmp_path / "rows.jsonl", tmp_path / "out-exact", settings)
    assert rounded.series("loss") == exact.series("loss")
    masters = load_file(exact.output_dir / "model.safetensors")
    to_even = 0
    for name, tensor in load_file(rounded.output_dir / "model.safetensors").items():
        assert tensor.dtype == torch.bfloat16, name
        assert masters[name].dtype == torch.float32, name
        assert torch.equal(tensor, round_half_up(masters[name])), name
        to_even += int((tensor != masters[name].bfloat16()).sum())
    assert to_even > 0, "no tie among the masters: this test cannot tell the roundings apart"


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
