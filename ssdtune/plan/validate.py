"""Predict published measurements with the simulator, and say how far off each prediction is.

The rows (`data/published_steps.csv`) were read from the figures of the Ratel paper (arXiv 2403.06504, ICDE 2025) and
its artifact. Column `use` says what a row serves for: `fit` (the machine's three free constants), `held-out`, `zero`
(other systems on the same machine), `left-out` (contradicts another row). `docs/simulator.md` explains it all;
`tools/validate_simulator.py` prints the table and fits the constants.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from itertools import pairwise

from ssdtune.plan import peers
from ssdtune.plan.hardware import Hardware
from ssdtune.plan.ledger import Ledger, ModelShape, TrainingShape
from ssdtune.plan.schedule import Kind
from ssdtune.plan.simulator import Simulation
from ssdtune.units import GIB

RATEL_4090 = Hardware(
    name="Ratel's testbed: RTX 4090, 2 Xeon Gold 5320, 12 P5510 of 3.84 TB",
    # The paper: highest rate of a transformer block (Fig. 5c), link labels (Fig. 1), memory. The factor is fitted.
    flop_per_s=0.77 * 160.3e12,
    h2d_bytes_per_s=21e9,
    d2h_bytes_per_s=21e9,
    ssd_link_bytes_per_s=32e9,
    num_drives=12,
    host_bytes=768 * GIB,
    device_bytes=int(23.5 * GIB),
    # Data sheets: the drives, and 16 channels of DDR4-3200, of which 70 % can be reached.
    drive_read_bytes_per_s=6.5e9,
    drive_write_bytes_per_s=3.4e9,
    dram_bytes_per_s=0.7 * 409.6e9,
    # CPU-Adam of two 24-core Xeons: 10e9 parameters in 2.57 s (ZeRO-Offload, arXiv 2101.06840, from memory).
    adam_elements_per_s=3.9e9,
    # Fitted; the first came out as 2.2.
    ssd_overlap=2.0,
    request_s=2.8e-3,
)
ACTIVATION_MEMORY = 0.9
"""Share of host memory that Ratel can fill with activations."""
BATCHES = (8, 16, 24, 32, 48, 64, 96, 128)
LARGEST_BATCH = {"zero-infinity": 32, "zero-offload": 16}
"""Fig. 5a marks the next batch size of these systems as failed for 13B; larger models fit no better."""


@dataclass(frozen=True)
class Row:
    """A published measurement. `batch` and `drives` are None where the paper doesn't state them."""

    figure: str
    system: str
    model: ModelShape
    model_name: str
    nominal: float
    batch: int | None
    sequence: int
    drives: int | None
    host_bytes: int
    swap_bytes: float | None
    metric: str
    value: float
    use: str

    @property
    def label(self) -> str:
        """Return a short name."""
        parts = [f"Fig. {self.figure}", self.system, self.model_name]
        parts += [f"batch {self.batch}"] if self.batch else []
        parts += [f"{self.drives} drives"] if self.drives else []
        parts += [f"{self.swap_bytes / 1e9:.0f} GB swapped"] if self.swap_bytes else []
        parts += [self.metric.removesuffix("_s")] if self.metric in PHASES else []
        return ", ".join(parts)

    def seconds(self, batch: int) -> float:
        """Return the published time; TFLOPS there are 8 times the nominal parameters per token."""
        tokens = batch * self.sequence
        match self.metric:
            case "tokens_per_s":
                return tokens / self.value
            case "tflops_8P":
                return 8 * self.nominal * tokens / (self.value * 1e12)
        return self.value


PHASES = ("forward_s", "backward_s", "optimizer_s")


@dataclass(frozen=True)
class Constants:
    """What the predictions rest on.

    Attributes:
        batches: Batch of the figures that don't state it, by figure and system.
        drives: Drives of the figures that don't state them.
    """

    hardware: Hardware = RATEL_4090
    batches: tuple[tuple[str, str, int], ...] = (
        ("10a", "ratel", 24), ("10a", "zero-infinity", 8),
    )  # fmt: skip
    drives: tuple[tuple[str, int], ...] = (("9b", 6),)


@dataclass(frozen=True)
class Prediction:
    """A row, the published and the predicted seconds, and the batch for which they hold."""

    row: Row
    batch: int
    published_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error; positive if the prediction is too slow."""
        return self.predicted_s / self.published_s - 1


@lru_cache(maxsize=1)
def published_rows() -> tuple[Row, ...]:
    """Return all rows of the table."""
    table = resources.files("ssdtune.plan").joinpath("data/published_steps.csv")
    lines = table.read_text(encoding="utf-8").splitlines()
    return tuple(_row(line) for line in csv.DictReader(lines))


def _row(line: dict[str, str]) -> Row:
    unstated = line["note"].endswith("drives not stated")
    return Row(
        figure=line["figure"],
        system=line["system"],
        model=ModelShape.gpt(int(line["num_blocks"]), int(line["hidden"])),
        model_name=line["model"],
        nominal=float(line["nominal_billions"]) * 1e9,
        batch=int(line["batch"]) if line["batch"] else None,
        sequence=int(line["sequence"]),
        drives=None if unstated else int(line["drives"]),
        host_bytes=int(line["host_gb"]) * GIB,
        swap_bytes=float(line["swapped_gb"]) * 1e9 if line["swapped_gb"] else None,
        metric=line["metric"],
        value=float(line["value"]),
        use=line["use"],
    )


def predict(row: Row, constants: Constants | None = None) -> Prediction:
    """Simulate a row. Where the paper gives the best over batch sizes, so do we."""
    constants = constants or Constants()
    batch = row.batch
    if batch is None:
        named = {(figure, system): b for figure, system, b in constants.batches}
        batch = named.get((row.figure, row.system))
    if batch is not None:
        job, simulation = run(row, batch, constants)
        seconds = simulation.step_s
        if row.metric in PHASES:
            seconds = phase_seconds(row.metric, job, simulation)
        return Prediction(row, batch, row.seconds(batch), seconds)
    most = LARGEST_BATCH.get(row.system, max(BATCHES))
    times = [(b, run(row, b, constants)[1].step_s) for b in BATCHES if b <= most]
    best, seconds = min(times, key=lambda item: item[1] / item[0])
    return Prediction(row, best, row.seconds(best), seconds)


def predict_all(
    constants: Constants | None = None, *, use: Iterable[str] = ("fit", "held-out", "zero")
) -> list[Prediction]:
    """Return the predictions of all rows that serve for one of these."""
    wanted = set(use)
    return [predict(row, constants) for row in published_rows() if row.use in wanted]


def run(row: Row, batch: int, constants: Constants) -> tuple[peers.Job, Simulation]:
    """Simulate the step of a row."""
    drives = dict(constants.drives).get(row.figure, row.drives or 1)
    hardware = replace(constants.hardware, num_drives=drives, host_bytes=row.host_bytes)
    job = job_of(row, batch, constants, hardware)
    return job, job.simulate(hardware)


def job_of(row: Row, batch: int, constants: Constants, hardware: Hardware) -> peers.Job:
    """Return the schedule of the row's system."""
    training = TrainingShape(
        tokens=batch * row.sequence,
        sequence=row.sequence,
        gradient_bytes=2,
        swap_bytes=row.swap_bytes,
        skips_last_matrix=row.system.startswith("ratel"),
    )
    ledger = Ledger(row.model, training)
    if row.system == "zero-infinity":
        return peers.zero_infinity(ledger, hardware)
    if row.system == "zero-offload":
        return peers.zero_offload(ledger, hardware)
    memory = ACTIVATION_MEMORY * hardware.host_bytes
    if row.swap_bytes is None:
        ledger = peers.ratel_swap(ledger, hardware, memory_bytes=memory)
    else:
        ledger = peers.with_swap(ledger, row.swap_bytes, memory)
    update = row.system.removeprefix("ratel").lstrip("-") or "optimized"
    return peers.ratel(ledger, hardware, update=update)


def phase_seconds(metric: str, job: peers.Job, simulation: Simulation) -> float:
    """Return the seconds of one phase: forward ends with the loss, backward before the first update."""
    ends: dict[str, float] = {}
    for operation, span in zip(job.schedule.operations, simulation.spans):
        if operation.kind == Kind.LOSS:
            ends["forward_s"] = span.end_s
        elif operation.kind != Kind.UPDATE:
            ends["backward_s"] = max(ends.get("backward_s", 0.0), span.end_s)
    if metric == "forward_s":
        return ends["forward_s"]
    if metric == "backward_s":
        return ends["backward_s"] - ends["forward_s"]
    return simulation.step_s - ends["backward_s"]


def anchor_rows() -> list[Row]:
    """Return the eleven rows by which a one-line formula is known to be 4.0 % off on average, 20.8 % at worst."""
    return [
        row
        for row in published_rows()
        if row.system == "ratel"
        and (row.figure in ("5a", "7b", "9a") or (row.figure == "10b" and row.drives == 12))
    ]


def one_line_formula_s(row: Row) -> float:
    """Return that formula's step time: the slower of computing and 20 GB/s, in forward and in backward."""
    assert row.batch is not None
    tokens = row.batch * row.sequence
    attention = 4 * row.sequence * row.model.hidden * row.model.num_blocks
    forward = tokens * (2 * row.nominal + attention) / 160.3e12
    ssd = row.nominal / 20e9
    return max(forward, 2 * ssd) + max(3 * forward, 28 * ssd)


def picks(constants: Constants | None = None) -> list[tuple[int, float, float]]:
    """Return how good the simulator's choice is in the sweep of swapped activations (Fig. 9b).

    For each batch: its size, the chosen volume in bytes, and the measured time there (between two measured
    volumes: on the line through them) over the best measured one. The smallest volume is chosen whose simulated
    step is within 2 % of the shortest: moving more for less than that isn't worth it.
    """
    sweeps: dict[int, list[Row]] = {}
    for row in published_rows():
        if row.figure == "9b" and row.batch:
            sweeps.setdefault(row.batch, []).append(row)
    result = []
    for batch, rows in sweeps.items():
        points = sorted((row.swap_bytes or 0.0, row.value) for row in rows)
        low, high = points[0][0], points[-1][0]
        volumes = [low + (high - low) * i / 60 for i in range(61)]
        times = [
            run(replace(rows[0], swap_bytes=v), batch, constants or Constants())[1].step_s
            for v in volumes
        ]
        pick = next(v for v, time in zip(volumes, times) if time <= 1.02 * min(times))
        measured = _between(points, pick)
        result.append((batch, pick, measured / min(value for _, value in points)))
    return result


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def summary(predictions: Sequence[Prediction]) -> tuple[float, float]:
    """Return mean and worst of the absolute relative errors."""
    errors = [abs(prediction.error) for prediction in predictions]
    return sum(errors) / len(errors), max(errors)
