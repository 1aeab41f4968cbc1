"""Reads and writes through an I/O backend for some time, and how many bytes that moved.

A `Bench` is a file without a name in the directory to be measured, filled with random data (some drives and file
systems compress); a `Stream` is one backend with one pair of settings at work on it. Both take no more than they are
allowed of time, space and memory. What is made of the rates is up to `ssdtune.hardware.drives`.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from ssdtune.hardware.place import open_nameless
from ssdtune.io.backend import Backend, File, Ticket
from ssdtune.io.buffers import Buffer
from ssdtune.io.select import open_backend
from ssdtune.units import MIB

CHUNK_BYTES = 32 * MIB
"""One transfer; the backend cuts it into requests, and hands out those of all waiting transfers in turns. So few large
transfers are measured, which keep the order of offsets: on a virtual drive nine of 4 MiB reached 73% of fio's rate with
small requests, two of 32 MiB 95 to 100%."""
AHEAD = 1
"""Transfers that wait behind those that fill the queue, so that it never runs dry while one is replaced."""
CHUNKS_IN_FILE = 4
"""Transfers that the smallest file holds."""

Clock = Callable[[], float]


class Place(Protocol):
    """Memory of one transfer."""

    def read(self, backend: Backend, file: File, offset: int) -> Ticket:
        """Start filling it from a file."""

    def write(self, backend: Backend, file: File, offset: int) -> Ticket:
        """Start writing it to a file."""


class HostPlace:
    """Memory of the host."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def read(self, backend: Backend, file: File, offset: int) -> Ticket:
        """Start filling it from a file."""
        return backend.read(file, offset, self._view)

    def write(self, backend: Backend, file: File, offset: int) -> Ticket:
        """Start writing it to a file."""
        return backend.write(file, offset, self._view)


PlaceOf = Callable[[Backend, memoryview], Place]
"""Makes the place of a transfer from a buffer of the bench."""


def in_host(backend: Backend, view: memoryview) -> Place:
    """Return the buffer itself."""
    return HostPlace(view)


@dataclass
class Moved:
    """What one run moved.

    Attributes:
        num_bytes: Bytes read and written.
        seconds: From the first submission to the last completion; with `sync` to durability.
        marks: Seconds and bytes, both since the start, each time a transfer was complete.
    """

    num_bytes: int = 0
    seconds: float = 0.0
    marks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.num_bytes / max(self.seconds, 1e-9)

    def rate_between(self, begin: float, end: float) -> float:
        """Return bytes per second in a part of the run; `begin` and `end` are shares of its time."""
        total = self.marks[-1][0] if self.marks else 0.0
        inside = [
            mark for mark in [(0.0, 0), *self.marks] if begin * total <= mark[0] <= end * total
        ]
        if len(inside) < 2 or inside[-1][0] <= inside[0][0]:
            return self.rate
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


class Bench:
    """A nameless file to measure on; a context manager that closes it.

    Args:
        place: Directory.
        direct: Bypass the page cache; `self.direct` says whether that works.
        memory_bytes: Most memory for data under way.
        chunk_bytes: Size of a transfer.

    Raises:
        ConfigError: No file can be made there.
    """

    def __init__(
        self,
        place: Path,
        *,
        direct: bool,
        memory_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        clock: Clock,
    ) -> None:
        self.place = place
        self.direct = direct
        self.clock = clock
        self.size = 0
        self.written_bytes = 0
        self.chunk_bytes = chunk_bytes
        self.smallest_bytes = CHUNKS_IN_FILE * chunk_bytes
        self.num_buffers = max(memory_bytes // chunk_bytes, 2)
        self.descriptor = open_nameless(place)
        self._buffers: list[Buffer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)
        self._buffers.clear()

    def buffers(self, number: int) -> list[Buffer]:
        """Return buffers of `chunk_bytes` with random content, made when first wanted."""
        random = np.random.default_rng()
        while len(self._buffers) < number:
            buffer = Buffer(self.chunk_bytes)
            buffer.view[:] = random.bytes(self.chunk_bytes)
            self._buffers.append(buffer)
        return self._buffers[:number]

    def fill(self, limit: int, seconds: float, *, backend: str = "auto") -> Moved:
        """Write the file for the first time, which allocates its blocks; `self.size` is how far it got.

        Raises:
            StorageError: The drive failed, or a quota is reached.
        """
        limit = max(limit // self.chunk_bytes * self.chunk_bytes, self.smallest_bytes)
        self.size = limit
        with self.stream(backend, 1 << 20, 16) as stream:
            moved = stream.run("write", seconds, at_least=self.smallest_bytes, at_most=limit)
            os.fdatasync(self.descriptor)
        self.size = moved.num_bytes
        return moved

    @contextlib.contextmanager
    def stream(
        self, backend: str, request_bytes: int, queue_depth: int, place_of: PlaceOf = in_host
    ) -> Iterator[Stream]:
        """Open a backend on the file.

        Args:
            place_of: Makes the memory that bytes come from and go to.

        Raises:
            BackendUnavailableError: The backend does not work here.
            StorageError: The file can't be opened.
        """
        engine = open_backend(backend, queue_depth=queue_depth, request_bytes=request_bytes)
        try:
            path = Path(f"/proc/self/fd/{self.descriptor}")
            file = engine.open(path, writable=True, direct=self.direct)
            self.direct = file.direct  # tried once, and warned of once
            named = replace(file, path=self.place / "(file to measure on)")
            stream = Stream(self, engine, named, request_bytes * queue_depth, place_of)
            try:
                yield stream
            finally:
                stream.drain()
                engine.close_file(file)
        finally:
            engine.close()


class Stream:
    """One backend at work on a bench's file, going round from its start to its end."""

    def __init__(
        self,
        bench: Bench,
        backend: Backend,
        file: File,
        in_flight_bytes: int,
        place_of: PlaceOf = in_host,
    ) -> None:
        self.backend = backend
        self._bench = bench
        self._file = file
        self._transfers = min(-(-in_flight_bytes // bench.chunk_bytes) + AHEAD, bench.num_buffers)
        self._places = [place_of(backend, b.view) for b in bench.buffers(self._transfers)]
        self._pending: deque[Ticket] = deque()
        self._next_read = self._next_write = 0

    def run(
        self,
        kind: str,
        seconds: float,
        *,
        sync: bool = False,
        within: int | None = None,
        at_least: int = 0,
        at_most: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Moved:
        """Move bytes for some time.

        Args:
            kind: "read", "write" or "mixed" (one transfer read for each one written).
            seconds: When no more is submitted; what is under way is waited for and counted.
            sync: Make what was written durable within the time.
            within: Use only so many bytes of the file.
            at_least: Bytes to move, whatever the time.
            at_most: Bytes to move at most.
            stop: Asked before each transfer; true ends the run once the least is moved.

        Raises:
            StorageError: A transfer failed.
        """
        bench, chunk, moved = self._bench, self._bench.chunk_bytes, Moved()
        size = min(bench.size, within or bench.size)
        least, number, start = max(at_least, len(self._places) * chunk), 0, bench.clock()

        def finish_one() -> None:
            self._pending.popleft().wait()
            moved.num_bytes += chunk
            moved.marks.append((bench.clock() - start, moved.num_bytes))

        if kind == "mixed":
            self._next_write = self._next_read + size // chunk // 2 * chunk
        while at_most is None or number * chunk < at_most:
            enough = number * chunk >= least
            if enough and (stop() or bench.clock() - start >= seconds):
                break
            if len(self._pending) == len(self._places):
                finish_one()
            place = self._places[number % len(self._places)]  # its last transfer is over
            if kind == "write" or (kind == "mixed" and number % 2):
                self._pending.append(place.write(self.backend, self._file, self._next_write % size))
                self._next_write += chunk
                bench.written_bytes += chunk
            else:
                self._pending.append(place.read(self.backend, self._file, self._next_read % size))
                self._next_read += chunk
            number += 1
        while self._pending:
            finish_one()
        if sync and kind != "read":
            self.backend.sync([self._file])
        moved.seconds = bench.clock() - start
        return moved

    def drain(self) -> None:
        """Wait for what is under way; failures were told, or another one is on its way up."""
        while self._pending:
            with contextlib.suppress(OSError):
                self._pending.popleft().wait()
