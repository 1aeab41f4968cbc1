"""What a run lays on its drives and writes to them: places, the check for room, and the estimate of wear.

One function for `ssdtune plan` and for the run itself, so that the one refuses exactly what the other would.
Nothing is written here. The arithmetic is in `ssdtune.plan.budget`, the places in `ssdtune.store.layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ssdtune.config.schema import Config
from ssdtune.errors import CapacityError
from ssdtune.hardware.figures import DirectoryProfile, DriveFacts
from ssdtune.hardware.place import drives_of
from ssdtune.io.buffers import aligned_size
from ssdtune.io.mounts import existing_parent, kind_warning, mount_of
from ssdtune.plan.budget import RunShape, run_written_bytes, step_traffic
from ssdtune.plan.estimate import Estimate, estimate
from ssdtune.plan.states import extent_bytes
from ssdtune.plan.wear import DriveLife, Rating, rate_drives
from ssdtune.store.claim import space_needs
from ssdtune.store.directories import resolve_directories
from ssdtune.store.layout import StoreLayout, UnitSpec
from ssdtune.store.space import Need, check_space
from ssdtune.swap.manager import unit_specs
from ssdtune.train import elsewhere
from ssdtune.train.prepare import Prepared
from ssdtune.train.speculation import MOST_CLIPPED
from ssdtune.units import format_disk

SAMPLED_STEPS = 64
"""Steps whose rows are looked at for the mean size of block inputs."""


@dataclass(frozen=True)
class DiskPlan:
    """Where the states of a run go.

    Attributes:
        units: What the store holds.
        directories: Swap directories, absolute.
        copies: Places of each state: the live one, one for each checkpoint that is kept, and one for speculative updates.
        layout: Where each place is.
        needs: Everything that the run will write, for `check_space`.
        estimate: Room, traffic and wear as figures.
        places: The directories as the profile of another machine describes them; empty on this one.
        warnings: What a user should know about keeping states in these directories.
    """

    units: list[UnitSpec]
    directories: list[Path]
    copies: int
    layout: StoreLayout
    needs: list[Need]
    estimate: Estimate
    places: tuple[DirectoryProfile, ...] = ()
    warnings: tuple[str, ...] = ()

    def check_space(self) -> None:
        """Refuse a run that does not fit.

        Raises:
            CapacityError: Some file systems are too small, or the run writes more than its wear budget.
        """
        problems = []
        try:
            if self.places:
                elsewhere.check_space(self.needs, self.places)
            else:
                check_space(self.needs)
        except CapacityError as error:
            problems.append(f"{error}{self._remedy()}")
        if problem := self.estimate.wear.budget_problem():
            problems.append(problem)
        if problems:
            raise CapacityError("\n".join(problems))

    def _remedy(self) -> str:
        size = self.estimate.disk.speculation
        if not size:
            return ""
        return f" {format_disk(size)} are for speculative updates; training.clipping: deferred does without."

    def wear_warning(self, config: Config) -> str | None:
        """Return a warning if the run takes more of the drives' life than the settings allow."""
        return self.estimate.wear.warning(config.io.wear_warning)


def plan_disk(
    prepared: Prepared,
    output_dir: Path,
    *,
    resumed: bool = False,
    places: Sequence[DirectoryProfile] = (),
) -> DiskPlan:
    """Plan the drives of a run.

    Args:
        output_dir: Absolute; holds the default swap directory and the tuned weights.
        resumed: The run goes on from a checkpoint, so that one exists from the start.
        places: Directories of another machine that are used instead of those of this one.

    Raises:
        ConfigError: A swap directory cannot be one.
    """
    config = prepared.config
    units = unit_specs(
        prepared.layout,
        prepared.memory,
        prepared.compute,
        prepared.precision,
    )
    if places:
        directories = [Path(place.path) for place in places]
        drives = [drive for place in places for drive in place.drives]
        warnings = [warning for place in places for warning in place.warnings]
    else:
        directories = swap_directories(config, output_dir)
        found = (kind_warning(path, mount_of(path).kind) for path in directories)
        warnings = [warning for warning in found if warning]
        drives = [drive for path in directories for drive in drives_of(existing_parent(path))]
    shape = _run_shape(prepared, resumed)
    copies = 1 + shape.checkpoints_kept + shape.speculates
    layout = StoreLayout.build(units, copies, prepared.shares or [1.0] * len(directories))
    needs = [
        *space_needs(directories, layout),
        Need(output_dir, shape.export_bytes, "tuned weights"),
    ]
    figures = estimate(
        prepared.parts,
        shape,
        prepared.memory.resident,
        rating=_rating(config, drives, len(directories)),
        wear_budget_bytes=wear_budget_bytes(config),
    )
    return DiskPlan(
        units, directories, copies, layout, needs, figures, tuple(places), tuple(warnings)
    )


def has_room(
    prepared: Prepared,
    output_dir: Path,
    *,
    resumed: bool = False,
    places: Sequence[DirectoryProfile] = (),
) -> bool:
    """Say whether the drives of a run have room for it; the arguments are those of `plan_disk`."""
    try:
        plan_disk(prepared, output_dir, resumed=resumed, places=places).check_space()
    except CapacityError:
        return False
    return True


def written_bytes(prepared: Prepared) -> int:
    """Return what a run writes, on all drives together."""
    shape = _run_shape(prepared, resumed=False)
    return run_written_bytes(prepared.parts, shape, prepared.memory.resident)


def activation_share(prepared: Prepared) -> float:
    """Return the share of activations in what a step writes, all states included, also those that stay in memory."""
    if not prepared.memory.input_slots:
        return 0.0
    run = _run_shape(prepared, resumed=False)
    written = step_traffic(prepared.parts, run).written
    return written["activations"] / max(sum(written.values()), 1)


def wear_budget_bytes(config: Config) -> int | None:
    """Return the most that a run may write; None for no limit."""
    return _terabytes(config.io.wear_budget_terabytes)


def swap_directories(config: Config, output_dir: Path | None = None) -> list[Path]:
    """Return the absolute directories over which a run deals its states.

    Args:
        output_dir: Holds the default one; that of the settings if it is not given.

    Raises:
        ConfigError: A name cannot be a directory.
    """
    folder = output_dir or output_folder(config)
    return resolve_directories(config.io.swap_dirs or [str(folder / "swap")])


def output_folder(config: Config) -> Path:
    """Return the absolute output folder; the current one if none is named."""
    return Path(config.training.output_dir or ".").expanduser().absolute()


def _rating(config: Config, drives: Sequence[DriveFacts], num_directories: int) -> Rating:
    lives = {
        drive.name: DriveLife(drive.wear_share, drive.written_bytes, drive.rated_bytes)
        for drive in drives
    }
    given = _terabytes(config.io.rated_terabytes_written)
    return rate_drives(given, list(lives.values()), num_directories)


def _terabytes(number: float | None) -> int | None:
    return None if number is None else round(number * 10**12)


def _run_shape(prepared: Prepared, resumed: bool) -> RunShape:
    training, rows = prepared.config.training, prepared.rows
    num_steps = rows.total_steps if rows else training.max_steps
    every = training.save_steps
    # A run whose only save, if any, is at its end never writes beside a checkpoint.
    only_at_end = every == 0 or (num_steps is not None and every >= num_steps)
    num_steps = num_steps or 1
    return RunShape(
        stored_inputs=prepared.memory.stored_inputs(prepared.layout.num_blocks),
        num_micro_batches=prepared.compute.num_micro_batches,
        input_bytes=prepared.compute.input_bytes,
        step_inputs_bytes=_mean_inputs_bytes(prepared),
        deferred=prepared.memory.deferred,
        gradients_on_ssd=prepared.memory.gradients_on_ssd,
        speculative=prepared.memory.speculative,
        clipped_share=1.0 if training.clipping == "speculative" else MOST_CLIPPED,
        swapped_bytes=sum(
            extent_bytes(prepared.memory.stored_bytes(block, prepared.compute))
            for block in prepared.memory.swapped
        ),
        checkpoints_kept=0 if only_at_end and not resumed else training.save_total_limit,
        export_bytes=_export_bytes(prepared),
        num_steps=num_steps,
        steps_per_epoch=rows.plan.steps_per_epoch if rows else None,
        num_checkpoints=num_steps // every if every else 0,
    )


def _export_bytes(prepared: Prepared) -> int:
    """Return the size of the tuned weights, or of the adapter in fp32."""
    if prepared.config.method == "full":
        if prepared.checkpoint.tensors:
            return prepared.checkpoint.num_bytes
        return 2 * prepared.built.keymap.num_parameters  # planned from a config.json: bf16
    return sum(4 * part.num_parameters for part in prepared.layout.trained_parts)


def _mean_inputs_bytes(prepared: Prepared) -> int | None:
    """Return the bytes of one block's inputs in a mean step: rows are shorter than the longest."""
    rows = prepared.rows
    if rows is None or not prepared.memory.input_slots:
        return None
    text = prepared.blocks.model.config.get_text_config()
    token_bytes = text.hidden_size * prepared.dtype.itemsize
    count = min(SAMPLED_STEPS, rows.total_steps)
    total = 0
    for index in range(count):
        batches = rows.plan.step_batches(index * rows.total_steps // count)
        total += sum(aligned_size(batch.input_ids.size * token_bytes) for batch in batches)
    return total // count
