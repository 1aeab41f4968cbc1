"""A rehearsal: the engine runs steps of a few blocks, all in memory, to see how long computing takes here.

What a step computes depends on much that no count of FLOP knows: kernels, masks, softmax of a large vocabulary, low-rank
products, conversions, caches. So the run's own code is timed, on the run's own shapes: `Engine` with its swap manager,
whose slots hold random numbers and are never filled from a drive. Operations run one after the other; what they slow
each other down by is `ssdtune.plan.simulator`'s business. Nothing is written, and nothing about results depends on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Self, cast

import numpy as np
import torch

from ssdtune.data.batches import Batch
from ssdtune.device.base import Device
from ssdtune.errors import SsdtuneError
from ssdtune.hardware.stream import Clock
from ssdtune.io.buffers import BufferPool
from ssdtune.model.loss import IGNORED
from ssdtune.optim.adamw import join_master, split_master
from ssdtune.plan.device_memory import device_bytes
from ssdtune.plan.generate import Piece, StageShape, StepShape
from ssdtune.plan.schedule import Kind, Operation, Schedule
from ssdtune.plan.times import COMPUTING, ComputeTimes, key
from ssdtune.swap.manager import SwapManager
from ssdtune.train.engine import Engine
from ssdtune.train.lanes import Lanes, Span
from ssdtune.train.prepare import Prepared
from ssdtune.units import MIB

SECONDS = 6.0
"""For all steps of a rehearsal, besides the first."""
MOST_STEPS = 5
"""Of each kind, besides the first."""
PATIENCE = 5
"""Times `seconds` that the first step may take; what takes longer is not rehearsed."""
MOST_BLOCKS = 4
COLD_BYTES = 256 * MIB
"""What is written between operations, so that nothing of the last one is left in the processor's caches; at most a quarter of
the memory that the run may take."""
FLOP_PER_TOKEN = 10
"""Of a step, per parameter: twice forward, and backward."""
LOOKED_AT = 32
"""Steps of a run whose rows say how large a micro-batch is."""


def rehearse(
    prepared: Prepared,
    *,
    flop_per_s: float,
    seconds: float = SECONDS,
    clock: Clock = time.perf_counter,
) -> ComputeTimes:
    """Measure what one micro-batch of a prepared run takes, by kind of operation; arguments as of `Rehearsal`.

    Raises:
        TooLong: Even the smallest step takes longer than is worth waiting for.
    """
    with Rehearsal(prepared, flop_per_s=flop_per_s, seconds=seconds, clock=clock) as rehearsal:
        if prepared.config.model.torch_compile:
            rehearsal.step()
            rehearsal.forget()  # blocks were compiled
        start = clock()
        for number in range(1 + MOST_STEPS):
            rehearsal.step(PATIENCE * seconds if number == 0 else math.inf)
            if number == 0 and clock() - start < 2 * seconds:  # kernels were loaded
                rehearsal.forget()
                start = clock()
            elif clock() - start > seconds:
                break
        return rehearsal.times


class TooLong(SsdtuneError):
    """A rehearsal would keep the user waiting."""


class Rehearsal:
    """Steps of a few blocks; a context manager.

    The memory that it takes is less than the run's: the slots of its plan with everything streamed.

    Args:
        flop_per_s: About what the device reaches. A micro-batch of which two steps would take longer than `seconds`
            is cut, and times are scaled by its tokens.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        flop_per_s: float,
        seconds: float = SECONDS,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._prepared = prepared
        self._clock = clock
        most_flop = seconds / 2 * flop_per_s
        self._num_blocks = _num_blocks(prepared, most_flop)
        self._batch, self._scale = _batch(prepared, self._num_blocks, most_flop)
        self._samples: dict[str, list[float]] = {}
        self._stage = ExitStack()
        room = prepared.limits.budget_bytes - prepared.memory.breakdown["process"]
        self._cold = torch.empty(min(COLD_BYTES, room // 4), dtype=torch.uint8)

    def __enter__(self) -> Self:
        self._swap, self._modes = self._stage.enter_context(
            _stage(self._prepared, self._num_blocks)
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._stage.close()

    def step(self, most_seconds: float = math.inf) -> None:
        """Run a step for each that blocks may keep in plans: their input, results of products, all.

        Raises:
            TooLong: All of them together take longer than `most_seconds`.
        """
        alone = _OneAfterTheOther(
            self._prepared.device, self._clock, self._cold, self._clock() + most_seconds
        )
        lanes = cast(Lanes, alone)
        for shape in self._modes:
            engine = Engine(
                self._prepared.blocks, self._swap, cast(Any, None), self._prepared.device, lanes,
                shape, seed=self._prepared.config.training.seed, max_grad_norm=0.0,
            )  # fmt: skip
            result = engine.train_step([self._batch] * shape.num_micro_batches, 0, 0.0)
            _sort(result.spans, shape.num_blocks, self._samples)

    def forget(self) -> None:
        """Count only what comes from now on."""
        self._samples.clear()

    @property
    def times(self) -> ComputeTimes:
        """What all steps took, in the mean: a step of the run is a sum, and means add up."""
        return ComputeTimes(
            {name: fmean(values) * self._scale for name, values in self._samples.items()}
        )


def _sort(spans: list[Span], num_blocks: int, samples: dict[str, list[float]]) -> None:
    for span in spans:
        op = span.operation
        # Gradients need not go on below the first block.
        lowest = op.kind == Kind.BACKWARD and op.stage == "block.0" and num_blocks > 1
        if op.kind in COMPUTING and not lowest:
            name = key(op.kind, op.keeps, later=op.micro_batch > 0)
            samples.setdefault(name, []).append(span.end_s - span.start_s)


@dataclass
class _OneAfterTheOther:
    """Stands for `Lanes`: each operation begins when the device has done all before it.

    And with cold caches: a run has other weights for every block, here there are a few for all.
    """

    device: Device
    clock: Clock
    cold: torch.Tensor
    end_s: float

    def run(self, schedule: Schedule, execute: Callable[[Operation], None]) -> list[Span]:
        spans, begin = [], self.clock()
        for operation in schedule.operations:
            if operation.kind in COMPUTING:  # nothing else is timed
                self.cold.fill_(1)
            start = self.clock()
            execute(operation)
            self.device.record().wait()
            now = self.clock()
            spans.append(Span(operation, start - begin, now - begin))
            if now > self.end_s:
                raise TooLong("its blocks are so large that a step of one takes too long")
        return spans


class _Filled(SwapManager):
    """A swap manager whose slots hold random numbers, whatever is loaded."""

    def fill(self) -> None:
        # Pairs of small bf16 numbers are small fp32 numbers.
        tile = torch.randn(MIB // 2).mul_(0.05).bfloat16().view(torch.uint8)
        for slot in self._weights.values():
            for piece in slot.host.split(MIB):
                piece.copy_(tile[: len(piece)])

    def load(self, stage_name: str, slot_name: str, *, with_trained: bool = True) -> None:
        pass

    def save_gradient(self, stage_name: str, slot_name: str) -> None:
        pass


@contextmanager
def _stage(prepared: Prepared, blocks: int) -> Iterator[tuple[SwapManager, list[StepShape]]]:
    """Yield the swap manager, and the shapes of steps whose blocks are run again, whole or partly, or keep all."""
    layout, compute = prepared.layout, prepared.compute
    trained = frozenset(part.stage for part in layout.trained_parts)
    plan = replace(
        prepared.memory, resident=frozenset(), deferred=trained, gradients_on_ssd=trained,
        kept=frozenset(), swapped=frozenset(), partly=frozenset(), in_host=frozenset(), input_slots=0,
        straight=frozenset(), block_slots=min(prepared.memory.block_slots, blocks),
    )  # fmt: skip
    shape = StepShape(
        num_blocks=blocks,
        num_micro_batches=min(2, compute.num_micro_batches),
        tied=layout.tied,
        embed_chunks=len(layout.embed_stages),
        head_chunks=len(layout.head_stages),
        stages={
            name: StageShape(pieces=(Piece(numel=1),) if name in trained else ())
            for name in layout.stages
        },
        block_slots=plan.block_slots,
        gradient_slots=plan.gradient_slots,
        deferred=trained,
        gradients_on_ssd=trained,
    )
    recompute = prepared.config.memory.recompute
    modes = [shape] if recompute in ("auto", "always") else []
    if card := prepared.limits.device:
        room = card.budget_bytes - sum(device_bytes(prepared.parts, compute, plan).values())
    else:
        room = (prepared.limits.budget_bytes - prepared.memory.breakdown["process"]) // 4
    for policy, size in (("cheap", compute.products_bytes), ("never", compute.kept_bytes)):
        count = max(room, 0) // max(1, shape.num_micro_batches * size)
        useful = compute.saves_partly or policy == "never"
        if recompute == policy or (
            recompute == "auto" and _may_keep(prepared) and useful and count
        ):
            some = frozenset(f"block.{n}" for n in range(min(blocks, max(count, 1))))
            partly = some if policy == "cheap" else frozenset[str]()
            modes.append(replace(shape, num_blocks=len(some), kept=some, partly=partly))
    pool = BufferPool()
    swap = _Filled(
        layout, plan, source=cast(Any, None), initial={}, split=split_master, join=join_master,
        store=cast(Any, None), device=prepared.device, pool=pool, compute=compute,
        precision=prepared.precision,
    )  # fmt: skip
    try:
        swap.fill()
        yield swap, modes
    finally:
        swap.free_slots()
        pool.trim()


def _may_keep(prepared: Prepared) -> bool:
    """Say whether a plan of this run may let blocks keep their activations."""
    return prepared.config.memory.host_cache != 0


def micro_batch_shape(prepared: Prepared) -> tuple[int, int, int, bool]:
    """Return what the times depend on: rows and length of a typical micro-batch, its mean tokens, and its padding."""
    batch, tokens = _typical(prepared)
    return *batch.input_ids.shape, round(tokens), bool(batch.attention_mask.all())


def _num_blocks(prepared: Prepared, most_flop: float) -> int:
    """Return how many blocks a step has: fewer of large ones."""
    _, tokens = _typical(prepared)
    ends, block = _parameters(prepared)
    affordable = int((most_flop / (FLOP_PER_TOKEN * tokens) - ends) / block)
    return max(1, min(MOST_BLOCKS, prepared.layout.num_blocks, affordable))


def _batch(prepared: Prepared, num_blocks: int, most_flop: float) -> tuple[Batch, float]:
    """Return a micro-batch to run, and by what its times are multiplied to get those of a mean one."""
    batch, tokens = _typical(prepared)
    ends, block = _parameters(prepared)
    most = max(1, int(most_flop / (FLOP_PER_TOKEN * (ends + num_blocks * block))))
    rows, length = batch.input_ids.shape
    if rows * length > most:
        rows = max(1, most // length)
        length = min(length, max(most, 16))
        batch = batch.part(slice(rows), length)
    return batch, tokens / (rows * length)


def _parameters(prepared: Prepared) -> tuple[int, int]:
    """Return the parameters of the head, and of a block."""
    layout = prepared.layout
    head = sum(layout.stages[stage].num_parameters for stage in layout.head_stages)
    return head, layout.stages["block.0"].num_parameters


def _typical(prepared: Prepared) -> tuple[Batch, float]:
    """Return a micro-batch of the run of middling size, and the mean number of tokens, padding included."""
    rows = prepared.rows
    if rows is None:
        batch = _made_up(prepared)
        return batch, batch.input_ids.size
    steps = range(min(LOOKED_AT, rows.total_steps))
    batches = [batch for step in steps for batch in rows.plan.step_batches(step)]
    tokens = fmean(batch.input_ids.size for batch in batches)
    return min(batches, key=lambda batch: abs(batch.input_ids.size - tokens)), tokens


def _made_up(prepared: Prepared) -> Batch:
    size = (prepared.config.training.per_device_train_batch_size, prepared.max_length)
    vocabulary = prepared.built.model.config.get_text_config().vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, size)
    labels = ids.copy()
    labels[:, 0] = IGNORED
    return Batch(ids, np.ones_like(ids), labels, list(range(size[0])))
