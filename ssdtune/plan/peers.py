"""Schedules of other systems, as data for the same simulator: Ratel, ZeRO-Infinity, ZeRO-Offload.

Each function returns a `Job`: the operations of one step and the work of each. What a system moves is taken from
its paper, what the machine can do from `ssdtune.plan.hardware`; nothing here depends on a measurement.

* Ratel (arXiv 2403.06504): fp16 weights and gradients, fp32 master and moments, 14 bytes per parameter on SSD.
  Forward reads 2 of them; backward reads and writes all 14. AdamW on the CPU within backward
  ("optimized": read, compute and write of neighbours overlap; "naive": one after the other) or, as its ablation
  "Ratel+ZeRO" does, in a phase of its own after backward ("serial"). It swaps as many activations as its own
  cost model finds best.
* ZeRO-Infinity (arXiv 2104.07857): gradients go to SSD in backward and come back in an optimizer phase that
  works on one group of parameters after the other. Block inputs go to host memory, all else is recomputed.
* ZeRO-Offload (arXiv 2101.06840): all states in host memory; AdamW on the CPU after backward.

What a step of ours does is `ssdtune.plan.generate`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ssdtune.plan.generate import EMBED, HEAD, block_stage
from ssdtune.plan.hardware import Hardware, Work
from ssdtune.plan.ledger import MATRICES_PER_BLOCK, Ledger
from ssdtune.plan.schedule import Kind, Lane, Schedule
from ssdtune.plan.simulator import Simulation, simulate

HALF, STATES = 2, 12
"""Bytes per parameter: fp16 weight or gradient; fp32 master and two moments."""
STATES_PER_UPDATE = 3
"""Master and two moments travel one by one."""


@dataclass
class Job:
    """A step: operations and the work of each, in the same order."""

    schedule: Schedule = field(default_factory=Schedule)
    work: list[Work] = field(default_factory=list)

    def add(
        self, lane: Lane, kind: Kind, stage: str, work: Work, after: tuple[int | None, ...] = ()
    ) -> int:
        """Append an operation with its work and return its index."""
        self.work.append(work)
        return self.schedule.add(lane, kind, stage, after=after)

    def simulate(self, hardware: Hardware) -> Simulation:
        """Run it on a machine."""
        return simulate(self.schedule, [hardware.cost(work) for work in self.work])


def weight_slots(ledger: Ledger, device_bytes: int) -> int:
    """Return how many blocks' weights and gradients the device has room for: 2, or 1 if it is full.

    Besides these it holds the embedding and its gradient, and of the block that is worked on all activations
    (16 hidden states), the hidden state and its gradient, and in the MLP's backward pass the gradients before
    and after its activation (4 hidden states each). With one slot a block's transfers wait for the computation
    before it.
    """
    model, training = ledger.model, ledger.training
    hidden_bytes = HALF * training.tokens // training.micro_batches * model.hidden
    used = (16 + 2 + 8) * hidden_bytes + 2 * HALF * model.embedding_parameters
    block = 2 * HALF * model.block_parameters
    return 2 if used + 2 * block <= device_bytes else 1


def ratel(ledger: Ledger, hardware: Hardware, *, update: str = "optimized") -> Job:
    """Return Ratel's step.

    Args:
        ledger: With the volume of swapped activations that `ratel_swap` chose, or a forced one.
        update: "optimized", "naive" or "serial".

    Raises:
        ValueError: `update` is none of them.
    """
    if update not in ("optimized", "naive", "serial"):
        raise ValueError(f'update is "{update}"; it must be "optimized", "naive" or "serial"')
    slots = weight_slots(ledger, hardware.device_bytes)
    return _offloaded_step(ledger, slots, update=update, weights_on_ssd=True, states_on_ssd=True)


def zero_infinity(ledger: Ledger, hardware: Hardware) -> Job:
    """Return ZeRO-Infinity's step: weights, gradients and states on SSD, optimizer phase group by group."""
    return _offloaded_step(
        ledger, 0, update="serial", weights_on_ssd=True, states_on_ssd=True, gradients_on_ssd=True
    )  # fmt: skip


def zero_offload(ledger: Ledger, hardware: Hardware) -> Job:
    """Return ZeRO-Offload's step: all states in host memory."""
    return _offloaded_step(ledger, 0, update="serial", weights_on_ssd=False, states_on_ssd=False)


def ratel_swap(ledger: Ledger, hardware: Hardware, *, memory_bytes: float, steps: int = 60) -> Ledger:  # fmt: skip
    """Return the ledger with the volume of swapped activations that Ratel's cost model picks.

    The step is taken as the sum of two phases, each as long as its slowest resource (its Eqs. 1-8; AdamW is not
    in it). The volume grows from the block inputs on until the step gets longer. What exceeds the memory goes
    to SSD.

    Args:
        memory_bytes: Host memory for activations.
    """
    best: tuple[float, Ledger] | None = None
    low, high = ledger.input_bytes, ledger.all_activation_bytes
    for i in range(steps + 1):
        volume = low + (high - low) * i / steps
        candidate = with_swap(ledger, volume, memory_bytes)
        time = _ratel_formula(candidate, hardware)
        if best is None or time < best[0] * (1 - 1e-9):
            best = (time, candidate)
    assert best is not None
    return best[1]


def with_swap(ledger: Ledger, volume: float, memory_bytes: float) -> Ledger:
    """Return the ledger with this volume of swapped activations; what exceeds the memory goes to SSD."""
    training = replace(
        ledger.training, swap_bytes=volume, swap_to_ssd_bytes=max(0.0, volume - memory_bytes)
    )
    return Ledger(ledger.model, training)


def _ratel_formula(ledger: Ledger, hardware: Hardware) -> float:
    parameters, spilled = ledger.model.parameters, ledger.training.swap_to_ssd_bytes
    forward_s = ledger.forward_flop / hardware.flop_per_s
    swapped = ledger.swap_bytes
    forward = max(
        forward_s,
        swapped / hardware.d2h_bytes_per_s,
        HALF * parameters / hardware.h2d_bytes_per_s,
        hardware.ssd_s(HALF * parameters, spilled),
    )
    backward = max(
        (2 + ledger.recompute_share) * forward_s,
        HALF * parameters / hardware.d2h_bytes_per_s,
        (HALF * parameters + swapped) / hardware.h2d_bytes_per_s,
        hardware.ssd_s((HALF + STATES) * parameters + spilled, (HALF + STATES) * parameters),
    )
    return forward + backward


def _offloaded_step(
    ledger: Ledger,
    slots: int,
    *,
    update: str,
    weights_on_ssd: bool,
    states_on_ssd: bool,
    gradients_on_ssd: bool = False,
) -> Job:
    """Write forward, backward, and updates within it or after it.

    Weights are read ahead into two host buffers per device slot; a device slot is free once the block that
    used it has been computed. With no slots nothing is ahead of or behind the computation: a block's weights
    are fetched when its turn comes, and its activations and gradient are away before the next one's turn.
    """
    job = Job()
    model = ledger.model
    blocks = [block_stage(number) for number in range(model.num_blocks)]
    loads: list[int | None] = []
    users: list[int] = []
    gradients: list[int] = []

    def weights(stage: str, parameters: int) -> int:
        place = len(users)
        # The host buffer is free once its content has gone to the device, the device slot once it was used.
        if slots:
            host_free = loads[place - 2 * slots] if place >= 2 * slots else None
            device_free = users[place - slots] if place >= slots else None
        else:
            host_free = device_free = len(job.work) - 1 if job.work else None
        load: int | None = None
        if weights_on_ssd:
            work = Work(read_bytes=HALF * parameters, requests=MATRICES_PER_BLOCK)
            load = job.add(Lane.SSD_READ, Kind.LOAD, stage, work, (host_free,))
        upload = job.add(
            Lane.H2D, Kind.UPLOAD, stage, Work(h2d_bytes=HALF * parameters), (load, device_free)
        )
        loads.append(upload)
        return upload

    def complete(stage: str, parameters: int, last: int) -> None:
        # A gradient buffer on the device is free once its content has left it.
        done = job.add(
            Lane.D2H, Kind.COLLECT_GRADIENT, stage, Work(d2h_bytes=HALF * parameters), (last,)
        )
        gradients.append(done)
        if gradients_on_ssd:
            work = Work(write_bytes=HALF * parameters, requests=MATRICES_PER_BLOCK)
            done = job.add(Lane.SSD_WRITE, Kind.SAVE_GRADIENT, stage, work, (done,))
        if update in ("optimized", "naive"):
            optimize(stage, parameters, (done,))

    def optimize(stage: str, parameters: int, after: tuple[int, ...]) -> None:
        if not states_on_ssd:
            work = ledger.update(parameters, read=0, write=0, requests=0)
            job.add(Lane.ADAM, Kind.UPDATE, stage, work, after)
            return
        read = STATES + (HALF if gradients_on_ssd else 0)
        num_read = MATRICES_PER_BLOCK * (STATES_PER_UPDATE + gradients_on_ssd)
        num_written = MATRICES_PER_BLOCK * (STATES_PER_UPDATE + 1)
        if update == "optimized":
            work = ledger.update(
                parameters, read=read, write=STATES + HALF, requests=num_read + num_written
            )
            job.add(Lane.ADAM, Kind.UPDATE, stage, work, after)
            return
        for work in (
            Work(read_bytes=read * parameters, requests=num_read),
            ledger.update(parameters, read=0, write=0, requests=0),
            Work(write_bytes=(STATES + HALF) * parameters, requests=num_written),
        ):
            after = (job.add(Lane.ADAM, Kind.UPDATE, stage, work, after),)

    def compute(kind: Kind, stage: str, work: Work, after: tuple[int | None, ...]) -> int:
        """Add a block's computation; activations travel beside it or, with no slots, apart from it."""
        if slots:
            return job.add(Lane.COMPUTE, kind, stage, work, after)
        alone = replace(work, h2d_bytes=0, d2h_bytes=0)
        if kind == Kind.FORWARD:
            last = job.add(Lane.COMPUTE, kind, stage, alone, after)
            away = Work(d2h_bytes=work.d2h_bytes)
            return job.add(Lane.D2H, Kind.SAVE_INPUT, stage, away, (last,))
        back = Work(h2d_bytes=work.h2d_bytes)
        here = job.add(Lane.H2D, Kind.LOAD_INPUT, stage, back, after)
        return job.add(Lane.COMPUTE, kind, stage, alone, (here,))

    last = -1
    upload = weights(EMBED, model.embedding_parameters)
    users.append(job.add(Lane.COMPUTE, Kind.ENTRY_FORWARD, EMBED, Work(), (upload,)))
    for stage in blocks:
        upload = weights(stage, model.block_parameters)
        users.append(compute(Kind.FORWARD, stage, ledger.forward(), (upload,)))
    # Tied: the matrix is read again as the head.
    upload = weights(HEAD, model.head_parameters)
    users.append(job.add(Lane.COMPUTE, Kind.LOSS, HEAD, ledger.loss(), (upload,)))
    for stage in reversed(blocks):
        upload = weights(stage, model.block_parameters)
        free = gradients[-slots] if slots and len(gradients) >= slots else None
        last = compute(Kind.BACKWARD, stage, ledger.backward(), (upload, free))
        users.append(last)
        complete(stage, model.block_parameters, last)
    complete(EMBED, model.embedding_parameters, last)
    if update == "serial":
        everything = len(job.work) - 1
        for stage in [EMBED, *blocks]:
            optimize(stage, model.stage_parameters(stage), (everything,))
    return job
