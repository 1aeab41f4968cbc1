"""One cell of the table: what is run for it, and the record of figures that comes out.

In this order: rates of the machine, forecast with its rehearsal, the run itself, rates and rehearsal again, and the same
training in memory. Forecast and run know the first figures, as the machine's profile. The bounds use the mean of both
measurements of the drives, which drift, and the better one of the processor, which other programs can only slow down.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from bench.bounds import Rates, Step, bounds, computing_reads
from bench.models import SIZES, Size, write_rows
from bench.process import Failed, Watched, run, run_json

SEQUENCE = 256
MODES = {
    "overlap": ("0", "auto"),
    "deferred": ("1.0", "deferred"),
    "speculative": ("1e9", "speculative"),
    "redo": ("1e-6", "speculative"),
}
"""max_grad_norm and clipping: without clipping AdamW runs beside backward, deferred beside the next forward, and speculative
beside backward again as nothing exceeds the norm. Where all steps do, it runs beside both: each update is made twice."""
COUNTED = slice(2, -1)
"""Steps that count. The first takes over the weights; the first update, in a deferred run the second step's, finds no moments
to read; the last step ends with all pending updates."""
SLACK = 1.05
"""Host memory that streamed runs get, beside what the plan needs without any cache."""
BENCH = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Cell:
    """What is varied."""

    model: str
    method: str
    batch: int
    mode: str
    memory: str

    @property
    def size(self) -> Size:
        return SIZES[self.model]

    @property
    def tokens(self) -> int:
        return self.batch * SEQUENCE

    @property
    def name(self) -> str:
        return f"{self.model} {self.method} {self.batch}x{SEQUENCE} {self.memory} {self.mode}"


@dataclass
class Bench:
    """What all cells share: the folder, the settings, and what need not be measured twice."""

    folder: Path
    steps: int
    quick: bool
    dtype: str
    in_memory_steps: int
    extra: Sequence[str] = ()
    in_memory: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def model(self, name: str) -> Path:
        """Return a model's folder; the model is made when it is first wanted."""
        folder = self.folder / f"model-{name}"
        if not folder.exists():
            run([sys.executable, str(BENCH / "models.py"), name, str(folder)], self.folder)
            os.sync()
        return folder

    def profile(self, name: str) -> Path:
        """Return this machine's profile with the model's block, a file; measured when first wanted."""
        path = self.folder / f"profile-{name}.json"
        command = [*ssdtune("profile", str(self.folder), "--model", str(self.model(name)))]
        run(
            [*command, "--output", str(path), *(["--quick"] if self.quick else []), "-q"],
            self.folder,
        )
        found = json.loads(path.read_text())
        self.dtype = self.dtype or ("bf16" if "bf16" in found["compute_dtypes"] else "fp32")
        drive = ("file_system", "device", "direct", "backend", "request_bytes", "queue_depth")
        self.machine = found["machine"] | {name: found["directories"][0][name] for name in drive}
        return path

    def rows(self, name: str, batch: int) -> Path:
        path = self.folder / f"rows-{SIZES[name].vocabulary}-{batch}.jsonl"
        steps = max(self.steps, self.in_memory_steps)
        write_rows(path, steps * batch, SEQUENCE, SIZES[name].vocabulary)
        return path

    def rates(self, profile: Path, fresh: Path) -> dict[str, Any]:
        """Measure the machine as it is now.

        Args:
            fresh: Where the profile with these rates goes.
        """
        effort = ("--seconds", "0.1", "--rounds", "1", "--size", "256MiB") if self.quick else ()
        return run_json(
            [
                sys.executable, str(BENCH / "rates.py"), str(profile), "--fresh", str(fresh), *effort,
            ],
            self.folder,
        )  # fmt: skip


def ssdtune(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ssdtune", *arguments]


def measure_cell(cell: Cell, bench: Bench) -> dict[str, Any]:
    """Run a cell.

    Returns:
        Its record; of one that does not fit or fails just "skipped" or "failed", the reason.
    """
    record: dict[str, Any] = {"cell": vars(cell), "name": cell.name}
    output = bench.folder / "out"
    try:
        return record | _measure(cell, bench, output)
    except Failed as error:
        return record | {"failed": str(error)}
    finally:
        shutil.rmtree(output, ignore_errors=True)


def _measure(cell: Cell, bench: Bench, output: Path) -> dict[str, Any]:
    profile, fresh = bench.profile(cell.model), bench.folder / "cache/ssdtune/profile.json"
    rates = [bench.rates(profile, fresh)]
    flags = [
        str(bench.model(cell.model)), "--method", cell.method, "--train-file", str(bench.rows(cell.model, cell.batch)),
        "--output-dir", str(output), "--max-length", str(SEQUENCE), "--max-steps", str(bench.steps),
        "--per-device-train-batch-size", str(cell.batch), "--max-grad-norm", MODES[cell.mode][0],
        "--clipping", MODES[cell.mode][1],
        "--dtype", bench.dtype, "--device", "cpu", "--save-steps", "0", *bench.extra,
    ]  # fmt: skip

    def plan() -> dict[str, Any]:
        command = ssdtune("plan", *flags, "--json")
        found: dict[str, Any] = run_json(command, bench.folder, codes=(0, 3))
        return found

    if cell.memory == "streamed":
        flags += ["--host-cache", "0"]
        if (least := plan())["memory"]:
            budget = int(SLACK * least["memory"]["host_bytes"])
            flags += ["--host-memory", str(budget)]
    planned = plan()
    if not planned["fits"]:
        return {"skipped": " ".join(planned["problems"])}
    command = ssdtune("finetune", *flags, "--json", "-q")
    seen = run(command, bench.folder, metrics=output / "metrics.jsonl")
    lines = (output / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if step["event"] == "step"]
    memory = json.loads((output / "plan.json").read_text())["memory"]
    shutil.rmtree(output)  # its export would still be on its way to the drives
    os.sync()
    times = [planned["forecast"]["compute_times_s"]]
    if not bench.quick:
        rates.append(bench.rates(profile, fresh))
        times.append(plan()["forecast"]["compute_times_s"])
    found = measured(cell, steps, seen, json.loads(seen.output))
    split, trained = bench.dtype == "bf16", planned["estimate"]["trained_parameters"]
    step = step_of(cell, steps, memory, fastest(times), trained=trained, split=split)
    found["bound"] = bounds(step, mean_rates(rates))
    found |= {"rates": rates, "times": times, "plan": planned, "in_memory": _in_memory(cell, bench)}
    return found | comparisons(found)


def measured(
    cell: Cell, steps: list[dict[str, Any]], seen: Watched, result: dict[str, Any]
) -> dict[str, Any]:
    """Return a run's figures per step."""
    counted, parameters = steps[COUNTED], cell.size.parameters
    if len(seen.io) < len(steps) - 1:
        raise Failed("the run ended before its bytes could be read; more steps are needed")
    per_step = {}
    for number, way in enumerate(("read", "written")):
        moved = seen.io[len(steps) - 2][number] - seen.io[COUNTED.start - 1][number]
        own = sum(sum(step[f"bytes_{way}"].values()) for step in counted)
        per_step[f"kernel_{way}_bytes_per_parameter"] = moved / len(counted) / parameters
        per_step[f"own_{way}_bytes_per_parameter"] = own / len(counted) / parameters
    lanes = {
        lane: statistics.median(step["lane_s"][lane] for step in counted)
        for lane in counted[0]["lane_s"]
    }
    return {
        "parameters": parameters,
        "tokens": cell.tokens,
        "all_step_s": [step["step_s"] for step in steps],
        "step_s": statistics.median(step["step_s"] for step in counted),
        "lane_s": lanes,
        **per_step,
        "peak_memory_bytes": max(seen.peak_bytes, result["peak_memory_bytes"]),
        "planned_memory_bytes": result["planned_memory_bytes"],
        "losses": result["losses"],
    }


def mean_rates(rates: list[dict[str, Any]]) -> Rates:
    """Return the mean of several measurements for the drives, the best for the processor."""
    found = {}
    for each in fields(Rates):
        values = [measured[each.name] for measured in rates]
        drives = each.name.startswith(("read", "write", "mixed"))
        found[each.name] = statistics.fmean(values) if drives else max(values)
    return Rates(**found)


def fastest(times: list[dict[str, float]]) -> dict[str, float]:
    """Return the shorter one of two rehearsals, kind by kind."""
    return {
        name: min(found.get(name, value) for found in times) for name, value in times[0].items()
    }


def computing(
    times: dict[str, float], num_blocks: int, num_kept: int, num_partly: int = 0
) -> tuple[float, float]:
    """Return the seconds of forward, and of loss and backward, of one micro-batch.

    Args:
        num_kept: Blocks that keep all their activations or let them go to the drives; `num_partly` only results of
            products; the others are run again.
    """

    def blocks(kind: str) -> float:
        counts = {
            "": num_blocks - num_kept - num_partly,
            "+products": num_partly,
            "+kept": num_kept,
        }
        return sum(count * times[kind + keeps] for keeps, count in counts.items() if count)

    forward = times["entry-forward"] + blocks("forward")
    return forward, times["loss"] + blocks("backward") + times["entry-backward"]


def step_of(
    cell: Cell,
    steps: list[dict[str, Any]],
    memory: dict[str, Any],
    times: dict[str, float],
    *,
    trained: int,
    split: bool,
) -> Step:
    """Return the work of a step as it was planned; how much is cached follows from the bytes of the middle steps.

    Args:
        memory: The run's memory plan.
        times: Seconds of computing, by kind.
        trained: Elements that the optimizer updates.
        split: The master weight is in two halves.
    """
    counted, size, frozen = steps[COUNTED], cell.size, cell.method == "lora"

    def moved(way: str, kind: str) -> float:
        return statistics.fmean(step[f"bytes_{way}"].get(kind, 0) for step in counted)

    blocks = {f"block.{number}": size.block_parameters for number in range(size.blocks)}
    ends = {"embed": size.head_parameters, "head": size.head_parameters}
    sizes = blocks if frozen else blocks | ends
    deferred, speculated = (
        sum(sizes.get(stage, 0) for stage in memory[name]) / sum(sizes.values())
        for name in ("deferred", "speculative")
    )
    redone = speculated if cell.mode == "redo" else 0.0
    partly = len(memory["partly"])
    kept = len(memory["kept"]) + len(memory["swapped"]) - partly
    forward, backward = computing(times, size.blocks, kept, partly)
    step = Step(
        num_blocks=size.blocks, block_parameters=size.block_parameters, head_parameters=size.head_parameters,
        forward_s=forward, backward_s=backward,
        trained_parameters=trained, frozen=frozen, weight_bytes=2 if split or frozen else 4, split=split,
        gradient_bytes=moved("written", "gradients"), read_gradient_bytes=moved("read", "gradients"),
        activation_bytes=moved("written", "activations"),
        deferred_share=deferred - speculated + redone, redone_share=redone,
    )  # fmt: skip
    states = min(1.0, moved("written", "moments") / (8 * trained * (1 + redone)))
    weights = min(1.0, moved("read", "weights") / sum(computing_reads(step))) if frozen else states
    return replace(step, streamed_states=states, streamed_weights=weights)


def _in_memory(cell: Cell, bench: Bench) -> dict[str, Any]:
    """Return the step time of the same training in memory; measured once for all memories."""
    key = (cell.model, cell.method, cell.batch, cell.mode)
    if key not in bench.in_memory and bench.in_memory_steps:
        command = [
            sys.executable, str(BENCH / "in_memory.py"), str(bench.model(cell.model)),
            str(bench.rows(cell.model, cell.batch)), "--method", cell.method, "--batch", str(cell.batch),
            "--steps", str(bench.in_memory_steps), "--dtype", bench.dtype, "--max-grad-norm", MODES[cell.mode][0],
        ]  # fmt: skip
        try:
            found = run_json(command, bench.folder)
        except Failed as error:
            found = {"skipped": str(error)}
        bench.in_memory[key] = found
    return bench.in_memory.get(key, {"skipped": "not asked for"})


def comparisons(found: dict[str, Any]) -> dict[str, Any]:
    """Return the ratios and errors of a record."""
    step, forecast, alone = found["step_s"], found["plan"]["forecast"], found["in_memory"]
    in_memory = statistics.median(alone["step_s"][1:]) if "step_s" in alone else None
    peak = found["peak_memory_bytes"]
    return {
        "forecast_s": forecast["step_s"] if forecast else None,
        "forecast_error": forecast["step_s"] / step - 1 if forecast else None,
        "memory_error": found["planned_memory_bytes"] / peak - 1,
        "in_memory_s": in_memory,
        "to_in_memory": in_memory and step / in_memory,
        "to_bound": step / found["bound"]["mode_s"],
        "to_ultimate": step / found["bound"]["ultimate_s"],
    }
