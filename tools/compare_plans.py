"""Set the plan that ssdtune chooses for this machine beside fixed ones: real steps of both, in turns.

    python tools/compare_plans.py --work-dir /mnt/nvme                                      # 0.13B, 1x256: some minutes
    python tools/compare_plans.py --work-dir /mnt/nvme --batches 1 8 --memories 1.5GiB 4GiB --modes overlap deferred

What the planner finds is the best of its space by simulation; whether that is so by the clock is measured here. The chosen
plan's run knows a profile of the machine, made now, and rehearses. The fixed plans are what one would set by hand, with
the same `host_memory` and nothing measured (FIXED). Two runs are alive at a time, and make steps in turns, so that a machine that
changes its pace from minute to minute changes it for both.

Computes on the CPU. Models are made in WORK_DIR/ssdtune-bench, which is removed at the end unless `--keep`.

Exit code: 0 everything was measured, 1 something failed. Nothing is judged by time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from bench.cells import BENCH, MODES, Bench
from bench.models import SIZES
from bench.process import Failed, environment

FIXED: dict[str, dict[str, Any]] = {
    "as without a profile": {},
    "nothing in memory": {"host_cache": 0},
    "all blocks run again": {"recompute": "always"},
    "products kept": {"recompute": "cheap"},
    "all kept": {"recompute": "never"},
    "activations on SSD": {"activations": "ssd"},
}
WARM_UP = 2
"""Steps that don't count: the first takes over the weights, the first update finds no moments."""
TAIL = 4000


class Run:
    """A run in a process of its own that makes a step when it is asked.

    Args:
        cache: Where it looks for a profile of the machine.

    Raises:
        Failed: It ended before it was ready.
    """

    def __init__(self, settings: dict[str, Any], folder: Path, name: str, cache: Path) -> None:
        self._output, self._log = folder / name, folder / f"{name}.log"
        settings = settings | {"output_dir": str(self._output)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(BENCH / "stepping.py"), json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=environment(folder) | {"XDG_CACHE_HOME": str(cache)},
            )  # fmt: skip
        try:
            self._take()
            for _ in range(WARM_UP - 1):
                self.step()
        except Failed:
            self.close()
            raise
        self.memory: dict[str, Any] = json.loads((self._output / "plan.json").read_text())["memory"]

    def step(self) -> float:
        """Make a step and return its seconds."""
        assert self._process.stdin
        print(file=self._process.stdin, flush=True)
        return self._take()

    def _take(self) -> float:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip()[-TAIL:]
            last = said.splitlines()[-1] if said else "it ended without a word"
            raise Failed(last.partition(" (")[0])
        return float(line)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self._output, ignore_errors=True)


@dataclass
class Compared:
    """Steps of the chosen plan and of a fixed one, in pairs; `failed` says why there are none."""

    case: str
    fixed: str
    chosen_s: list[float] = field(default_factory=list)
    fixed_s: list[float] = field(default_factory=list)
    plan: str = ""
    failed: str = ""

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.chosen_s, self.fixed_s, strict=True)]


def plan_text(memory: dict[str, Any]) -> str:
    """Return what a plan keeps in memory, in a few words."""
    partly, kept, swapped = (set(memory[name]) for name in ("partly", "kept", "swapped"))
    counts = {
        "parts in memory": len(memory["resident"]),
        "stages updated later": len(memory["deferred"]),
        "speculatively": len(memory["speculative"]),
        "blocks keep all": len(kept - partly),
        "keep products": len(kept & partly),
        "on SSD": len(swapped),
    }
    found = [f"{count} {what}" for what, count in counts.items() if count]
    inputs = memory["input_slots"] and not memory["inputs_stay"]
    return ", ".join([*found, f"block inputs {'on SSD' if inputs else 'in memory'}"])


def compare(
    case: str, settings: dict[str, Any], folder: Path, rounds: int, fixed: list[str]
) -> list[Compared]:
    """Run the chosen plan beside each fixed one."""
    found = []
    chosen = Run(settings, folder, "chosen", folder / "cache")
    try:
        for name in fixed:
            result = Compared(case, name, plan=plan_text(chosen.memory))
            found.append(result)
            print(f"{case}: {name}", file=sys.stderr, flush=True)
            try:
                other = Run(settings | FIXED[name], folder, "fixed", folder / "nothing")
            except Failed as error:
                result.failed = str(error)
                continue
            try:
                for number in range(rounds):
                    pair = [(chosen, result.chosen_s), (other, result.fixed_s)]
                    for run, seconds in pair if number % 2 == 0 else reversed(pair):
                        seconds.append(run.step())
            finally:
                other.close()
    finally:
        chosen.close()
    return found


def render(found: list[Compared]) -> str:
    """Return the table, and the chosen plans below it."""
    lines = [
        "| case | fixed plan | chosen s | fixed s | chosen ÷ fixed | lowest to highest pair |",
        "|---|---|--:|--:|--:|---|",
    ]
    for one in found:
        if one.failed:
            lines.append(f"| {one.case} | {one.fixed} | | | – | {one.failed} |")
            continue
        lines.append(
            f"| {one.case} | {one.fixed} | {statistics.median(one.chosen_s):.2f} | "
            f"{statistics.median(one.fixed_s):.2f} | {statistics.median(one.ratios):.2f} | "
            f"{min(one.ratios):.2f} to {max(one.ratios):.2f} |"
        )
    plans = {one.case: one.plan for one in found}
    return "\n".join([*lines, "", *(f"Chosen for {case}: {plan}." for case, plan in plans.items())])


def main() -> int:
    """Measure the cases that the command line names."""
    args = _parse()
    folder = args.work_dir.absolute() / "ssdtune-bench"
    folder.mkdir(parents=True, exist_ok=True)
    steps = WARM_UP + args.rounds * len(args.fixed) + 1
    bench = Bench(folder, steps, True, args.dtype, 0)
    found: list[Compared] = []
    failed = False
    profiles: dict[str, Path] = {}
    try:
        for model, method, batch, mode, memory in product(
            args.models, args.methods, args.batches, args.modes, args.memories
        ):
            case = f"{model} {method} {batch}x256 {mode} {memory}"
            profiles[model] = profiles.get(model) or bench.profile(model)
            kept = folder / "cache/ssdtune/profile.json"
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(profiles[model], kept)
            settings = {
                "model_name_or_path": str(bench.model(model)), "method": method,
                "train_file": str(bench.rows(model, batch)), "max_length": 256, "max_steps": steps,
                "per_device_train_batch_size": batch, "max_grad_norm": float(MODES[mode][0]),
                "clipping": "auto", "dtype": bench.dtype, "device": "cpu", "save_steps": 0, "verify": False,
                "host_memory": memory,
            }  # fmt: skip
            try:
                found += compare(case, settings, folder, args.rounds, args.fixed)
            except Failed as error:
                failed = True
                print(f"{case}: {error}", file=sys.stderr)
    finally:
        if not args.keep:
            shutil.rmtree(folder)
    print(render(found))
    return int(failed)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work-dir", type=Path, default=Path(), help="on the drive to measure")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["0.13B"])
    parser.add_argument("--methods", nargs="+", choices=("full", "lora"), default=["full"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="rows of 256 tokens")
    parser.add_argument(
        "--modes", nargs="+", choices=("overlap", "deferred"), default=["overlap"],
        help="without and with clipping; with it, when updates are made is the planner's choice",
    )  # fmt: skip
    parser.add_argument(
        "--memories", nargs="+", default=["1.5GiB"], help="host_memory of all runs of a case"
    )
    parser.add_argument("--fixed", nargs="+", choices=FIXED, default=list(FIXED))
    parser.add_argument("--rounds", type=int, default=3, help="pairs of steps for each fixed plan")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="")
    parser.add_argument("--keep", action="store_true", help="leave models and profiles")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
