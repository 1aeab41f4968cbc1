"""Which rows make up which step, and their arrays: any step can be asked for directly, in any order.

The order of an epoch depends on (seed, epoch) alone, so a resumed run needs no replay. The last, partial
micro-batch and the last, partial accumulation window of an epoch count like any other. Arrays are numpy; the
model layer makes tensors of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdtune.data.dataset import TokenizedRows
from ssdtune.data.packing import pack
from ssdtune.data.tokenize import IGNORED


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B sequences, padded to its longest, S.

    Attributes:
        input_ids: int64 [B, S].
        attention_mask: int64 [B, S]; 1 for tokens, 0 for padding. It comes from the padding, not from the ids.
        labels: int64 [B, S], not shifted; -100 for padding, masked tokens and the first token of each row, which
            nothing predicts.
        rows: Numbers of the rows, in order of the sequences.
        position_ids: Only if packed: int64 [B, S], from 0 in each row; 0 for padding.
        segment_ids: Only if packed: int64 [B, S], the number of the row within its sequence; -1 for padding.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    labels: NDArray[np.int64]
    rows: list[int]
    position_ids: NDArray[np.int64] | None = None
    segment_ids: NDArray[np.int64] | None = None

    @property
    def num_learned_tokens(self) -> int:
        """Labels that the loss is averaged over."""
        return num_learned_tokens(self.labels)

    def part(self, sequences: slice, length: int | None = None) -> Batch:
        """Return some of its sequences, whole or the first `length` tokens of each; their arrays are views."""
        where = (sequences, slice(length))
        optional = (self.position_ids, self.segment_ids)
        positions, segments = (None if array is None else array[where] for array in optional)
        return Batch(
            self.input_ids[where], self.attention_mask[where], self.labels[where], self.rows[sequences],
            positions, segments,
        )  # fmt: skip


def num_learned_tokens(labels: NDArray[np.int64]) -> int:
    """Count the labels that are learned once they are shifted by one, of [B, S]."""
    return int(np.count_nonzero(labels[:, 1:] != IGNORED))


@dataclass(frozen=True)
class Padding:
    """How short sequences are filled up."""

    token_id: int = 0
    side: str = "right"

    @classmethod
    def of(cls, tokenizer: Any) -> Padding:
        """Take the tokenizer's pad token, else its end token, else 0; None gives the defaults."""
        if tokenizer is None:
            return cls()
        ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return cls(next(token for token in ids if token is not None), tokenizer.padding_side)


def plan_epoch(num_rows: int, *, epoch: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
    """Return the order of an epoch (counted from 0), a permutation int64 [num_rows]."""
    if not shuffle:
        return np.arange(num_rows)
    # Sorted raw output: numpy promises that PCG64's stream stays the same, not that its permutations do.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


class BatchPlan:
    """Maps steps to micro-batches.

    With packing, which rows share a sequence is settled once, by their lengths, and only the order of the
    sequences changes between epochs; so all epochs have equally many steps.

    Args:
        rows: The rows to train on.
        batch_size: Sequences in a micro-batch.
        accumulation_steps: Micro-batches in a step.
        seed: Random state of the order.
        pack_length: Put several rows into one sequence of up to so many tokens; None packs nothing.
    """

    def __init__(
        self,
        rows: TokenizedRows,
        *,
        batch_size: int,
        accumulation_steps: int,
        seed: int,
        shuffle: bool = True,
        pack_length: int | None = None,
        padding: Padding | None = None,
    ) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._accumulation_steps = accumulation_steps
        self._seed = seed
        self._shuffle = shuffle
        self._padding = padding or Padding()
        self._sequences = pack(rows.lengths, pack_length) if pack_length else None
        self.num_sequences = len(rows) if self._sequences is None else len(self._sequences)
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch, the last of which may have fewer micro-batches."""
        return math.ceil(self._micro_batches_per_epoch / self._accumulation_steps)

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches of the largest step."""
        return min(self._accumulation_steps, self._micro_batches_per_epoch)

    @property
    def _micro_batches_per_epoch(self) -> int:
        return math.ceil(self.num_sequences / self._batch_size)

    def num_steps(self, num_train_epochs: float, max_steps: int | None = None) -> int:
        """Return the steps of the whole run; `max_steps` wins."""
        if max_steps is not None:
            return max_steps
        return math.ceil(num_train_epochs * self.steps_per_epoch)

    def epoch_of(self, step: int) -> int:
        """Return the epoch, counted from 0, that a step (counted from 0) belongs to."""
        return step // self.steps_per_epoch

    def step_batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step, counted from 0 over the whole run."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * self._accumulation_steps
        last = min(first + self._accumulation_steps, self._micro_batches_per_epoch)
        order = self._epoch_order(epoch)
        return [
            self._batch(order[number * self._batch_size : (number + 1) * self._batch_size].tolist())
            for number in range(first, last)
        ]

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            order = plan_epoch(
                self.num_sequences, epoch=epoch, seed=self._seed, shuffle=self._shuffle
            )
            self._order = (epoch, order)
        return self._order[1]

    def _batch(self, numbers: list[int]) -> Batch:
        if self._sequences is None:
            return make_batch(self._rows, [[number] for number in numbers], self._padding)
        groups = [self._sequences[number] for number in numbers]
        return make_batch(self._rows, groups, self._padding, packed=True)


def eval_batches(
    rows: TokenizedRows, *, batch_size: int, padding: Padding | None = None
) -> Iterator[Batch]:
    """Yield all rows once, in file order."""
    for first in range(0, len(rows), batch_size):
        numbers = range(first, min(first + batch_size, len(rows)))
        yield make_batch(rows, [[number] for number in numbers], padding or Padding())


def make_batch(
    rows: TokenizedRows, groups: Sequence[Sequence[int]], padding: Padding, *, packed: bool = False
) -> Batch:
    """Lay out one sequence per group of rows.

    Args:
        groups: Row numbers of each sequence, [B]; several to a sequence only if `packed`.
    """
    totals = [sum(len(rows.row(number)[0]) for number in group) for group in groups]
    shape = (len(groups), max(totals))
    input_ids = np.full(shape, padding.token_id, np.int64)
    attention_mask = np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    position_ids = np.zeros(shape, np.int64)
    segment_ids = np.full(shape, -1, np.int64)
    for index, (group, total) in enumerate(zip(groups, totals, strict=True)):
        start = shape[1] - total if padding.side == "left" else 0
        for segment, number in enumerate(group):
            ids, row_labels = rows.row(number)
            where = (index, slice(start, start + len(ids)))
            input_ids[where] = ids
            attention_mask[where] = 1
            labels[where] = row_labels
            # Nothing of the row precedes its first token: to its left is padding or another row.
            labels[index, start] = IGNORED
            position_ids[where] = np.arange(len(ids))
            segment_ids[where] = segment
            start += len(ids)
    used = [number for group in groups for number in group]
    if not packed:
        return Batch(input_ids, attention_mask, labels, used)
    return Batch(input_ids, attention_mask, labels, used, position_ids, segment_ids)
