"""How much of a step's computing torch.compile saves: steps of a few blocks, plain and compiled in turns, by CPU time.

    python tools/bench_compile.py                          # the processor, 0.13B, bf16 and fp32
    python tools/bench_compile.py --model 0.37B --rows 8

Made of rehearsals (`ssdtune.train.rehearse`), so what is timed is the engine's own code, without drives. CPU time of all threads
is compared, which neighbours on the machine disturb less than the clock on the wall.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.models import SIZES, config
from bench.process import ROOT

sys.path.insert(0, str(ROOT))

from ssdtune.config.load import load_config
from ssdtune.hardware.memory import process_memory
from ssdtune.plan.times import ComputeTimes
from ssdtune.train.prepare import prepare
from ssdtune.train.rehearse import Rehearsal
from ssdtune.units import format_memory, format_time

NAMES = ("forward", "backward", "forward+kept", "backward+kept")


def main() -> None:
    """Compare what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="0.13B")
    parser.add_argument("--rows", type=int, default=4, help="of 256 tokens")
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--methods", nargs="+", choices=("full", "lora"), default=["full"])
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-compile-") as name:
        model = Path(name)
        (model / "config.json").write_text(json.dumps(config(SIZES[args.model])), encoding="utf-8")
        for method in args.methods:
            for dtype in args.dtypes:
                print(f"{args.model} {method} {dtype}, {args.rows} x 256 tokens")
                compare(model, method, dtype, args.rows, args.turns)


def compare(model: Path, method: str, dtype: str, rows: int, turns: int) -> None:
    """Run steps of both kinds in turns and print the medians."""
    rehearsals: dict[bool, Rehearsal] = {}
    for compiled in (False, True):
        settings = {
            "model_name_or_path": str(model), "output_dir": str(model / "out"), "method": method, "dtype": dtype,
            "device": "cpu", "per_device_train_batch_size": rows, "max_length": 256, "packing": True,
            "torch_compile": compiled,
        }  # fmt: skip
        prepared = prepare(load_config(None, settings), with_rows=False)
        rehearsals[compiled] = Rehearsal(
            prepared, flop_per_s=1e15, clock=time.process_time
        ).__enter__()
    before, start = process_memory().rss_bytes, time.perf_counter()
    rehearsals[True].step()
    took, grown = time.perf_counter() - start, process_memory().rss_bytes - before
    print(f"  first compiled step {format_time(took)}, memory grew by {format_memory(grown)}")
    rehearsals[False].step()
    found: dict[bool, list[ComputeTimes]] = {False: [], True: []}
    for _ in range(turns):
        for compiled, rehearsal in rehearsals.items():
            rehearsal.forget()
            rehearsal.step()
            found[compiled].append(rehearsal.times)
    for name in NAMES:
        plain, fast = (median(times.seconds[name] for times in found[which]) for which in found)
        print(f"  {name:15} {plain:.3f} s, compiled {fast:.3f} s: {plain / fast:.2f} times as fast")
    for rehearsal in rehearsals.values():
        rehearsal.__exit__()


if __name__ == "__main__":
    main()
