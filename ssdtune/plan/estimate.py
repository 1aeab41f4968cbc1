"""Disk need, traffic and drive wear of a run, as words and as a dictionary.

Reads the figures of `ssdtune.plan.budget`; decides nothing.
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
    run_written_bytes,
    step_traffic,
)
from ssdtune.plan.residency import PartSize
from ssdtune.units import format_count, format_disk

CONSUMER_RATED_BYTES = 600 * 10**12
"""Bytes that consumer drives of 1 TB are usually rated for; the data sheet calls it TBW."""


@dataclass(frozen=True)
class Wear:
    """What a run writes, against what the drives are rated for.

    Attributes:
        step_bytes, epoch_bytes, run_bytes: Bytes written, on all drives together; None if unknown.
        rated_bytes: Bytes that the drives are rated for, together.
        rated_is_assumed: Nobody said so; it is a guess.
    """

    step_bytes: int
    epoch_bytes: int | None
    run_bytes: int
    rated_bytes: int
    rated_is_assumed: bool = False

    @property
    def share(self) -> float:
        """Share of the drives' rated life that the run takes."""
        return self.run_bytes / self.rated_bytes

    def text(self) -> str:
        """Return one line for people."""
        epoch = "" if self.epoch_bytes is None else f"{format_disk(self.epoch_bytes)} per epoch, "
        return (
            f"{format_disk(self.step_bytes)} written per step, {epoch}"
            f"{format_disk(self.run_bytes)} in this run: {_percent(self.share)} of {self._rating()}"
        )

    def _rating(self) -> str:
        rated = f"the {format_disk(self.rated_bytes)} that the drives are rated for"
        if self.rated_is_assumed:
            rated += " (assumed; set io.rated_terabytes_written)"
        return rated

    def warning(self, limit: float = 0.05) -> str | None:
        """Return a warning if the run takes more than this share of the drives' life, else None."""
        if self.share <= limit:
            return None
        return (
            f"this run writes {format_disk(self.run_bytes)}, {_percent(self.share)} of {self._rating()}. Larger batches (gradient_accumulation_steps) "
            "write less per token, more host_cache less per step; method: lora writes next to nothing."
        )


@dataclass(frozen=True)
class Estimate:
    """All figures of one run.

    Attributes:
        trained_parameters: Elements that the optimizer updates, padding included.
        frozen_bytes: Bytes of weights that are only read.
    """

    trained_parameters: int
    frozen_bytes: int
    disk: DiskNeed
    traffic: Traffic
    wear: Wear

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
            "wear": {**asdict(self.wear), "share": self.wear.share},
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
                f"{format_disk(self.traffic.written_bytes)} written{self._per_parameter()}",
                f"wear      {self.wear.text()}",
            ]
        )

    def _per_parameter(self) -> str:
        if self.frozen_bytes or not self.trained_parameters:
            return ""
        read = self.traffic.read_bytes / self.trained_parameters
        written = self.traffic.written_bytes / self.trained_parameters
        return f" ({read:.3g} and {written:.3g} bytes per parameter)"


def estimate(
    parts: Sequence[PartSize],
    run: RunShape,
    resident: Collection[str] = (),
    *,
    rated_bytes: int = CONSUMER_RATED_BYTES,
    rated_is_assumed: bool = False,
) -> Estimate:
    """Return all figures of a run.

    Args:
        resident: Names of parts whose weights and states stay in memory.
        rated_bytes: Bytes that the drives of the swap directories are rated for, together.
    """
    traffic = step_traffic(parts, run, resident)
    wear = Wear(
        traffic.written_bytes,
        None if run.steps_per_epoch is None else round(traffic.written_bytes * run.steps_per_epoch),
        run_written_bytes(parts, run, resident),
        rated_bytes,
        rated_is_assumed,
    )
    return Estimate(
        sum(part.numel for part in parts if part.trained),
        sum(part.weight_bytes for part in parts if not part.trained),
        disk_need(parts, run),
        traffic,
        wear,
    )


def _percent(share: float) -> str:
    return f"{share * 100:.3g} %" if share >= 1e-4 or share == 0 else "under 0.01 %"
