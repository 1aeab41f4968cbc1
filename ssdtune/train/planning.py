"""`ssdtune plan`: what a run would need, move and cost, found by the run's own preparation; nothing is written.

Read `ssdtune.train.prepare` for how memory is planned, `ssdtune.train.disk` for the drives, `ssdtune.train.forecast`
for time, and `ssdtune.train.elsewhere` for a machine that is not this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ssdtune.config.schema import Config
from ssdtune.errors import CapacityError, ConfigError
from ssdtune.hardware import datasheet
from ssdtune.hardware.profile import HardwareProfile
from ssdtune.io.streams import StreamNames
from ssdtune.plan.estimate import Estimate, RunCost, run_cost, save_s
from ssdtune.plan.residency import MemoryPlan
from ssdtune.report.answer import step_line
from ssdtune.train import elsewhere
from ssdtune.train.choose import Chosen, choose, rates_for
from ssdtune.train.disk import has_room, output_folder, plan_disk
from ssdtune.train.forecast import Forecast, training_shape
from ssdtune.train.prepare import Prepared, check_memory, prepare, summary_lines
from ssdtune.train.rehearsed import times_of
from ssdtune.train.streams import streams_of

UNMEASURED = "basis     data sheets and assumed efficiencies: nothing of this was measured"


@dataclass(frozen=True)
class Step:
    """What a step learns.

    Attributes:
        sequences: Rows of a micro-batch.
        micro_batches: Micro-batches of a step.
        tokens: Of a whole step, padding apart; with rows the mean.
    """

    sequences: int
    micro_batches: int
    tokens: float


@dataclass(frozen=True)
class RunPlan:
    """What a run needs.

    Attributes:
        problems: Why it does not fit, with numbers; empty if it does.
        summary: What would happen, a few lines for people.
        memory, estimate: The figures; None if the memory is too small for any plan.
        wear_warning: Set if the run takes more of the drives' life than `io.wear_warning` allows.
        chosen: How long a step takes, and what would make it faster; None without a hardware profile.
        cost: Of the whole run; None if its length is not known.
        step: What a step learns; None if the memory is too small for any plan.
        save_s: Seconds that a checkpoint takes; None without measured rates.
        no_time: Why no time is given; empty if it is.
        rates_from: What the times rest on, "measured" or "data sheet"; empty if none is given.
        place_warnings: What a user should know about the directories that hold the states.
        streams: The I/O backend of each stream; None if the memory is too small for any plan.
    """

    problems: tuple[str, ...]
    summary: tuple[str, ...] = ()
    memory: MemoryPlan | None = None
    estimate: Estimate | None = None
    wear_warning: str | None = None
    chosen: Chosen | None = None
    cost: RunCost | None = None
    step: Step | None = None
    save_s: float | None = None
    no_time: str = ""
    rates_from: str = ""
    place_warnings: tuple[str, ...] = ()
    streams: StreamNames | None = None

    @property
    def forecast(self) -> Forecast | None:
        """How long a step takes; None without a hardware profile."""
        return self.chosen.forecast if self.chosen else None

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
            "search": self.chosen.to_dict() if self.chosen else None,
            "run": self.cost.to_dict() if self.cost else None,
            "step": asdict(self.step) if self.step else None,
            "save_s": self.save_s,
            "no_time": self.no_time,
            "rates_from": self.rates_from,
            "place_warnings": list(self.place_warnings),
            "backends": asdict(self.streams) if self.streams else None,
        }

    def text(self) -> str:
        """Return the plan for people."""
        lines = list(self.summary)
        if self.estimate:
            lines.append(self.estimate.text())
        if self.step:
            lines.append(step_line(self.step.sequences, self.step.micro_batches, self.step.tokens))
        lines += self._times()
        if self.cost:
            lines.append(self.cost.text())
        if self.wear_warning:
            lines.append(f"warning: {self.wear_warning}")
        lines += [f"warning: {text}" for text in self.place_warnings]
        verdict = (
            ["It fits."] if self.fits else [f"It does not fit: {text}" for text in self.problems]
        )
        return "\n".join([*lines, *verdict])

    def _times(self) -> list[str]:
        if self.no_time:
            return [f"time      not known: {self.no_time}"]
        if not self.chosen:
            return []
        lines = [self.chosen.forecast.text()]
        if self.rates_from == datasheet.EFFORT:
            lines.append(UNMEASURED)
        lines.append(self.chosen.text())
        if self.save_s is not None and self.estimate:
            lines.append(self.estimate.save_text(self.save_s))
        return lines


def plan(
    config: Config, hardware: HardwareProfile | None = None, *, other_machine: bool = False
) -> RunPlan:
    """Plan a run. Without a train_file, the figures are those of one step at max_length.

    Args:
        hardware: Measured rates, for the time that a step takes.
        other_machine: Plan for the machine of `hardware` as its profile describes it: its memory (unless
            host_memory is set), dtypes, directories and free space take the place of this machine's.

    Raises:
        ConfigError: Something about the input is wrong, or the profile of another machine lacks a figure.
        ValueError: Another machine without a profile.
    """
    there = hardware if other_machine else None
    if other_machine and there is None:
        raise ValueError("other_machine needs the profile of that machine")
    summary = [elsewhere.describe(there)] if there else []
    places = elsewhere.swap_places(there, config.io.swap_dirs) if there else []
    if places:
        names = [place.path for place in places]
        config = replace(config, io=replace(config.io, swap_dirs=names))
    try:
        prepared = _prepare(config, hardware, there)
    except CapacityError as error:
        return RunPlan((str(error),), tuple(summary))
    times = times_of if not other_machine else None
    room = partial(has_room, output_dir=output_folder(config), places=places)
    chosen, no_time = None, "this machine was not measured; run ssdtune profile DIR once"
    if hardware:
        try:
            chosen, no_time = choose(prepared, hardware, times_of=times, has_room=room), ""
        except ConfigError as error:
            if there:
                file = there.machine.get("file")
                raise ConfigError(f"{file}: {error}" if file else str(error)) from error
            no_time = str(error)
    prepared = chosen.prepared if chosen else prepared
    disk = plan_disk(prepared, output_folder(config), places=places)
    problems = _refused(disk.check_space, *([] if there else [partial(check_memory, prepared)]))
    device = str(there.machine.get("cpu", "")) if there else ""
    summary += summary_lines(prepared, disk.layout.total_bytes, disk.directories, device)
    if prepared.rows is None:
        summary.append(
            "no train_file: the figures are those of rows as long as max_length, and of "
            + (f"{config.training.max_steps} steps" if config.training.max_steps else "one step")
        )
    training, shape = prepared.config.training, training_shape(prepared)
    rates = rates_for(prepared, hardware) if hardware and chosen else None
    io = (rates.read_bytes_per_s, rates.write_bytes_per_s) if rates else (0.0, 0.0)
    rates_from = datasheet.EFFORT if there and elsewhere.is_sheet(there) else "measured"
    return RunPlan(
        problems,
        tuple(summary),
        prepared.memory,
        disk.estimate,
        disk.wear_warning(config),
        chosen,
        _cost(prepared, disk.estimate, io, chosen),
        Step(training.per_device_train_batch_size, shape.micro_batches, shape.tokens),
        save_s(disk.estimate.save, *io) if rates else None,
        no_time,
        rates_from if chosen else "",
        disk.warnings,
        prepared.streams,
    )


def _refused(*checks: Callable[[], None]) -> tuple[str, ...]:
    problems = []
    for check in checks:
        try:
            check()
        except CapacityError as error:
            problems += str(error).splitlines()
    return tuple(problems)


def _prepare(
    config: Config, hardware: HardwareProfile | None, there: HardwareProfile | None
) -> Prepared:
    with_rows = bool(config.data.train_file)
    streams_for = partial(streams_of, config, hardware, here=there is None)
    if there is None:
        return prepare(config, with_rows=with_rows, weights_needed=False, streams_for=streams_for)
    # Nothing is computed here, and this machine may lack the device that the settings name.
    config = replace(config, memory=replace(config.memory, device="cpu"))
    budget = config.memory.host_memory or elsewhere.host_budget(there)
    dtype = elsewhere.compute_dtype(there, config.model.dtype)
    return prepare(
        config,
        with_rows=with_rows,
        weights_needed=False,
        host_budget_bytes=budget,
        dtype=dtype,
        other_device=elsewhere.device_limits(there, config.memory.gpu_memory),
        streams_for=streams_for,
    )


def _cost(
    prepared: Prepared,
    estimate: Estimate,
    io_bytes_per_s: tuple[float, float],
    chosen: Chosen | None,
) -> RunCost | None:
    tokens = run_tokens(prepared)
    if tokens is None:
        return None
    return run_cost(
        estimate,
        tokens,
        step_s=chosen.forecast.step_s if chosen else None,
        read_bytes_per_s=io_bytes_per_s[0],
        write_bytes_per_s=io_bytes_per_s[1],
    )


def run_tokens(prepared: Prepared) -> int | None:
    """Return the tokens of a run, padding apart; None if neither rows nor max_steps say how long it is."""
    rows, training = prepared.rows, prepared.config.training
    if rows is not None:
        return round(int(rows.train.lengths.sum()) * rows.total_steps / rows.plan.steps_per_epoch)
    if training.max_steps is None:
        return None
    sequences = training.per_device_train_batch_size * training.gradient_accumulation_steps
    return training.max_steps * sequences * prepared.max_length
