"""How long a step will take: the schedule that the engine will run, simulated with this machine's measured rates.

The work of each operation is `ssdtune.plan.ledger`'s, the clock `ssdtune.plan.simulator`'s; here the prepared run and
the measured profile are put into their terms.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch

from ssdtune.device.dtypes import dtype_name
from ssdtune.errors import ConfigError
from ssdtune.hardware.profile import Rates
from ssdtune.model.experts import active_parameters
from ssdtune.model.layout import Stage
from ssdtune.plan.generate import (
    StageShape,
    StepShape,
    generate_training_step,
    merged,
)
from ssdtune.plan.hardware import Hardware
from ssdtune.plan.ledger import Ledger, ModelShape, TrainingShape, work_of
from ssdtune.plan.residency import MemoryPlan
from ssdtune.plan.schedule import Schedule
from ssdtune.plan.simulator import Cost, Simulation, simulate
from ssdtune.plan.times import ComputeTimes
from ssdtune.report.answer import time_lines
from ssdtune.report.timeline import Bar, draw
from ssdtune.swap.update import pieces_of_part
from ssdtune.train.prepare import Prepared
from ssdtune.train.step_shape import make_step_shape, stage_shape
from ssdtune.units import format_time

MOST_OPERATIONS = 20000
"""About so many operations of updates are simulated at most; above, neighbouring pieces are taken as one."""
QUICK_OPERATIONS = 2500
"""About so many where many plans are tried. They cost up to 1 % of exactness, the same for all plans of a run."""
LEAST_GROUPS = 4
"""Micro-batches are taken together too where there are many, but so many stay."""


@dataclass(frozen=True)
class Forecast:
    """What the simulation gave for a step in the middle of the run.

    Attributes:
        lane_s: Seconds for which each lane works.
        resource_s: Seconds for which each part of the machine is busy.
        binding: The busiest part.
        run_s: All steps of the run; None if the rows are not known.
        compute_times_s: What the compute lane's operations take alone, where that was measured.
        bars: Every operation, for a picture.
    """

    step_s: float
    tokens_per_s: float
    lane_s: dict[str, float]
    resource_s: dict[str, float]
    binding: str
    run_s: float | None
    compute_times_s: dict[str, float]
    bars: tuple[Bar, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the single operations."""
        plain = asdict(replace(self, bars=()))
        return {name: value for name, value in plain.items() if name != "bars"}

    def picture(self) -> str:
        """Return the simulated step as SVG."""
        return draw(
            self.bars, f"simulated step of {format_time(self.step_s)}; {self.binding} binds"
        )

    def text(self) -> str:
        """Return a few lines for people."""
        tokens = self.tokens_per_s * self.step_s
        return "\n".join(time_lines(self.step_s, tokens, self.lane_s, self.resource_s))


class Forecaster:
    """Simulates steps of a prepared run under different memory plans.

    Args:
        times: Of computing, if this machine measured them for this run; else they are counted from FLOP.

    Raises:
        ConfigError: The profile lacks a rate that is needed.
    """

    def __init__(self, prepared: Prepared, rates: Rates, times: ComputeTimes | None = None) -> None:
        self._prepared = prepared
        self.hardware = hardware_of(prepared, rates)
        training, name = training_shape(prepared), dtype_name(prepared.dtype)
        slowness = rates.forward_flop_per_s[name] / rates.backward_flop_per_s[name]
        training = replace(training, backward_slowness=slowness)
        self.ledger = Ledger(model_shape(prepared), training, times)
        self._stages: dict[tuple[object, ...], StageShape] = {}

    def step_s(
        self, plan: MemoryPlan, *, hardware: Hardware | None = None, ledger: Ledger | None = None
    ) -> float:
        """Return what a step takes, with so few pieces that many plans can be tried.

        Args:
            hardware, ledger: Another machine or batch.
        """
        return self._simulate(plan, hardware, ledger, QUICK_OPERATIONS)[1].step_s

    def forecast(self, plan: MemoryPlan) -> Forecast:
        """Return what a step in the middle of the run takes, with every piece where there are not too many."""
        schedule, result = self._simulate(plan, None, None, MOST_OPERATIONS)
        rows = self._prepared.rows
        return Forecast(
            result.step_s,
            self.ledger.training.tokens / result.step_s,
            dict(result.lane_s),
            dict(result.resource_s),
            result.binding,
            None if rows is None else rows.total_steps * result.step_s,
            dict(self.ledger.times.seconds) if self.ledger.times else {},
            tuple(
                Bar.of(op, span.begin_s, span.end_s)
                for op, span in zip(schedule.operations, result.spans, strict=True)
                if span.end_s > span.begin_s
            ),
        )

    def _simulate(
        self,
        plan: MemoryPlan,
        hardware: Hardware | None,
        ledger: Ledger | None,
        most_operations: int,
    ) -> tuple[Schedule, Simulation]:
        machine, ledger = hardware or self.hardware, ledger or self.ledger
        count, shape = ledger.training.micro_batches, self._shape(plan, most_operations)
        # Where inputs go to SSD and back, how long a single one takes matters.
        together = 1 if shape.input_slots else -(-2 * len(shape.stages) * count // most_operations)
        together = min(together, max(count // LEAST_GROUPS, 1))
        shape = replace(
            shape, num_micro_batches=-(-count // together), pending=bool(plan.deferred), settled=plan.speculative
        )  # fmt: skip
        schedule = generate_training_step(shape)
        works = work_of(schedule, shape, ledger)  # the same object for operations that are alike
        distinct = {id(work): work for work in works}
        prices = {number: machine.cost(work) for number, work in distinct.items()}
        costs = [prices[id(work)] for work in works]
        if together > 1:
            costs = _for_groups(schedule, costs, together, count)
        return schedule, simulate(schedule, costs)

    def _shape(self, plan: MemoryPlan, most_operations: int) -> StepShape:
        """Return the shape of a step whose updates have about so many operations at most.

        Of stages that are alike, in this plan or another, only one is cut up.
        """
        layout, precision = self._prepared.layout, self._prepared.precision
        keys = {}
        for name, stage in layout.stages.items():
            sizes = [
                (p.numel, p.dtype, p.trained, p.name in plan.resident, p.name in plan.straight)
                for p in stage.parts
            ]
            keys[name] = key = (1, plan.chunk_bytes, *sizes)
            if key not in self._stages:
                trained = [part for part in stage.parts if part.trained]
                pieces = [p for part in trained for p in pieces_of_part(part, plan, precision)]
                self._stages[key] = stage_shape(stage, plan, pieces, precision)
        streamed = sum(p.streamed for key in keys.values() for p in self._stages[key].pieces)
        size = max(-(-3 * streamed // most_operations), 1)  # read, computed and written, each
        if size > 1:
            for name, key in keys.items():
                keys[name] = (size, *key[1:])
                if keys[name] not in self._stages:
                    self._stages[keys[name]] = merged(self._stages[key], size)
        compute = self._prepared.compute
        shape = make_step_shape(layout, plan, {}, compute, precision)
        # As many bytes are on their way as with smaller pieces, as far as one is still read while another is written.
        slots = max(min(shape.chunk_slots, 3), -(-shape.chunk_slots // size))
        stages = {name: self._stages[key] for name, key in keys.items()}
        return replace(shape, stages=stages, chunk_slots=slots)


def _for_groups(
    schedule: Schedule, costs: list[Cost], together: int, micro_batches: int
) -> list[Cost]:
    """Return the costs of a schedule each of whose micro-batches stands for so many, the last one for the rest.

    Args:
        costs: Of single micro-batches. The first of a step may cost less or more than the others.
    """
    operations = schedule.operations
    later = {
        (op.kind, op.stage): cost for op, cost in zip(operations, costs) if op.micro_batch == 1
    }
    known: dict[tuple[int, int, int], Cost] = {}
    result = []
    for op, cost in zip(operations, costs):
        more = min(together, micro_batches - op.micro_batch * together) - 1
        if op.micro_batch >= 0 and more:
            other = later[op.kind, op.stage]
            key = (id(cost), id(other), more)
            if key not in known:
                known[key] = cost.followed_by(other, more)
            cost = known[key]
        result.append(cost)
    return result


def hardware_of(prepared: Prepared, rates: Rates) -> Hardware:
    """Return the machine in the simulator's terms."""
    name = dtype_name(prepared.dtype)
    forward = rates.forward_flop_per_s.get(name)
    missing = [
        what
        for what, value in (
            (f"compute in {name}", forward and rates.backward_flop_per_s.get(name)),
            ("drives", rates.read_bytes_per_s and rates.write_bytes_per_s),
            ("AdamW", rates.adam_parameters_per_s),
        )
        if not value
    ]
    if missing or not forward:
        raise ConfigError(
            f"the hardware profile has no figures for {', '.join(missing)}. Measure again: ssdtune profile --force"
        )
    infinite = float("inf")
    return Hardware(
        name="this machine",
        flop_per_s=forward,
        h2d_bytes_per_s=rates.h2d_bytes_per_s or infinite,
        d2h_bytes_per_s=rates.d2h_bytes_per_s or infinite,
        drive_read_bytes_per_s=rates.read_bytes_per_s,
        drive_write_bytes_per_s=rates.write_bytes_per_s,
        source_bytes_per_s=rates.source_read_bytes_per_s or None,
        activation_pace=rates.activation_pace,
        dram_bytes_per_s=rates.memory_bytes_per_s or infinite,
        copy_bytes_per_s=rates.copy_bytes_per_s or None,
        adam_elements_per_s=rates.adam_parameters_per_s,
        adam_core_share=rates.adam_core_share,
        io_core_share=_io_core_share(rates),
        computes_on_cpu=rates.h2d_bytes_per_s is None,
    )


def _io_core_share(rates: Rates) -> float:
    """Return the share of the cores that I/O takes, from how much AdamW and I/O slow each other down.

    If I/O takes x of the cores beside AdamW, which takes all, both get 1 / (1 + x) of their own pace.
    """
    if not (rates.adam_parameters_per_s and rates.mixed_bytes_per_s):
        return 0.0
    adam = rates.adam_with_io_parameters_per_s / rates.adam_parameters_per_s
    moved = rates.io_with_adam_bytes_per_s / rates.mixed_bytes_per_s
    pace = (adam + moved) / 2
    return max(0.0, 1 / pace - 1) if pace > 0 else 0.0


def model_shape(prepared: Prepared) -> ModelShape:
    """Return the sizes of a prepared model."""
    layout = prepared.layout
    text = prepared.built.model.config.get_text_config()
    blocks = [layout.stages[f"block.{number}"] for number in range(layout.num_blocks)]
    embedding = sum(_elements(layout.stages[stage]) for stage in layout.embed_stages)
    return ModelShape(
        num_blocks=layout.num_blocks,
        hidden=text.hidden_size,
        # Some models have blocks of several kinds, with experts and without.
        block_parameters=round(fmean(map(_elements, blocks))),
        active_block_parameters=round(fmean(_active(text, block) for block in blocks)),
        embedding_parameters=embedding,
        head_parameters=sum(_elements(layout.stages[stage]) for stage in layout.head_stages),
        tied=layout.tied,
    )


def _elements(stage: Stage) -> int:
    return sum(spec.numel for part in stage.parts for spec in part.tensors)


def _active(text: Any, stage: Stage) -> int:
    shapes = {spec.name: spec.shape for part in stage.parts for spec in part.tensors}
    return active_parameters(text, shapes)


def training_shape(prepared: Prepared) -> TrainingShape:
    """Return how a prepared run is trained: a mean step of its rows."""
    training, rows = prepared.config.training, prepared.rows
    length = prepared.max_length
    sequences = training.per_device_train_batch_size * training.gradient_accumulation_steps
    if rows is not None and not prepared.config.data.packing:
        length = max(1, round(float(rows.train.lengths.mean())))
        sequences = min(sequences, rows.plan.num_sequences)
    layout = prepared.layout
    trained = sum(
        spec.numel
        for part in layout.trained_parts
        if part.stage.startswith("block.")
        for spec in part.tensors
    )
    micro_inputs = layout.num_blocks * prepared.compute.num_micro_batches
    return TrainingShape(
        tokens=sequences * length,
        sequence=length,
        micro_batches=max(1, -(-sequences // training.per_device_train_batch_size)),
        weight_bytes=prepared.dtype.itemsize,
        split_master=prepared.dtype != torch.float32,
        adapter_parameters=trained // layout.num_blocks if prepared.config.method == "lora" else 0,
        activation_bytes=prepared.compute.kept_bytes * micro_inputs,
        product_bytes=prepared.compute.products_bytes * micro_inputs,
    )
