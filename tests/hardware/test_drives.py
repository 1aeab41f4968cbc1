"""Measuring a drive: real files and real faults; rates by a clock that ticks once per look."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ssdtune.errors import BackendUnavailableError
from ssdtune.hardware import drives
from ssdtune.hardware.drives import measure_bench, measure_together, open_bench, score
from ssdtune.hardware.figures import DirectoryProfile, IoPoint
from ssdtune.hardware.stream import Bench, Moved
from tests.hardware.tiny import TINY

CHUNK_BYTES = 2 << 20
SMALLEST_FILE_BYTES = 4 * CHUNK_BYTES


def ticking() -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: float(next(ticks))


def bench_in(place: Path, clock: Callable[[], float]) -> Bench:
    return Bench(
        place, direct=True, memory_bytes=16 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, clock=clock
    )


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_rates_are_bytes_over_time(tmp_path: Path) -> None:
    with bench_in(tmp_path, ticking()) as bench:
        bench.fill(0, 0, backend="python")
        assert bench.size == SMALLEST_FILE_BYTES
        assert bench.written_bytes == SMALLEST_FILE_BYTES
        with bench.stream("python", 1 << 20, 4) as stream:
            moved = stream.run("read", 0)
    # A queue of 4 MiB is filled by two transfers, and one waits. Looks at the clock: start, after the least that is
    # moved, one for each finished transfer, end.
    assert moved.num_bytes == 3 * CHUNK_BYTES
    assert moved.rate == 3 * CHUNK_BYTES / 5
    assert [seconds for seconds, _ in moved.marks] == [2, 3, 4]
    assert list(tmp_path.iterdir()) == []


def test_more_time_moves_more_and_goes_round(tmp_path: Path) -> None:
    with bench_in(tmp_path, ticking()) as bench:
        bench.fill(0, 0, backend="python")
        with bench.stream("python", 1 << 20, 16) as stream:
            written = stream.run("write", 100, sync=True)
            both = stream.run("mixed", 100)
    assert written.num_bytes > 2 * SMALLEST_FILE_BYTES
    assert both.num_bytes > 2 * SMALLEST_FILE_BYTES
    halves = abs(
        2 * (bench.written_bytes - written.num_bytes - SMALLEST_FILE_BYTES) - both.num_bytes
    )
    assert halves <= CHUNK_BYTES


def test_what_is_written_is_what_is_in_the_file(tmp_path: Path) -> None:
    with bench_in(tmp_path, ticking()) as bench:
        bench.fill(16 * CHUNK_BYTES, 1e9, backend="python")
        buffers = [bytes(buffer.view[:64]) for buffer in bench.buffers(9)]
        found = [os.pread(bench.descriptor, 64, i * CHUNK_BYTES) for i in range(16)]
    assert found == (buffers * 2)[:16]
    assert len(set(found)) == 9  # random, so that nothing can compress or deduplicate it


def test_a_part_of_a_run() -> None:
    moved = Moved(400, 10.0, [(1, 100), (2, 200), (6, 300), (10, 400)])
    assert moved.rate == 40
    assert moved.rate_between(0, 0.25) == 100
    assert moved.rate_between(0.5, 1) == 25
    assert Moved(400, 10.0).rate_between(0, 1) == 40


def measured(place: Path, **options: object) -> DirectoryProfile:
    with open_bench(place, TINY, direct=True, clock=ticking()) as (known, bench):
        assert bench is not None
        return measure_bench(
            known, bench, TINY, seconds=0, **{"backends": ["python"], **options}  # type: ignore[arg-type]
        )  # fmt: skip


def test_a_directory(tmp_path: Path) -> None:
    said: list[str] = []
    before = open_files()
    profile = measured(tmp_path / "later" / "swap", say=said.append, backends=["python", "threads"])
    assert profile.path == str(tmp_path / "later" / "swap")
    assert min(profile.read_bytes_per_s, profile.write_bytes_per_s, profile.mixed_bytes_per_s) > 0
    assert min(profile.read_burst_bytes_per_s, profile.write_burst_bytes_per_s) > 0
    assert profile.problem == ""
    assert profile.file_bytes == TINY.largest_file_bytes < profile.written_bytes
    assert {point.backend for point in profile.points} >= {"python"}
    assert profile.backend in ("python", "threads")
    assert any("filling" in text for text in said) and any("in flight" in text for text in said)
    assert list(tmp_path.iterdir()) == []
    assert open_files() == before


def test_every_backend_is_tried_even_without_time(tmp_path: Path) -> None:
    from ssdtune.io.select import probe_backends

    working = [probe.name for probe in probe_backends() if probe.available]
    with open_bench(tmp_path, TINY, direct=True, clock=ticking()) as (_, bench):
        assert bench is not None
        bench.fill(0, 0, backend="python")
        points = drives._try_settings(bench, TINY, 0, working, drives.silent)
    assert {point.backend for point in points} == set(working)


def test_a_backend_that_does_not_work_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown I/O backend"):
        measured(tmp_path, backends=["floppy"])
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_stops_working_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = drives.measure_point

    def point(bench: Bench, backend: str, *args: int, seconds: float) -> IoPoint:
        if backend == "threads":
            raise BackendUnavailableError("its kernel resources are gone")
        return real(bench, backend, *args, seconds=seconds)

    monkeypatch.setattr(drives, "measure_point", point)
    assert measured(tmp_path, backends=["threads", "python"]).backend == "python"


def test_several_file_systems_at_once(tmp_path: Path) -> None:
    with (
        open_bench(tmp_path, TINY, direct=True, clock=ticking()) as (one, first),
        open_bench(tmp_path, TINY, direct=True, clock=ticking()) as (_, second),
    ):
        assert first is not None and second is not None
        pairs = []
        for bench in (first, second):
            bench.fill(0, 0, backend="python")
            known = replace(one, backend="python", request_bytes=1 << 20, queue_depth=2)
            pairs.append((known, bench))
        together = measure_together(pairs, seconds=0)
    assert together.num_file_systems == 2
    assert min(together.read_bytes_per_s, together.write_bytes_per_s) > 0


def test_the_smallest_of_the_good_settings_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {(1 << 20, 4): 99.0, (1 << 20, 16): 100.0, (128 << 10, 1): 50.0}

    def point(bench: Bench, backend: str, size: int, depth: int, *, seconds: float) -> IoPoint:
        rate = rates[size, depth]
        return IoPoint(
            backend=backend, request_bytes=size, queue_depth=depth,
            read_bytes_per_s=rate, write_bytes_per_s=rate, mixed_bytes_per_s=rate,
        )  # fmt: skip

    monkeypatch.setattr(drives, "measure_point", point)
    with bench_in(tmp_path, ticking()) as bench:
        points = [point(bench, "python", *setting, seconds=0) for setting in rates]
        best = drives._best_again(bench, points, 0)
    assert (best.request_bytes, best.queue_depth) == (1 << 20, 4)
    assert score(replace(best, read_bytes_per_s=0.0)) == 0


def test_a_cache_is_noticed(tmp_path: Path) -> None:
    # A drive whose first 16 transfers of every write take one second each, the others four.
    def run_with(kind: str, seconds: float, **_: object) -> Moved:
        moved = Moved()
        for number in range(64):
            moved.seconds += 4 if kind == "write" and number >= 16 else 1
            moved.num_bytes += 100
            moved.marks.append((moved.seconds, moved.num_bytes))
        return moved

    with bench_in(tmp_path, ticking()) as bench:
        bench.fill(0, 0, backend="python")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "ssdtune.hardware.stream.Stream.run", lambda self, *a, **k: run_with(*a, **k)
            )
            best = IoPoint(backend="python", request_bytes=1 << 20, queue_depth=1)
            found = drives._sustained(bench, best, 1, run_with("read", 1))
    assert found["caches"] == ("write",)
    assert found["write_burst_bytes_per_s"] > 1.5 * found["write_bytes_per_s"]
    assert found["read_burst_bytes_per_s"] == found["read_bytes_per_s"] == 100


def test_nothing_is_left_or_open_after_ctrl_c(tmp_path: Path) -> None:
    looks = itertools.count()

    def clock() -> float:
        if next(looks) == 40:
            raise KeyboardInterrupt
        return 0.0

    before = open_files()
    with pytest.raises(KeyboardInterrupt):
        with open_bench(tmp_path, TINY, direct=True, clock=clock) as (known, bench):
            assert bench is not None
            measure_bench(known, bench, TINY, seconds=0, backends=["python"])
    assert list(tmp_path.iterdir()) == []
    assert open_files() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal_while_measuring(tmp_path: Path, number: int) -> None:
    script = """
import os, sys
from pathlib import Path
from ssdtune.hardware.drives import measure_bench, open_bench
from tests.hardware.tiny import TINY
def say(text):
    if "hold" in text:
        os.kill(os.getpid(), int(sys.argv[2]))
with open_bench(Path(sys.argv[1]), TINY, direct=True, clock=lambda: 0.0) as (known, bench):
    measure_bench(known, bench, TINY, seconds=-1, backends=["python"], say=say)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(int(number))],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert result.returncode == -number
    assert list(tmp_path.iterdir()) == []


def test_a_nearly_full_drive_is_left_alone(tmp_path: Path) -> None:
    effort = replace(TINY, free_share=1e-9)
    with open_bench(tmp_path, effort, direct=True, clock=ticking()) as (known, bench):
        assert bench is None
    assert "measuring needs" in known.problem
    assert (known.read_bytes_per_s, known.file_bytes) == (0, 0)


def test_a_place_without_space() -> None:
    with open_bench(Path("/proc"), TINY, direct=True, clock=ticking()) as (known, bench):
        assert bench is None
    assert known.problem.startswith("only 0 B are free")
    assert known.file_system == "proc"


def test_memory_is_no_drive() -> None:
    place = Path("/dev/shm")
    with open_bench(place, TINY, direct=True, clock=ticking()) as (known, bench):
        if known.file_system != "tmpfs" or bench is None:
            pytest.skip("no tmpfs with room at /dev/shm")
    (warning,) = known.warnings
    assert "memory and no drive" in warning


def test_a_fault_in_the_middle_is_told(tmp_path: Path) -> None:
    script = """
import resource, signal, sys, time
from pathlib import Path
from ssdtune.hardware.drives import measure_bench, open_bench
from tests.hardware.tiny import TINY
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, resource.RLIM_INFINITY))
with open_bench(Path(sys.argv[1]), TINY, direct=True, clock=time.perf_counter) as (known, bench):
    print(measure_bench(known, bench, TINY, seconds=0, backends=["python"]).problem)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert result.stdout.startswith(f"write of {tmp_path}/(file to measure on) failed")
    assert "[EFBIG]" in result.stdout
    assert list(tmp_path.iterdir()) == []
