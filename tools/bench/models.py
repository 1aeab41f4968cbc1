"""The models and rows that are trained: sizes as plain numbers, and a script that writes a random checkpoint.

    python tools/bench/models.py 0.13B FOLDER

A script of its own, for whoever starts the runs must stay small: the kernel counts the memory of a parent that forks as the
child's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FIRST_ID = 3
"""Smaller ids are special tokens."""


@dataclass(frozen=True)
class Size:
    """A llama's sizes; embedding and head are not tied."""

    hidden: int
    inner: int
    blocks: int
    heads: int
    key_value_heads: int
    vocabulary: int = 32000

    @property
    def block_parameters(self) -> int:
        keys = self.hidden // self.heads * self.key_value_heads
        matrices = 2 * self.hidden**2 + 2 * self.hidden * keys + 3 * self.hidden * self.inner
        return matrices + 2 * self.hidden

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.blocks * self.block_parameters + 2 * self.head_parameters + self.hidden


SIZES = {
    "tiny": Size(64, 128, 3, 4, 2, vocabulary=512),
    "small": Size(384, 1024, 8, 6, 6, vocabulary=8192),
    "0.13B": Size(768, 2048, 12, 12, 12),
    "0.37B": Size(1024, 2816, 24, 16, 16),
    "1.1B": Size(2048, 5632, 22, 32, 4),
}


def write_rows(path: Path, rows: int, length: int, vocabulary: int) -> None:
    """Write rows of random tokens, all of one length, already tokenized."""
    chance = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            ids = [chance.randrange(FIRST_ID, vocabulary) for _ in range(length)]
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")


def tensors(size: Size) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint, by the names that transformers gives them."""
    hidden, inner = size.hidden, size.inner
    keys = hidden // size.heads * size.key_value_heads
    block = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    ends = (size.vocabulary, hidden)
    return {
        "model.embed_tokens.weight": ends,
        **{
            f"model.layers.{number}.{name}.weight": shape
            for number in range(size.blocks)
            for name, shape in block.items()
        },
        "model.norm.weight": (hidden,),
        "lm_head.weight": ends,
    }


def config(size: Size) -> dict[str, Any]:
    """Return the checkpoint's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": size.hidden, "intermediate_size": size.inner, "num_hidden_layers": size.blocks,
        "num_attention_heads": size.heads, "num_key_value_heads": size.key_value_heads,
        "vocab_size": size.vocabulary, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip


def make_model(folder: Path, size: Size) -> None:
    """Write a checkpoint with random bf16 weights, one tensor in memory at a time."""
    shapes, header, end = tensors(size), {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    assert end == 2 * size.parameters
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    (partial / "config.json").write_text(json.dumps(config(size), indent=2), encoding="utf-8")
    chance = np.random.default_rng(0)
    with (partial / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            values = np.ones(shape, np.float32)  # norms
            if len(shape) > 1:
                values = chance.standard_normal(shape, np.float32) * np.float32(0.02)
            file.write((values.view(np.uint32) >> 16).astype("<u2").data)  # cut to bf16
    partial.rename(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a random llama checkpoint.")
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make_model(arguments.folder, SIZES[arguments.size])
