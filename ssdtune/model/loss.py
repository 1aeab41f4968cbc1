"""Causal language model loss, chunk by chunk, so that logits of a large vocabulary never exist whole.

Shape letters: B sequences, S positions, D hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

IGNORED = -100
LOGIT_BYTES = 64 << 20
"""Logits of one chunk in fp32. Fixed, for the chunks decide how sums are rounded."""


def shifted_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return for each position [B, S] the label of the next one, as transformers shifts them."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def chunk_tokens(vocab_size: int) -> int:
    """Return the tokens whose logits are computed at once."""
    return max(1, LOGIT_BYTES // (4 * vocab_size))


def loss_by_chunks(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    num_items: float,
    gradient: torch.Tensor | None,
) -> torch.Tensor:
    """Sum the token losses, and with `gradient` run the backward pass too.

    Args:
        logits_of: Maps hidden states [b, s, D] to logits [b, s, V].
        hidden: Final hidden states [B, S, D], without a graph.
        labels: [B, S], IGNORED where nothing is learned; shifted here.
        num_items: Divisor: learned tokens of the whole step.
        gradient: Zero-filled [B, S, D]; receives the loss's gradient.

    Returns:
        Sum of the losses divided by `num_items`, fp32 scalar.
    """
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for piece, target, indices in _chunks(hidden, shifted_labels(labels), chunk_tokens(vocab_size)):
        piece = piece.detach().requires_grad_(gradient is not None)
        with torch.set_grad_enabled(gradient is not None):
            logits = logits_of(piece).float()
            loss = functional.cross_entropy(
                logits.view(-1, logits.shape[-1]),
                target.reshape(-1),
                ignore_index=IGNORED,
                reduction="sum",
            )
            loss = loss / num_items
        del logits
        if gradient is not None:
            loss.backward()
            assert piece.grad is not None
            if indices is None:
                gradient.copy_(piece.grad)
            else:
                flat = piece.grad.view(-1, piece.grad.shape[-1])
                gradient.view(-1, gradient.shape[-1]).index_copy_(0, indices, flat)
        total += loss.detach()
    return total


def _chunks(
    hidden: torch.Tensor, target: torch.Tensor, limit: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield (hidden [b, s, D], target [b, s], positions or None for all).

    A micro-batch that fits goes whole, just as the model would do it. A larger one is cut, and only positions
    that are learned take part. No chunk is longer than S, for models with learned positions.
    """
    if not bool((target != IGNORED).any()):
        return
    batch, length, width = hidden.shape
    if batch * length <= limit:
        yield hidden, target, None
        return
    learned = torch.nonzero(target.reshape(-1) != IGNORED).squeeze(1)
    flat, flat_target = hidden.reshape(-1, width), target.reshape(-1)
    step = limit if limit <= length else limit // length * length
    for indices in learned.split(step):
        rows = len(indices) // length
        if rows:
            whole = indices[: rows * length]
            yield (
                flat[whole].view(rows, length, width),
                flat_target[whole].view(rows, length),
                whole,
            )
            indices = indices[rows * length :]
        if len(indices):
            yield flat[indices][None], flat_target[indices][None], indices
