"""Measure this machine's rates for one cell, now: drives (ours and fio in turns), and AdamW.

    python tools/bench/rates.py PROFILE [--fresh FILE]

Starts from a profile of `ssdtune profile`, uses its best settings, and can write it anew with the fresh figures. Prints one
JSON document: the fields of `bench.bounds.Rates`, the rates of both programs, and their ratio. A rate of the drives is
the better of both programs' medians, for a bound must not profit from a slow measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare_fio import FIO_ENGINES, PAUSE_S, fio_rate

from ssdtune.hardware.compute import AdamWork, best_time, num_cores
from ssdtune.hardware.drives import KINDS, open_bench
from ssdtune.hardware.effort import FULL
from ssdtune.hardware.figures import AdamPoint, DirectoryProfile
from ssdtune.hardware.memory import map_large_blocks, prefer_huge_pages
from ssdtune.hardware.profile import HardwareProfile, read_profile, save
from ssdtune.units import parse_size


def measure_drives(
    known: DirectoryProfile, *, seconds: float, rounds: int, size: int
) -> dict[str, Any]:
    """Return bytes per second by kind of both programs, and the seconds of a core that a byte costs us."""
    setting = (known.request_bytes, known.queue_depth)
    engine = FIO_ENGINES.get(known.backend, "io_uring") if shutil.which("fio") else None
    own: dict[str, list[float]] = {kind: [] for kind in KINDS}
    fio: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu_s, moved_bytes = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    with open_bench(Path(known.path), FULL, direct=True, clock=time.perf_counter) as (now, bench):
        if bench is None:
            raise SystemExit(f"error: {now.path}: {now.problem}")
        bench.fill(min(size, int(now.free_bytes * FULL.free_share)), float("inf"))

        def run_own(kind: str) -> None:
            time.sleep(PAUSE_S if engine else 0)
            with bench.stream(known.backend, *setting) as stream:
                before = time.process_time()
                moved = stream.run(kind, seconds, sync=True)
                cpu_s[kind] += time.process_time() - before
            moved_bytes[kind] += moved.num_bytes
            own[kind].append(moved.rate)

        def run_fio(kind: str) -> None:
            if engine:
                fio[kind].append(fio_rate(bench, engine, kind, setting, seconds))

        for number in range(rounds):
            for kind in KINDS:
                for run in (run_own, run_fio) if number % 2 == 0 else (run_fio, run_own):
                    run(kind)
    ours = {kind: statistics.median(found) for kind, found in own.items()}
    theirs = {kind: statistics.median(found) for kind, found in fio.items() if found}
    return {
        "own_bytes_per_s": ours,
        "fio_bytes_per_s": theirs,
        "own_to_fio": {kind: ours[kind] / rate for kind, rate in theirs.items()},
        **{f"{kind}_bytes_per_s": max(ours[kind], theirs.get(kind, 0.0)) for kind in KINDS},
        "read_cpu_s_per_byte": cpu_s["read"] / moved_bytes["read"],
        "write_cpu_s_per_byte": cpu_s["write"] / moved_bytes["write"],
    }


def measure_adam(seconds: float) -> AdamPoint:
    """Return the fastest form with all cores."""
    from ssdtune.optim.adamw import forms

    work, threads = AdamWork(), num_cores()
    taken = best_time(lambda: work.update(threads), seconds, time.perf_counter)
    return AdamPoint(form=forms()[0], threads=threads, parameters_per_s=work.size / taken)


def renewed(profile: HardwareProfile, drives: dict[str, Any], adam: AdamPoint) -> HardwareProfile:
    """Return the profile with the fresh figures; the drives' rates are our own, which a run can reach.

    Measured now, so that what was rehearsed before is rehearsed again.
    """
    rates = {f"{kind}_bytes_per_s": drives["own_bytes_per_s"][kind] for kind in KINDS}
    together = profile.together and dataclasses.replace(profile.together, **rates)
    directories = tuple(
        dataclasses.replace(directory, **rates) for directory in profile.directories
    )
    return dataclasses.replace(
        profile,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        together=together,
        directories=directories,
        adam=(adam,),
    )


def main() -> int:
    prefer_huge_pages()
    map_large_blocks()  # as runs do
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each run on the drives")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--size", type=parse_size, default=2 << 30, help="of the file on the drives"
    )
    parser.add_argument("--fresh", type=Path, help="write the profile with the new figures here")
    args = parser.parse_args()
    profile = read_profile(args.profile)
    drives = measure_drives(
        profile.directories[0], seconds=args.seconds, rounds=args.rounds, size=args.size
    )
    adam = measure_adam(args.seconds)
    if args.fresh:
        save(renewed(profile, drives, adam), args.fresh)
    memory = max(max(p.copy_bytes_per_s, p.triad_bytes_per_s) for p in profile.memory)
    rates = {
        **drives,
        "memory_bytes_per_s": memory,
        "adam_parameters_per_s": adam.parameters_per_s,
        "cores": num_cores(),
    }
    print(json.dumps(rates))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
