"""`ssdtune plan`: what a run would need and move, found by the run's own preparation; nothing is written.

Time is not predicted yet. Read `ssdtune.train.prepare` for how memory is planned and `ssdtune.plan.budget` for
the arithmetic of drives.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdtune.config.schema import Config
from ssdtune.errors import CapacityError
from ssdtune.plan.budget import RunShape
from ssdtune.plan.estimate import Estimate, estimate
from ssdtune.plan.residency import MemoryPlan
from ssdtune.store.space import Need, check_space
from ssdtune.train.prepare import Prepared, prepare, summary_lines


@dataclass(frozen=True)
class RunPlan:
    """What a run needs.

    Attributes:
        problems: Why it does not fit, with numbers; empty if it does.
        summary: What would happen, a few lines for people.
        memory, estimate: The figures; None if the memory is too small for any plan.
    """

    problems: tuple[str, ...]
    summary: tuple[str, ...] = ()
    memory: MemoryPlan | None = None
    estimate: Estimate | None = None

    @property
    def fits(self) -> bool:
        """Say whether the run can start."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return raw bytes, ready for JSON."""
        return {
            "fits": self.fits,
            "problems": list(self.problems),
            "memory": self.memory.to_dict() if self.memory else None,
            "estimate": self.estimate.to_dict() if self.estimate else None,
        }

    def text(self) -> str:
        """Return the plan for people."""
        lines = list(self.summary)
        if self.estimate:
            lines.append(self.estimate.text())
            if warning := self.estimate.wear.warning():
                lines.append(warning)
        verdict = (
            ["It fits."] if self.fits else [f"It does not fit: {text}" for text in self.problems]
        )
        return "\n".join([*lines, *verdict])


def plan(config: Config) -> RunPlan:
    """Plan a run. Without a train_file, the figures are those of one step at max_length.

    Raises:
        ConfigError: Something about the input is wrong.
    """
    try:
        prepared = prepare(config, with_rows=bool(config.data.train_file))
    except CapacityError as error:
        return RunPlan((str(error),))
    figures = estimate(prepared.parts, _run_shape(prepared), prepared.memory.resident)
    output_dir = Path(config.training.output_dir or ".").expanduser().absolute()
    folders = config.io.swap_dirs or [str(output_dir / "swap")]
    directories = [Path(folder).expanduser().absolute() for folder in folders]
    needs = [Need(output_dir, figures.disk.export, "tuned weights")]
    needs += [
        Need(folder, figures.disk.swap_bytes // len(directories), "states")
        for folder in directories
    ]
    problems: tuple[str, ...] = ()
    try:
        check_space(needs)
    except CapacityError as error:
        problems = (str(error),)
    summary = summary_lines(prepared, figures.disk.swap_bytes, directories)
    return RunPlan(problems, tuple(summary), prepared.memory, figures)


def _run_shape(prepared: Prepared) -> RunShape:
    training, rows = prepared.config.training, prepared.rows
    num_steps = rows.total_steps if rows else training.max_steps or 1
    every = training.save_steps
    num_checkpoints = num_steps // every if every else 0
    return RunShape(
        num_blocks=prepared.layout.num_blocks,
        num_micro_batches=prepared.compute.num_micro_batches,
        input_bytes=prepared.compute.input_bytes,
        gradients_on_ssd=prepared.memory.gradients == "ssd",
        inputs_on_ssd=prepared.memory.input_slots > 0,
        # A run whose only save is at its end never writes beside a checkpoint.
        checkpoints_kept=training.save_total_limit if every and every < num_steps else 0,
        export_bytes=prepared.checkpoint.num_bytes if prepared.config.method == "full" else 0,
        num_steps=num_steps,
        steps_per_epoch=rows.plan.steps_per_epoch if rows else 1.0,
        num_checkpoints=num_checkpoints,
    )
