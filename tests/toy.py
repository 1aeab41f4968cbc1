"""Real Hugging Face checkpoints, tokenizers and pre-tokenized rows at toy size.

Sizes are odd on purpose (hidden 40 or 48, feed-forward 84, vocabulary 131) so that no tensor fills whole
blocks of a drive. Every parameter gets noise, so that norms differ from 1, biases from 0, and a wrong update
of any of them shows in the losses. Nothing here trains; `tests.equality.reference` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 131
PAD, BOS, EOS = 0, 1, 2

_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA_LIKE, "attention_bias": True},
    "qwen2": {**_LLAMA_LIKE, "num_hidden_layers": 4},
    "qwen3": {**_LLAMA_LIKE, "head_dim": 12},
    "mistral": {**_LLAMA_LIKE, "head_dim": 10, "sliding_window": 5},
    "gemma2": {**_LLAMA_LIKE, "head_dim": 12, "query_pre_attn_scalar": 14, "sliding_window": 5,
               "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0,
               "num_hidden_layers": 4},
    "gemma3_text": {**_LLAMA_LIKE, "head_dim": 12, "query_pre_attn_scalar": 14,
                    "sliding_window": 5, "num_hidden_layers": 4,
                    "layer_types": ["sliding_attention", "full_attention"] * 2,
                    "rope_parameters": {
                        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
                        "full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "gpt2": {"n_embd": 40, "n_head": 4, "n_layer": 3, "n_inner": 84, "n_positions": 64,
             "scale_attn_by_inverse_layer_idx": True,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"hidden_size": 40, "ffn_dim": 84, "num_hidden_layers": 3, "num_attention_heads": 4,
            "word_embed_proj_dim": 28, "max_position_embeddings": 64,
            "dropout": 0.0, "attention_dropout": 0.0},
    "gpt_neox": {"hidden_size": 48, "intermediate_size": 84, "num_hidden_layers": 3,
                 "num_attention_heads": 3, "max_position_embeddings": 64},
    "mixtral": {**_LLAMA_LIKE, "intermediate_size": 36, "num_local_experts": 5,
                "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {**_LLAMA_LIKE, "head_dim": 12, "moe_intermediate_size": 28, "num_experts": 6,
                  "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "gpt_oss": {**_LLAMA_LIKE, "head_dim": 12, "intermediate_size": 36, "num_local_experts": 4,
                "num_experts_per_tok": 2, "sliding_window": 5, "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                                    "original_max_position_embeddings": 16}},
    "phi3": {**_LLAMA_LIKE, "original_max_position_embeddings": 64, "sliding_window": 5},
    "olmo2": _LLAMA_LIKE,
    "bloom": {"hidden_size": 40, "n_layer": 3, "n_head": 4},
    "falcon": {"hidden_size": 40, "ffn_hidden_size": 84, "num_hidden_layers": 3,
               "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True,
               "max_position_embeddings": 64},
}  # fmt: skip
"""Configuration overrides that make each architecture small."""


def make_checkpoint(
    folder: Path,
    arch: str,
    *,
    tied: bool | None = None,
    seed: int = 0,
    dtype: str = "float32",
    sharded: bool = False,
    **config_overrides: Any,
) -> Path:
    """Save a small random model as `save_pretrained` does, and a tokenizer that pads on the right.

    Args:
        folder: Where it goes; made if missing.
        arch: A key of `ARCHITECTURES` (transformers' `model_type`).
        tied: Whether embedding and head are one parameter; None keeps the architecture's default.
        dtype: "float32" or "bfloat16"; the parameters are drawn in float32 and then rounded.
        sharded: Split the weights over several safetensors files with an index.
        config_overrides: Further fields of the model's configuration.

    Returns:
        `folder`.
    """
    fields = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    fields |= ARCHITECTURES[arch] | config_overrides
    if tied is not None:
        fields["tie_word_embeddings"] = tied
    config = AutoConfig.for_model(arch, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.06)
    model.to(getattr(torch, dtype)).save_pretrained(
        folder, max_shard_size="30KB" if sharded else "1GB"
    )
    make_tokenizer(folder, vocab_size=config.vocab_size)
    return folder


def make_tokenizer(folder: Path, *, padding_side: str = "right", vocab_size: int = VOCAB) -> Path:
    """Save a word-level tokenizer ("w7" is token 7) that pads on the given side."""
    words = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}
    words |= {f"w{index}": index for index in range(len(words), vocab_size)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side=padding_side,
    )
    tokenizer.save_pretrained(folder)
    return folder


def make_rows(
    path: Path,
    n: int,
    vocab: int = VOCAB,
    lengths: tuple[int, int] = (4, 14),
    seed: int = 0,
    mask_some_labels: bool = True,
) -> list[dict[str, list[int]]]:
    """Write `n` tokenized rows as jsonl (columns `input_ids` and `labels`) and return them.

    Every id may occur, the padding token too: a mask made by comparing ids would be wrong. The first label
    of a row is always masked, for nothing precedes it.

    Args:
        lengths: Shortest and longest row, in tokens.
        mask_some_labels: Mask a prefix of some rows and a few single labels.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows = []
    for index in range(n):
        length = draw(lengths[0], lengths[1] + 1)
        ids = [draw(0, vocab) for _ in range(length)]
        labels = [-100, *ids[1:]]
        if mask_some_labels and index % 3 == 0:
            prefix = draw(1, length - 1)
            labels[:prefix] = [-100] * prefix
        if mask_some_labels and index % 4 == 1:
            labels[draw(1, length - 1)] = -100
        rows.append({"input_ids": ids, "labels": labels})
    write_rows(path, rows)
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, Sequence[int]]]) -> Path:
    """Write rows as jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
