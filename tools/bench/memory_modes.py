"""Planned against measured peak memory, in every mode of training, with little, some and all of the memory it can use.

Each run has a process of its own, made by a fork server that has imported everything, so it costs little more than its
steps. The peak is the largest resident set that the kernel saw (VmHWM), from the start of the process to its end: the
comparison before the first step and the export are in it, as they are in the plan.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.models import SIZES, make_model, write_rows

MIB = 1 << 20
LENGTH = 256
"""Tokens of a row."""
DRIFT_BYTES = 24 * MIB
"""What is added to the least memory of a plan for `short`: processes differ a little before they begin."""

UNCLIPPED = {"max_grad_norm": 0}
MODES: dict[str, dict[str, Any]] = {
    "full, updates overlapped": UNCLIPPED,
    "full, clipped, deferred": {"clipping": "deferred"},
    "full, clipped, speculative": {"clipping": "speculative"},
    "LoRA": {"method": "lora"},
    "8-bit moments": {**UNCLIPPED, "optim": "adamw_8bit"},
    "no masters": {**UNCLIPPED, "master_weights": False},
    "activations on SSD": {**UNCLIPPED, "recompute": "never", "activations": "ssd"},
}
MEMORIES = ("short", "streamed", "roomy")
"""`short`: `host_cache` 0, and no memory for gaps between freed tensors; `streamed`: `host_cache` 0; `roomy`: all there is."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    mode: str
    dtype: str
    rows: int
    memory: str


def cells(dtypes: list[str], rows: list[int], only: list[str] | None = None) -> list[Cell]:
    """Return all cells, or those of some modes; rounding without masters is for bf16 alone."""
    return [
        Cell(mode, dtype, count, memory)
        for mode in only or MODES
        for dtype in dtypes
        for count in rows
        for memory in MEMORIES
        if dtype == "bf16" or mode != "no masters"
    ]


def measure(chosen: list[Cell], folder: Path, size: str, steps: int) -> Iterator[dict[str, Any]]:
    """Yield what each run planned and took, in bytes; `error` is the planned less the measured share of the measured.

    Args:
        folder: For the model, the rows and the runs; what is there is used again.
        size: One of `bench.models.SIZES`.
    """
    os.environ["XDG_CACHE_HOME"] = str(
        folder / "cache"
    )  # no profile: plans as they are made without
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # as the command line does, before torch is imported
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    model = folder / f"model-{size}"
    if not model.exists():
        make_model(model, SIZES[size])
    for cell in chosen:
        rows = folder / f"rows-{size}-{cell.rows}.jsonl"
        if not rows.exists():
            write_rows(rows, cell.rows * steps, LENGTH, SIZES[size].vocabulary)
        settings = {
            "model_name_or_path": str(model), "train_file": str(rows), "output_dir": str(folder / "run"),
            "dtype": cell.dtype, "per_device_train_batch_size": cell.rows, "max_length": LENGTH,
            "max_steps": steps, "save_steps": 0, "device": "cpu", **MODES[cell.mode],
        }  # fmt: skip
        if cell.memory != "roomy":
            settings["host_cache"] = 0
        if cell.memory == "short":
            settings["host_memory"] = _in_process(_least, settings)["least"] + DRIFT_BYTES
        found = _in_process(_run, settings)
        shutil.rmtree(folder / "run", ignore_errors=True)
        error = found["planned"] / found["measured"] - 1
        yield {"mode": cell.mode, "dtype": cell.dtype, "rows": cell.rows, "memory": cell.memory,
               "error": error, **found}  # fmt: skip


def line(record: dict[str, Any]) -> str:
    """Return one run for people."""
    name = f"{record['mode']}, {record['dtype']} {record['rows']}x{LENGTH}, {record['memory']}"
    return f"{name}: {_figures(record)}"


def _figures(record: dict[str, Any]) -> str:
    planned, measured = record["planned"] / MIB, record["measured"] / MIB
    return f"{planned:.0f} / {measured:.0f} MiB, {100 * record['error']:+.1f} %"


def render(records: list[dict[str, Any]]) -> str:
    """Return the table: a line for each mode, precision and batch, a column for each memory."""
    lines = [
        f"| run | {' | '.join(MEMORIES)} |",
        f"|---{'|--:' * len(MEMORIES)}|",
    ]
    table: dict[str, dict[str, str]] = {}
    for record in records:
        name = f"{record['mode']}, {record['dtype']} {record['rows']}x{LENGTH}"
        table.setdefault(name, {})[record["memory"]] = _figures(record)
    for name, found in table.items():
        lines.append(f"| {name} | {' | '.join(found.get(memory, '–') for memory in MEMORIES)} |")
    errors = [record["error"] for record in records]
    if errors:
        lines += [
            "",
            f"Planned less measured: {100 * min(errors):+.1f} to {100 * max(errors):+.1f} %.",
        ]
    return "\n".join(lines)


def _in_process(function: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["peft", "transformers", "ssdtune.train.finetune"])
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, dict(settings)))
    process.start()
    theirs.close()
    try:
        answer = mine.recv()
    except EOFError:
        answer = f"the process ended: {process.exitcode}"
    process.join()
    if not isinstance(answer, dict):
        raise SystemExit(f"error: {answer}")
    return answer


def _answer(to: Connection, function: Any, settings: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    try:
        to.send(function(settings))
    except Exception as error:
        to.send(f"{type(error).__name__}: {error}")


def _least(settings: dict[str, Any]) -> dict[str, Any]:
    import ssdtune

    return {"least": ssdtune.plan(**settings).memory.least_bytes}


def _run(settings: dict[str, Any]) -> dict[str, Any]:
    import ssdtune

    result = ssdtune.finetune(**settings)
    return {
        "planned": result.planned_memory_bytes,
        "measured": result.peak_memory_bytes,
        "steps_s": result.step_seconds,
    }
