"""The loop around the engine: steps, metrics, evaluations, checkpoints, and the end of the run."""

from __future__ import annotations

import errno
import logging
import math
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssdtune.config.schema import TrainingConfig
from ssdtune.data.batches import Batch
from ssdtune.errors import Interrupted, StorageError
from ssdtune.model.rotary import longest_rows
from ssdtune.model.source import WeightSource
from ssdtune.optim.schedule import learning_rate, warmup_count
from ssdtune.plan.schedule import Lane
from ssdtune.report.accuracy import Drift
from ssdtune.report.metrics import MetricsWriter, read_metrics
from ssdtune.report.progress import Progress
from ssdtune.report.timeline import Bar, draw
from ssdtune.store.store import Store
from ssdtune.train.checkpoint import (
    PREFIX,
    TrainerState,
    checkpoint_folders,
    save_checkpoint,
)
from ssdtune.train.engine import Engine
from ssdtune.train.lanes import Span
from ssdtune.train.rows import Rows
from ssdtune.train.signals import StopSignals
from ssdtune.units import format_time

logger = logging.getLogger(__name__)

Bytes = dict[str, dict[str, int]]


@dataclass
class History:
    """What the run gave, step by step."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    lane_seconds: dict[str, array[float]] = field(default_factory=dict)
    """Of every lane, step by step."""
    checkpoints: list[Path] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    """Steps, counted from 1, that were left out."""

    def picture(self) -> str:
        """Return when each operation of `spans`, the last step's, ran, as SVG."""
        bars = [Bar.of(span.operation, span.start_s, span.end_s) for span in self.spans]
        return draw(bars, f"measured step of {format_time(self.step_seconds[-1])}")


class Trainer:
    """Runs all steps of a run.

    Args:
        first_step: Steps done before (resume).
        identity: What a resumed run must share with this one.
        expected_s: Seconds of a step, as forecast; None if it was not.
    """

    def __init__(
        self,
        config: TrainingConfig,
        engine: Engine,
        *,
        output_dir: Path,
        store: Store,
        source: WeightSource,
        rows: Rows,
        first_step: int,
        identity: dict[str, Any],
        metrics: MetricsWriter,
        progress: Progress,
        signals: StopSignals,
        expected_s: float | None = None,
    ) -> None:
        self.history = History()
        self._config = config
        self._engine = engine
        self._store = store
        self._source = source
        self._batches = rows.plan
        self._evaluation = rows.evaluation
        self._total = rows.total_steps
        self._first = first_step
        self._identity = identity
        self._metrics = metrics
        self._progress = progress
        self._signals = signals
        self._output_dir = output_dir
        self._drift = Drift(expected_s, rows.total_steps) if expected_s else None
        self._warmup = warmup_count(config.warmup_steps, rows.total_steps)

    def run(self) -> History:
        """Run to the end.

        Raises:
            Interrupted: A signal came; the run was saved first.
            SsdtuneError: A step failed; the last checkpoint is whole.
        """
        if self._first and self._evaluates_after(self._first - 1) and not self._was_evaluated():
            self._evaluate(self._first)  # a signal cut it short before
        for step in range(self._first, self._total):
            self._step(step)
            done = step + 1
            if self._evaluates_after(step):
                self._evaluate(done)
            if self._signals.requested is not None and done < self._total:
                self._stop(done)
            if self._saves_after(step):
                self._save(done)
        return self.history

    def _saves_after(self, step: int) -> bool:
        every = self._config.save_steps
        return every > 0 and (step + 1) % every == 0

    def _evaluates_after(self, step: int) -> bool:
        if not self._evaluation:
            return False
        every = self._config.eval_steps or self._batches.steps_per_epoch
        return (step + 1) % every == 0 or step + 1 == self._total

    def _was_evaluated(self) -> bool:
        lines = read_metrics(self._metrics.path, "evaluation")
        return any(line["step"] == self._first for line in lines)

    def _is_looked_at_after(self, step: int) -> bool:
        """Say whether somebody wants the weights as they are after a step, before the next one begins."""
        return (
            step + 1 == self._total
            or self._saves_after(step)
            or self._evaluates_after(step)
            or self._signals.requested is not None
        )

    def _step(self, step: int) -> None:
        batches = self._batches.step_batches(step)
        rate = learning_rate(
            self._config.lr_scheduler_type,
            step,
            self._total,
            self._config.learning_rate,
            self._warmup,
        )
        before, begin = self.bytes_moved(), time.perf_counter()
        self._check_folders()
        self._store.checksum_writes(self._saves_after(step))
        result = self._engine.train_step(batches, step, rate)
        if self._is_looked_at_after(step):
            self._engine.flush()
        seconds = time.perf_counter() - begin
        after = self.bytes_moved()
        self.history.losses.append(result.loss)
        self.history.grad_norms.append(result.grad_norm)
        self.history.step_seconds.append(seconds)
        self.history.spans = result.spans
        busy = _busy(result.spans)
        for lane, value in busy.items():
            self.history.lane_seconds.setdefault(lane, array("d")).append(value)
        tokens = sum(int(batch.attention_mask.sum()) for batch in batches)
        values = {
            "epoch": self._batches.epoch_of(step),
            "loss": result.loss,
            "grad_norm": None if result.skipped else result.grad_norm,
            "clip_scale": result.clip_scale,
            "speculated": result.speculated,
            "skipped": result.skipped,
            "not_finite": result.not_finite or None,
            "loss_scale": self._engine.loss_scale and self._engine.loss_scale.scale,
            "learning_rate": rate,
            "learned_tokens": result.learned_tokens,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "rows": [row for batch in batches for row in batch.rows],
            "step_s": seconds,
            "stall_share": _stall_share(result.spans, seconds),
            "lane_s": busy,
            "bytes_read": _difference(after, before, "read"),
            "bytes_written": _difference(after, before, "written"),
        }
        self._metrics.write("step", step + 1, values)
        self._progress.step({"step": step + 1, **values})
        if result.skipped:
            self._tell_skipped(step, result.not_finite)
        if self._drift and (words := self._drift.add(step + 1, seconds)):
            self._progress.note(words)

    def _tell_skipped(self, step: int, where: str) -> None:
        skipped, scale = self.history.skipped, self._engine.loss_scale
        skipped.append(step + 1)
        self._progress.note(
            f"step {step + 1} was skipped: {where}. "
            + (f"The loss scale is now {scale.scale:g}. " if scale else "")
            + f"{len(skipped)} of {step + 1 - self._first} steps were skipped"
        )

    def _check_folders(self) -> None:
        """Notice what was deleted or moved while the run uses it, before another step is lost."""
        self._store.check_files()
        if not self._metrics.path.exists():
            raise StorageError(
                "open",
                self._metrics.path,
                errno=errno.ENOENT,
                hint="The output folder was deleted or moved while the run used it. Put it back and go on "
                "with --resume-from-checkpoint last, or start again.",
            )

    def bytes_moved(self) -> Bytes:
        """Return the bytes moved so far, by kind."""
        counters = self._store.counters
        counters["weights"]["read"] += self._source.bytes_read
        return counters

    def _evaluate(self, done: int) -> None:
        begin = time.perf_counter()
        found = self.evaluate()
        if found is None:
            return
        loss, tokens = found
        values = {"eval_loss": loss, "eval_tokens": tokens, "eval_s": time.perf_counter() - begin}
        self.history.evaluations.append((done, loss))
        self._metrics.write("evaluation", done, values)
        self._progress.evaluation({"step": done, **values})

    def evaluate(self) -> tuple[float, int] | None:
        """Return the token-weighted mean loss on the held-out rows, and their learned tokens.

        None if a signal asked to stop: large sets take longer than whoever sent it may wait.
        """
        total, count = 0.0, 0
        # No more at once than a step has, for which the memory was planned.
        for group in _groups(self._evaluation, self._batches.micro_batches_per_step):
            if self._signals.requested is not None:
                return None
            loss, tokens = self._engine.evaluate(group)
            if math.isfinite(total) and not math.isfinite(loss):
                self._progress.note(f"the held-out loss is {loss}: {self._engine.not_finite()}")
            total += loss
            count += tokens
        return total / max(count, 1), count

    def _save(self, done: int) -> Path:
        begin = time.perf_counter()
        self._store.checksum_writes(True)
        self._engine.flush()
        self._engine.swap.flush()
        self._metrics.sync()
        scale = self._engine.loss_scale
        state = TrainerState(
            done, self._total, self._engine.adam.steps, self._identity, scale.to_dict() if scale else None,
            longest_rows(self._engine.blocks.model),
        )  # fmt: skip
        folder = save_checkpoint(
            self._output_dir, self._store, state, keep=self._config.save_total_limit
        )
        self.history.checkpoints.append(folder)
        self._progress.note(f"saved {folder} in {time.perf_counter() - begin:.2f} s")
        return folder

    def save_result(self) -> Path:
        """Save what the last step left, unless it is saved already; the engine's slots may be gone."""
        folder = self._output_dir / f"{PREFIX}{self._total}"
        return folder if folder in checkpoint_folders(self._output_dir) else self._save(self._total)

    def _stop(self, done: int) -> None:
        """Save and leave, because a signal asked for it."""
        number = self._signals.requested
        assert number is not None
        folder = self._save(done)
        raise Interrupted(
            f"stopped after step {done} of {self._total}; saved {folder}. "
            "Go on with --resume-from-checkpoint last.",
            number,
        )


def _groups(batches: Sequence[Batch], size: int) -> Iterator[Sequence[Batch]]:
    for start in range(0, len(batches), size):
        yield batches[start : start + size]


def _difference(after: Bytes, before: Bytes, direction: str) -> dict[str, int]:
    return {kind: counts[direction] - before[kind][direction] for kind, counts in after.items()}


def _busy(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds that each lane worked."""
    busy: dict[str, float] = {lane.value: 0.0 for lane in Lane}
    for span in spans:
        busy[span.operation.lane.value] += span.end_s - span.start_s
    return busy


def _stall_share(spans: Sequence[Span], seconds: float) -> float:
    """Return the share of the step in which nothing was computed."""
    return max(0.0, 1.0 - _busy(spans)[Lane.COMPUTE.value] / seconds)
