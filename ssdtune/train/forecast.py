"""How long a step will take: the schedule that the engine will run, simulated with this machine's measured rates.

The work of each operation is `ssdtune.plan.ledger`'s, the clock `ssdtune.plan.simulator`'s; here the prepared run and
the measured profile are put into their terms.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ssdtune.errors import ConfigError
from ssdtune.hardware.profile import Rates
from ssdtune.model.layout import ModelLayout, Stage
from ssdtune.plan.generate import EMBED, HEAD, generate_training_step
from ssdtune.plan.hardware import Hardware
from ssdtune.plan.ledger import Ledger, ModelShape, TrainingShape, work_of
from ssdtune.plan.schedule import Kind
from ssdtune.plan.simulator import simulate
from ssdtune.report.timeline import Bar, draw
from ssdtune.train.engine import make_step_shape
from ssdtune.train.prepare import Prepared
from ssdtune.units import format_time


@dataclass(frozen=True)
class Forecast:
    """What the simulation gave for a step in the middle of the run.

    Attributes:
        lane_s: Seconds for which each lane works.
        resource_s: Seconds for which each part of the machine is busy.
        binding: The busiest part.
        run_s: All steps of the run; None if the rows are not known.
        bars: Every operation, for a picture.
    """

    step_s: float
    tokens_per_s: float
    lane_s: dict[str, float]
    resource_s: dict[str, float]
    binding: str
    run_s: float | None
    bars: tuple[Bar, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the single operations."""
        return {name: value for name, value in asdict(self).items() if name != "bars"}

    def picture(self) -> str:
        """Return the simulated step as SVG."""
        return draw(
            self.bars, f"simulated step of {format_time(self.step_s)}; {self.binding} binds"
        )

    def text(self) -> str:
        """Return one line for people."""
        busy = ", ".join(
            f"{name} {seconds / self.step_s:.0%}"
            for name, seconds in self.resource_s.items()
            if seconds
        )
        run = f", {format_time(self.run_s)} for the run" if self.run_s is not None else ""
        return (
            f"expected  {format_time(self.step_s)} per step ({self.tokens_per_s:.3g} tokens/s){run}; "
            f"busy: {busy}; {self.binding} binds (simulated with measured rates, other work on the machine apart)"
        )


def forecast(prepared: Prepared, rates: Rates) -> Forecast:
    """Simulate one step of a prepared run.

    Raises:
        ConfigError: The profile lacks a rate that is needed.
    """
    hardware = hardware_of(prepared, rates)
    ledger = Ledger(model_shape(prepared), _training_shape(prepared))
    shape = make_step_shape(prepared.layout, prepared.memory)
    shape = replace(
        shape, num_micro_batches=ledger.training.micro_batches, pending=shape.update == "deferred"
    )
    schedule = generate_training_step(shape)

    def work(resident: set[str]) -> list[Any]:
        return work_of(
            schedule,
            ledger,
            update="deferred",  # the update reads weights again in every mode
            resident=resident,
            resident_gradients=prepared.memory.gradients != "ssd",
        )

    # A stage's weights and its optimizer states may stay in memory one without the other (LoRA).
    loads, updates = (
        work(_resident(prepared, trained=False)),
        work(_resident(prepared, trained=True)),
    )
    costs = [
        hardware.cost(updates[op.index] if op.kind == Kind.UPDATE else loads[op.index])
        for op in schedule.operations
    ]
    result = simulate(schedule, costs)
    steps = prepared.rows.total_steps if prepared.rows else None
    return Forecast(
        result.step_s,
        ledger.training.tokens / result.step_s,
        dict(result.lane_s),
        dict(result.resource_s),
        result.binding,
        None if steps is None else steps * result.step_s,
        tuple(
            Bar.of(op, span.begin_s, span.end_s)
            for op, span in zip(schedule.operations, result.spans, strict=True)
            if span.end_s > span.begin_s
        ),
    )


def hardware_of(prepared: Prepared, rates: Rates) -> Hardware:
    """Return the machine in the simulator's terms."""
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[prepared.dtype]
    forward, backward = rates.forward_flop_per_s.get(name), rates.backward_flop_per_s.get(name)
    missing = [
        what
        for what, value in (
            (f"compute in {name}", forward and backward),
            ("drives", rates.read_bytes_per_s and rates.write_bytes_per_s),
            ("AdamW", rates.adam_parameters_per_s),
        )
        if not value
    ]
    if missing or not forward or not backward:
        raise ConfigError(
            f"the hardware profile has no figures for {', '.join(missing)}. Measure again: ssdtune profile --force"
        )
    infinite = float("inf")
    return Hardware(
        name="this machine",
        # Forward and recomputation at one rate, the two parts of backward at the other.
        flop_per_s=4 / (2 / forward + 2 / backward),
        h2d_bytes_per_s=rates.h2d_bytes_per_s or infinite,
        d2h_bytes_per_s=rates.d2h_bytes_per_s or infinite,
        drive_read_bytes_per_s=rates.read_bytes_per_s,
        drive_write_bytes_per_s=rates.write_bytes_per_s,
        dram_bytes_per_s=rates.memory_bytes_per_s or infinite,
        adam_elements_per_s=rates.adam_parameters_per_s,
        computes_on_cpu=prepared.device.torch_device.type == "cpu",
    )


def model_shape(prepared: Prepared) -> ModelShape:
    """Return the sizes of a prepared model."""
    layout = prepared.layout
    text = prepared.built.model.config.get_text_config()
    block = _elements(layout.stages["block.0"])
    embedding = _elements(layout.stages[EMBED])
    return ModelShape(
        num_blocks=layout.num_blocks,
        hidden=text.hidden_size,
        block_parameters=block,
        active_block_parameters=_active(layout, text, block),
        embedding_parameters=embedding,
        head_parameters=_elements(layout.stages[HEAD]) if HEAD in layout.stages else embedding,
        tied=HEAD not in layout.stages,
    )


def _elements(stage: Stage) -> int:
    return sum(spec.numel for part in stage.parts for spec in part.tensors)


def _active(layout: ModelLayout, text: Any, block: int) -> int:
    """Return the parameters of a block that a token passes: of its experts only some."""
    chosen = getattr(text, "num_experts_per_tok", None)
    counts = (
        getattr(text, name, None)
        for name in ("num_local_experts", "num_experts", "n_routed_experts")
    )
    number = next((count for count in counts if isinstance(count, int) and count), None)
    if not chosen or not number:
        return block
    experts = sum(
        spec.numel
        for part in layout.stages["block.0"].parts
        for spec in part.tensors
        if ".experts." in spec.name
    )
    return block - experts + experts * chosen // number


def _training_shape(prepared: Prepared) -> TrainingShape:
    training, rows = prepared.config.training, prepared.rows
    length = prepared.max_length
    sequences = training.per_device_train_batch_size * training.gradient_accumulation_steps
    if rows is not None and not prepared.config.data.packing:
        length = max(1, round(float(rows.train.lengths.mean())))
        sequences = min(sequences, rows.plan.num_sequences)
    layout = prepared.layout
    trained = sum(
        spec.numel
        for part in layout.stages["block.0"].parts
        if part.trained
        for spec in part.tensors
    )
    return TrainingShape(
        tokens=sequences * length,
        sequence=length,
        micro_batches=max(1, -(-sequences // training.per_device_train_batch_size)),
        weight_bytes=prepared.dtype.itemsize,
        split_master=prepared.dtype != torch.float32,
        adapter_parameters=trained if prepared.config.method == "lora" else 0,
    )


def _resident(prepared: Prepared, *, trained: bool) -> set[str]:
    """Return the stages whose trained parts, or whose largest part, stay in memory."""
    found = set()
    for stage in prepared.layout.stages.values():
        parts = [part for part in stage.parts if part.trained] if trained else list(stage.parts)
        largest = max(parts, key=lambda part: part.weight_bytes, default=None)
        if largest is not None and largest.name in prepared.memory.resident:
            found.add(stage.name)
    return found
