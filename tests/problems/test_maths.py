"""Rows packed into one sequence: each learns as if it were alone, or packing is refused for the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssdtune.errors import MismatchError, UnsupportedModelError
from ssdtune.train import prepare
from tests.equality.harness import TRAINING, assert_close, stream
from tests.equality.reference import train_in_memory
from tests.toy import ARCHITECTURES, make_checkpoint, make_rows

LEAKING = {
    "bloom": "takes no position_ids",
    "opt": "does not mask earlier rows",
    "gpt_oss": "does not mask earlier rows",
}
"""What transformers makes of positions that start again: these models attend to the rows before."""

WINDOW = {
    "gradient_accumulation_steps": 100,
    "num_train_epochs": 1,
    "warmup_steps": 0,
    "learning_rate": 3e-3,
}
"""All rows in one step, so that only how they share sequences differs."""


@pytest.mark.parametrize(
    "arch, side",
    [(arch, "left") for arch in ("llama", "gemma2", "gpt2", "qwen3_moe")]
    + [
        (arch, "right")
        for arch in (
            "qwen2",
            "qwen3",
            "mistral",
            "gemma3_text",
            "gpt_neox",
            "mixtral",
            "phi3",
            "olmo2",
            "falcon",
        )
    ],
)
def test_packed_rows_learn_as_if_alone(tmp_path: Path, arch: str, side: str) -> None:
    model_dir = make_checkpoint(tmp_path / "model", arch)
    rows = make_rows(tmp_path / "rows.jsonl", 6)
    reference = train_in_memory(model_dir, rows, TRAINING | WINDOW)
    packed = {"packing": True, "max_length": 32, "padding_side": side, "verify": True}
    run = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", TRAINING | WINDOW | packed)
    assert_close("losses", run.series("loss"), reference.losses, atol=2e-5)
    assert_close("norms", run.series("grad_norm"), reference.grad_norms, rtol=1e-5)


def test_every_architecture_is_dealt_with() -> None:
    tested = {arch for arch, _ in test_packed_rows_learn_as_if_alone.pytestmark[0].args[1]}
    assert tested | set(LEAKING) == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", LEAKING)
def test_packing_is_refused_where_rows_would_see_each_other(tmp_path: Path, arch: str) -> None:
    model_dir = make_checkpoint(tmp_path / "model", arch)
    make_rows(tmp_path / "rows.jsonl", 6)
    with pytest.raises(UnsupportedModelError) as caught:
        stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", {"packing": True})
    text = str(caught.value)
    assert text.startswith(f"{arch} {LEAKING[arch]}")
    assert "packing: false" in text
    assert not (tmp_path / "out").exists()


def test_verification_would_notice_rows_that_see_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "refuse_leaking_rows", lambda blocks: None)
    model_dir = make_checkpoint(tmp_path / "model", "opt")
    make_rows(tmp_path / "rows.jsonl", 6)
    settings = {"packing": True, "max_length": 32, "verify": True}
    with pytest.raises(MismatchError, match="transformers computes"):
        stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", settings)
    assert not list(tmp_path.glob("out/*.safetensors"))
