"""How fast the drive under a directory reads and writes, measured with real direct I/O through a backend.

The file that is measured on has no name: it is unlinked as soon as it is open, so nothing is left behind
whatever happens. It takes no more than a tenth of the free space. Data is random, because some drives and
file systems compress.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ssdtune.errors import ConfigError, StorageError
from ssdtune.io.backend import Backend, File, Ticket
from ssdtune.io.buffers import Buffer
from ssdtune.units import MIB, format_disk

CHUNK_BYTES = 8 * MIB
CHUNKS_IN_FLIGHT = 4
SMALLEST_FILE_BYTES = CHUNKS_IN_FLIGHT * 2 * CHUNK_BYTES
LARGEST_FILE_BYTES = 2048 * MIB
FREE_SHARE = 10
"""The file takes at most the free space divided by this."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class DirectoryProfile:
    """A directory's drive.

    Attributes:
        path: The directory.
        file_system: Kind, such as "ext4".
        device: What is mounted there, such as "/dev/nvme0n1p2".
        free_bytes: Space that an ordinary user may still take.
        direct: Direct I/O works; if not, rates include copies through the page cache.
        read_bytes_per_s, write_bytes_per_s: Sequential rates; 0 if not measured.
        mixed_bytes_per_s: Sum of both directions when reads and writes alternate.
        file_bytes: Size of the file that was measured on.
        problem: Why nothing was measured; empty if it was.
    """

    path: str
    file_system: str
    device: str
    free_bytes: int
    direct: bool = False
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0
    mixed_bytes_per_s: float = 0.0
    file_bytes: int = 0
    problem: str = ""


def measure_directory(
    directory: Path,
    backend: Backend,
    *,
    seconds: float,
    direct: bool = True,
    clock: Clock = time.perf_counter,
) -> DirectoryProfile:
    """Measure the drive under a directory; one that does not exist yet is measured at its nearest parent.

    Args:
        backend: Moves the bytes; stays open.
        seconds: About how long it takes: a quarter each for filling, writing, reading and both at once.

    Raises:
        ConfigError: No file can be made there.
    """
    place = existing_parent(directory)
    file_system, device = mount_of(place)
    figures = os.statvfs(place)
    free_bytes = figures.f_bavail * figures.f_frsize
    facts = (str(directory), file_system, device, free_bytes)
    file_bytes = min(LARGEST_FILE_BYTES, free_bytes // FREE_SHARE) // CHUNK_BYTES * CHUNK_BYTES
    if file_bytes < SMALLEST_FILE_BYTES:
        needed = format_disk(SMALLEST_FILE_BYTES * FREE_SHARE)
        return DirectoryProfile(
            *facts, problem=f"only {format_disk(free_bytes)} are free; measuring needs {needed}"
        )
    file = _open_nameless(place, backend, direct)
    try:
        rates = _Rates(backend, file, seconds / 4, clock)
        try:
            size = rates.fill(file_bytes)
            write = rates.write(size)
            read = rates.read(size)
            mixed = rates.mixed(size)
        finally:
            rates.drain()
    except StorageError as error:  # a quota, or a drive that is failing: said, not hidden
        return DirectoryProfile(*facts, direct=file.direct, problem=str(error))
    finally:
        backend.close_file(file)
    return DirectoryProfile(*facts, file.direct, read, write, mixed, size)


def existing_parent(path: Path) -> Path:
    """Return the path with links resolved, or its nearest parent that exists."""
    path = Path(os.path.realpath(path.expanduser()))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def mount_of(path: Path) -> tuple[str, str]:
    """Return kind of the file system and what is mounted, by the longest mount point above the path."""
    best, found = -1, ("unknown", "unknown")
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        left, _, right = line.partition(" - ")
        point = Path(left.split(" ")[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= best:
            kind, source = right.split(" ")[:2]
            best, found = len(point.parts), (kind, source)
    return found


def _open_nameless(place: Path, backend: Backend, direct: bool) -> File:
    path = place / f".ssdtune-profile-{secrets.token_hex(8)}"
    try:
        return backend.open(path, writable=True, create=True, direct=direct)
    except OSError as error:
        raise ConfigError(
            f"cannot measure {place}: {os.strerror(error.errno or 0).lower()}. Name a directory on the drive "
            "that you may write to."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


class _Rates:
    """Runs the phases on one open file; keeps `CHUNKS_IN_FLIGHT` transfers under way."""

    def __init__(self, backend: Backend, file: File, seconds: float, clock: Clock) -> None:
        self.backend = backend
        self.file = file
        self.seconds = seconds
        self.clock = clock
        self.pending: deque[Ticket] = deque()
        self.submitted = 0
        self.buffers = [Buffer(CHUNK_BYTES) for _ in range(CHUNKS_IN_FLIGHT)]
        random = np.random.default_rng()
        for buffer in self.buffers:
            buffer.view[:] = random.bytes(CHUNK_BYTES)

    def fill(self, limit: int) -> int:
        """Write the file for the first time, which allocates its blocks; return how far it got."""
        size = 0
        start = self.clock()
        while size < limit and (size < SMALLEST_FILE_BYTES or self.clock() - start < self.seconds):
            self._submit(self.backend.write, size)
            size += CHUNK_BYTES
        self.drain()
        self.backend.sync([self.file])
        return size

    def write(self, size: int) -> float:
        """Return the rate of writing over what is there, up to durability."""
        return self._run(size, lambda number: self.backend.write, sync=True)

    def read(self, size: int) -> float:
        """Return the rate of reading."""
        return self._run(size, lambda number: self.backend.read)

    def mixed(self, size: int) -> float:
        """Return the rate of both directions together, one chunk read for each one written."""
        return self._run(
            size, lambda number: self.backend.write if number % 2 else self.backend.read, sync=True
        )

    def drain(self) -> None:
        """Wait for what is under way."""
        while self.pending:
            self.pending.popleft().wait()

    def _run(
        self, size: int, operation: Callable[[int], Callable[..., Ticket]], *, sync: bool = False
    ) -> float:
        start = self.clock()
        number = 0
        while number < CHUNKS_IN_FLIGHT or self.clock() - start < self.seconds:
            self._submit(operation(number), number * CHUNK_BYTES % size)
            number += 1
        self.drain()
        if sync:
            self.backend.sync([self.file])
        return number * CHUNK_BYTES / max(self.clock() - start, 1e-9)

    def _submit(self, operation: Callable[..., Ticket], offset: int) -> None:
        if len(self.pending) == CHUNKS_IN_FLIGHT:
            self.pending.popleft().wait()
        buffer = self.buffers[self.submitted % CHUNKS_IN_FLIGHT]  # its last transfer is over
        self.submitted += 1
        self.pending.append(operation(self.file, offset, buffer.view))
