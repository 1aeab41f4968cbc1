"""Fine-tune from a configuration: the whole run, from the input checks to the exported weights."""

from __future__ import annotations

import gc
import json
import logging
import os
import shlex
import shutil
import statistics
import uuid
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssdtune.config.check import require
from ssdtune.config.load import to_yaml, with_absolute_paths
from ssdtune.config.schema import Config
from ssdtune.errors import ConfigError, DeviceMemoryError, Interrupted, SsdtuneError
from ssdtune.hardware.known import known
from ssdtune.hardware.memory import (
    KeptMemory,
    map_large_blocks,
    process_memory,
    return_memory,
)
from ssdtune.hardware.profile import HardwareProfile
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
from ssdtune.report.progress import Progress, choose_progress
from ssdtune.store.directories import prepare_directories
from ssdtune.store.durable import write_text_atomic
from ssdtune.store.store import Store
from ssdtune.swap.manager import SwapManager
from ssdtune.swap.update import AdamSettings, OutOfCoreAdam
from ssdtune.train.checkpoint import (
    PLAN,
    TrainerState,
    check_identity,
    checkpoint_folders,
    find_checkpoint,
    read_manifest,
    read_state,
    remove_remains,
)
from ssdtune.train.choose import Chosen, choose, tuned
from ssdtune.train.disk import DiskPlan, has_room, plan_disk
from ssdtune.train.engine import Engine
from ssdtune.train.exporting import write_result
from ssdtune.train.forecast import Forecast
from ssdtune.train.lanes import Lanes
from ssdtune.train.nonfinite import FiniteWatch, rows_text, skipped_in_a_row
from ssdtune.train.output import (
    METRICS,
    SETTINGS,
    SETTINGS_TITLE,
    hold_output,
    refuse_foreign,
)
from ssdtune.train.prepare import Prepared, check_memory, config_with, prepare, summary_lines
from ssdtune.train.rehearsed import times_of
from ssdtune.train.signals import StopSignals
from ssdtune.train.speculation import Speculation
from ssdtune.train.step_shape import make_step_shape
from ssdtune.train.streams import streams_of
from ssdtune.train.trainer import History, Trainer
from ssdtune.train.verify import compared_part, reference_losses, verify
from ssdtune.units import format_disk, format_memory, format_time

logger = logging.getLogger(__name__)

RETRY_SHARE = 0.8
"""Of a card's memory, what the plan of a second attempt may take."""


@dataclass
class Result:
    """What came out of a run.

    Attributes:
        losses: Of every step that this process ran.
        evaluations: (step, mean loss on the held-out rows).
        peak_memory_bytes: Most resident memory of this process.
        skipped_steps: Steps, counted from 1, that were left out because something was not finite.
    """

    output_dir: Path
    steps: int
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    planned_memory_bytes: int = 0
    peak_memory_bytes: int = 0
    checkpoints: list[Path] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        data = asdict(self)
        data["output_dir"] = str(self.output_dir)
        data["checkpoints"] = [str(path) for path in self.checkpoints]
        return data

    def text(self) -> str:
        """Return a summary for people."""
        lines = [f"tuned weights: {self.output_dir}"]
        if self.losses:
            median = statistics.median(self.step_seconds)
            lines.append(
                f"{len(self.losses)} steps, {format_time(median)} each; loss {self.losses[0]:.4f} to "
                f"{self.losses[-1]:.4f}"
            )
        if self.skipped_steps:
            lines.append(
                f"{len(self.skipped_steps)} of them were skipped, as something was not finite: "
                f"{rows_text(self.skipped_steps, 'step')}"
            )
        if self.evaluations:
            lines.append(f"evaluation loss {self.evaluations[-1][1]:.4f}")
        lines.append(
            f"moved {format_disk(sum(self.bytes_read.values()))} from and "
            f"{format_disk(sum(self.bytes_written.values()))} to SSD; peak memory "
            f"{format_memory(self.peak_memory_bytes)}, planned {format_memory(self.planned_memory_bytes)}"
        )
        return "\n".join(lines)


def finetune(
    config: Config,
    *,
    progress: Progress | None = None,
    quiet: bool = False,
    verbose: bool = False,
) -> Result:
    """Fine-tune a model and write the tuned weights, or the adapter, to `output_dir`.

    Args:
        progress: Where the run is shown; by default a display on stderr that suits it.
        quiet: Without `progress`, show nothing of the run (warnings still go to the loggers).
        verbose: Without `progress`, plain lines and no live bar, which debug lines would tear apart.

    Raises:
        ConfigError: Bad settings or input, before anything is written.
        CapacityError: Not enough memory or space, before anything is written.
        Interrupted: A signal came; the run was saved.
        SsdtuneError: The run failed; checkpoints are whole.
    """
    run = partial(_finetune, progress=progress, quiet=quiet, verbose=verbose)
    try:
        return run(config)
    except DeviceMemoryError as error:
        if not config.memory.retry_out_of_memory:
            raise
        config = _with_less_memory(config, error)
    gc.collect()  # the error is gone, and with it what its frames held of the card's memory
    return run(config)


def _with_less_memory(config: Config, error: DeviceMemoryError) -> Config:
    """Return the settings of a second attempt, which goes on from the last checkpoint if there is one."""
    output_dir = Path(config.training.output_dir).expanduser().absolute()
    budget = int(RETRY_SHARE * (config.memory.gpu_memory or error.budget_bytes))
    again = "last" if checkpoint_folders(output_dir) else None
    logger.warning(
        "%s Trying once more%s with a plan for %s.",
        error, " from the last checkpoint" if again else "", format_memory(budget),
    )  # fmt: skip
    return replace(
        config,
        memory=replace(config.memory, gpu_memory=budget),
        training=replace(config.training, resume_from_checkpoint=again),
    )


def _finetune(config: Config, *, progress: Progress | None, quiet: bool, verbose: bool) -> Result:
    require(config)
    output_dir = Path(config.training.output_dir).expanduser().absolute()
    resumed = _resumed_from(config, output_dir)
    map_large_blocks()
    if resumed:
        config = _divided_as_before(config, resumed[1])
    profile = known()
    config = tuned(config, profile)
    prepared = prepare(config, streams_for=partial(streams_of, config, profile))
    chosen = _choose(prepared, profile, output_dir, resumed=resumed is not None)
    if chosen is not None:
        prepared = chosen.prepared
    config = prepared.config
    assert prepared.rows is not None
    check_memory(prepared)
    disk = plan_disk(prepared, output_dir, resumed=resumed is not None)
    disk.check_space()
    if progress is None:
        progress = choose_progress(
            quiet=quiet,
            verbose=verbose,
            logging_steps=config.training.logging_steps,
            environ=os.environ,
        )
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        stack.enter_context(progress)
        progress.start(
            prepared.rows.total_steps,
            "\n".join(
                [
                    *summary_lines(prepared, disk.layout.total_bytes, disk.directories),
                    f"drive wear: {disk.estimate.wear.text()}",
                    *([chosen.forecast.text(), chosen.text()] if chosen else []),
                ]
            ),
            first_step=1 + (resumed[1].step if resumed else 0),
        )
        if warning := disk.wear_warning(config):
            logger.warning("%s", warning)
        forecast = chosen.forecast if chosen else None
        run = _Run(config, prepared, disk, output_dir, resumed, progress, signals, forecast)
        return run.run()


def _choose(
    prepared: Prepared, profile: HardwareProfile | None, output_dir: Path, *, resumed: bool
) -> Chosen | None:
    """Return the run with the fastest plan for this machine; None if it was not measured."""
    if profile is None:
        logger.info("no forecast: this machine was not measured (ssdtune profile DIR)")
        return None
    try:
        room = partial(has_room, output_dir=output_dir, resumed=resumed)
        return choose(prepared, profile, times_of=times_of, has_room=room)
    except ConfigError as error:
        logger.warning("no forecast: %s", error)
        return None


def _resumed_from(config: Config, output_dir: Path) -> tuple[Path, TrainerState] | None:
    wanted = config.training.resume_from_checkpoint
    if wanted:
        folder = find_checkpoint(output_dir, wanted)
        return folder, read_state(folder)
    kept = checkpoint_folders(output_dir)
    if kept:
        raise ConfigError(
            f"{output_dir} holds a run with {kept[-1].name}. Go on with --resume-from-checkpoint last, "
            f"name another output_dir, or delete it: rm -r '{output_dir}'"
        )
    if (output_dir / METRICS).exists() and _is_finished(output_dir):
        raise ConfigError(
            f"{output_dir} holds the result of a finished run. Name another output_dir, or delete it: "
            f"rm -r '{output_dir}'"
        )
    refuse_foreign(output_dir)
    return None


def _divided_as_before(config: Config, state: TrainerState) -> Config:
    """Return the settings with the micro-batches that the run was begun with, where they were left to us."""
    size = state.identity.get("per_device_train_batch_size")
    if config.training.train_batch_size is None or not isinstance(size, int):
        return config
    return config_with(config, size)


def _is_finished(output_dir: Path) -> bool:
    return any(output_dir.glob("*.safetensors"))


def _identity(prepared: Prepared) -> dict[str, Any]:
    """Return what must be the same when a run is resumed."""
    config, rows = prepared.config, prepared.rows
    assert rows is not None
    training = config.training
    return {
        "method": config.method,
        "dtype": str(prepared.dtype),
        "lora": asdict(config.lora) if config.method == "lora" else None,
        "model": prepared.checkpoint.fingerprint,
        "rows": rows.train.fingerprint(),
        "total_steps": rows.total_steps,
        **{
            key: getattr(training, key)
            for key in (
                "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
                "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2",
                "adam_epsilon", "max_grad_norm", "seed", "data_seed", "optim", "master_weights",
            )
        },
        "shuffle": config.data.shuffle,
        # Which rows share a sequence follows from its length.
        "packed_length": config.data.max_length if config.data.packing else None,
    }  # fmt: skip


@dataclass
class _Run:
    """One run, once everything is checked: opens what it needs, trains, exports, tidies up."""

    config: Config
    prepared: Prepared
    disk: DiskPlan
    output_dir: Path
    resumed: tuple[Path, TrainerState] | None
    progress: Progress
    signals: StopSignals
    forecast: Forecast | None

    def run(self) -> Result:
        identity = _identity(self.prepared)
        if self.resumed:
            check_identity(self.resumed[0], self.resumed[1].identity, identity)
        rows = self.prepared.rows
        assert rows is not None
        io = self.config.io
        with ExitStack() as stack:
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
            check_batch = [compared_part(rows.plan.step_batches(0)[0])]
            reference = None
            if self.config.training.verify and not self.resumed:
                reference = reference_losses(self.prepared, check_batch[0])
                return_memory()
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
            swap, adam, engine = self._assemble(stack, streams, store, source, pool)
            if reference is not None:
                verify(engine, check_batch, reference, self.prepared.dtype)
            self._write_settings()
            trainer = self._trainer(stack, engine, swap, adam, store, source, identity)
            history, counters = self._train(trainer)
            self._export(swap, pool, trainer)
        final = process_memory()
        return Result(
            self.output_dir, rows.total_steps, history.losses, history.grad_norms, history.evaluations,
            history.step_seconds,
            {kind: counts["read"] for kind, counts in counters.items()},
            {kind: counts["written"] for kind, counts in counters.items()},
            self.prepared.memory.host_bytes, final.peak_rss_bytes,
            [path for path in history.checkpoints if path.exists()], history.skipped,
        )  # fmt: skip

    def _write_settings(self) -> None:
        """Write settings and plan: from here on the folder is that of a run."""
        # Where a resumed run went on from is no setting of the run.
        training = replace(self.config.training, resume_from_checkpoint=None)
        settings = with_absolute_paths(replace(self.config, training=training))
        write_text_atomic(self.output_dir / SETTINGS, SETTINGS_TITLE + to_yaml(settings))
        plan = {
            "schema_version": 1,
            "memory": self.prepared.memory.to_dict(),
            "estimate": self.disk.estimate.to_dict(),
            "forecast": self.forecast.to_dict() if self.forecast else None,
        }
        write_text_atomic(self.output_dir / PLAN, json.dumps(plan, indent=2) + "\n")

    def _leave_if_asked(self, when: str) -> None:
        if self.signals.requested is not None:
            raise Interrupted(f"stopped {when}.", self.signals.requested)

    def _open_store(self, streams: Streams) -> Store:
        direct, disk = self.config.io.direct, self.disk
        if self.resumed:
            folders = checkpoint_folders(self.output_dir)
            return Store.open(
                disk.directories, disk.units, checkpoints={f: read_manifest(f) for f in folders},
                live=self.resumed[0], backend=streams.states, activations=streams.activations,
                output_dir=self.output_dir, copies=disk.copies, direct=direct,
            )  # fmt: skip
        prepare_directories([str(path) for path in disk.directories])
        return Store.create(
            disk.directories, disk.units, copies=disk.copies, run_id=uuid.uuid4().hex,
            backend=streams.states, activations=streams.activations,
            output_dir=self.output_dir, weights=disk.layout.weights, check_bytes=self._check_bytes(),
            direct=direct,
        )  # fmt: skip

    def _check_bytes(self) -> int:
        coded = self.prepared.precision.coded_moments
        return check_bytes_of(self.prepared.memory.chunk_bytes, coded=coded)

    def _close_store(self, store: Store) -> None:
        """Close the store; without a checkpoint its states are of no use to anybody."""
        keep = bool(checkpoint_folders(self.output_dir))
        store.close(delete_files=not keep)
        if not keep and not self.config.io.swap_dirs:
            shutil.rmtree(self.output_dir / "swap", ignore_errors=True)

    def _load_buffers(self, source: WeightSource) -> None:
        buffers = self.prepared.blocks.persistent_buffers()
        if buffers:
            into = {
                base_name(name): torch.empty_like(b, device="cpu") for name, b in buffers.items()
            }
            source.load(list(into), into)
            for name, buffer in buffers.items():
                buffer.copy_(into[base_name(name)])

    def _assemble(
        self,
        stack: ExitStack,
        streams: Streams,
        store: Store,
        source: WeightSource,
        pool: BufferPool,
    ) -> tuple[SwapManager, OutOfCoreAdam, Engine]:
        training, prepared = self.config.training, self.prepared
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
                self.config.io.adam_threads,
            ),
            pool=pool, seed=training.seed,
        )  # fmt: skip
        if self.resumed:
            swap.fresh.clear()
            adam.steps = self.resumed[1].adam_steps
        lanes = stack.enter_context(Lanes())
        engine = Engine(
            prepared.blocks, swap, adam, prepared.device, lanes,
            make_step_shape(
                prepared.layout, prepared.memory, adam.pieces, prepared.compute,
                prepared.precision,
            ),
            seed=training.seed, max_grad_norm=training.max_grad_norm,
            speculation=Speculation(always=training.clipping == "speculative"),
            watch=self._watch(), kept_memory=self._kept_memory(stack),
        )  # fmt: skip
        rows = self.resumed[1].longest_rows if self.resumed else {}
        set_longest_rows(prepared.blocks.model, rows)
        if self.resumed and engine.loss_scale and (kept := self.resumed[1].loss_scale):
            engine.loss_scale = LossScale.from_dict(kept)
        return swap, adam, engine

    def _kept_memory(self, stack: ExitStack) -> KeptMemory | None:
        memory = self.prepared.memory
        if not memory.keeps_freed_memory:
            return None
        stack.callback(return_memory)
        stack.callback(map_large_blocks)
        return KeptMemory(memory.host_bytes)

    def _watch(self) -> FiniteWatch:
        rows = self.prepared.rows
        assert rows is not None
        lines, file = rows.train.lines, Path(self.config.data.train_file).name
        path, in_a_row = self.output_dir / METRICS, 0
        if self.resumed and path.exists():
            in_a_row = skipped_in_a_row(path, self.resumed[1].step)
        return FiniteWatch(
            skips=self.config.training.non_finite == "skip",
            in_a_row=in_a_row,
            name_rows=lambda numbers: (
                f"{rows_text([int(lines[n]) for n in numbers], 'line')} of {file}"
            ),
        )

    def _trainer(
        self, stack: ExitStack, engine: Engine, swap: SwapManager, adam: OutOfCoreAdam, store: Store,
        source: WeightSource, identity: dict[str, Any],
    ) -> Trainer:  # fmt: skip
        rows, first = self.prepared.rows, self.resumed[1].step if self.resumed else 0
        assert rows is not None
        metrics = stack.enter_context(MetricsWriter(self.output_dir / METRICS, resume_step=first))
        return Trainer(
            self.config, engine, output_dir=self.output_dir, swap=swap, adam=adam, store=store,
            source=source, batches=rows.plan, evaluation=rows.evaluation,
            total_steps=rows.total_steps, first_step=first, identity=identity, metrics=metrics,
            progress=self.progress, signals=self.signals,
            expected_s=self.forecast.step_s if self.forecast else None,
        )  # fmt: skip

    def _train(self, trainer: Trainer) -> tuple[History, dict[str, dict[str, int]]]:
        history = trainer.run()
        counters = trainer.bytes_moved()
        if history.spans:
            self._tell(history)
            try:
                (self.output_dir / "timeline.svg").write_text(history.picture(), encoding="utf-8")
            except OSError as error:  # no reason to lose what was trained
                logger.warning("the picture of the last step cannot be written: %s", error)
        self.progress.finish()
        return history, counters

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
                base_model_name_or_path=self.config.model.model_name_or_path,
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
