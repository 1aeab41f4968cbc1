"""What came out of a run, as plain data and in words."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ssdtune.train.nonfinite import rows_text
from ssdtune.units import format_disk, format_memory, format_time


@dataclass
class Result:
    """What came out of a run.

    Attributes:
        steps: Of the whole run, those before a resume included.
        losses: Of every step that this process ran, as `grad_norms` and `step_seconds`.
        evaluations: (step, mean loss on the held-out rows).
        bytes_read: Between drives and memory, by kind (`ssdtune.plan.states.STATE_KINDS`), as `bytes_written`.
        peak_memory_bytes: Most resident memory of this process.
        checkpoints: Those that are still there.
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
