"""The rows of a run, tokenized, and how they make up steps and micro-batches.

How many sequences a micro-batch has may be left open (`train_batch_size`): `micro_batch_sizes` says what may be chosen,
`ssdtune.train.choose` chooses. Steps, and so all results but for rounding, stay the same. Arrays are `ssdtune.data`'s.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from ssdtune.config.schema import Config
from ssdtune.data import (
    Batch,
    BatchPlan,
    Padding,
    TokenizedRows,
    eval_batches,
    load_rows,
    load_tokenizer,
)
from ssdtune.model.checkpoint import HfCheckpoint

logger = logging.getLogger(__name__)

USUAL_TOKENS = 8192
"""Tokens of a micro-batch above which computing gains nothing from more."""


@dataclass
class Rows:
    """The rows of a run, tokenized, and how they make up steps.

    Attributes:
        evaluation: Micro-batches of the held-out rows.
        total_steps: Of the whole run.
    """

    train: TokenizedRows
    plan: BatchPlan
    evaluation: list[Batch]
    total_steps: int
    padding: Padding

    def divided(self, config: Config) -> Rows:
        """Return the same rows in the micro-batches of other settings."""
        return replace(self, plan=_batch_plan(config, self.train, self.padding))


def read_rows(config: Config, checkpoint: HfCheckpoint) -> Rows:
    """Read and tokenize the training and held-out rows.

    Raises:
        ConfigError: A file or its rows cannot be used.
        FormatError: A file is damaged.
    """
    tokenizer = load_tokenizer(
        checkpoint.path, trust_remote_code=config.model.trust_remote_code, missing_ok=True
    )
    vocab_size = checkpoint.vocab_size
    train = load_rows(config.data.train_file, tokenizer, config.data, vocab_size=vocab_size)
    padding = Padding.of(tokenizer)
    training = config.training
    if training.train_batch_size:
        # How it is divided, and so its memory, comes later; steps stay the same.
        config = config_with(config, micro_batch_sizes(config)[0])
    plan = _batch_plan(config, train, padding)
    evaluation: list[Batch] = []
    if config.data.eval_file:
        held_out = load_rows(config.data.eval_file, tokenizer, config.data, vocab_size=vocab_size)
        size = training.per_device_eval_batch_size or training.per_device_train_batch_size
        evaluation = list(eval_batches(held_out, batch_size=size, padding=padding))
    for line in train.report.summary():
        logger.info("%s", line)
    steps = plan.num_steps(training.num_train_epochs, training.max_steps)
    return Rows(train, plan, evaluation, steps, padding)


def _batch_plan(config: Config, train: TokenizedRows, padding: Padding) -> BatchPlan:
    training = config.training
    return BatchPlan(
        train,
        batch_size=training.per_device_train_batch_size,
        accumulation_steps=training.gradient_accumulation_steps,
        seed=training.seed if training.data_seed is None else training.data_seed,
        shuffle=config.data.shuffle,
        pack_length=config.data.max_length if config.data.packing else None,
        padding=padding,
    )


def micro_batch_sizes(config: Config) -> list[int]:
    """Return the sizes of micro-batches that may be chosen, in sequences, the usual one first, then smaller ones."""
    total, given = config.training.train_batch_size, config.training.per_device_train_batch_size
    if total is None or given * config.training.gradient_accumulation_steps == total != 1:
        return [given]
    most = max(1, USUAL_TOKENS // config.data.max_length)
    return [size for size in range(min(total, most), 0, -1) if total % size == 0]


def config_with(config: Config, micro_batch_size: int) -> Config:
    """Return settings whose step is divided into micro-batches of this size."""
    training = config.training
    total = training.per_device_train_batch_size * training.gradient_accumulation_steps
    training = replace(
        training,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=(training.train_batch_size or total) // micro_batch_size,
    )
    return replace(config, training=training)


def longest_sequence(config: Config, rows: Rows | None) -> int:
    """Return the longest sequence of the run, in tokens."""
    if rows is None or config.data.packing:
        return config.data.max_length
    lengths = [int(rows.train.lengths.max())]
    lengths += [batch.input_ids.shape[1] for batch in rows.evaluation]
    return max(lengths)


def num_lengths(config: Config, rows: Rows | None) -> int:
    """Return the most different lengths that micro-batches can have, the other number of rows in the last counted as one."""
    if rows is None:
        return 1
    size = config.training.per_device_train_batch_size
    if config.data.packing:  # what rows add up to
        most = config.data.max_length
    else:
        most = len(np.unique(rows.train.lengths))
    most += rows.plan.num_sequences % size > 0
    most += len({batch.input_ids.shape for batch in rows.evaluation})
    return min(
        most, rows.total_steps * config.training.gradient_accumulation_steps + len(rows.evaluation)
    )
