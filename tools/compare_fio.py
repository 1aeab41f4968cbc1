"""Compare the rates that `ssdtune profile` measures with those of fio, in turns, on one file.

    python tools/compare_fio.py DIRECTORY [--settings 1MiB:16 4MiB:4] [--backend io_uring] [--rounds 9] [--seconds 1]

Both move the same nameless file with the same request size and queue depth, one after the other in changing order,
so that whatever else the machine does hits both alike. The medians are compared. Exit code 3: a read or write rate is
below 0.95 of fio's. Needs fio (Debian: apt-get install fio).
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ssdtune.errors import SsdtuneError
from ssdtune.hardware.drives import KINDS, open_bench
from ssdtune.hardware.effort import FULL
from ssdtune.hardware.stream import Bench
from ssdtune.units import format_memory, format_rate, parse_size

ENOUGH = 0.95
PAUSE_S = 0.3
"""Before each run of ours: while fio starts, a drive that saves up credit for bursts rests too."""
FIO_ENGINES = {"io_uring": "io_uring", "libaio": "libaio"}
FIO_KINDS = {"read": "read", "write": "write", "mixed": "rw"}


def fio_rate(
    bench: Bench, engine: str, kind: str, setting: tuple[int, int], seconds: float
) -> float:
    """Return what fio moves on the bench's file, in bytes per second."""
    request_bytes, depth = setting
    command = [
        "fio", "--name=compare", f"--filename=/proc/{os.getpid()}/fd/{bench.descriptor}", f"--size={bench.size}",
        f"--rw={FIO_KINDS[kind]}", f"--bs={request_bytes}", f"--iodepth={depth}", f"--ioengine={engine}", "--direct=1",
        "--time_based", f"--runtime={round(seconds * 1000)}ms", "--allow_file_create=0", "--fallocate=none",
        "--output-format=json",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    try:
        job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]
    except (ValueError, KeyError, IndexError):
        raise SystemExit(
            f"error: fio failed: {result.stderr.strip() or result.stdout.strip()}"
        ) from None
    if result.returncode or job["error"]:
        raise SystemExit(f"error: fio failed: {result.stderr.strip() or job['error']}")
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    return moved / (max(job["read"]["runtime"], job["write"]["runtime"]) / 1000)


def own_rate(
    bench: Bench, backend: str, kind: str, setting: tuple[int, int], seconds: float
) -> float:
    """Return what the profile measures: writes count until they are durable."""
    time.sleep(PAUSE_S)
    with bench.stream(backend, *setting) as stream:
        return stream.run(kind, seconds, sync=True).rate


def in_turns(
    bench: Bench, backend: str, kind: str, setting: tuple[int, int], rounds: int, seconds: float
) -> tuple[list[float], list[float]]:
    """Return the rates of both in all rounds; who begins changes."""
    own, fio = [], []
    for number in range(rounds):
        if number % 2:
            fio.append(fio_rate(bench, FIO_ENGINES[backend], kind, setting, seconds))
        own.append(own_rate(bench, backend, kind, setting, seconds))
        if not number % 2:
            fio.append(fio_rate(bench, FIO_ENGINES[backend], kind, setting, seconds))
    return own, fio


def parse_setting(text: str) -> tuple[int, int]:
    size, _, depth = text.partition(":")
    try:
        return parse_size(size), int(depth)
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is not like 1MiB:16') from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--settings", nargs="+", type=parse_setting, metavar="SIZE:DEPTH",
        default=[(128 << 10, 32), (1 << 20, 16), (4 << 20, 4)],
    )  # fmt: skip
    parser.add_argument("--backend", default="io_uring", choices=FIO_ENGINES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each run")
    parser.add_argument("--size", type=parse_size, default=2 << 30, help="of the file")
    args = parser.parse_args()
    if not shutil.which("fio"):
        parser.error("fio is not installed. Install it (Debian: apt-get install fio).")
    bad = []
    with open_bench(args.directory, FULL, direct=True, clock=time.perf_counter) as (known, bench):
        if bench is None:
            raise SystemExit(f"error: {known.path}: {known.problem}")
        bench.fill(min(args.size, int(known.free_bytes * FULL.free_share)), float("inf"))
        print(
            f"{known.path}: {known.file_system} on {known.device}, file of {format_memory(bench.size)}, "
            f"{args.backend}, medians of {args.rounds} rounds of {args.seconds:g} s in turns"
        )
        print("requests   in flight  kind    ssdtune     fio         ratio   ratios of the rounds")
        for setting in args.settings:
            for kind in KINDS:
                own, fio = in_turns(bench, args.backend, kind, setting, args.rounds, args.seconds)
                ratio = statistics.median(own) / statistics.median(fio)
                quartiles = (
                    statistics.quantiles([a / b for a, b in zip(own, fio)], n=4)
                    if args.rounds > 1
                    else []
                )
                if ratio < ENOUGH and kind != "mixed":
                    bad.append(f"{format_memory(setting[0])} x {setting[1]} {kind}")
                print(
                    f"{format_memory(setting[0]):10} {setting[1]:9}  {kind:6}  "
                    f"{format_rate(statistics.median(own)):10}  {format_rate(statistics.median(fio)):10}  {ratio:5.2f}   "
                    + " ".join(f"{q:.2f}" for q in quartiles),
                    flush=True,
                )
    if bad:
        print(f"below {ENOUGH} of fio: {', '.join(bad)}")
        return 3
    print(f"All read and write rates are at least {ENOUGH} of fio's.")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except SsdtuneError as error:
        raise SystemExit(f"error: {error}") from error
