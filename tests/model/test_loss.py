"""The loss in chunks is the loss of all logits at once, and no larger piece of them ever exists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ssdtune.model import loss as loss_module
from ssdtune.model.blocks import BlockModel
from ssdtune.model.build import build_model
from ssdtune.model.checkpoint import HfCheckpoint
from ssdtune.model.chunked_loss import ChunkedLoss
from ssdtune.model.loss import (
    IGNORED,
    SLICE_BYTES,
    chunk_tokens,
    elements_on_card,
    loss_by_chunks,
    loss_bytes,
    shifted_labels,
)
from tests.toy import make_checkpoint

D = 7


def whole(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, items: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss and the gradients of hidden states and head, from all logits at once."""
    hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in (hidden, weight))
    logits = (hidden @ weight.T).float().view(-1, weight.shape[0])
    targets = shifted_labels(labels).reshape(-1)
    total = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    (total / items).backward()
    return (total / items).detach(), hidden.grad, weight.grad


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    vocab, chunk = draw(st.sampled_from([3, 50, 600])), draw(st.integers(1, 40))
    share = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))  # of positions that are learned
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    hidden = torch.randn(batch, length, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab, (batch, length), generator=generator)
    labels[torch.rand(batch, length, generator=generator) >= share] = IGNORED
    return hidden, labels, vocab, chunk


@given(problems())
def test_chunks_equal_the_whole(problem: tuple[torch.Tensor, torch.Tensor, int, int]) -> None:
    hidden, labels, vocab, chunk = problem
    head = torch.randn(vocab, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaf, shapes = head.clone().requires_grad_(), []

    def logits_of(piece: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(piece.shape))
        return piece @ leaf.T

    gradient = torch.zeros_like(hidden)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "LOGIT_BYTES", chunk * 4 * vocab)
        assert chunk_tokens(vocab) == chunk
        got = loss_by_chunks(
            logits_of, hidden, labels, vocab_size=vocab, num_items=5.0, gradient=gradient
        )
        alone = loss_by_chunks(
            logits_of, hidden, labels, vocab_size=vocab, num_items=5.0, gradient=None
        )
    wanted, hidden_gradient, head_gradient = whole(hidden, head, labels, 5.0)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(got, alone)
    torch.testing.assert_close(gradient, hidden_gradient, rtol=1e-4, atol=1e-6)
    found = torch.zeros_like(head) if leaf.grad is None else leaf.grad
    torch.testing.assert_close(found, head_gradient, rtol=1e-4, atol=1e-5)
    batch, length, _ = hidden.shape
    for rows, positions, _ in shapes:
        assert positions <= length  # models with learned positions have no more
        assert rows * positions <= max(chunk, 1)
    learned = int((shifted_labels(labels) != IGNORED).sum())
    tokens = sum(rows * positions for rows, positions, _ in shapes) // 2
    # a micro-batch that fits goes whole; of others only what is learned
    assert tokens == (batch * length if batch * length <= chunk and learned else learned)


@given(problems(), st.integers(1, 600), st.booleans())
def test_chunks_of_the_head_equal_the_whole(
    problem: tuple[torch.Tensor, torch.Tensor, int, int], size: int, descending: bool
) -> None:
    """Some rows of the head at a time, in either direction, its own gradient at once or later."""
    hidden, labels, vocab, tokens = problem
    head = torch.randn(vocab, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    head *= 20  # some logits are far above others
    leaf = head.clone().requires_grad_()
    chunks = [range(first, min(first + size, vocab)) for first in range(0, vocab, size)]

    def logits_of(rows: range) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda piece: piece @ leaf[rows.start : rows.stop].T

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "LOGIT_BYTES", tokens * 4 * min(size, vocab))
        found = ChunkedLoss(hidden, labels, min(size, vocab))
    for rows in chunks[::-1] if descending else chunks:
        found.add(logits_of(rows), rows)
    wanted, hidden_gradient, head_gradient = whole(hidden, head, labels, 5.0)
    torch.testing.assert_close(found.losses(5.0), wanted, rtol=1e-5, atol=1e-5)
    for rows in chunks:
        found.backward(logits_of(rows), rows, 0.2)
    torch.testing.assert_close(found.take_gradient(), hidden_gradient, rtol=1e-4, atol=1e-4)
    got = torch.zeros_like(head) if leaf.grad is None else leaf.grad.clone()
    torch.testing.assert_close(got, head_gradient, rtol=1e-4, atol=1e-5)
    for rows in chunks:
        found.backward(logits_of(rows), rows, 0.2, to_hidden=False)
    assert leaf.grad is None or torch.allclose(leaf.grad, 2 * got)


def test_a_micro_batch_that_fits_is_exactly_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 5, D, generator=generator)
    head = torch.randn(20, D, generator=generator)
    labels = torch.randint(0, 20, (3, 5), generator=generator)
    leaf, gradient = head.clone().requires_grad_(), torch.zeros_like(hidden)
    got = loss_by_chunks(
        lambda piece: piece @ leaf.T, hidden, labels,
        vocab_size=20, num_items=12.0, gradient=gradient,
    )  # fmt: skip
    wanted, hidden_gradient, head_gradient = whole(hidden, head, labels, 12.0)
    assert torch.equal(got, wanted)
    assert torch.equal(gradient, hidden_gradient)
    assert torch.equal(leaf.grad, head_gradient)


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, in elements."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_no_more_logits_than_a_chunk_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, chunk = 3001, 16
    monkeypatch.setattr(loss_module, "LOGIT_BYTES", chunk * 4 * vocab)
    hidden = torch.randn(4, 50, 3)
    labels = torch.randint(0, vocab, (4, 50))
    head = torch.randn(vocab, 3, requires_grad=True)
    gradient = torch.zeros_like(hidden)
    with _Largest() as largest:
        loss_by_chunks(
            lambda piece: piece @ head.T, hidden, labels,
            vocab_size=vocab, num_items=1.0, gradient=gradient,
        )  # fmt: skip
    assert largest.numel == chunk * vocab


def test_a_chunk_is_no_longer_than_the_models_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt2 has no position after its last one, not even where its result is thrown away."""
    folder = make_checkpoint(tmp_path / "model", "gpt2", n_positions=8)
    blocks = BlockModel(
        build_model(HfCheckpoint.open(folder), dtype=torch.float32), torch.device("cpu")
    )
    tensors = {
        spec.name: torch.randn(spec.shape)
        for stage in ("outer", "embed")
        for part in blocks.layout.stages[stage].parts
        for spec in part.tensors
    }
    labels = torch.randint(0, 131, (5, 8))
    hidden = torch.randn(5, 8, 40)
    for chunk in (1, 8, 9, 24, 31):
        monkeypatch.setattr(loss_module, "LOGIT_BYTES", chunk * 4 * 131)
        loss_by_chunks(
            lambda piece: blocks.logits(tensors, piece), hidden, labels,
            vocab_size=131, num_items=1.0, gradient=None,
        )  # fmt: skip


def test_on_a_card_the_head_is_read_a_few_times_only() -> None:
    vocab, hidden_size, tokens = 128_256, 4096, 8192
    on_card = chunk_tokens(vocab, tokens * hidden_size)
    assert tokens / chunk_tokens(vocab) > 60 and tokens / on_card < 4
    # two bytes each for the logits and their gradient, against 16 hidden states
    assert loss_bytes(tokens, vocab, 2, tokens * hidden_size) <= 16 * 2 * tokens * hidden_size + 3 * SLICE_BYTES  # fmt: skip
    few = chunk_tokens(vocab, 100 * hidden_size)
    assert few == chunk_tokens(vocab) == chunk_tokens(vocab, 0)
    hidden = torch.empty(2, 3, hidden_size, device="meta")
    assert elements_on_card(hidden) == 6 * hidden_size
    assert elements_on_card(torch.empty(2, 3)) == 0
