"""The models and rows that are trained: sizes as plain numbers, and a script that writes a random checkpoint.

    python tools/bench/models.py 0.13B FOLDER

Imports torch only as a script: whoever starts the runs stays small, for the kernel counts the memory of a parent that
forks as the child's.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

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


def make_model(folder: Path, size: Size) -> None:
    """Write a checkpoint with random bf16 weights in the layout of transformers."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.blocks,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in model.named_parameters():
        weight = torch.ones(parameter.shape, dtype=torch.bfloat16)
        if weight.ndim > 1:
            weight.normal_(0, 0.02, generator=generator)
        weights[name] = weight
    assert sum(weight.numel() for weight in weights.values()) == size.parameters
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(partial)
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    partial.rename(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a random llama checkpoint.")
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make_model(arguments.folder, SIZES[arguments.size])
