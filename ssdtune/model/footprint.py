"""What memory computing takes, found without computing anything.

A block runs on fake tensors, which have shapes but no memory, forward and backward as the engine runs it; what is alive at once is added up as it is made and freed, and so is what autograd saves. So the figures hold for any
architecture and attention kernel, and a block of any size takes less than a second. What kernels take for themselves
while they work is not seen: `ssdtune.plan.residency` adds it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ssdtune.model.blocks import BlockModel, Call, Entry
from ssdtune.model.layout import Part
from ssdtune.model.products import product_bytes, recorded
from ssdtune.units import GIB

logger = logging.getLogger(__name__)

MOST_MASK_BYTES = GIB


@dataclass(frozen=True)
class Footprint:
    """Bytes for one micro-batch.

    Attributes:
        kept_bytes: What a block keeps for its backward pass, its input included: the one that keeps most.
        products_bytes: The same if it keeps only its input and what is dear (`ssdtune.model.products`).
        block_bytes: The most that is alive while a block is run again and backward, besides its weights, its input and
            the gradient that comes in.
        entry_bytes: What stays until the end of a step: rows of the embedding and what blocks are called with (masks,
            rotary tables); the first block's input is not counted.
    """

    kept_bytes: int
    products_bytes: int
    block_bytes: int
    entry_bytes: int


def footprint(
    blocks: BlockModel, sequences: int, length: int, *, masked: bool = False
) -> Footprint | None:
    """Return what a micro-batch takes.

    Weights and what all blocks are called with (masks, rotary tables) are not counted for a block.

    Args:
        length: Tokens of a sequence.
        masked: Rows are padded or packed. Kernels that are given a mask keep more than those that need none.

    Returns:
        None where some kernel doesn't run on fake tensors (grouped products of experts), or the mask, which is
        real, would be huge.
    """
    if masked and sequences * length**2 > MOST_MASK_BYTES:
        return None
    entry = _enter(blocks, sequences, length, masked)
    calls, hidden = entry.calls, entry.hidden
    kinds = {_kind(blocks, number, call): number for number, call in enumerate(calls)}
    blocks.train(True)
    try:
        with _silent():
            found = [_block(blocks, number, calls[number], hidden) for number in kinds.values()]
    except Exception as error:
        logger.debug("what computing takes can't be counted: %s", error)
        return None
    stays = {_storage(t): t.untyped_storage().nbytes() for call in calls for t in _tensors(call)}
    stays.pop(_storage(hidden), None)
    vocab_size = blocks.model.config.get_text_config().vocab_size
    rows = min(sequences * length, vocab_size) * hidden.shape[-1] * hidden.dtype.itemsize
    return Footprint(
        kept_bytes=max(kept for kept, _, _ in found),
        products_bytes=max(products for _, products, _ in found),
        block_bytes=max(peak for _, _, peak in found),
        entry_bytes=rows + sum(stays.values()),
    )


def kept_bytes(
    blocks: BlockModel, sequences: int, length: int, *, masked: bool = False
) -> int | None:
    """Return only what a block keeps; see `footprint`."""
    found = footprint(blocks, sequences, length, masked=masked)
    return found.kept_bytes if found else None


class _Alive(TorchDispatchMode):
    """Adds up the tensors that are made while it is entered and not yet freed; views count once.

    Args:
        known: Tensors that do not count.

    Attributes:
        peak_bytes: The most at any moment.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak_bytes = self._bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in known:
            self._add(tensor, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, leaf.untyped_storage().nbytes())
        return result

    def _add(self, tensor: torch.Tensor, num_bytes: int) -> None:
        key = _storage(tensor)
        if key in self._storages:
            return

        def freed(_: object) -> None:
            self._storages.pop(key, None)
            self._bytes -= num_bytes

        self._storages[key] = weakref.ref(tensor.untyped_storage(), freed)
        self._bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)


def _block(
    blocks: BlockModel, number: int, call: Call, hidden: torch.Tensor
) -> tuple[int, int, int]:
    """Return what a block keeps, what of it are products and its input, and its peak."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        call = Call(*tree_map_only(torch.Tensor, fake.from_tensor, (call.args, call.kwargs)))
        weights = _weights(blocks, blocks.layout.stages[f"block.{number}"].parts)
        leaf = torch.empty(hidden.shape, dtype=hidden.dtype, device=blocks.device).requires_grad_()
        gradient = torch.empty_like(leaf)
        shared = {_storage(tensor) for tensor in (*_tensors(call), *weights.values())}
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if _storage(tensor) not in shared:
                saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        alive = _Alive([leaf, gradient, *_tensors(call), *weights.values()])
        with alive, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = blocks.run_block(number, weights, call, leaf)
            kept = sum(saved.values())
            torch.autograd.backward(output, gradient)
        with recorded(hidden.shape[-1]) as products:
            blocks.run_block(number, weights, call, leaf)
        dear = product_bytes(products) + leaf.untyped_storage().nbytes()
        return kept, dear, alive.peak_bytes


def _weights(blocks: BlockModel, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    """Return fake weights whose gradients are let go at once, as in the engine."""

    def drop(leaf: torch.Tensor) -> None:
        leaf.grad = None

    weights = {}
    for part in parts:
        for spec in part.tensors:
            weight = torch.empty(spec.shape, dtype=part.dtype, device=blocks.device)
            weights[spec.name] = weight.requires_grad_(part.trained)
            if part.trained:
                weight.register_post_accumulate_grad_hook(drop)
    return weights


@contextmanager
def _silent() -> Iterator[None]:
    """Keep torch from reporting kernels that don't run on fake tensors; that is no error here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


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


def _enter(blocks: BlockModel, sequences: int, length: int, masked: bool) -> Entry:
    """Return the first block's input and what blocks are called with, for tokens without meaning."""
    ids = torch.zeros(sequences, length, dtype=torch.long, device=blocks.device)
    mask = torch.ones_like(ids)
    mask[0, 0] = not masked
    with torch.no_grad():
        return blocks.enter(blocks.stand_ins(), {"input_ids": ids, "attention_mask": mask}, False)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
