"""Choose the memory plan of a prepared run by simulation, and say what another machine or batch would bring.

`ssdtune.train.prepare` makes a plan without knowing any rates; with a hardware profile this module finds a faster one
(`ssdtune.plan.search`). Both train the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from ssdtune.config.schema import Config
from ssdtune.errors import CapacityError, ConfigError
from ssdtune.hardware.blocks import digest_of
from ssdtune.hardware.profile import HardwareProfile, Rates
from ssdtune.hardware.striped import measured_places, shares
from ssdtune.plan.residency import ComputeSize, MemoryLimits, MemoryPlan
from ssdtune.plan.search import LEAST_GAIN, Found, search
from ssdtune.plan.times import ComputeTimes
from ssdtune.report.answer import gain_line
from ssdtune.train.disk import (
    activation_share,
    swap_directories,
    wear_budget_bytes,
    written_bytes,
)
from ssdtune.train.forecast import Forecast, Forecaster, model_shape, training_shape
from ssdtune.train.prepare import (
    Prepared,
    usual_proportions,
    with_micro_batches,
)

LEAST_SPECULATION_GAIN = 0.05
"""What speculative updates must gain if nothing is clipped: they take room on the drives, and lose if much is clipped."""
LEAST_SWAP_GAIN = 0.05
"""What a step must gain for activations to go to SSD if they are all that it writes, as with LoRA; where states are written
too, a part of it. They wear the drives for time alone: they can be kept in memory or computed again."""
MOST_SPECULATING = 20
"""Simulated steps with such updates."""
BEYOND_BUDGET_S = 1e9
"""What a plan is charged that writes more than the wear budget: more than any step takes."""

StepTime = Callable[[MemoryPlan], float]
HasRoom = Callable[[Prepared], bool]
TimesOf = Callable[[Prepared, HardwareProfile], ComputeTimes | None]


@dataclass(frozen=True)
class Change:
    """What a change of the machine or the batch would bring.

    Attributes:
        step_s: Seconds for the tokens of a step.
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
        return gain_line({change.name: change.speedup for change in self.changes})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "proportions": asdict(self.found.proportions),
            "usual_step_s": self.found.usual_s,
            "plans_tried": self.found.num_tried,
            "changes": [asdict(change) for change in self.changes],
        }


def choose(
    prepared: Prepared,
    profile: HardwareProfile,
    *,
    times_of: TimesOf | None = None,
    has_room: HasRoom | None = None,
) -> Chosen:
    """Find the fastest plan for a prepared run.

    Args:
        times_of: Says how long computing takes (`ssdtune.train.rehearsed`); else the profile's blocks do.
        has_room: Says whether the drives have room for a run; else plans that need more of it aren't considered.

    Raises:
        ConfigError: The profile lacks a rate that is needed.
    """
    if has_room:
        prepared = _dealt(prepared, profile, has_room)
    times_of = times_of and _until_none(times_of)
    prepared = _divide(prepared, profile, times_of)
    forecaster = _forecaster(prepared, profile, times_of)
    usual, step_s = usual_proportions(prepared.config), cache(forecaster.step_s)
    charged_s = within_wear(prepared, step_s)
    found = search(prepared.parts, prepared.compute, prepared.limits, charged_s, usual=usual)
    found = replace(found, step_s=step_s(found.plan), usual_s=step_s(prepared.memory))
    if has_room:
        found = _speculating(prepared, found, step_s, charged_s, has_room)
    better = replace(prepared, memory=found.plan)
    return Chosen(
        better, forecaster.forecast(found.plan), found, tuple(_changes(better, forecaster, found))
    )


def _dealt(prepared: Prepared, profile: HardwareProfile, has_room: HasRoom) -> Prepared:
    """Return the run with its states dealt over the drives by their rates, where that gains and all have room for it."""
    if not profile.directories:  # only what all reach together is known
        return prepared
    places = measured_places(profile.directories, swap_directories(prepared.config))
    by_rate = replace(prepared, shares=shares(places, profile.together))
    return by_rate if by_rate.shares and has_room(by_rate) else prepared


def _speculating(
    prepared: Prepared, found: Found, step_s: StepTime, charged_s: StepTime, has_room: HasRoom
) -> Found:
    """Return the plan with updates made before the norm is known, if that is left to us, pays, and has room.

    What else is best changes with it: the drives are busy beside the backward pass instead of the forward pass.
    """
    if prepared.config.training.clipping != "auto" or not prepared.limits.clipping:
        return found
    again = search(
        prepared.parts, prepared.compute, prepared.limits, charged_s,
        usual=replace(found.proportions, speculative=True), most_steps=MOST_SPECULATING,
    )  # fmt: skip
    found = replace(found, num_tried=found.num_tried + again.num_tried)
    seconds = step_s(again.plan)
    if not again.plan.speculative or seconds > found.step_s * (1 - LEAST_SPECULATION_GAIN):
        return found
    if not has_room(replace(prepared, memory=again.plan)):
        return found
    return replace(found, plan=again.plan, proportions=again.proportions, step_s=seconds)


def _until_none(times_of: TimesOf) -> TimesOf:
    """Return the same, that isn't asked again once it had no answer: what is measured and what is counted can't be compared."""
    answers = True

    def times(prepared: Prepared, profile: HardwareProfile) -> ComputeTimes | None:
        nonlocal answers
        found = times_of(prepared, profile) if answers else None
        answers = found is not None
        return found

    return times


def within_wear(prepared: Prepared, step_s: StepTime) -> StepTime:
    """Return the time of a step under a plan, and on top what it is charged for its writing.

    Activations on SSD cost a little, and plans beyond the wear budget come after all that keep it.
    """
    budget_bytes = wear_budget_bytes(prepared.config)

    def seconds(plan: MemoryPlan) -> float:
        would = replace(prepared, memory=plan)
        charged = step_s(plan) * (1 + LEAST_SWAP_GAIN * activation_share(would))
        if budget_bytes is None:
            return charged
        share = written_bytes(would) / max(budget_bytes, 1)
        return charged + (BEYOND_BUDGET_S * share if share > 1 else 0.0)

    return seconds


def tuned(config: Config, profile: HardwareProfile | None) -> Config:
    """Return settings in which what was left open is what the profile found best."""
    if profile is None:
        return config
    try:
        found = measured_places(profile.directories, swap_directories(config))
    except ConfigError:  # the drives of some directories were not measured
        found = []
    io, places = config.io, [place for place in found if place.queue_depth]
    if places:
        place = max(places, key=lambda place: place.mixed_bytes_per_s)
        io = replace(
            io,
            queue_depth=io.queue_depth or place.queue_depth,
            request_bytes=io.request_bytes or place.request_bytes,
        )
    kernels = [point for point in profile.adam if point.form != "numpy"]
    if kernels and io.adam_threads is None:
        best = max(kernels, key=lambda point: point.parameters_per_s)
        io = replace(io, adam_threads=best.threads)
    return replace(config, io=io)


def _divide(prepared: Prepared, profile: HardwareProfile, times_of: TimesOf | None) -> Prepared:
    """Return the run with its step divided into the fastest micro-batches, where that is left to us."""
    best, best_s = prepared, 0.0
    for size in prepared.sizes:
        other = prepared if size == _size(prepared) else with_micro_batches(prepared, size)
        if other is None:
            continue
        step_s = _forecaster(other, profile, times_of).step_s(other.memory)
        if not best_s or step_s < best_s * (1 - LEAST_GAIN):
            best, best_s = other, step_s
    return best


def _forecaster(
    prepared: Prepared, profile: HardwareProfile, times_of: TimesOf | None
) -> Forecaster:
    times = times_of(prepared, profile) if times_of else None
    return Forecaster(prepared, rates_for(prepared, profile), times)


def _size(prepared: Prepared) -> int:
    return prepared.config.training.per_device_train_batch_size


def rates_for(prepared: Prepared, profile: HardwareProfile) -> Rates:
    """Return the rates of a run: of the nearest block that was measured, and of the directories that it uses.

    Raises:
        ConfigError: The drives of some of its directories were not measured.
    """
    model = prepared.config.model.model_name_or_path
    try:
        digest = digest_of(model)[0]
    except ConfigError:  # a name in the hub's cache
        digest = None
    training = training_shape(prepared)
    return profile.rates(
        digest,
        parameters=model_shape(prepared).block_parameters,
        tokens=training.tokens / training.micro_batches,
        directories=swap_directories(prepared.config),
        shares=prepared.shares,
        model=prepared.checkpoint.path,
        streams=prepared.streams,
    )


def _changes(prepared: Prepared, forecaster: Forecaster, found: Found) -> list[Change]:
    hardware, ledger, plan = forecaster.hardware, forecaster.ledger, found.plan
    drives = replace(hardware, num_drives=2 * hardware.num_drives)
    quicker = replace(hardware, flop_per_s=2 * hardware.flop_per_s)
    times = ledger.times and replace(
        ledger.times, seconds={name: s / 2 for name, s in ledger.times.seconds.items()}
    )
    now = ledger.training
    training = replace(
        now,
        tokens=2 * now.tokens,
        micro_batches=2 * now.micro_batches,
        activation_bytes=now.activation_bytes and 2 * now.activation_bytes,
        product_bytes=now.product_bytes and 2 * now.product_bytes,
    )
    larger = replace(ledger, training=training)
    compute = replace(prepared.compute, num_micro_batches=2 * prepared.compute.num_micro_batches)
    limits = replace(prepared.limits, budget_bytes=2 * prepared.limits.budget_bytes)

    def best(compute: ComputeSize, limits: MemoryLimits, step_s: StepTime) -> float | None:
        step_s = cache(step_s)
        kept = within_wear(replace(prepared, compute=compute), step_s)
        try:
            result = search(
                prepared.parts, compute, limits, kept, usual=found.proportions, most_steps=12
            )
        except CapacityError:
            return None
        return step_s(result.plan)

    results = {
        "computing twice as fast": forecaster.step_s(
            plan, hardware=quicker, ledger=replace(ledger, times=times)
        ),
        "twice the drives": forecaster.step_s(plan, hardware=drives),
        "twice the host_memory": best(prepared.compute, limits, forecaster.step_s),
        "twice the gradient_accumulation_steps": best(
            compute, prepared.limits, lambda plan: forecaster.step_s(plan, ledger=larger) / 2
        ),
    }
    return [
        Change(name, step_s, found.step_s / step_s) for name, step_s in results.items() if step_s
    ]
