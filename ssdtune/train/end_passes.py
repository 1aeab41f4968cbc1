"""The ends of the model, forward and backward: embedding and what else comes before the blocks; norm, head and loss.

Each end is one stage, or a stage for each chunk of its rows. Blocks are `ssdtune.train.block_passes`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ssdtune.model.blocks import BlockModel
from ssdtune.model.chunked_loss import ChunkedLoss, LogitsOf
from ssdtune.model.loss import loss_by_chunks
from ssdtune.plan.generate import EMBED, OUTER, StepShape
from ssdtune.train.leaves import Leaves
from ssdtune.train.run_state import RunState


class EndPasses:
    """Runs the compute operations of embedding and head, for micro-batch `m`.

    Args:
        shape: Says how embedding and head are divided, and whether they are one matrix.
    """

    def __init__(self, blocks: BlockModel, leaves: Leaves, shape: StepShape) -> None:
        self._blocks = blocks
        self._leaves = leaves
        self._shape = shape
        self._vocab_size = blocks.model.config.get_text_config().vocab_size
        layout = blocks.layout
        self._embedding_parts = {
            stage: (part, index)
            for stage in layout.embed_stages
            for part in layout.stages[stage].parts
            for index, spec in enumerate(part.tensors)
            if spec.name == blocks.embedding_name
        }
        self._rows = {
            stage: spec.rows
            for stage in (*layout.embed_stages, *layout.head_stages)
            for part in layout.stages[stage].parts
            for spec in part.tensors
        }
        """Of the vocabulary, in each chunk of a divided embedding or head."""

    # Before the blocks

    def gather_rows(self, state: RunState, stage: str, m: int) -> None:
        """Take the rows of the micro-batch's tokens from a chunk."""
        part, index = self._embedding_parts[stage]
        chunk = self._leaves.stored(state, stage)[part.tensors[index].name]
        state.token_rows[m].gather(chunk, self._rows[stage], self._leaves.dtype(chunk))

    def rows_needed(self, state: RunState, stage: str) -> NDArray[Any]:
        """Return the numbers of the rows of a chunk that the step needs, in order."""
        rows = self._rows[stage]
        tokens = [taker.needed(rows) for taker in state.token_rows.values()]
        return np.unique(np.concatenate(tokens)) - rows.start

    def take_rows(
        self, state: RunState, stage: str, numbers: NDArray[Any], rows: torch.Tensor
    ) -> None:
        """Take some rows [N, D] of a chunk, in order, from host memory instead of from the whole chunk."""
        tokens = numbers + self._rows[stage].start
        for taker in state.token_rows.values():
            taker.put(tokens, rows, self._leaves.dtype(rows))

    def enter(self, state: RunState, m: int) -> None:
        """Run what comes before the first block."""
        rows = state.token_rows.get(m)
        with torch.set_grad_enabled(state.training):
            tensors = self._leaves.of(state, OUTER, training=state.training)
            if rows is None:
                tensors |= self._leaves.of(state, EMBED, training=state.training)
            trained = any(part.trained for part, _ in self._embedding_parts.values())
            entry = self._blocks.enter(
                tensors,
                state.batches[m],
                state.training and trained,
                at_start=lambda: state.seed_stage(m, 0),
                gathered=rows.take() if rows else None,
            )
        state.entries[m] = entry
        state.hidden[m] = entry.hidden.detach()

    def enter_backward(self, state: RunState, m: int, slot: str) -> None:
        """Run that backward, to the rows of the embedding."""
        entry, gradient = state.entries.pop(m), state.gradients.pop(m, None)
        if not entry.hidden.requires_grad:
            return
        torch.autograd.backward(entry.hidden, gradient)
        if entry.rows.grad is None:
            return
        gradient = entry.rows.grad
        if self._blocks.padding_row is not None:
            gradient[entry.ids == self._blocks.padding_row] = 0
        if m in state.token_rows:
            state.token_rows[m].gradient = gradient
            return
        state.gradient_slots[EMBED] = slot
        self._embedding_sum(state, EMBED).index_add_(0, entry.ids, gradient.float())

    def rows_backward(self, state: RunState, stage: str, m: int, slot: str) -> None:
        """Add to the gradient of a chunk of the embedding: its rows', and if it is tied that of its logits."""
        rows = self._rows[stage]
        state.gradient_slots[stage] = slot
        if self._shape.tied:
            logits_of = self._logits_of(state, stage, m, outer_trains=False, head_trains=True)
            state.chunked[m].backward(logits_of, rows, _weight(state), to_hidden=False)
        if state.token_rows[m].gradient is not None:
            state.token_rows[m].add_gradient(self._embedding_sum(state, stage), rows)
        if stage == self._shape.embed_stages[0]:  # the last one
            state.token_rows.pop(m)
            state.chunked.pop(m, None)

    def _embedding_sum(self, state: RunState, stage: str) -> torch.Tensor:
        """Return the sum of the gradients of the embedding, or of a chunk of its rows."""
        return self._leaves.started_sum(state, *self._embedding_parts[stage])

    # Behind the blocks

    def loss(self, state: RunState, stage: str, m: int, slot: str) -> None:
        """Make the micro-batch's loss with a whole head, and in training its gradients."""
        hidden = state.hidden.pop(m)
        gradient = torch.zeros_like(hidden) if state.training else None
        state.gradient_slots[stage] = slot
        logits_of = self._logits_of(
            state, stage, m, outer_trains=state.training, head_trains=state.training
        )
        loss = loss_by_chunks(
            logits_of, hidden, state.labels[m], vocab_size=self._vocab_size,
            num_items=state.num_items, gradient=gradient, scale=state.loss_scale,
        )  # fmt: skip
        state.losses.append(loss)
        if gradient is not None:
            state.gradients[m] = gradient
        else:
            del state.entries[m]

    def score(self, state: RunState, stage: str, m: int) -> None:
        """Add what a chunk of the head contributes to the losses; the last one completes them."""
        chunks = self._shape.head_stages
        if m not in state.chunked:
            most = max(len(self._rows[chunk]) for chunk in chunks)
            state.chunked[m] = ChunkedLoss(state.hidden.pop(m), state.labels[m], most)
        loss = state.chunked[m]
        logits_of = self._logits_of(state, stage, m, outer_trains=False, head_trains=False)
        loss.add(logits_of, self._rows[stage])
        if stage == chunks[0]:  # the last one
            state.losses.append(loss.losses(state.num_items))
            if not state.training:
                del state.entries[m], state.chunked[m]

    def chunk_loss(self, state: RunState, stage: str, m: int, slot: str) -> None:
        """Run the backward pass of a chunk of the head; if tied, its own gradient is made later (`rows_backward`)."""
        state.gradient_slots[stage] = slot
        loss = state.chunked[m]
        logits_of = self._logits_of(state, stage, m, outer_trains=True, head_trains=bool(slot))
        loss.backward(logits_of, self._rows[stage], _weight(state))
        if stage == self._shape.head_stages[-1]:
            state.gradients[m] = loss.take_gradient()
            if not (self._shape.tied and stage in self._shape.trained):
                del state.chunked[m]

    def _logits_of(
        self, state: RunState, stage: str, m: int, *, outer_trains: bool, head_trains: bool
    ) -> LogitsOf:
        """Return what gives the logits of the head, or of a chunk of it."""
        tensors = self._leaves.of(state, OUTER, training=outer_trains)
        tensors |= self._leaves.of(state, stage, training=head_trains)
        seeds = iter([self._shape.num_blocks + 1])

        def seed_once() -> None:
            for number in seeds:
                state.seed_stage(m, number)

        return lambda piece: self._blocks.logits(tensors, piece, seed_once)


def _weight(state: RunState) -> float:
    """Return by what the gradient of a token's loss is multiplied."""
    return state.loss_scale / state.num_items
