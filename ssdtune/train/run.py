"""One run, once everything is checked: opens what it needs, trains, exports, tidies up.

`ssdtune.train.finetune` prepares it. Read `ssdtune.train.trainer` for the loop over its steps, `ssdtune.train.engine` for a
step.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ssdtune.config.schema import Config
from ssdtune.errors import Interrupted, SsdtuneError
from ssdtune.hardware.memory import (
    KeptMemory,
    map_large_blocks,
    process_memory,
    return_memory,
)
from ssdtune.io.buffers import BufferPool
from ssdtune.io.streams import Streams
from ssdtune.model.build import base_name
from ssdtune.model.rotary import set_longest_rows
from ssdtune.model.source import WeightSource
from ssdtune.optim.adamw import join_master, split_master
from ssdtune.optim.loss_scale import LossScale
from ssdtune.plan.states import check_bytes_of
from ssdtune.report.accuracy import compare
from ssdtune.report.critical import verdict
from ssdtune.report.metrics import MetricsWriter
from ssdtune.report.progress import Progress
from ssdtune.store.directories import prepare_directories
from ssdtune.store.store import Store
from ssdtune.swap.manager import SwapManager
from ssdtune.swap.update import AdamSettings, OutOfCoreAdam
from ssdtune.train.checkpoint import checkpoint_folders, read_manifest, remove_remains
from ssdtune.train.disk import DiskPlan
from ssdtune.train.engine import Engine
from ssdtune.train.exporting import write_result
from ssdtune.train.forecast import Forecast
from ssdtune.train.lanes import Lanes
from ssdtune.train.nonfinite import FiniteWatch, rows_text, skipped_in_a_row
from ssdtune.train.output import METRICS, hold_output, write_plan, write_settings
from ssdtune.train.prepare import Prepared
from ssdtune.train.result import Result
from ssdtune.train.resume import Resumed, identity_of
from ssdtune.train.signals import StopSignals
from ssdtune.train.speculation import Speculation
from ssdtune.train.step_shape import make_step_shape
from ssdtune.train.trainer import History, Trainer
from ssdtune.train.verify import Reference, reference_loss, verify

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """One run.

    Attributes:
        output_dir: Absolute.
        resumed: The checkpoint that it goes on from; None if it begins.
        forecast: How long a step should take; None if this machine was not measured.
    """

    prepared: Prepared
    disk: DiskPlan
    output_dir: Path
    resumed: Resumed | None
    progress: Progress
    signals: StopSignals
    forecast: Forecast | None

    def run(self) -> Result:
        """Train up to the last step and write the tuned weights. What a failure leaves is whole checkpoints, or nothing.

        Raises:
            ConfigError: The checkpoint is of another run, or a folder cannot be used.
            Interrupted: A signal came; the run was saved.
            SsdtuneError: The run failed.
        """
        identity = identity_of(self.prepared)
        if self.resumed:
            self.resumed.check(identity)
        with ExitStack() as stack:
            io = self._config.io
            streams = stack.enter_context(
                Streams(
                    self.prepared.streams,
                    queue_depth=io.queue_depth,
                    request_bytes=io.request_bytes,
                )
            )
            stack.enter_context(hold_output(self.output_dir))
            remove_remains(self.output_dir)
            made = [folder for folder in self.disk.directories if not folder.exists()]
            stack.callback(_remove_empty, made)
            store = self._open_store(streams)
            stack.callback(self._close_store, store)
            # Only now: loading a model takes minutes, and folders that cannot be used are known at once.
            reference = self._reference()
            self._leave_if_asked("before the first step; nothing was written")
            pool = BufferPool()
            source = WeightSource(
                self.prepared.checkpoint,
                self.prepared.built.keymap,
                streams.weights,
                pool,
                direct=io.direct,
            )
            stack.callback(source.close)
            self._load_buffers(source)
            engine = self._assemble(stack, streams, store, source, pool)
            if reference is not None:
                verify(engine, reference, self.prepared.dtype)
            write_settings(self.output_dir, self._config)
            write_plan(
                self.output_dir,
                memory=self.prepared.memory.to_dict(),
                estimate=self.disk.estimate.to_dict(),
                forecast=self.forecast.to_dict() if self.forecast else None,
            )
            trainer = self._trainer(stack, engine, store, source, identity)
            result = self._train(trainer)
            self._export(engine.swap, pool, trainer)
        result.peak_memory_bytes = process_memory().peak_rss_bytes
        return result

    @property
    def _config(self) -> Config:
        return self.prepared.config

    def _leave_if_asked(self, when: str) -> None:
        if self.signals.requested is not None:
            raise Interrupted(f"stopped {when}.", self.signals.requested)

    def _open_store(self, streams: Streams) -> Store:
        direct, disk = self._config.io.direct, self.disk
        if self.resumed:
            folders = checkpoint_folders(self.output_dir)
            return Store.open(
                disk.directories, disk.units, checkpoints={f: read_manifest(f) for f in folders},
                live=self.resumed.folder, backend=streams.states, activations=streams.activations,
                output_dir=self.output_dir, copies=disk.copies, direct=direct,
            )  # fmt: skip
        prepare_directories([str(path) for path in disk.directories])
        coded = self.prepared.precision.coded_moments
        return Store.create(
            disk.directories, disk.units, copies=disk.copies, run_id=uuid.uuid4().hex,
            backend=streams.states, activations=streams.activations, output_dir=self.output_dir, weights=disk.layout.weights,
            check_bytes=check_bytes_of(self.prepared.memory.chunk_bytes, coded=coded), direct=direct,
        )  # fmt: skip

    def _close_store(self, store: Store) -> None:
        """Close the store; without a checkpoint its states are of no use to anybody."""
        keep = bool(checkpoint_folders(self.output_dir))
        store.close(delete_files=not keep)
        if not keep and not self._config.io.swap_dirs:
            shutil.rmtree(self.output_dir / "swap", ignore_errors=True)

    def _reference(self) -> Reference | None:
        """Return what transformers makes of a batch; None if nothing is to be compared with it."""
        if not self._config.training.verify or self.resumed:
            return None
        reference = reference_loss(self.prepared)
        return_memory()
        return reference

    def _load_buffers(self, source: WeightSource) -> None:
        buffers = self.prepared.blocks.persistent_buffers()
        into = {base_name(name): torch.empty_like(b, device="cpu") for name, b in buffers.items()}
        source.load(list(into), into)
        for name, buffer in buffers.items():
            buffer.copy_(into[base_name(name)])

    def _assemble(
        self, stack: ExitStack, streams: Streams, store: Store, source: WeightSource, pool: BufferPool
    ) -> Engine:  # fmt: skip
        training, prepared = self._config.training, self.prepared
        swap = SwapManager(
            prepared.layout, prepared.memory, source=source, initial=prepared.built.initial,
            split=split_master, join=join_master, store=store, device=prepared.device, pool=pool,
            compute=prepared.compute, precision=prepared.precision,
            register=streams.register,
        )  # fmt: skip
        adam = OutOfCoreAdam(
            swap,
            AdamSettings(
                training.adam_beta1, training.adam_beta2, training.adam_epsilon, training.weight_decay,
                self._config.io.adam_threads,
            ),
            pool=pool, seed=training.seed,
        )  # fmt: skip
        engine = Engine(
            prepared.blocks, swap, adam, prepared.device, stack.enter_context(Lanes()),
            make_step_shape(
                prepared.layout, prepared.memory, adam.pieces, prepared.compute,
                prepared.precision,
            ),
            seed=training.seed, max_grad_norm=training.max_grad_norm,
            speculation=Speculation(always=training.clipping == "speculative"),
            watch=self._watch(), kept_memory=self._kept_memory(stack),
        )  # fmt: skip
        state = self.resumed.state if self.resumed else None
        set_longest_rows(prepared.blocks.model, state.longest_rows if state else {})
        if state:
            swap.fresh.clear()
            adam.steps = state.adam_steps
            if engine.loss_scale and state.loss_scale:
                engine.loss_scale = LossScale.from_dict(state.loss_scale)
        return engine

    def _kept_memory(self, stack: ExitStack) -> KeptMemory | None:
        memory = self.prepared.memory
        if not memory.keeps_freed_memory:
            return None
        stack.callback(return_memory)
        stack.callback(map_large_blocks)
        return KeptMemory(memory.host_bytes)

    def _watch(self) -> FiniteWatch:
        lines = self.prepared.training_rows.train.lines
        file, path = Path(self._config.data.train_file).name, self.output_dir / METRICS
        in_a_row = 0
        if self.resumed and path.exists():
            in_a_row = skipped_in_a_row(path, self.resumed.state.step)
        return FiniteWatch(
            skips=self._config.training.non_finite == "skip",
            in_a_row=in_a_row,
            name_rows=lambda numbers: (
                f"{rows_text([int(lines[n]) for n in numbers], 'line')} of {file}"
            ),
        )

    def _trainer(
        self, stack: ExitStack, engine: Engine, store: Store, source: WeightSource, identity: dict[str, Any]
    ) -> Trainer:  # fmt: skip
        first = self.resumed.state.step if self.resumed else 0
        metrics = stack.enter_context(MetricsWriter(self.output_dir / METRICS, resume_step=first))
        return Trainer(
            self._config.training, engine, output_dir=self.output_dir, store=store, source=source,
            rows=self.prepared.training_rows, first_step=first, identity=identity, metrics=metrics,
            progress=self.progress, signals=self.signals,
            expected_s=self.forecast.step_s if self.forecast else None,
        )  # fmt: skip

    def _train(self, trainer: Trainer) -> Result:
        history = trainer.run()
        moved = trainer.bytes_moved()
        if history.spans:
            self._tell(history)
            try:
                (self.output_dir / "timeline.svg").write_text(history.picture(), encoding="utf-8")
            except OSError as error:  # no reason to lose what was trained
                logger.warning("the picture of the last step cannot be written: %s", error)
        self.progress.finish()
        return Result(
            self.output_dir, self.prepared.training_rows.total_steps, history.losses, history.grad_norms, history.evaluations,
            history.step_seconds,
            {kind: counts["read"] for kind, counts in moved.items()},
            {kind: counts["written"] for kind, counts in moved.items()},
            planned_memory_bytes=self.prepared.memory.host_bytes,
            checkpoints=[path for path in history.checkpoints if path.exists()],
            skipped_steps=history.skipped,
        )  # fmt: skip

    def _tell(self, history: History) -> None:
        """Say what held steps up, and how far the forecast was right."""
        self.progress.note(verdict(history.spans).text())
        if self.forecast:
            lanes = history.lane_seconds
            steps = [dict(zip(lanes, values)) for values in zip(*lanes.values())]
            accuracy = compare(
                self.forecast.step_s, self.forecast.lane_s, history.step_seconds, steps
            )
            if accuracy:
                self.progress.note(accuracy.text())

    def _export(self, swap: SwapManager, pool: BufferPool, trainer: Trainer) -> None:
        """Write the tuned weights; the memory of training is given back first.

        Raises:
            SsdtuneError: They cannot be written; what was trained is saved.
        """
        swap.free_slots()
        pool.trim()
        prepared = self.prepared
        try:
            write_result(
                self.output_dir,
                checkpoint=prepared.checkpoint,
                built=prepared.built,
                blocks=prepared.blocks,
                read=lambda part, spec, high: swap.read_tensor(part, spec, high_only=high),
                base_model_name_or_path=self._config.model.model_name_or_path,
            )
        except (SsdtuneError, OSError) as error:
            folder = shlex.quote(str(trainer.save_result()))
            raise SsdtuneError(
                f"the tuned weights cannot be written: {error} All steps are done and saved: ssdtune export {folder} OUT "
                "writes the weights elsewhere."
            ) from error


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it is in use
            folder.rmdir()
