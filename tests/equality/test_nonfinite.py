"""Values that are not finite: the run says where they began, and stops, or leaves out what in-memory training leaves out.

They come from weights: an infinite one in some block, or one so large that the gradient of a norm overflows wherever a
certain token is read.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssdtune.errors import FormatError, MismatchError, SsdtuneError
from ssdtune.train import nonfinite
from tests.equality.harness import (
    ATOL,
    TRAINING,
    Streamed,
    assert_close,
    assert_same_bits,
    hash_folder,
    stream,
)
from tests.equality.reference import train_in_memory
from tests.toy import make_checkpoint, make_rows, write_rows

RARE = 77
"""A token that one row has."""
ROW, STEP = 9, 2
"""That row, counted from 0: the second of the first micro-batch of two, of the third step."""
LARGE = 3e38
"""As one element: its square is infinite, as is its double, so that the gradient of its norm is NaN; what goes forward is
finite, even in sum."""
SETTINGS: dict[str, Any] = {"max_steps": 5, "weight_decay": 0.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", "llama", tied=False)
    rows = make_rows(tmp_path / "rows.jsonl", 20)
    for row in rows:
        row["input_ids"] = [token if token != RARE else 5 for token in row["input_ids"]]
        row["labels"] = [label if label != RARE else 5 for label in row["labels"]]
    rows[ROW]["input_ids"][2] = RARE
    write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path


def put(folder: Path, name: str, row: int, value: float) -> None:
    """Give the third element of one row of a weight another value."""
    path = folder / "model/model.safetensors"
    weights = load_file(path)
    weights[name][row, 2] = value
    save_file(weights, path, metadata={"format": "pt"})


def run(folder: Path, name: str, **settings: Any) -> Streamed:
    return stream(folder / "model", folder / "rows.jsonl", folder / name, SETTINGS | settings)


def rows_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


EMBEDDING = "model.embed_tokens.weight"
CASES: dict[str, tuple[float, dict[str, Any], str]] = {
    "deferred": (LARGE, {"clipping": "deferred"}, "the gradient of the last block's output is not finite (its sum is nan)"),
    "speculative": (
        LARGE, {"clipping": "speculative"}, "the gradient of the last block's output is not finite (its sum is nan)",
    ),
    "not clipped": (
        LARGE, {"max_grad_norm": 0, "host_cache": "1GiB"},
        "the gradient of the last block's output is not finite (its sum is nan)",
    ),
    "lora": (float("inf"), {"method": "lora"}, "the embedding's output is not finite (its sum is inf)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_left_out_as_in_memory(folder: Path, case: str) -> None:
    value, settings, what = CASES[case]
    put(folder, EMBEDDING, RARE, value)
    settings = SETTINGS | settings
    wanted = train_in_memory(folder / "model", rows_of(folder), TRAINING | settings)
    assert wanted.skipped == [STEP]
    ours = run(folder, "ours", non_finite="skip", **settings)
    assert ours.series("skipped") == [step == STEP for step in range(5)]
    assert ours.series("not_finite")[STEP].startswith(
        f"{what} in micro-batch 1 of 2 (line {ROW + 1} of rows.jsonl)"
    )
    others = [step for step in range(5) if step != STEP]
    for name, got, reference in (
        ("losses", ours.series("loss"), wanted.losses),
        ("norms", ours.series("grad_norm"), wanted.grad_norms),
    ):
        assert_close(
            name, [got[n] for n in others], [reference[n] for n in others], atol=ATOL, rtol=1e-5
        )
    for name, tensor in ours.state().items():
        assert torch.allclose(tensor, wanted.state[name], rtol=0, atol=ATOL), name


def test_a_run_that_stopped_goes_on_with_skipping(folder: Path) -> None:
    """Nothing of the step is in the checkpoint, whatever was updated before it was found out."""
    put(folder, EMBEDDING, RARE, LARGE)
    whole = run(folder, "whole", non_finite="skip", save_steps=0)
    with pytest.raises(SsdtuneError) as caught:
        run(folder, "cut", save_steps=2, max_grad_norm=0, clipping="auto")
    assert str(caught.value).startswith(f"step {STEP + 1}: the gradient of the last block's output")
    with pytest.raises(SsdtuneError, match="no checkpoint holds anything of this step"):
        run(folder, "stopped", save_steps=2)
    before = hash_folder(folder / "stopped/checkpoint-2")
    again = run(
        folder, "stopped", save_steps=2, save_total_limit=3, non_finite="skip", resume_from_checkpoint="last"
    )  # fmt: skip
    assert hash_folder(folder / "stopped/checkpoint-2") == before
    assert_same_bits(again, whole)


@pytest.mark.parametrize("settings", [{}, {"method": "lora", "host_cache": "1GiB"}])
def test_weights_that_are_not_finite_are_named(folder: Path, settings: dict[str, Any]) -> None:
    weight = "model.layers.1.mlp.down_proj.weight"
    put(folder, weight, 3, float("inf"))
    with pytest.raises(SsdtuneError) as caught:
        run(folder, "out", max_grad_norm=0, **settings)
    message = str(caught.value)
    assert message.startswith("step 1: the output of block 1 (model.layers.1) is not finite")
    assert f"weights are not finite themselves: {weight}" in message.replace(".base_layer", "")
    assert "intact copy" in message
    gc.collect()
    alive = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    assert not [tensor for tensor in alive if tensor.grad_fn is not None], "graphs are left"
    with pytest.raises(MismatchError, match=r"is not finite .*: the output of block 1 .*down_proj"):
        run(folder, "compared", verify=True, **settings)


def test_weights_whose_values_attention_swallows_are_named(folder: Path) -> None:
    """Without padding torch's attention on a CPU makes finite values of queries that are not: only gradients tell."""
    weight = "model.layers.0.self_attn.q_proj.weight"
    put(folder, weight, 3, float("nan"))
    with pytest.raises(
        SsdtuneError, match=rf"not finite themselves: {weight}\. .* Train an intact"
    ):
        run(folder, "out", max_grad_norm=0, per_device_train_batch_size=1)


def test_halves_of_masters_are_made_of_finite_weights(folder: Path) -> None:
    put(folder, "model.layers.1.mlp.down_proj.weight", 3, float("nan"))
    with pytest.raises(
        FormatError, match=r'model\.safetensors: .*in tensor "model.layers.1.mlp.down_proj.weight"'
    ):
        run(folder, "out", dtype="bf16")


def test_steps_skipped_in_a_row_end_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the run is resumed between them."""
    monkeypatch.setattr(nonfinite, "MOST_IN_A_ROW", 3)
    put(folder, "model.layers.0.mlp.down_proj.weight", 3, float("inf"))
    settings = {"method": "lora", "non_finite": "skip", "save_steps": 1}
    for more in ({}, {"resume_from_checkpoint": "last"}):
        with pytest.raises(SsdtuneError, match=r"3 steps one after the other.*output of block 0"):
            run(folder, "out", **settings, **more)
        assert (folder / "out/checkpoint-2").exists()
