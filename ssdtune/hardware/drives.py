"""How fast the drive under a directory reads and writes: by settings, in bursts, and for as long as it holds.

First all settings are tried for a moment each with the best backend, and a few with the others; then the best ones
again, in turns, because a moment can be unlucky; then the chosen settings for longer, reading, writing and both in
turns. `ssdtune.hardware.stream` moves the bytes, `ssdtune.hardware.place` knows what needs no measuring.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdtune.errors import BackendUnavailableError, StorageError
from ssdtune.hardware.effort import Effort
from ssdtune.hardware.figures import DirectoryProfile, IoPoint, TogetherProfile
from ssdtune.hardware.memory import available_host_memory
from ssdtune.hardware.place import drives_of, has_reflink, warnings_for
from ssdtune.hardware.stream import CHUNKS_IN_FILE, Bench, Clock, Moved
from ssdtune.hardware.ways import measure_ways
from ssdtune.io.mounts import IN_MEMORY, existing_parent, mount_of
from ssdtune.units import MIB, format_disk

if TYPE_CHECKING:
    from ssdtune.device.base import Device

KINDS = ("read", "write", "mixed")
FEW_SETTINGS = ((1 * MIB, 16), (4 * MIB, 4))
"""What the backends that are not the best are tried with: request size and queue depth."""
LARGEST_IN_FLIGHT_BYTES = 64 * MIB
"""Settings with more under way are not tried: that memory is better used otherwise."""
AS_GOOD = 0.97
"""Smaller requests and queues are taken if they reach this share of the best; they need less memory."""
CLEARLY_FASTER = 1.3
"""A burst so much faster than what holds comes from a cache."""
LARGEST_IN_MEMORY_BYTES = 256 * MIB

_SHARES = {
    "fill": 0.17,
    "grid": 0.36,
    "others": 0.06,
    "again": 0.08,
    "ways": 0.06,
    "sustained": 0.25,
    "hot": 0.02,
}
_ROUNDS = 3

Say = Callable[[str], None]


def silent(text: str) -> None:
    """Say nothing."""


@contextlib.contextmanager
def open_bench(
    directory: Path, effort: Effort, *, direct: bool, clock: Clock
) -> Iterator[tuple[DirectoryProfile, Bench | None]]:
    """Look at a directory and open a file there; one that does not exist yet stands for its nearest parent.

    Yields:
        What is known without measuring, and the file; None if there is too little space, which `problem` tells.

    Raises:
        ConfigError: No file can be made there.
    """
    place = existing_parent(directory)
    mount = mount_of(place)
    figures = os.statvfs(place)
    free_bytes = figures.f_bavail * figures.f_frsize
    drives = drives_of(place)
    known = DirectoryProfile(
        path=str(directory),
        file_system=mount.kind,
        device=mount.source,
        free_bytes=free_bytes,
        total_bytes=figures.f_blocks * figures.f_frsize,
        drives=drives,
        warnings=warnings_for(place, mount.kind, drives),
    )
    smallest = CHUNKS_IN_FILE * effort.chunk_bytes
    if free_bytes * effort.free_share < smallest:
        needed = format_disk(smallest / effort.free_share)
        problem = (
            f"only {format_disk(free_bytes)} are free; measuring needs {needed}. Free space there."
        )
        yield replace(known, problem=problem), None
        return
    memory_bytes = min(128 * MIB, available_host_memory().bytes // 8)
    with Bench(
        place,
        direct=direct,
        memory_bytes=memory_bytes,
        chunk_bytes=effort.chunk_bytes,
        clock=clock,
    ) as bench:
        yield replace(known, reflink=has_reflink(place)), bench


def measure_bench(
    known: DirectoryProfile,
    bench: Bench,
    effort: Effort,
    *,
    seconds: float,
    backends: Sequence[str],
    card: Device | None = None,
    straight: Sequence[str] = (),
    say: Say = silent,
) -> DirectoryProfile:
    """Measure the drive under an opened file.

    Args:
        known: What is known of the directory already.
        seconds: Time for all of it.
        backends: Those that work, the best first.
        card: The card that bytes may go on to, or come from; `straight` backends reach its memory.
        say: Told what is being done.

    Returns:
        `known` with all figures; with `problem` if the drive failed or a quota is reached.
    """
    limit = min(effort.largest_file_bytes, int(known.free_bytes * effort.free_share))
    if known.file_system in IN_MEMORY:
        limit = min(limit, LARGEST_IN_MEMORY_BYTES)
    try:
        say(f"{known.path}: filling a file")
        filled = bench.fill(limit, seconds * _SHARES["fill"], backend=backends[0])
        points = _try_settings(
            bench, effort, seconds, backends, lambda text: say(f"{known.path}: {text}")
        )
        best = _best_again(bench, points, seconds * _SHARES["again"])
        say(f"{known.path}: rates of all backends in turns")
        ways = measure_ways(
            bench, best, [*backends, *straight], seconds=seconds * _SHARES["ways"], device=card
        )
        say(f"{known.path}: rates that hold")
        found = _sustained(bench, best, seconds, filled)
    except StorageError as error:  # a quota, or a drive that is failing: said, not hidden
        return replace(
            known, direct=bench.direct, problem=str(error), written_bytes=bench.written_bytes
        )
    return replace(
        known,
        direct=bench.direct,
        points=tuple(points),
        ways=ways,
        file_bytes=bench.size,
        written_bytes=bench.written_bytes,
        backend=best.backend,
        request_bytes=best.request_bytes,
        queue_depth=best.queue_depth,
        **found,
    )


def measure_together(
    benches: Sequence[tuple[DirectoryProfile, Bench]], *, seconds: float
) -> TogetherProfile:
    """Measure several file systems at once, each with its best settings.

    Raises:
        StorageError: A drive failed.
    """
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(bench.stream(p.backend, p.request_bytes, p.queue_depth))
            for p, bench in benches
        ]
        rates = {}
        for kind in KINDS:
            moved = _at_once([partial(stream.run, kind, seconds / 3) for stream in streams])
            rates[f"{kind}_bytes_per_s"] = sum(run.rate for run in moved)
    return TogetherProfile(num_file_systems=len(benches), **rates)


def _at_once(runs: Sequence[Callable[[], Moved]]) -> list[Moved]:
    results: dict[int, Moved | BaseException] = {}

    def work(number: int) -> None:
        try:
            results[number] = runs[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moved = []
    for number in range(len(runs)):
        result = results[number]
        if isinstance(result, BaseException):
            raise result
        moved.append(result)
    return moved


def _try_settings(
    bench: Bench, effort: Effort, seconds: float, backends: Sequence[str], say: Say
) -> list[IoPoint]:
    """Try settings for a moment each; those for which no time is left are missing, but one of each backend."""
    best, *others = backends
    grid = [
        (best, size, depth)
        for size in effort.request_bytes
        for depth in effort.queue_depths
        if size * depth <= LARGEST_IN_FLIGHT_BYTES
    ]
    few = [(name, *setting) for setting in FEW_SETTINGS for name in others]
    points: list[IoPoint] = []
    for settings, share in ((grid, _SHARES["grid"]), (few, _SHARES["others"])):
        end = bench.clock() + seconds * share
        for number, (backend, request_bytes, depth) in enumerate(settings):
            left = end - bench.clock()
            if left <= 0 and any(point.backend == backend for point in points):
                continue
            say(f"{backend}, requests of {request_bytes >> 10} KiB, {depth} in flight")
            each = max(left, 0.0) / (len(settings) - number) / len(KINDS)
            try:
                points.append(measure_point(bench, backend, request_bytes, depth, seconds=each))
            except BackendUnavailableError:  # its kernel resources are in use at the moment
                if len(backends) == 1:
                    raise
    return points


def measure_point(
    bench: Bench, backend: str, request_bytes: int, queue_depth: int, *, seconds: float
) -> IoPoint:
    """Measure one backend with one pair of settings, `seconds` for each of reading, writing and both."""
    with bench.stream(backend, request_bytes, queue_depth) as stream:
        rates = {f"{kind}_bytes_per_s": stream.run(kind, seconds).rate for kind in KINDS}
        name = stream.backend.name
    return IoPoint(backend=name, request_bytes=request_bytes, queue_depth=queue_depth, **rates)


def score(point: IoPoint) -> float:
    """Return one figure for a setting: bytes per second where a third each is read, written, and both."""
    rates = (point.read_bytes_per_s, point.write_bytes_per_s, point.mixed_bytes_per_s)
    return statistics.harmonic_mean(rates) if min(rates) > 0 else 0.0


def _best_again(bench: Bench, points: list[IoPoint], seconds: float) -> IoPoint:
    """Measure the best settings again, in turns, and return the smallest of those that are as good."""
    finalists = sorted(points, key=score, reverse=True)[:4]
    scores: dict[IoPoint, list[float]] = {point: [score(point)] for point in finalists}
    each = seconds / (len(finalists) * 2 * len(KINDS))
    for _ in range(2):
        for point in finalists:
            again = measure_point(
                bench, point.backend, point.request_bytes, point.queue_depth, seconds=each
            )
            scores[point].append(score(again))
    medians = {point: statistics.median(found) for point, found in scores.items()}
    enough = AS_GOOD * max(medians.values())
    return min(
        (point for point in finalists if medians[point] >= enough),
        key=lambda point: (point.request_bytes * point.queue_depth, point.request_bytes),
    )


def _sustained(bench: Bench, best: IoPoint, seconds: float, filled: Moved) -> dict[str, Any]:
    each = seconds * _SHARES["sustained"] / (_ROUNDS * len(KINDS))
    runs: dict[str, list[Moved]] = {kind: [] for kind in KINDS}
    with bench.stream(best.backend, best.request_bytes, best.queue_depth) as stream:
        for _ in range(_ROUNDS):
            for kind in KINDS:
                runs[kind].append(stream.run(kind, each, sync=True))
        small = max(bench.size // 64, bench.smallest_bytes)
        stream.run("read", 0, within=small, at_least=small)
        hot = stream.run("read", seconds * _SHARES["hot"], within=small)
    rates = {kind: statistics.median(run.rate for run in found) for kind, found in runs.items()}
    bursts = {
        "read": hot.rate,
        "write": max(_burst(run) for run in (filled, *runs["write"])),
    }
    return {
        **{f"{kind}_bytes_per_s": rate for kind, rate in rates.items()},
        **{f"{kind}_burst_bytes_per_s": burst for kind, burst in bursts.items()},
        "caches": tuple(k for k, burst in bursts.items() if burst > CLEARLY_FASTER * rates[k]),
    }


def _burst(run: Moved) -> float:
    """Return the rate of a run's first quarter: a cache is empty at the start, if ever."""
    return run.rate_between(0.0, 0.25) if len(run.marks) >= 16 else run.rate
