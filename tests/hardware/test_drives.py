"""Measuring a drive: real files and real faults; rates by a clock that ticks once per look."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssdtune.errors import ConfigError
from ssdtune.hardware import drives
from ssdtune.hardware.drives import CHUNK_BYTES, SMALLEST_FILE_BYTES, measure_directory, mount_of
from ssdtune.io.backend import Backend
from ssdtune.io.select import open_backend


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend = open_backend("python", queue_depth=4, request_bytes=1 << 20)
    yield backend
    backend.close()


def test_rates_are_bytes_over_time(tmp_path: Path, backend: Backend) -> None:
    ticks = itertools.count()
    profile = measure_directory(tmp_path, backend, seconds=0, clock=lambda: float(next(ticks)))
    # Without time each phase moves four chunks and looks at the clock at its begin, once between, at its end.
    assert profile.read_bytes_per_s == profile.write_bytes_per_s == 4 * CHUNK_BYTES / 2
    assert profile.mixed_bytes_per_s == 4 * CHUNK_BYTES / 2
    assert profile.file_bytes == SMALLEST_FILE_BYTES
    assert profile.problem == ""
    assert profile.path == str(tmp_path)
    assert profile.free_bytes > SMALLEST_FILE_BYTES


def test_more_time_moves_more(tmp_path: Path, backend: Backend) -> None:
    ticks = itertools.count()
    profile = measure_directory(tmp_path, backend, seconds=4 * 20, clock=lambda: float(next(ticks)))
    # 4 chunks, then one for each of the ticks 1 to 19; the file is shorter than that and is gone round.
    assert profile.read_bytes_per_s == 23 * CHUNK_BYTES / 21
    assert SMALLEST_FILE_BYTES < profile.file_bytes < 40 * CHUNK_BYTES


def test_the_file_has_no_name_while_it_is_measured(tmp_path: Path, backend: Backend) -> None:
    seen = []

    def clock() -> float:
        seen.append(list(tmp_path.iterdir()))
        return float(len(seen))

    measure_directory(tmp_path, backend, seconds=1, clock=clock)
    assert seen and not any(seen)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_or_open_after_ctrl_c(tmp_path: Path, backend: Backend) -> None:
    looks = itertools.count()

    def clock() -> float:
        if next(looks) == 5:
            raise KeyboardInterrupt
        return 0.0

    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(KeyboardInterrupt):
        measure_directory(tmp_path, backend, seconds=1, clock=clock)
    assert list(tmp_path.iterdir()) == []
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_nearly_full_drive_is_left_alone(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the drive had a billionth of its space.
    monkeypatch.setattr(drives, "FREE_SHARE", 10**10)
    profile = measure_directory(tmp_path, backend, seconds=1)
    assert "measuring needs" in profile.problem
    assert (profile.read_bytes_per_s, profile.file_bytes) == (0, 0)


def test_a_fault_in_the_middle_is_told(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from pathlib import Path
from ssdtune.hardware.drives import measure_directory
from ssdtune.io.select import open_backend
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, resource.RLIM_INFINITY))
with open_backend("python", queue_depth=4, request_bytes=1 << 20) as backend:
    print(measure_directory(Path(sys.argv[1]), backend, seconds=1).problem)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "write of" in result.stdout and "[EFBIG]" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_yet(tmp_path: Path, backend: Backend) -> None:
    profile = measure_directory(tmp_path / "later" / "swap", backend, seconds=0)
    assert profile.path == str(tmp_path / "later" / "swap")
    assert profile.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_instead_of_a_directory(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"not a directory\. Name a directory"):
        measure_directory(tmp_path / "file", backend, seconds=0)


def test_a_place_without_space(backend: Backend) -> None:
    profile = measure_directory(Path("/proc"), backend, seconds=0)
    assert profile.problem.startswith("only 0 B are free")
    assert profile.file_system == "proc"


def test_mounts() -> None:
    assert mount_of(Path("/proc/self"))[0] == "proc"
    assert mount_of(Path(os.path.realpath("/")))[0] != "unknown"
