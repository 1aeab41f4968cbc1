"""Packed rows must not see each other: whether a model keeps them apart, found out before any work.

Rows that share a sequence are told apart by positions that start again at 0. Most of transformers' models then
mask the rows before; some take the positions and mask nothing, some ignore them without a word. So the model
is shown two rows in one sequence, without weights, and what it hands to its blocks is looked at.
"""

from __future__ import annotations

import inspect

import torch
from torch.utils._pytree import tree_flatten

from ssdtune.errors import UnsupportedModelError
from ssdtune.model.blocks import BlockModel, Call

FIRST, SECOND = 5, 6
"""Tokens of the two rows; their sum is no other size that a mask could have."""


def refuse_leaking_rows(blocks: BlockModel) -> None:
    """Make sure that of two rows packed into one sequence the second never sees the first, in any block.

    Raises:
        UnsupportedModelError: It does; names the model and the remedy.
    """
    kind = blocks.model.config.model_type
    remedy = (
        "so rows packed into one sequence would see each other. Set packing: false for this model."
    )
    if "position_ids" not in inspect.signature(type(blocks.model).forward).parameters:
        raise UnsupportedModelError(f"{kind} takes no position_ids, {remedy}")
    for number, call in enumerate(_calls(blocks)):
        if not _isolates(call, blocks):
            raise UnsupportedModelError(
                f"{kind} does not mask earlier rows in its block {number} where positions start again, {remedy}"
            )


def _calls(blocks: BlockModel) -> list[Call]:
    """Return what the blocks are called with for one sequence of two rows."""
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None].to(blocks.device)
    batch = {"input_ids": torch.zeros_like(positions), "position_ids": positions}
    with torch.no_grad():
        return blocks.enter(blocks.stand_ins(), batch, trained=False).calls


def _isolates(call: Call, blocks: BlockModel) -> bool:
    if "flash" in str(blocks.model.config.get_text_config()._attn_implementation):
        return call.kwargs.get("position_ids") is not None  # it finds the rows' borders in them
    length = FIRST + SECOND
    masks = [
        value[..., FIRST:, :FIRST]
        for value in tree_flatten((call.args, call.kwargs))[0]
        if isinstance(value, torch.Tensor)
        and value.ndim >= 2
        and value.shape[-2:] == (length, length)
    ]
    # True attends in a boolean mask; others are added to the scores
    return any(
        not mask.any() if mask.dtype == torch.bool else bool((mask <= -1e4).all()) for mask in masks
    )
