"""Before the first step: the loss of one batch, streamed, must be what transformers itself computes.

transformers runs the model whole where it fits into the memory that training will take, else a copy of it with as
many of its first blocks as fit, on some rows of the batch; the streamed side then stops after the same blocks, so real weights are compared.
Where not even one block fits, a shape-reduced copy of the architecture is compared (`ssdtune.train.reduced`).
"""

from __future__ import annotations

import gc
import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from ssdtune.errors import MismatchError
from ssdtune.model.loss import IGNORED
from ssdtune.model.safetensors_file import TORCH_DTYPES
from ssdtune.train.run_state import model_inputs

if TYPE_CHECKING:
    from ssdtune.data.batches import Batch
    from ssdtune.train.engine import Engine
    from ssdtune.train.prepare import Prepared

logger = logging.getLogger(__name__)

COMPARED_TOKENS = 512
"""More of a batch prove nothing more. Their logits take 10 bytes each: with a vocabulary of 32000, 164 MB."""


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference of losses that rounding explains.

    fp32 sums in another order differ by some 1e-6. bf16 keeps 8 bits: a loss is a mean over tokens of logits
    that differ by up to 2^-8 relative, which averages out to well under 2e-2; a lost mask or a wrong scale
    shows as more.
    """
    return 1e-4 if dtype == torch.float32 else 2e-2


def compare(
    streamed: float, reference: float, dtype: torch.dtype, where: str, not_finite: str = ""
) -> None:
    """Compare two mean losses.

    Args:
        not_finite: Where the streamed one first came to a value that is not finite.

    Raises:
        MismatchError: They differ by more than rounding.
    """
    limit = tolerance(dtype) * max(1.0, abs(reference))
    if not math.isfinite(streamed) or not math.isfinite(reference):
        raise MismatchError(
            f"the loss of the first batch is not finite (streamed {streamed}, transformers {reference})"
            f"{': ' if not_finite else ''}{not_finite}. Look at the rows with `ssdtune data`, and at the weights."
        )
    if abs(streamed - reference) > limit:
        raise MismatchError(
            f"the loss of the first batch is {streamed:.6f} when streamed, but transformers computes "
            f"{reference:.6f} ({where}): this model is not taken apart correctly, so training it would be "
            "wrong. Please report the model; --no-verify trains all the same."
        )
    logger.info(
        "first batch: loss %.6f streamed, %.6f by transformers (%s)", streamed, reference, where
    )


@dataclass(frozen=True)
class Reference:
    """What transformers computed: the mean loss of a batch, through the first `num_blocks` blocks."""

    batch: Batch
    loss: float
    num_blocks: int


def reference_loss(prepared: Prepared) -> Reference | None:
    """Run transformers on rows of the first batch, with as many blocks as fit.

    Returns:
        None if the comparison is over already: a shape-reduced copy was compared.

    Raises:
        MismatchError: The copy's losses differ.
    """
    batch = _compared_part(prepared.training_rows.plan.step_batches(0)[0])
    num_blocks = _blocks_that_fit(prepared, batch)
    whole = num_blocks == prepared.layout.num_blocks
    if num_blocks == 0 or (prepared.config.model.adapter and not whole):
        compare_reduced(prepared, batch)
        return None
    model = _load_first_blocks(prepared, num_blocks)
    try:
        return Reference(batch, _mean_loss(model, batch), num_blocks)
    finally:
        del model
        _drop_page_cache(prepared)


def verify(engine: Engine, reference: Reference, dtype: torch.dtype) -> None:
    """Compare the streamed loss of the batch with the reference.

    Raises:
        MismatchError: They differ by more than rounding.
    """
    loss, tokens = engine.evaluate([reference.batch], num_blocks=reference.num_blocks)
    where = f"{reference.num_blocks} blocks"
    compare(loss / tokens, reference.loss, dtype, where, engine.not_finite())


def compare_reduced(prepared: Prepared, batch: Batch) -> None:
    """Compare a shape-reduced copy of the architecture, run in pieces, with transformers.

    Raises:
        MismatchError: The losses differ.
    """
    from transformers import AutoModelForCausalLM

    from ssdtune.train.reduced import loss_in_pieces, reduced_config

    try:
        config = reduced_config(prepared.built.model.config)
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        reference = _mean_loss(model, batch)
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        # Some architecture's sizes depend on each other in a way that the reduction does not know.
        logger.warning(
            "the first batch is not compared with transformers: the model is too large for the memory "
            "budget, and a small copy of it cannot be made (%s)", error,
        )  # fmt: skip
        return
    inputs = model_inputs(batch, torch.device("cpu"))
    labels = torch.from_numpy(batch.labels)
    loss = loss_in_pieces(model, prepared.built.keymap, inputs, labels)
    compare(loss, reference, torch.float32, "a shape-reduced copy")


def _compared_part(batch: Batch) -> Batch:
    """Return the batch, or as many of its rows as have `COMPARED_TOKENS` in all: logits take much memory.

    The first of them is one that something is learned of.
    """
    sequences, length = batch.input_ids.shape
    count = max(1, COMPARED_TOKENS // length)
    if count >= sequences:
        return batch
    first = int((batch.labels != IGNORED).any(axis=1).argmax())
    start = min(first, sequences - count)
    return batch.part(slice(start, start + count))


def _blocks_that_fit(prepared: Prepared, batch: Batch) -> int:
    """Return how many blocks, with everything outside of them, fit into the memory that training is planned to take.

    So the comparison does not decide how much memory a run needs. If that has room for none, half of the budget does.
    """
    memory = prepared.memory
    training = memory.host_bytes - memory.breakdown["process"] - memory.breakdown["reserve"]
    budget = (memory.budget_bytes - memory.breakdown["process"]) // 2
    return _count(prepared, batch, min(training, budget)) or _count(prepared, batch, budget)


def _count(prepared: Prepared, batch: Batch, room: int) -> int:
    sizes: dict[str, int] = {}
    for part in prepared.parts:
        sizes[part.stage] = sizes.get(part.stage, 0) + part.weight_bytes
    # Weights of another dtype are converted from the mapped file, whose pages count too; others stay there.
    extents = list(prepared.checkpoint.tensors.values())
    share = 1.0
    if any(TORCH_DTYPES[extent.dtype] != prepared.dtype for extent in extents):
        share += sum(extent.num_bytes for extent in extents) / max(1, sum(sizes.values()))
    vocab_size = prepared.built.model.config.get_text_config().vocab_size
    # Logits, the fp32 ones of the loss, and the logarithms of their softmax.
    logits = batch.input_ids.size * vocab_size * (prepared.dtype.itemsize + 8)
    others = sum(size for stage, size in sizes.items() if not stage.startswith("block."))
    left, count = room - share * others, 0
    for number in range(prepared.layout.num_blocks):
        left -= share * sizes[f"block.{number}"]
        # loading comes first, computing after the file's pages are let go
        loaded = (room - left) / share
        if left < 0 or loaded + logits > room:
            break
        count += 1
    return count


def _load_first_blocks(prepared: Prepared, num_blocks: int) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    path, settings = prepared.checkpoint.path, prepared.config.model
    config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
    text = config.get_text_config()
    if num_blocks < prepared.layout.num_blocks:
        text.num_hidden_layers = num_blocks
        for name in ("layer_types", "attention_layers"):
            if isinstance(getattr(text, name, None), list):
                setattr(text, name, getattr(text, name)[:num_blocks])
    options: dict[str, Any] = {}
    if settings.attn_implementation:
        options["attn_implementation"] = settings.attn_implementation
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=prepared.dtype,
            trust_remote_code=settings.trust_remote_code,
            **options,
        )
        if settings.adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, settings.adapter)
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from showing bars and reports about loading part of a model."""
    from transformers.utils import logging as their_logging

    level = their_logging.get_verbosity()
    bars = their_logging.is_progress_bar_enabled()
    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        their_logging.set_verbosity(level)
        if bars:
            their_logging.enable_progress_bar()


def _drop_page_cache(prepared: Prepared) -> None:
    """Let go of the pages of the original files that loading has read; they count against the budget."""
    gc.collect()
    for path in {extent.path for extent in prepared.checkpoint.tensors.values()}:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _mean_loss(model: torch.nn.Module, batch: Batch) -> float:
    """Return the mean loss of a batch; rows that were packed run apart, as if each had been alone."""
    learned = batch.num_learned_tokens
    model.eval()
    total = 0.0
    with torch.no_grad():
        for ids, mask, labels in _apart(batch):
            result = model(
                input_ids=torch.from_numpy(ids),
                attention_mask=torch.from_numpy(mask),
                labels=torch.from_numpy(labels),
                use_cache=False,
                num_items_in_batch=torch.tensor(learned),
            )
            total += result.loss.item()
    return total


def _apart(batch: Batch) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """Yield input_ids, attention_mask and labels [b, s] of the batch, or of each packed row."""
    if batch.segment_ids is None:
        yield batch.input_ids, batch.attention_mask, batch.labels
        return
    for sequence, segments in enumerate(batch.segment_ids):
        for segment in range(segments.max() + 1):
            where = (slice(sequence, sequence + 1), segments == segment)
            yield batch.input_ids[where], batch.attention_mask[where], batch.labels[where]
