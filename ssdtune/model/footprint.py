"""How many bytes a block keeps for its backward pass if it isn't run again, found without computing anything.

The block runs on fake tensors, which have shapes but no memory, and what autograd saves is added up. So the figure
is exact for any architecture and attention kernel, and a block of any size takes less than a second.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ssdtune.model.blocks import BlockModel, Call
from ssdtune.units import GIB

logger = logging.getLogger(__name__)

MOST_MASK_BYTES = GIB


def kept_bytes(
    blocks: BlockModel, sequences: int, length: int, *, masked: bool = False
) -> int | None:
    """Return the bytes that a block keeps for a micro-batch, its input included: the one that keeps most.

    Weights and what all blocks are called with (masks, rotary tables) are not counted.

    Args:
        length: Tokens of a sequence.
        masked: Rows are padded or packed. Kernels that are given a mask keep more than those that need none.

    Returns:
        None where some kernel doesn't run on fake tensors (grouped products of experts), or the mask, which is
        real, would be huge.
    """
    if masked and sequences * length**2 > MOST_MASK_BYTES:
        return None
    hidden, calls = _enter(blocks, sequences, length, masked)
    kinds = {_kind(blocks, number, call): number for number, call in enumerate(calls)}
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    level = torch_log.level
    blocks.train(True)
    try:
        torch_log.setLevel(logging.CRITICAL)  # a kernel that can't is no error here
        return max(_count(blocks, number, calls[number], hidden) for number in kinds.values())
    except Exception as error:
        logger.debug("the block's activations can't be counted: %s", error)
        return None
    finally:
        torch_log.setLevel(level)


def _count(blocks: BlockModel, number: int, call: Call, hidden: torch.Tensor) -> int:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        call = Call(*tree_map_only(torch.Tensor, fake.from_tensor, (call.args, call.kwargs)))
        weights = {
            spec.name: torch.empty(
                spec.shape, dtype=part.dtype, device=blocks.device
            ).requires_grad_(part.trained)
            for part in blocks.layout.stages[f"block.{number}"].parts
            for spec in part.tensors
        }
        shared = {_storage(tensor) for tensor in (*_tensors(call), *weights.values())}
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> None:
            if _storage(tensor) not in shared:
                saved[_storage(tensor)] = tensor.untyped_storage()

        leaf = torch.empty(hidden.shape, dtype=hidden.dtype, device=blocks.device).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
            blocks.run_block(number, weights, call, leaf)
        return sum(storage.nbytes() for storage in saved.values())


def _kind(blocks: BlockModel, number: int, call: Call) -> Hashable:
    """Return what blocks that keep the same have in common: shapes of weights and of what they are called with."""
    weights = tuple(
        (spec.shape, part.dtype, part.trained)
        for part in blocks.layout.stages[f"block.{number}"].parts
        for spec in part.tensors
    )
    return weights, tuple((tensor.shape, tensor.dtype) for tensor in _tensors(call))


def _tensors(call: Call) -> list[torch.Tensor]:
    leaves = tree_leaves((call.args, call.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _enter(
    blocks: BlockModel, sequences: int, length: int, masked: bool
) -> tuple[torch.Tensor, list[Call]]:
    """Return the first block's input and what blocks are called with, for tokens without meaning."""
    outer = {
        spec.name: torch.zeros((), dtype=part.dtype, device=blocks.device).expand(spec.shape)
        for stage in ("outer", "embed")
        for part in blocks.layout.stages[stage].parts
        for spec in part.tensors
    }
    ids = torch.zeros(sequences, length, dtype=torch.long, device=blocks.device)
    mask = torch.ones_like(ids)
    mask[0, 0] = not masked
    with torch.no_grad():
        entry = blocks.enter(outer, {"input_ids": ids, "attention_mask": mask}, False)
    return entry.hidden, entry.calls


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
