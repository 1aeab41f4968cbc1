"""The interface of every I/O backend: bytes between a file and a buffer, asynchronously.

A backend moves whole transfers of any size; it cuts them into requests, keeps its queue full, completes
short transfers and turns every failure into a `StorageError`. It knows nothing of tensors or units.
Implementations: `native` (io_uring, kernel aio, C++ threads), `threads` (Python, always there) and
`kvikio_backend` (NVIDIA's library, also for device memory).
`ssdtune.io.select` picks one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ssdtune.io.device_bytes import Memory

ALIGNMENT = 4096
"""Offsets, lengths and addresses of direct transfers are multiples of this many bytes."""


@dataclass(frozen=True, slots=True)
class File:
    """An open file. `handle` belongs to the backend that opened it."""

    path: Path
    handle: int
    direct: bool
    writable: bool


class Ticket(Protocol):
    """One transfer under way."""

    def done(self) -> bool:
        """Say whether `wait` would return at once."""

    def wait(self) -> None:
        """Block until the transfer is complete. May be called again.

        Raises:
            StorageError: The transfer failed; every call raises it again.
        """


class Backend(Protocol):
    """Moves bytes between files and buffers."""

    takes_device_memory: bool
    """`read` and `write` also take `ssdtune.io.device_bytes.DeviceBytes`, of any alignment, once the device is done with them."""
    name: str
    """"io_uring", "libaio", "threads" (native), "python" or "kvikio"."""

    def open(
        self, path: Path, *, writable: bool = False, create: bool = False, direct: bool = True
    ) -> File:
        """Open a file; without direct I/O (and one logged warning) where the file system has none."""

    def read(
        self, file: File, offset: int, buffer: memoryview, *, minimum: int | None = None
    ) -> Ticket:
        """Start filling `buffer` from `offset`.

        Args:
            buffer: Writable, contiguous bytes. On a direct file its address and length, and the offset,
                are multiples of `ALIGNMENT`. It is kept alive, and must not be touched, until `wait`.
            minimum: Bytes that must be there; fewer because of the file's end is an error. All by default.
        """

    def write(self, file: File, offset: int, buffer: memoryview) -> Ticket:
        """Start writing `buffer` at `offset`; the same rules as for `read`."""

    def register(self, memory: Memory) -> Callable[[], None]:
        """Prepare device memory for many transfers, and return what undoes that before it is freed."""

    def sync(self, files: Iterable[File]) -> None:
        """Make what was written durable (fdatasync). Waits for no transfer: call `wait` first."""

    def close_file(self, file: File) -> None:
        """Close the file; buffered (not direct) files drop their page cache first."""

    def close(self) -> None:
        """Wait for all transfers and release everything."""
