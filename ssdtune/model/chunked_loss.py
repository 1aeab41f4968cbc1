"""Causal language model loss where the head comes in chunks of rows, so that it never has to lie in memory whole.

A chunk's rows give the logits of some of the vocabulary. A first pass over all chunks keeps, for each token, the largest
logit so far and the sum of the exponentials relative to it (online softmax), and the logit of its label when that comes
by: the losses. With these a second pass makes every chunk's logits again and their slope, which is all that the
backward pass needs. As in `ssdtune.model.loss`, logits are made for some tokens at a time.

Shape letters: B sequences, S positions, D hidden size, R rows of a chunk, C tokens whose logits are made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ssdtune.model.loss import (
    IGNORED,
    SLICE_BYTES,
    chunk_tokens,
    elements_on_card,
    pieces_of,
    shifted_labels,
    slice_rows,
)

LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""Maps hidden states [b, s, D] to the logits [b, s, R] of a chunk."""


@dataclass
class _Piece:
    """Tokens whose logits are made at once, and what is known of all their logits so far, [C] each.

    Attributes:
        positions: In the micro-batch [C]; None if it is all of it.
        highest: The largest logit; `total` the sum of exp(logit - highest), fp32.
        chosen: The logit of the label, fp32.
    """

    hidden: torch.Tensor
    target: torch.Tensor
    positions: torch.Tensor | None
    highest: torch.Tensor
    total: torch.Tensor
    chosen: torch.Tensor


class ChunkedLoss:
    """The losses of one micro-batch: call `add` for every chunk, then `losses`, then `backward` for every chunk.

    Args:
        hidden: Final hidden states [B, S, D], without a graph.
        labels: [B, S], IGNORED where nothing is learned; shifted here.
        most_rows: Of any chunk.
    """

    def __init__(self, hidden: torch.Tensor, labels: torch.Tensor, most_rows: int) -> None:
        self._shape, self._dtype, self._device = hidden.shape, hidden.dtype, hidden.device
        self._pieces = []
        for piece, target, positions in pieces_of(
            hidden, shifted_labels(labels), chunk_tokens(most_rows, elements_on_card(hidden))
        ):
            target = target.reshape(-1)
            highest = piece.new_full(
                target.shape, torch.finfo(torch.float32).min, dtype=torch.float32
            )
            total, chosen = torch.zeros_like(highest), torch.zeros_like(highest)
            self._pieces.append(_Piece(piece, target, positions, highest, total, chosen))
        self._gradient: torch.Tensor | None = None

    def add(self, logits_of: LogitsOf, rows: range) -> None:
        """Take a chunk's logits into account.

        Args:
            rows: Of the vocabulary.
        """
        for piece in self._pieces:
            with torch.no_grad():
                logits = logits_of(piece.hidden).flatten(0, -2)
            for part, values in _slices(logits):
                highest = torch.maximum(piece.highest[part], values.amax(-1))
                piece.total[part] *= torch.exp(piece.highest[part] - highest)
                piece.total[part] += values.sub_(highest[:, None]).exp_().sum(-1)
                piece.highest[part] = highest
            inside, index = _labels_within(piece.target, rows)
            found = logits.gather(1, index).squeeze(1).float()
            piece.chosen = torch.where(inside, found, piece.chosen)

    def losses(self, num_items: float) -> torch.Tensor:
        """Return the sum of the losses divided by `num_items`, the learned tokens of the whole step: an fp32 scalar."""
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        for piece in self._pieces:
            losses = piece.highest + piece.total.log() - piece.chosen
            total += torch.where(piece.target != IGNORED, losses, 0.0).sum() / num_items
        return total

    def backward(
        self, logits_of: LogitsOf, rows: range, weight: float, *, to_hidden: bool = True
    ) -> None:
        """Run a chunk's backward pass: gradients of the weights in `logits_of` are accumulated in them.

        Args:
            rows: Of the vocabulary.
            weight: By which the gradient of a token's loss is multiplied.
            to_hidden: Add to the gradient of the hidden states, too.
        """
        if to_hidden and self._gradient is None:
            self._gradient = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        for piece in self._pieces:
            hidden = piece.hidden.detach().requires_grad_(to_hidden)
            with torch.enable_grad():
                logits = logits_of(hidden)
            with torch.no_grad():
                slope = _slope(logits, piece, rows, weight)
            torch.autograd.backward(logits, slope)
            if to_hidden:
                assert self._gradient is not None and hidden.grad is not None
                if piece.positions is None:
                    self._gradient += hidden.grad
                else:
                    flat = hidden.grad.view(-1, self._shape[-1]).float()
                    into = self._gradient.view(-1, self._shape[-1])
                    into.index_add_(0, piece.positions, flat)

    def take_gradient(self) -> torch.Tensor:
        """Return the gradient of the hidden states [B, S, D], once all chunks have added to it."""
        gradient, self._gradient = self._gradient, None
        if gradient is None:
            return torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return gradient.to(self._dtype)


def chunked_loss_bytes(tokens: int, most_rows: int, itemsize: int, card_elements: int = 0) -> int:
    """Return the memory that the losses of a micro-batch take: logits of some tokens, their gradient, a few rows in fp32."""
    chunk = min(tokens, chunk_tokens(most_rows, card_elements)) * most_rows
    return 2 * chunk * itemsize + 2 * min(max(SLICE_BYTES, 4 * most_rows), 4 * chunk)


def _slope(logits: torch.Tensor, piece: _Piece, rows: range, weight: float) -> torch.Tensor:
    """Return the gradient of the logits [..., R]: softmax, less 1 at the label."""
    slope = torch.empty_like(logits, memory_format=torch.contiguous_format)
    flat = slope.flatten(0, -2)
    scale = torch.where(piece.target != IGNORED, weight, 0.0).float()
    shift = piece.highest + piece.total.log()
    inside, index = _labels_within(piece.target, rows)
    less = torch.where(inside, -scale, 0.0)[:, None]
    for part, values in _slices(logits.detach().flatten(0, -2)):
        shares = values.sub_(shift[part, None]).exp_().mul_(scale[part, None])
        shares.scatter_add_(1, index[part], less[part])
        flat[part] = shares
    return slope


def _labels_within(target: torch.Tensor, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which labels [C] are of the chunk, and where [C, 1]; the first row for the others."""
    inside = (target >= rows.start) & (target < rows.stop)
    return inside, torch.where(inside, target - rows.start, 0)[:, None]


def _slices(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield some rows of logits [C, R] at a time, as an fp32 copy; see `slice_rows`."""
    count = slice_rows(logits.device, logits.shape[-1])
    for start in range(0, len(logits), count):
        part = slice(start, start + count)
        yield part, logits[part].to(torch.float32, copy=True)
