"""`ssdtune plan`: what a run would need and move, found by the run's own preparation; nothing is written.

Read `ssdtune.train.prepare` for how memory is planned, `ssdtune.train.disk` for the drives, and
`ssdtune.train.forecast` for time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdtune.config.schema import Config
from ssdtune.errors import CapacityError
from ssdtune.hardware.profile import HardwareProfile
from ssdtune.plan.estimate import Estimate
from ssdtune.plan.residency import MemoryPlan
from ssdtune.train.disk import plan_disk
from ssdtune.train.forecast import Forecast, forecast
from ssdtune.train.prepare import prepare, summary_lines


@dataclass(frozen=True)
class RunPlan:
    """What a run needs.

    Attributes:
        problems: Why it does not fit, with numbers; empty if it does.
        summary: What would happen, a few lines for people.
        memory, estimate: The figures; None if the memory is too small for any plan.
        wear_warning: Set if the run takes more of the drives' life than `io.wear_warning` allows.
        forecast: How long a step takes; None without a hardware profile.
    """

    problems: tuple[str, ...]
    summary: tuple[str, ...] = ()
    memory: MemoryPlan | None = None
    estimate: Estimate | None = None
    wear_warning: str | None = None
    forecast: Forecast | None = None

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
            "wear_warning": self.wear_warning,
            "forecast": self.forecast.to_dict() if self.forecast else None,
        }

    def text(self) -> str:
        """Return the plan for people."""
        lines = list(self.summary)
        if self.estimate:
            lines.append(self.estimate.text())
        if self.forecast:
            lines.append(self.forecast.text())
        elif self.memory:
            lines.append("expected  no time without measured rates: run ssdtune profile DIR once")
        if self.wear_warning:
            lines.append(f"warning: {self.wear_warning}")
        verdict = (
            ["It fits."] if self.fits else [f"It does not fit: {text}" for text in self.problems]
        )
        return "\n".join([*lines, *verdict])


def plan(config: Config, hardware: HardwareProfile | None = None) -> RunPlan:
    """Plan a run. Without a train_file, the figures are those of one step at max_length.

    Args:
        hardware: Measured rates, for the time that a step takes.

    Raises:
        ConfigError: Something about the input is wrong.
    """
    try:
        prepared = prepare(config, with_rows=bool(config.data.train_file))
    except CapacityError as error:
        return RunPlan((str(error),))
    disk = plan_disk(prepared, output_folder(config))
    problems: tuple[str, ...] = ()
    try:
        disk.check_space()
    except CapacityError as error:
        problems = tuple(str(error).splitlines())
    summary = summary_lines(prepared, disk.layout.total_bytes, disk.directories)
    if prepared.rows is None:
        summary.append(
            "no train_file: the figures are those of rows as long as max_length, and of "
            + (f"{config.training.max_steps} steps" if config.training.max_steps else "one step")
        )
    return RunPlan(
        problems,
        tuple(summary),
        prepared.memory,
        disk.estimate,
        disk.wear_warning(config),
        forecast(prepared, hardware.rates()) if hardware else None,
    )


def output_folder(config: Config) -> Path:
    """Return the absolute output folder; the current one if none is named."""
    return Path(config.training.output_dir or ".").expanduser().absolute()
