"""Fine-tune from a configuration: checks everything, chooses the plan, runs it, and once more with less of a card's memory.

`ssdtune.train.prepare` finds what is wrong with the input, before anything is written; `ssdtune.train.choose` finds the
fastest plan; `ssdtune.train.run` does the work.
"""

from __future__ import annotations

import gc
import logging
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from ssdtune.config.check import require
from ssdtune.config.schema import Config
from ssdtune.errors import ConfigError, DeviceMemoryError
from ssdtune.hardware.known import known
from ssdtune.hardware.memory import map_large_blocks
from ssdtune.hardware.profile import HardwareProfile
from ssdtune.report.progress import Progress, choose_progress
from ssdtune.train.checkpoint import checkpoint_folders
from ssdtune.train.choose import Chosen, choose, tuned
from ssdtune.train.disk import has_room, output_folder, plan_disk
from ssdtune.train.prepare import Prepared, check_memory, prepare, summary_lines
from ssdtune.train.rehearsed import times_of
from ssdtune.train.result import Result
from ssdtune.train.resume import resumed_from
from ssdtune.train.run import Run
from ssdtune.train.signals import StopSignals
from ssdtune.train.streams import streams_of
from ssdtune.units import format_memory

logger = logging.getLogger(__name__)

RETRY_SHARE = 0.8
"""Of a card's memory, what the plan of a second attempt may take."""


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
    budget = int(RETRY_SHARE * (config.memory.gpu_memory or error.budget_bytes))
    again = "last" if checkpoint_folders(output_folder(config)) else None
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
    output_dir = output_folder(config)
    resumed = resumed_from(config, output_dir)
    map_large_blocks()
    if resumed:
        config = resumed.divided_as_before(config)
    profile = known()
    config = tuned(config, profile)
    prepared = prepare(config, streams_for=partial(streams_of, config, profile))
    chosen = _choose(prepared, profile, output_dir, resumed=resumed is not None)
    if chosen is not None:
        prepared = chosen.prepared
    config = prepared.config
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
            prepared.training_rows.total_steps,
            "\n".join(
                [
                    *summary_lines(prepared, disk.layout.total_bytes, disk.directories),
                    f"drive wear: {disk.estimate.wear.text()}",
                    *([chosen.forecast.text(), chosen.text()] if chosen else []),
                ]
            ),
            first_step=1 + (resumed.state.step if resumed else 0),
        )
        if warning := disk.wear_warning(config):
            logger.warning("%s", warning)
        forecast = chosen.forecast if chosen else None
        return Run(prepared, disk, output_dir, resumed, progress, signals, forecast).run()


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
