"""Disk need, traffic, drive wear and cost of a run, as words and as a dictionary.

Reads the figures of `ssdtune.plan.budget` and `ssdtune.plan.wear`; decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ssdtune.plan.budget import (
    DiskNeed,
    RunShape,
    Traffic,
    disk_need,
    mean_written_bytes,
    rewritten_bytes,
    run_written_bytes,
    save_traffic,
    step_traffic,
)
from ssdtune.plan.residency import PartSize
from ssdtune.plan.wear import Rating, Wear
from ssdtune.units import format_count, format_disk, format_time


@dataclass(frozen=True)
class Estimate:
    """All figures of one run.

    Attributes:
        trained_parameters: Elements that the optimizer updates, padding included.
        frozen_bytes: Bytes of weights that are only read.
        traffic: Of one step.
        save: Of one checkpoint.
        num_saves: Checkpoints that the run makes.
    """

    trained_parameters: int
    frozen_bytes: int
    disk: DiskNeed
    traffic: Traffic
    save: Traffic
    wear: Wear
    num_saves: int

    def to_dict(self) -> dict[str, Any]:
        """Return raw bytes under names that say what they are, ready for JSON."""
        return {
            "trained_parameters": self.trained_parameters,
            "frozen_bytes": self.frozen_bytes,
            "disk_bytes": {
                **asdict(self.disk),
                "swap": self.disk.swap_bytes,
                "total": self.disk.total,
            },
            "step_bytes_read": dict(self.traffic.read),
            "step_bytes_written": dict(self.traffic.written),
            "save_bytes_read": self.save.read_bytes,
            "save_bytes_written": self.save.written_bytes,
            "wear": self.wear.to_dict(),
        }

    def text(self) -> str:
        """Return a few lines for people."""
        disk = {name: size for name, size in asdict(self.disk).items() if size}
        parts = ", ".join(f"{name} {format_disk(size)}" for name, size in disk.items())
        frozen = f", {format_disk(self.frozen_bytes)} frozen" if self.frozen_bytes else ""
        return "\n".join(
            [
                f"trained   {format_count(self.trained_parameters)} parameters{frozen}",
                f"drives    {format_disk(self.disk.total)}: {parts or 'nothing'}",
                f"per step  {format_disk(self.traffic.read_bytes)} read, "
                f"{format_disk(self.traffic.written_bytes)} written{self._activations()}{self._per_parameter()}",
                f"wear      {self.wear.text()}",
            ]
        )

    def save_text(self, seconds: float) -> str:
        """Say how long a checkpoint takes, one line for people."""
        moved = f"{format_disk(self.save.read_bytes)} read, {format_disk(self.save.written_bytes)} written"
        return f"save      {format_time(seconds)} for a checkpoint: {moved}"

    def _activations(self) -> str:
        size = self.traffic.written.get("activations", 0)
        return f", {format_disk(size)} of it activations" if size else ""

    def _per_parameter(self) -> str:
        if self.frozen_bytes or not self.trained_parameters:
            return ""
        read = self.traffic.read_bytes / self.trained_parameters
        written = self.traffic.written_bytes / self.trained_parameters
        return f" ({read:.3g} and {written:.3g} bytes per parameter)"


@dataclass(frozen=True)
class RunCost:
    """What the whole run costs.

    Attributes:
        tokens: Tokens that it trains on, without padding.
        save_s: Seconds that one save takes; None without measured rates.
        seconds: Steps and saves; evaluations, the start and the export come on top. None without measured rates.
        written_bytes: On all drives together.
        life_share: Share of the drives' rated life.
    """

    num_steps: int
    tokens: int
    num_saves: int
    save_s: float | None
    seconds: float | None
    written_bytes: int
    life_share: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)

    def text(self) -> str:
        """Return one line for people; the wear has a line of its own."""
        text = f"run       {format_count(self.num_steps)} steps, {format_count(self.tokens)} tokens"
        if self.seconds is not None:
            text += f", about {format_time(self.seconds)}"
        if self.save_s is not None:
            number = f"{self.num_saves} saves" if self.num_saves != 1 else "1 save"
            saves = f"{number} of {format_time(self.save_s)}" if self.num_saves else "no saves"
            text += f" with {saves}"
        return text


def run_cost(
    figures: Estimate,
    tokens: int,
    *,
    step_s: float | None = None,
    read_bytes_per_s: float = 0.0,
    write_bytes_per_s: float = 0.0,
) -> RunCost:
    """Return the cost of a whole run.

    Args:
        tokens: Tokens of all its steps.
        step_s: Seconds of a step; None if nothing was measured. Then no times are given.
        read_bytes_per_s, write_bytes_per_s: Of all drives together; 0 if not measured.
    """
    saving = None
    if read_bytes_per_s and write_bytes_per_s:
        saving = save_s(figures.save, read_bytes_per_s, write_bytes_per_s)
    steps = figures.wear.num_steps
    return RunCost(
        steps,
        tokens,
        figures.num_saves,
        saving,
        None if step_s is None else steps * step_s + figures.num_saves * (saving or 0.0),
        figures.wear.run_bytes,
        figures.wear.share,
    )


def save_s(save: Traffic, read_bytes_per_s: float, write_bytes_per_s: float) -> float:
    """Return the seconds for which a save keeps the drives busy, which read and write in turns."""
    return save.read_bytes / read_bytes_per_s + save.written_bytes / write_bytes_per_s


def estimate(
    parts: Sequence[PartSize],
    run: RunShape,
    resident: Collection[str] = (),
    *,
    rating: Rating | None = None,
    wear_budget_bytes: int | None = None,
) -> Estimate:
    """Return all figures of a run.

    Args:
        resident: Names of parts whose weights and states stay in memory.
        rating: What the drives are rated for; by default one consumer drive.
        wear_budget_bytes: The most that the run may write; None for no limit.
    """
    traffic = step_traffic(parts, run, resident)
    written = mean_written_bytes(parts, run, resident)
    wear = Wear(
        written,
        None if run.steps_per_epoch is None else round(written * run.steps_per_epoch),
        run_written_bytes(parts, run, resident),
        rating or Rating(),
        run.num_steps,
        wear_budget_bytes,
        rewritten_bytes(parts, run, resident),
        run.clipped_share,
    )
    return Estimate(
        sum(part.numel for part in parts if part.trained),
        sum(part.weight_bytes for part in parts if not part.trained),
        disk_need(parts, run),
        traffic,
        save_traffic(parts, run, resident),
        wear,
        run.num_checkpoints,
    )
