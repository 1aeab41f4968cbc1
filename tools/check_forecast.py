"""Set the forecast of a step beside real steps: the rates it is made of are measured between these steps, in turns.

    python tools/check_forecast.py --work-dir /mnt/nvme                       # everything: an hour or two
    python tools/check_forecast.py --work-dir /mnt/nvme --models 0.13B --methods full --batches 8

On a machine that is shared with others, the same operation takes twice as long from one minute to the next. So the rates
that a forecast had before the run say as much about the neighbours as about the forecast. Here each step of a real run is
followed by a rehearsal, by reads and writes on the drives and by AdamW; what the simulator makes of their means is set beside the
steps ("error"). Beside it stands the forecast that a user was given before the run ("error before").

Computes on the CPU. Models are made in WORK_DIR/ssdtune-bench, which is removed at the end unless `--keep`.

Exit code: 0 all cases were measured, 1 some failed. Nothing is judged by time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

from bench.cells import BENCH, Bench, Cell
from bench.models import SIZES
from bench.process import Failed, run_json

MEMORIES = ("streamed", "roomy")
WITHIN = 0.10


def main() -> int:
    """Measure the cases that the command line names."""
    args = _parse()
    folder = args.work_dir.absolute() / "ssdtune-bench"
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder, args.steps, True, args.dtype, 0)
    records: list[dict[str, Any]] = []
    for model in args.models:  # kept ones are hours old
        (folder / f"profile-{model}.json").unlink(missing_ok=True)
    try:
        for chosen in product(args.models, args.methods, args.batches, args.modes, args.memories):
            cell = Cell(*chosen)
            print(cell.name, file=sys.stderr, flush=True)
            records.append({"name": cell.name} | _measure(cell, bench, args.in_memory))
            if args.save:
                args.save.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    finally:
        if not args.keep:
            shutil.rmtree(folder)
    print(json.dumps(records, indent=2) if args.json else render(records))
    return 1 if any("failed" in record for record in records) else 0


def _measure(cell: Cell, bench: Bench, in_memory: bool) -> dict[str, Any]:
    output = bench.folder / "out"
    try:
        profile = bench.profile(cell.model)
        kept = bench.folder / "cache/ssdtune/profile.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(profile, kept)
        settings = {
            "model_name_or_path": str(bench.model(cell.model)), "method": cell.method,
            "train_file": str(bench.rows(cell.model, cell.batch)), "output_dir": str(output),
            "max_length": 256, "max_steps": bench.steps, "per_device_train_batch_size": cell.batch,
            "max_grad_norm": 0.0 if cell.mode == "overlap" else 1.0, "dtype": bench.dtype, "device": "cpu",
            "save_steps": 0, "verify": False,
        }  # fmt: skip
        if cell.memory == "streamed":
            settings["host_cache"] = 0
        command = [sys.executable, str(BENCH / "side_by_side.py"), str(kept), json.dumps(settings)]
        if in_memory:
            command += [
                sys.executable, str(BENCH / "in_memory.py"), str(settings["model_name_or_path"]),
                str(settings["train_file"]), "--method", cell.method, "--batch", str(cell.batch),
                "--steps", str(bench.steps), "--dtype", bench.dtype, "--max-grad-norm", str(settings["max_grad_norm"]),
            ]  # fmt: skip
        return run_json(command, bench.folder)
    except Failed as error:
        return {"failed": str(error)}
    finally:
        shutil.rmtree(output, ignore_errors=True)


def render(records: list[dict[str, Any]]) -> str:
    """Return the table, and what failed."""
    lines = [
        "| case | step s | slowest ÷ fastest | forecast s | error | error before | step ÷ in memory "
        "| lanes: forecast / measured s |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for record in records:
        if "failed" in record:
            lines.append(f"| {record['name']} | failed: {record['failed']} | | | | | | |")
            continue
        lanes = ", ".join(
            f"{lane} {record['forecast_lane_s'].get(lane, 0):.2f} / {seconds:.2f}"
            for lane, seconds in record["lane_s"].items()
            if max(seconds, record["forecast_lane_s"].get(lane, 0)) > 0.02 * record["step_s"]
        )
        spread = max(record["all_step_s"]) / min(record["all_step_s"])
        lines.append(
            f"| {record['name']} | {record['step_s']:.2f} | {spread:.2f} | {record['forecast_s']:.2f} | "
            f"{record['error']:+.1%} | {record['error_before']:+.1%} | {_to_in_memory(record)} | {lanes} |"
        )
    errors = [abs(record["error"]) for record in records if "error" in record]
    if errors:
        inside = sum(error <= WITHIN for error in errors)
        lines.append(
            f"\n{inside} of {len(errors)} within {WITHIN:.0%}; mean {statistics.fmean(errors):.1%}, "
            f"worst {max(errors):.1%}"
        )
    return "\n".join(lines)


def _to_in_memory(record: dict[str, Any]) -> str:
    seconds = record["in_memory_s"]
    return f"{record['step_s'] / statistics.median(seconds):.2f}" if seconds else "–"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work-dir", type=Path, default=Path(), help="on the drive to measure")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["0.13B", "0.37B", "1.1B"])
    parser.add_argument("--methods", nargs="+", choices=("full", "lora"), default=["full", "lora"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="rows of 256 tokens")
    parser.add_argument(
        "--modes", nargs="+", choices=("overlap", "deferred"), default=["overlap"],
        help="without and with clipping",
    )  # fmt: skip
    parser.add_argument("--memories", nargs="+", choices=MEMORIES, default=list(MEMORIES))
    parser.add_argument(
        "--steps", type=int, default=10, help="the first two and the last don't count"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="")
    parser.add_argument(
        "--in-memory",
        action="store_true",
        help="also a step of the same training in memory, in turns",
    )
    parser.add_argument("--keep", action="store_true", help="leave models for next time")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON after each case")
    args = parser.parse_args()
    if args.steps < 4:
        parser.error("--steps must be at least 4: the first two and the last don't count")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
