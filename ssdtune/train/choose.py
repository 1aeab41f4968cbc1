"""Choose the memory plan of a prepared run by simulation, and say what another machine or batch would bring.

`ssdtune.train.prepare` makes a plan without knowing any rates; with a hardware profile this module finds a faster one
(`ssdtune.plan.search`). Both train the same numbers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ssdtune.errors import CapacityError
from ssdtune.hardware.profile import Rates
from ssdtune.plan.residency import Proportions
from ssdtune.plan.search import Found, search
from ssdtune.train.forecast import Forecast, Forecaster
from ssdtune.train.prepare import Prepared


@dataclass(frozen=True)
class Change:
    """What a change of the machine or the batch would bring.

    Attributes:
        speedup: Tokens per second, in units of those of the plan.
    """

    name: str
    step_s: float
    speedup: float


@dataclass(frozen=True)
class Chosen:
    """A run with its plan chosen.

    Attributes:
        prepared: The run, its memory plan replaced.
        changes: What else would make it faster.
    """

    prepared: Prepared
    forecast: Forecast
    found: Found
    changes: tuple[Change, ...]

    def text(self) -> str:
        """Return one line for people."""
        faster = [c for c in self.changes if c.speedup > 1.02]
        parts = [f"{change.name} {change.speedup:.2f} times" for change in faster]
        if not parts:
            return (
                "faster    nothing tried would be: another drive, twice the memory, a larger batch"
            )
        return f"faster    tokens/s with {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "proportions": asdict(self.found.proportions),
            "usual_step_s": self.found.usual_s,
            "plans_tried": self.found.num_tried,
            "changes": [asdict(change) for change in self.changes],
        }


def choose(prepared: Prepared, rates: Rates) -> Chosen:
    """Find the fastest plan for a prepared run.

    Raises:
        ConfigError: The profile lacks a rate that is needed.
    """
    forecaster = Forecaster(prepared, rates)
    usual = Proportions(block_slots=prepared.config.io.prefetch_depth + 2)
    found = search(
        prepared.parts, prepared.compute, prepared.limits, forecaster.step_s, usual=usual
    )
    better = replace(prepared, memory=found.plan)
    return Chosen(
        better, forecaster.forecast(found.plan), found, tuple(_changes(better, forecaster, found))
    )


def _changes(prepared: Prepared, forecaster: Forecaster, found: Found) -> list[Change]:
    hardware, ledger, plan = forecaster.hardware, forecaster.ledger, found.plan
    # One more drive than the profile's directories lie on.
    more = (hardware.num_drives + 1) / hardware.num_drives
    drive = replace(
        hardware,
        drive_read_bytes_per_s=more * hardware.drive_read_bytes_per_s,
        drive_write_bytes_per_s=more * hardware.drive_write_bytes_per_s,
    )
    training = replace(
        ledger.training,
        tokens=2 * ledger.training.tokens,
        micro_batches=2 * ledger.training.micro_batches,
    )
    twice = replace(ledger, training=training)
    results = {
        "one more drive": forecaster.step_s(plan, hardware=drive),
        "twice the gradient_accumulation_steps": forecaster.step_s(plan, ledger=twice) / 2,
    }
    limits = replace(prepared.limits, budget_bytes=2 * prepared.limits.budget_bytes)
    try:
        roomy = search(
            prepared.parts, prepared.compute, limits, forecaster.step_s, usual=found.proportions,
            most_steps=20,
        )  # fmt: skip
        results["twice the host_memory"] = roomy.step_s
    except CapacityError:
        pass
    return [Change(name, step_s, found.step_s / step_s) for name, step_s in results.items()]
