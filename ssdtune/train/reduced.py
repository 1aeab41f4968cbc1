"""A shape-reduced copy of an architecture: small enough for any memory, with every kind of its blocks.

Where a model is too large for even one block to run in memory beside the stream, this copy is taken apart as the
model is and compared with transformers instead. Its weights are random; masks, positions, per-layer
arguments, head and scaling are the architecture's own. Used by `ssdtune.train.verify`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from ssdtune.model.blocks import BlockModel
from ssdtune.model.build import BuiltModel
from ssdtune.model.loss import IGNORED, loss_by_chunks

if TYPE_CHECKING:
    from ssdtune.model.keys import KeyMap

MAX_BLOCKS = 6
"""Enough for the repeating patterns of block kinds (five sliding windows to one full attention)."""
INNER_SIZE = 64


def reduced_config(config: Any) -> Any:
    """Return a copy of a model configuration with few, narrow blocks; the vocabulary and head size stay."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    hidden, heads = text.hidden_size, text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None)
    head_size = getattr(text, "head_dim", None) or hidden // heads
    new_heads = max(2, heads // groups) if groups else 2
    for name, value in {
        "num_hidden_layers": min(text.num_hidden_layers, MAX_BLOCKS),
        "num_attention_heads": new_heads,
        "num_key_value_heads": new_heads // max(1, heads // groups) if groups else None,
        "hidden_size": new_heads * head_size,
        "word_embed_proj_dim": new_heads * head_size,
        "intermediate_size": INNER_SIZE,
        "ffn_dim": INNER_SIZE,
        "n_inner": INNER_SIZE,
        "ffn_hidden_size": INNER_SIZE,
        "moe_intermediate_size": INNER_SIZE,
    }.items():
        if getattr(text, name, None) is not None and value is not None:
            setattr(text, name, value)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), max(4, text.num_experts_per_tok)))
    for name in ("layer_types", "attention_layers", "mlp_layer_types"):
        if isinstance(getattr(text, name, None), list):
            setattr(text, name, getattr(text, name)[: text.num_hidden_layers])
    return config


def loss_in_pieces(
    model: Any, keymap: KeyMap, batch: dict[str, torch.Tensor], labels: torch.Tensor
) -> float:
    """Return the mean loss of a model in memory, run block by block; the model is left taken apart.

    Args:
        batch: What its forward takes, [B, S].
        labels: Not shifted, [B, S].
    """
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    built = BuiltModel(model, None, keymap, frozenset(), frozenset())
    blocks = BlockModel(built, torch.device("cpu"))
    blocks.train(False)
    with torch.no_grad():
        entry = blocks.enter(weights, batch, trained=False)
        hidden = entry.hidden
        for number, call in enumerate(entry.calls):
            hidden = blocks.run_block(number, weights, call, hidden)
        learned = int((labels[:, 1:] != IGNORED).sum())
        loss = loss_by_chunks(
            lambda piece: blocks.logits(weights, piece),
            hidden,
            labels,
            vocab_size=model.config.get_text_config().vocab_size,
            num_items=learned,
            gradient=None,
        )
    return float(loss)
