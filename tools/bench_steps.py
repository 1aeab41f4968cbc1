"""Measure steps of real runs beside their forecast, their bounds, and the same training in memory.

    python tools/bench_steps.py --work-dir /mnt/nvme                                        # everything: hours
    python tools/bench_steps.py --models 0.13B --methods full --batches 1 --memories streamed --modes overlap
    python tools/bench_steps.py --quick --models tiny --batches 1                           # does it work?

A cell is a model, a method, a batch, an update mode and a memory. For each, the rates of the machine are measured, then
`ssdtune plan` forecasts and `ssdtune finetune` runs a few steps, watched from outside. `docs/benchmarks.md` explains the
columns; `tools/bench/` has the parts. Computes on the CPU. Models are random llamas, made in WORK_DIR/ssdtune-bench, which is
removed at the end unless `--keep`. Needs fio for the comparison of rates (Debian: apt-get install fio).

Exit code: 0 all cells were measured, 1 some failed, 3 some don't fit. Nothing is judged by time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from itertools import product
from pathlib import Path
from typing import Any

from bench.cells import MODES, SEQUENCE, Bench, Cell, measure_cell
from bench.models import SIZES
from bench.process import ROOT, Failed
from bench.table import describe, render

sys.path.insert(0, str(ROOT))

from ssdtune.units import format_disk

MARK = "ssdtune-bench.txt"
PEAK_BYTES = 36
"""Per parameter of the largest model while it runs: states twice 12, gradients 4, export 4, and slack."""
MODEL_BYTES = 2
FILE_BYTES = 4 << 30
"""For the files on which the drives are measured."""


def main() -> int:
    """Run the cells that the command line names."""
    args = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = _folder(args)
    bench = Bench(folder, args.steps, args.quick, args.dtype, args.in_memory_steps, args.extra)
    cells = [
        Cell(*chosen)
        for chosen in product(args.models, args.methods, args.batches, args.modes, args.memories)
    ]
    records: list[dict[str, Any]] = []
    try:
        for number, cell in enumerate(cells, start=1):
            print(f"{number} of {len(cells)}: {cell.name}", file=sys.stderr, flush=True)
            records.append(measure_cell(cell, bench))
            if args.save:  # hours of work survive whatever happens to the next cell
                args.save.write_text(_document(records, bench), encoding="utf-8")
    except KeyboardInterrupt:
        print("interrupted; the cells so far:", file=sys.stderr)
    finally:
        if not args.keep:
            shutil.rmtree(folder)
    if args.json:
        print(_document(records, bench))
    else:
        print(describe(bench.machine, dtype=bench.dtype, steps=bench.steps))
        print(render(records))
    if len(records) < len(cells):
        return 130
    return 1 if any("failed" in r for r in records) else 3 if _skipped(records) else 0


def _skipped(records: list[dict[str, Any]]) -> bool:
    return any("skipped" in record for record in records)


def _document(records: list[dict[str, Any]], bench: Bench) -> str:
    settings = {
        "machine": bench.machine,
        "dtype": bench.dtype,
        "steps": bench.steps,
        "sequence": SEQUENCE,
    }
    return json.dumps({"schema_version": 1, **settings, "cells": records}, indent=2)


def _folder(args: argparse.Namespace) -> Path:
    """Return the work folder, after a look at the free space."""
    args.work_dir.mkdir(parents=True, exist_ok=True)
    sizes = [SIZES[name].parameters for name in args.models]
    needed = PEAK_BYTES * max(sizes) + MODEL_BYTES * sum(sizes)
    needed += FILE_BYTES if not args.quick else FILE_BYTES // 4
    free = shutil.disk_usage(args.work_dir).free
    if needed > free:
        raise SystemExit(
            f"error: {args.work_dir} has {format_disk(free)} free; these models need {format_disk(needed)}. "
            "Choose smaller --models or another --work-dir."
        )
    folder: Path = args.work_dir.absolute() / "ssdtune-bench"
    if folder.exists() and not (folder / MARK).exists():
        raise SystemExit(
            f"error: {folder} exists and was not made by this script. Move it or choose another --work-dir."
        )
    folder.mkdir(exist_ok=True)
    (folder / MARK).write_text("Made by tools/bench_steps.py; may be deleted.\n")
    return folder


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work-dir", type=Path, default=Path(), help="on the drive to measure")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["0.13B", "0.37B", "1.1B"])
    parser.add_argument("--methods", nargs="+", choices=("full", "lora"), default=["full", "lora"])
    parser.add_argument(
        "--batches",
        nargs="+",
        type=int,
        default=[1, 8],
        help=f"rows of {SEQUENCE} tokens in a step",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["overlap", "deferred", "speculative"],
        help="redo: speculative updates that are all wrong",
    )  # fmt: skip
    parser.add_argument(
        "--memories", nargs="+", choices=("streamed", "roomy"), default=["streamed", "roomy"],
        help="nothing cached and a small budget, or all the memory there is",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=6, help="at least 4; the first two and the last don't count"
    )
    parser.add_argument(
        "--in-memory-steps", type=int, default=3, help="the first doesn't count; 0 leaves this out"
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="", help="default: bf16 where it is fast"
    )
    parser.add_argument("--quick", action="store_true", help="rates that are hardly measured")
    parser.add_argument(
        "--keep", action="store_true", help="leave models and profiles for next time"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON after each cell")
    parser.add_argument("extra", nargs="*", help="further flags of ssdtune finetune, after --")
    args = parser.parse_args()
    if args.steps < 4:
        parser.error("--steps must be at least 4: the first two and the last don't count")
    if args.in_memory_steps == 1:
        parser.error("--in-memory-steps must be 0 or at least 2: the first doesn't count")
    if min(args.batches) < 1:
        parser.error("--batches must be at least 1")
    return args


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except Failed as error:
        raise SystemExit(f"error: {error}") from error
