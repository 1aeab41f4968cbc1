"""The check that stands in where a model is too large to be compared itself."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from ssdtune.data.batches import Batch
from ssdtune.errors import MismatchError
from ssdtune.model.blocks import BlockModel
from ssdtune.train.reduced import reduced_config
from ssdtune.train.verify import compare_reduced
from tests.toy import ARCHITECTURES, VOCAB, make_checkpoint


def _prepared(config: Any) -> Any:
    return SimpleNamespace(built=SimpleNamespace(model=SimpleNamespace(config=config), keymap=None))


def _batch() -> Batch:
    ids = np.random.default_rng(0).integers(3, VOCAB, (2, 11))
    mask = np.ones_like(ids)
    mask[0, :4] = 0
    labels = np.where(mask == 1, ids, -100)
    return Batch(ids, mask, labels, [0, 1])


def _levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records if record.name.startswith("ssdtune")]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_copy_in_pieces_gives_the_loss_of_transformers(
    arch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = AutoConfig.from_pretrained(make_checkpoint(tmp_path / "model", arch))
    with caplog.at_level(logging.INFO, logger="ssdtune.train.verify"):
        compare_reduced(_prepared(config), _batch())
    assert _levels(caplog) == ["INFO"]
    assert "a shape-reduced copy" in caplog.text


@pytest.mark.parametrize(
    "model_type", ["llama", "gemma3_text", "falcon", "bloom", "mpt", "qwen3_moe", "gpt_oss"]
)
def test_full_size_architectures_are_reduced_and_compared(
    model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = AutoConfig.for_model(model_type)
    reduced = reduced_config(config)
    assert reduced.get_text_config().num_hidden_layers <= 6
    assert (
        reduced.get_text_config().hidden_size < config.get_text_config().hidden_size
        or model_type == "bloom"
    )
    with caplog.at_level(logging.INFO, logger="ssdtune.train.verify"):
        compare_reduced(_prepared(config), _batch())
    assert _levels(caplog) == ["INFO"]


def test_a_wrong_piece_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.from_pretrained(make_checkpoint(tmp_path / "model", "mistral"))
    original = BlockModel.run_block

    def without_mask(
        self: BlockModel, number: int, tensors: Any, call: Any, hidden: torch.Tensor
    ) -> Any:
        call.kwargs["attention_mask"] = None
        return original(self, number, tensors, call, hidden)

    monkeypatch.setattr(BlockModel, "run_block", without_mask)
    with pytest.raises(MismatchError, match="a shape-reduced copy"):
        compare_reduced(_prepared(config), _batch())
