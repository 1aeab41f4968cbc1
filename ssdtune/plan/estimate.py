"""Disk need, traffic and drive wear of a run, as words and as a dictionary.

Reads the figures of `ssdtune.plan.budget`; decides nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ssdtune.plan.budget import (
    DiskNeed,
    MemoryNeed,
    ModelShape,
    Resident,
    RunShape,
    Traffic,
    disk_need,
    memory_need,
    run_written_bytes,
    step_traffic,
)
from ssdtune.units import format_disk, format_memory

CONSUMER_RATED_BYTES = 600 * 10**12
"""Bytes that consumer drives of 1 TB are usually rated for; the data sheet calls it TBW."""


@dataclass(frozen=True)
class Wear:
    """What a run writes, against what the drives are rated for.

    Attributes:
        step_bytes, epoch_bytes, run_bytes: Bytes written, on all drives together.
        rated_bytes: Bytes that the drives are rated for, together.
    """

    step_bytes: int
    epoch_bytes: int
    run_bytes: int
    rated_bytes: int

    @property
    def share(self) -> float:
        """Share of the drives' rated life that the run takes."""
        return self.run_bytes / self.rated_bytes

    def text(self) -> str:
        """Return one line for people."""
        return (
            f"{format_disk(self.step_bytes)} written per step, {format_disk(self.epoch_bytes)} per epoch, "
            f"{format_disk(self.run_bytes)} in this run: {_percent(self.share)} of the "
            f"{format_disk(self.rated_bytes)} that the drives are rated for"
        )

    def warning(self, limit: float = 0.05) -> str | None:
        """Return a warning if the run takes more than this share of the drives' life, else None."""
        if self.share <= limit:
            return None
        return (
            f"this run writes {format_disk(self.run_bytes)}, {_percent(self.share)} of what the drives are "
            f"rated for ({format_disk(self.rated_bytes)}). Larger batches (gradient_accumulation_steps) "
            "write less per token, more host_cache less per step; method: lora writes next to nothing."
        )


@dataclass(frozen=True)
class Estimate:
    """All figures of one run."""

    model: ModelShape
    run: RunShape
    disk: DiskNeed
    traffic: Traffic
    memory: MemoryNeed
    wear: Wear

    def to_dict(self) -> dict[str, Any]:
        """Return raw bytes under names that say what they are, ready for JSON."""
        return {
            "schema_version": 1,
            "trained_parameters": self.model.trained_elements,
            "frozen_bytes": self.model.frozen_bytes,
            "disk_bytes": {
                **asdict(self.disk),
                "swap": self.disk.swap_bytes,
                "total": self.disk.total,
            },
            "step_bytes_read": dict(self.traffic.read),
            "step_bytes_written": dict(self.traffic.written),
            "memory_bytes": {**asdict(self.memory), "total": self.memory.total},
            "wear": {**asdict(self.wear), "share": self.wear.share},
        }

    def text(self) -> str:
        """Return a few lines for people."""
        trained = self.model.trained_elements
        per_parameter = ""
        if self.run.method == "full" and trained:
            read, written = self.traffic.read_bytes / trained, self.traffic.written_bytes / trained
            per_parameter = f" ({read:.3g} and {written:.3g} bytes per parameter)"
        lines = [
            f"trained   {trained:.4g} parameters"
            + (
                f", {format_disk(self.model.frozen_bytes)} frozen"
                if self.model.frozen_bytes
                else ""
            ),
            f"drives    {format_disk(self.disk.total)}: {_parts(asdict(self.disk), format_disk)}",
            f"per step  {format_disk(self.traffic.read_bytes)} read, "
            f"{format_disk(self.traffic.written_bytes)} written{per_parameter}",
            f"memory    {format_memory(self.memory.total)} and what is cached: "
            f"{_parts(asdict(self.memory), format_memory)}",
            f"wear      {self.wear.text()}",
        ]
        return "\n".join(lines)


def estimate(
    model: ModelShape,
    run: RunShape,
    resident: Resident = (),
    *,
    rated_bytes: int = CONSUMER_RATED_BYTES,
) -> Estimate:
    """Return all figures of a run.

    Args:
        resident: Pairs (unit, state) that stay in memory.
        rated_bytes: Bytes that the drives of the swap directories are rated for, together.
    """
    traffic = step_traffic(model, run, resident)
    return Estimate(
        model,
        run,
        disk_need(model, run),
        traffic,
        memory_need(model, run),
        Wear(
            traffic.written_bytes,
            round(traffic.written_bytes * run.steps_per_epoch),
            run_written_bytes(model, run, resident),
            rated_bytes,
        ),
    )


def _percent(share: float) -> str:
    return f"{share * 100:.3g} %"


def _parts(values: dict[str, int], form: Any) -> str:
    words = [f"{key.replace('_', ' ')} {form(value)}" for key, value in values.items() if value]
    return ", ".join(words) or "nothing"
