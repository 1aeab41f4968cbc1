"""Blocks of real architectures, built from a configuration alone, run forward and backward."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ssdtune.device import open_device
from ssdtune.errors import ConfigError, SsdtuneError
from ssdtune.hardware.blocks import digest_of, measure_blocks
from ssdtune.hardware.figures import BlockProfile

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def block_of(folder: Path, config: dict[str, Any], **options: Any) -> BlockProfile:
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"tokens": (8,), "seconds": 0.0, "device": open_device("cpu"), **options}
    (block,) = measure_blocks(str(folder), **settings)
    return block


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [
        (LLAMA, 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 64, None),
        (MIXTRAL, 3072 + 4 * 32 + 64 + 4 * 4608, 3072 + 4 * 32 + 64 + 2 * 4608),
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}, 12 * 32**2 + 13 * 32, None),
    ],
    ids=["llama", "mixtral", "gpt2"],
)  # fmt: skip
def test_blocks(
    tmp_path: Path, config: dict[str, Any], parameters: int, active: int | None
) -> None:
    block = block_of(tmp_path, config)
    assert block.notes == ()
    assert (block.parameters, block.active_parameters) == (parameters, active or parameters)
    assert block.hidden_size == 32
    assert [point.dtype for point in block.points] == ["fp32", "bf16"]
    for point in block.points:
        assert point.tokens == 8
        assert point.forward_flop == 2 * block.active_parameters * 8 + 4 * 8 * 32 * 8
        assert point.forward_flop_per_s == point.forward_flop / point.forward_s
        assert point.backward_flop_per_s == 2 * point.forward_flop / point.backward_s


def test_the_most_frequent_kind_is_measured(tmp_path: Path) -> None:
    from transformers import DeepseekV3Config

    values = DeepseekV3Config(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=4, first_k_dense_replace=1,
        n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        vocab_size=64,
    ).to_dict()  # fmt: skip
    block = block_of(tmp_path, values)
    assert block.active_parameters < block.parameters  # its first block has no experts


def test_sequences_of_512(tmp_path: Path) -> None:
    block = block_of(tmp_path, LLAMA, tokens=(1024,))
    assert {(point.sequences, point.sequence) for point in block.points} == {(2, 512)}


def test_what_takes_too_long_is_left_out(tmp_path: Path) -> None:
    ticks = itertools.count()
    block = block_of(tmp_path, LLAMA, tokens=(8, 16), seconds=1, clock=lambda: float(next(ticks)))
    assert [(point.dtype, point.tokens) for point in block.points] == [("fp32", 8), ("bf16", 8)]
    assert block.notes[0] == "fp32: micro-batches from 16 tokens on would take too long to measure"


def test_what_does_not_fit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ssdtune.device.base import DeviceMemory
    from ssdtune.device.cpu import CpuDevice

    # 7744 parameters: 61952 bytes of weights and gradients in fp32, 30976 in bf16; half of the memory may be taken.
    monkeypatch.setattr(CpuDevice, "memory", lambda self: DeviceMemory(200_000, 100_000, 0))
    block = block_of(tmp_path, LLAMA)
    assert [point.dtype for point in block.points] == ["bf16"]
    assert block.notes == ("fp32: not measured, weights and gradients take 60.5 KiB",)


@pytest.mark.parametrize("config", [{"model_type": "no such model"}, {}, {"model_type": "t5"}])
def test_what_cannot_be_built(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(SsdtuneError, match=r"transformers cannot|t5 is an encoder-decoder"):
        block_of(tmp_path, config)


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1, "b": 2}')
    (tmp_path / "other.json").write_text('{"b": 2,\n "a": 1}')
    assert digest_of(str(tmp_path)) == digest_of(str(tmp_path / "other.json"))
    assert digest_of(None) == ["small", "medium"]
    (tmp_path / "other.json").write_text('{"b": 3, "a": 1}')
    assert digest_of(str(tmp_path)) != digest_of(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match=r"Name a model folder or its config\.json"):
        digest_of(str(tmp_path / "missing"))
