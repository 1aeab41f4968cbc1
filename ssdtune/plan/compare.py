"""Our own schedules on the machines and models of published measurements.

The steps are written by `ssdtune.plan.generate`, as the engine runs them, and simulated with the constants of
`ssdtune.plan.validate`. `tools/validate_simulator.py` prints the table; `docs/simulator.md` discusses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ssdtune.plan.generate import StepShape, block_stage, generate_training_step
from ssdtune.plan.hardware import Hardware
from ssdtune.plan.ledger import MATRICES_PER_BLOCK, Ledger, TrainingShape, work_of
from ssdtune.plan.peers import Job, with_swap
from ssdtune.plan.simulator import Simulation
from ssdtune.plan.validate import ACTIVATION_MEMORY, Constants, Row, predict

STATE_BYTES = 12
"""Bytes per parameter that a part which stays in memory takes: weights 2, lower half 2, moments 8."""
MICRO_BATCH_TOKENS = 8192


def own_job(
    ledger: Ledger,
    *,
    update: str = "overlap",
    resident: Sequence[str] = (),
    gradients: str = "host",
    slots: int = 3,
) -> Job:
    """Return one of our steps: full fine-tuning, weights and states on SSD but for resident stages.

    Each state takes as many transfers as Ratel's do, one per matrix, so that a difference in the number of
    requests plays no part.

    Args:
        update: "overlap" (no clipping, updates within backward), "deferred" (exact clipping, the previous
            step's updates within forward), or "speculative" (exact clipping, but neither this step nor the one
            before is clipped: updates of streamed stages within backward, gradients wait all the same).
        gradients: Where gradients wait for the norm of all, "host" or "ssd".
        slots: For blocks' weights; one less for their gradients.
    """
    if update not in ("overlap", "deferred", "speculative") or gradients not in ("host", "ssd"):
        raise ValueError(f'no schedule with update "{update}" and gradients on "{gradients}"')
    model, training = ledger.model, ledger.training
    stages = ledger.stages(resident)
    trained = frozenset(name for name, stage in stages.items() if stage.pieces)
    deferred = trained if update != "overlap" else frozenset()
    speculative = deferred - {*resident} if update == "speculative" else frozenset[str]()
    shape = StepShape(
        num_blocks=model.num_blocks,
        num_micro_batches=training.micro_batches,
        tied=model.tied,
        stages=stages,
        block_slots=slots,
        gradient_slots=slots - 1,
        deferred=deferred,
        speculative=speculative,
        pending=bool(deferred),
        settled=speculative,
        gradients_on_ssd=deferred if gradients == "ssd" else frozenset(),
    )
    schedule = generate_training_step(shape)
    return Job(schedule, work_of(schedule, shape, ledger, requests_per_state=MATRICES_PER_BLOCK))


def own_ledger(row: Row, batch: int) -> Ledger:
    """Return the ledger of our step for a row: fp32 gradients, whole recomputation, small micro-batches."""
    tokens = batch * row.sequence
    training = TrainingShape(
        tokens=tokens,
        sequence=row.sequence,
        micro_batches=max(1, tokens // MICRO_BATCH_TOKENS),
        gradient_bytes=4,
        swap_bytes=0.0,  # block inputs wait in host memory
    )
    return Ledger(row.model, training)


def spare_bytes(ledger: Ledger, hardware: Hardware, *, waiting_gradients: bool) -> float:
    """Return the host memory that is left beside activations, buffers and, if they wait, gradients."""
    model, training = ledger.model, ledger.training
    buffers = 4 * (training.weight_bytes + training.gradient_bytes) * model.block_parameters
    gradients = training.gradient_bytes * model.parameters if waiting_gradients else 0
    used = ledger.swap_bytes + buffers + gradients + STATE_BYTES * model.embedding_parameters
    return ACTIVATION_MEMORY * hardware.host_bytes - used


def resident_blocks(ledger: Ledger, hardware: Hardware, *, waiting_gradients: bool) -> list[str]:
    """Return the blocks that stay in host memory: as many as there is room for, evenly spread."""
    model = ledger.model
    room = max(0.0, spare_bytes(ledger, hardware, waiting_gradients=waiting_gradients))
    count = int(min(model.num_blocks, room // (STATE_BYTES * model.block_parameters)))
    return [block_stage(i * model.num_blocks // count) for i in range(count)]


@dataclass(frozen=True)
class Comparison:
    """Seconds of a step for one row.

    Attributes:
        ratel_s, ratel_published_s: Ratel, simulated and published.
        streamed_s: Ours without clipping, nothing kept in memory, all activations recomputed.
        swapped_s: The same with the best volume of activations kept in host memory.
        cached_s: As `swapped_s`, and blocks kept in host memory as far as there is room.
        clipped_s: As `streamed_s` with exact clipping: updates are deferred.
        clipped_cached_s: As `cached_s` with exact clipping.
        speculative_s, speculative_cached_s: The same two with speculative updates, where nothing is clipped.
        bounds: What is occupied longest in `streamed_s`, `swapped_s` and `cached_s`.
    """

    row: Row
    batch: int
    ratel_s: float
    ratel_published_s: float
    streamed_s: float
    swapped_s: float
    cached_s: float
    clipped_s: float
    clipped_cached_s: float
    speculative_s: float
    speculative_cached_s: float
    bounds: tuple[str, str, str]


def compare(row: Row, constants: Constants | None = None) -> Comparison:
    """Simulate our steps for a row of Ratel."""
    constants = constants or Constants()
    prediction = predict(row, constants)
    drives = dict(constants.drives).get(row.figure, row.drives or 1)
    hardware = replace(constants.hardware, num_drives=drives, host_bytes=row.host_bytes)
    ledger = own_ledger(row, prediction.batch)
    volumes = _volumes(ledger, hardware)

    def simulated(candidate: Ledger, update: str, *, caching: bool) -> Simulation:
        waiting = update != "overlap"
        fits = spare_bytes(candidate, hardware, waiting_gradients=waiting) >= 0
        gradients = "host" if fits or not waiting else "ssd"
        resident: list[str] = []
        if caching and gradients == "host":
            resident = resident_blocks(candidate, hardware, waiting_gradients=waiting)
        job = own_job(candidate, update=update, resident=resident, gradients=gradients)
        return job.simulate(hardware)

    def fastest(candidates: Sequence[Ledger], update: str, *, caching: bool) -> Simulation:
        results = [simulated(candidate, update, caching=caching) for candidate in candidates]
        return min(results, key=lambda result: result.step_s)

    streamed = simulated(ledger, "overlap", caching=False)
    swapped = fastest(volumes, "overlap", caching=False)
    kept = fastest(volumes, "overlap", caching=True)
    clipped = simulated(ledger, "deferred", caching=False)
    clipped_kept = fastest(volumes, "deferred", caching=True)
    speculative = simulated(ledger, "speculative", caching=False)
    speculative_kept = fastest(volumes, "speculative", caching=True)
    return Comparison(
        row=row,
        batch=prediction.batch,
        ratel_s=prediction.predicted_s,
        ratel_published_s=prediction.published_s,
        streamed_s=streamed.step_s,
        swapped_s=swapped.step_s,
        cached_s=kept.step_s,
        clipped_s=clipped.step_s,
        clipped_cached_s=clipped_kept.step_s,
        speculative_s=speculative.step_s,
        speculative_cached_s=speculative_kept.step_s,
        bounds=(streamed.binding, swapped.binding, kept.binding),
    )


def _volumes(ledger: Ledger, hardware: Hardware, count: int = 8) -> list[Ledger]:
    """Return the ledger with volumes of swapped activations from the least to all that memory holds."""
    room = ACTIVATION_MEMORY * hardware.host_bytes
    low, high = ledger.input_bytes, min(ledger.all_activation_bytes, room)
    volumes = [low + (high - low) * i / count for i in range(count + 1)]
    return [ledger, *(with_swap(ledger, volume, room) for volume in volumes[1:])]
