"""How many bytes a block keeps for its backward pass if it isn't run again, found without computing anything.

The block runs on fake tensors, which have shapes but no memory, and what autograd saves is added up. So the figure
is exact for any architecture and attention kernel, and a block of any size takes less than a second.
"""

from __future__ import annotations

import logging

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ssdtune.model.blocks import BlockModel, Call

logger = logging.getLogger(__name__)


def kept_bytes(blocks: BlockModel, sequences: int, length: int) -> int | None:
    """Return the bytes that the last block keeps for a micro-batch, its input included.

    Weights and what all blocks are called with (masks, rotary tables) are not counted.

    Args:
        length: Tokens of a sequence.

    Returns:
        None where some kernel doesn't run on fake tensors (grouped products of experts).
    """
    number = len(blocks.blocks) - 1
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    hidden, call = _enter(blocks, number, sequences, length)
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    level = torch_log.level
    blocks.train(True)
    try:
        torch_log.setLevel(logging.CRITICAL)  # a kernel that can't is no error here
        with fake:
            call = Call(*tree_map_only(torch.Tensor, fake.from_tensor, (call.args, call.kwargs)))
            weights = {
                spec.name: torch.empty(
                    spec.shape, dtype=part.dtype, device=blocks.device
                ).requires_grad_(part.trained)
                for part in blocks.layout.stages[f"block.{number}"].parts
                for spec in part.tensors
            }
            given = [
                t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)
            ]
            shared = {_storage(tensor) for tensor in (*given, *weights.values())}
            saved: dict[int, torch.UntypedStorage] = {}

            def pack(tensor: torch.Tensor) -> None:
                if _storage(tensor) not in shared:
                    saved[_storage(tensor)] = tensor.untyped_storage()

            leaf = torch.empty(
                hidden.shape, dtype=hidden.dtype, device=blocks.device
            ).requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
                blocks.run_block(number, weights, call, leaf)
            return sum(storage.nbytes() for storage in saved.values())
    except Exception as error:
        logger.debug("the block's activations can't be counted: %s", error)
        return None
    finally:
        torch_log.setLevel(level)


def _enter(
    blocks: BlockModel, number: int, sequences: int, length: int
) -> tuple[torch.Tensor, Call]:
    """Return the first block's input and what block `number` is called with, for tokens without meaning."""
    outer = {
        spec.name: torch.zeros((), dtype=part.dtype, device=blocks.device).expand(spec.shape)
        for stage in ("outer", "embed")
        for part in blocks.layout.stages[stage].parts
        for spec in part.tensors
    }
    ids = torch.zeros(sequences, length, dtype=torch.long, device=blocks.device)
    with torch.no_grad():
        entry = blocks.enter(
            outer, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, False
        )
    return entry.hidden, entry.calls[number]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
