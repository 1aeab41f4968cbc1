"""Causal language model loss, chunk by chunk, so that logits of a large vocabulary never exist whole.

Shape letters: B sequences, S positions, D hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

IGNORED = -100
LOGIT_BYTES = 64 << 20
"""Logits of one chunk in fp32. They depend on nothing that a plan chooses, for the chunks decide how sums are rounded."""
CARD_HIDDEN_STATES = 16
"""On a card, a chunk's logits and their gradient may take as much as so many hidden states of the micro-batch, if that is more: a
block's backward pass takes more, so most of it is there anyway, and the head is read a few times instead of dozens of times."""

SLICE_BYTES = 4 << 20
"""Rows of logits in fp32 whose softmax is taken at once; no result depends on it."""
CARD_SLICE_BYTES = 32 << 20
"""The same on a card, which has no caches to stay in, and where kernels that do little take as long to launch as to run."""


def shifted_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return for each position [B, S] the label of the next one, as transformers shifts them."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def chunk_tokens(vocab_size: int, card_elements: int = 0) -> int:
    """Return the tokens whose logits are computed at once.

    Args:
        card_elements: Of the micro-batch's hidden states, B S D, where a card computes; 0 on a CPU.
    """
    on_card = CARD_HIDDEN_STATES * card_elements // (2 * vocab_size)
    return max(1, LOGIT_BYTES // (4 * vocab_size), on_card)


def elements_on_card(hidden: torch.Tensor) -> int:
    """Return the elements of hidden states on a card; 0 on a CPU."""
    return 0 if hidden.device.type == "cpu" else hidden.numel()


def slice_rows(device: torch.device, vocab_size: int) -> int:
    """Return the rows of logits whose softmax is taken at once."""
    most = SLICE_BYTES if device.type == "cpu" else CARD_SLICE_BYTES
    return max(1, most // (4 * vocab_size))


def loss_bytes(tokens: int, vocab_size: int, itemsize: int, card_elements: int = 0) -> int:
    """Return the memory that losses of a micro-batch take: a chunk's logits, their gradient, and a few rows in fp32."""
    chunk = min(tokens, chunk_tokens(vocab_size, card_elements)) * vocab_size
    return 2 * chunk * itemsize + 3 * min(max(SLICE_BYTES, 4 * vocab_size), 4 * chunk)


def loss_by_chunks(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    num_items: float,
    gradient: torch.Tensor | None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Sum the token losses, and with `gradient` run the backward pass too.

    Args:
        logits_of: Maps hidden states [b, s, D] to logits [b, s, V].
        hidden: Final hidden states [B, S, D], without a graph.
        labels: [B, S], IGNORED where nothing is learned; shifted here.
        num_items: Divisor: learned tokens of the whole step.
        gradient: Zero-filled [B, S, D]; receives the loss's gradient.
        scale: All gradients are multiplied by it (`ssdtune.optim.loss_scale`).

    Returns:
        Sum of the losses divided by `num_items`, fp32 scalar.
    """
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for piece, target, indices in pieces_of(
        hidden, shifted_labels(labels), chunk_tokens(vocab_size, elements_on_card(hidden))
    ):
        piece = piece.detach().requires_grad_(gradient is not None)
        with torch.set_grad_enabled(gradient is not None):
            logits = logits_of(piece)
        slope = torch.empty_like(logits) if gradient is not None else None
        with torch.no_grad():
            total += _sum_losses(logits, target.reshape(-1), scale / num_items, slope) / num_items
        if gradient is not None:
            torch.autograd.backward(logits, slope)
            assert piece.grad is not None
            if indices is None:
                gradient.copy_(piece.grad)
            else:
                flat = piece.grad.view(-1, piece.grad.shape[-1])
                gradient.view(-1, gradient.shape[-1]).index_copy_(0, indices, flat)
    return total


def _sum_losses(
    logits: torch.Tensor, target: torch.Tensor, weight: float, slope: torch.Tensor | None
) -> torch.Tensor:
    """Return the sum of the token losses, fp32, and fill in the gradient of `weight` times it.

    The same bits as cross_entropy and its backward give, which make four fp32 tensors as large as the logits. Here they
    are as large as a few rows, and stay in the processor's caches: half the time.

    Args:
        logits: [..., V], C rows.
        target: [C].
        slope: As the logits; None without gradients.
    """
    vocabulary = logits.shape[-1]
    flat, count = logits.reshape(-1, vocabulary), len(target)
    learned, index = target != IGNORED, target.clamp(min=0)[:, None]
    rows = min(count, slice_rows(flat.device, vocabulary))
    buffers = [flat.new_zeros((rows, vocabulary), dtype=torch.float32) for _ in range(3)]
    chosen = flat.new_empty((count, 1), dtype=torch.float32)
    weights = learned.float().mul_(-weight)[:, None]
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        values, log_shares, losses = (buffer[: count - start] for buffer in buffers)
        values.copy_(flat[part])
        torch._log_softmax(values, -1, False, out=log_shares)
        torch.gather(log_shares, 1, index[part], out=chosen[part])
        if slope is not None:
            losses.scatter_(1, index[part], weights[part])
            torch._log_softmax_backward_data(losses, log_shares, -1, torch.float32, out=values)
            slope.view(-1, vocabulary)[part] = values
            losses.scatter_(1, index[part], 0.0)
    first = torch.where(learned, 0, IGNORED)
    return functional.nll_loss(chosen, first, ignore_index=IGNORED, reduction="sum")


def pieces_of(
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
