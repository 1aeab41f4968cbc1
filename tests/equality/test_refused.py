"""Models that cannot be trained block by block are refused by name, before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from ssdtune.errors import UnsupportedModelError
from tests.equality.harness import stream
from tests.toy import ARCHITECTURES, VOCAB, make_checkpoint, make_rows

_TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = ARCHITECTURES["llama"]

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    # name: (architecture, configuration, what the message must say)
    "layer-drop": ("opt", {**ARCHITECTURES["opt"], "layerdrop": 0.1}, "layer"),
    "router-loss": ("mixtral", {**ARCHITECTURES["mixtral"], "output_router_logits": True}, "router"),
    "shared-keys-and-values": (
        "gemma3n_text",
        {**_LLAMA, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 12,
         "intermediate_size": [84] * 4, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
         "vocab_size_per_layer_input": VOCAB, "sliding_window": 5,
         "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
        "gemma3n",
    ),
    "shared-parameters": (
        "zamba2",
        {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "mamba_ngroups": 1,
         "n_mamba_heads": 4, "mamba_d_state": 8, "intermediate_size": 84, "num_mem_blocks": 1,
         "adapter_rank": 4, "hybrid_layer_ids": [1, 3], "attention_head_dim": 24,
         "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
        "zamba2",
    ),
    "encoder-decoder": (
        "t5",
        {"d_model": 40, "d_kv": 10, "d_ff": 84, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
        "encoder-decoder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("case", CASES)
def test_refused_by_name(tmp_path: Path, case: str, method: str) -> None:
    arch, fields, expected = CASES[case]
    model_dir = _save(tmp_path / "model", arch, fields)
    make_rows(tmp_path / "rows.jsonl", 5)
    with pytest.raises(UnsupportedModelError) as caught:
        stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", {"method": method})
    message = str(caught.value)
    assert arch.removesuffix("_text") in message
    assert expected in message
    assert "\n" not in message
    assert caught.value.exit_code == 2
    left = [path for path in tmp_path.glob("out/**/*") if path.is_file()]
    assert not [path for path in left if path.suffix == ".safetensors" or "swap" in path.parts]


def _save(folder: Path, arch: str, fields: dict[str, Any]) -> Path:
    if arch in ARCHITECTURES:
        return make_checkpoint(folder, arch, **fields)
    config = AutoConfig.for_model(arch, **_TOKENS, **fields)
    auto = AutoModelForSeq2SeqLM if arch == "t5" else AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    return folder
