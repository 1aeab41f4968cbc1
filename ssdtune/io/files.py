"""What all host backends share: opening and closing files, checking arguments, tickets and their errors.

A backend adds the engine that moves the bytes: see `ssdtune.io.threads` (Python) and `ssdtune.io.native`
(C++). Nothing here knows how a transfer is cut up or how it is waited for.
"""

from __future__ import annotations

import errno as errno_names
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from ssdtune.errors import StorageError
from ssdtune.io.backend import ALIGNMENT, File
from ssdtune.io.device_bytes import Memory
from ssdtune.io.mounts import IN_MEMORY, mount_of

logger = logging.getLogger(__name__)


class Transfer(Protocol):
    """One transfer inside an engine."""

    def done(self) -> bool:
        """Say whether `wait` would return at once."""

    def wait(self) -> tuple[int, int]:
        """Block until nothing of it is in flight.

        Returns:
            The error number (0 if none) and the bytes moved from the start without a gap. Fewer bytes than
            wanted and no error: the file ended there.
        """


class FileTicket:
    """A transfer with the names that its error message needs. Keeps the buffer alive until `wait`."""

    def __init__(
        self,
        files: OpenFiles,
        transfer: Transfer | None,
        buffer: memoryview,
        operation: str,
        file: File,
        offset: int,
        minimum: int,
    ) -> None:
        self._files = files
        self._transfer = transfer
        self._buffer: memoryview | None = buffer
        self._operation = operation
        self._file = file
        self._offset = offset
        self._wanted = buffer.nbytes
        self._minimum = minimum
        self._outcome = (0, 0)
        self._hint = ""

    def done(self) -> bool:
        """Say whether `wait` would return at once."""
        transfer = self._transfer
        return transfer is None or transfer.done()

    def wait(self) -> None:
        """Block until the transfer is complete; raise `StorageError` if it failed."""
        transfer = self._transfer
        if transfer is not None:
            self._outcome = transfer.wait()
            if self._transfer is not None:
                # An engine whose failures are not all error numbers says the others in words.
                self._hint = getattr(transfer, "hint", "")
                self._transfer = self._buffer = None
                if not self._file.direct:
                    self._files.drop_cache(self._file, self._offset, self._wanted)
        number, moved = self._outcome
        if number or moved < self._minimum:
            raise StorageError(
                self._operation,
                self._file.path,
                errno=number,
                offset=self._offset,
                wanted=self._wanted,
                done=moved,
                hint=self._hint,
            )


class OpenFiles:
    """The open files of one backend. Handles are never used twice, so a closed file stays closed."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}
        self._next_handle = 0
        self._warned_devices: set[int] = set()
        self._lock = threading.Lock()

    def open(self, path: Path, *, writable: bool, create: bool, direct: bool) -> File:
        """Open a file, with direct I/O if asked for and possible.

        Raises:
            StorageError: The file cannot be opened.
        """
        path = Path(path)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT
        descriptor = -1
        reason = ""
        try:
            if direct:
                descriptor, reason = _open_direct(path, flags)
            if descriptor < 0:
                descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise StorageError("open", path, errno=error.errno or 0) from None
        if reason:
            self._warn_once(path, descriptor, reason)
        with self._lock:
            handle = self._next_handle
            self._next_handle += 1
            self._descriptors[handle] = descriptor
        return File(path, handle, direct and not reason, writable)

    def descriptor(self, file: File, operation: str) -> int:
        """Return the system's descriptor of an open file.

        Raises:
            StorageError: It was closed, or belongs to another backend.
        """
        with self._lock:
            descriptor = self._descriptors.get(file.handle)
        if descriptor is None:
            hint = "The file is not open in this backend."
            raise StorageError(operation, file.path, errno=errno_names.EBADF, hint=hint)
        return descriptor

    def sync(self, file: File) -> None:
        """Make the file's data durable; a buffered file's page cache is clean then and is dropped."""
        descriptor = self.descriptor(file, "sync")
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            raise StorageError("sync", file.path, errno=error.errno or 0) from None
        if not file.direct:
            self.drop_cache(file, 0, 0)

    def drop_cache(self, file: File, offset: int, num_bytes: int) -> None:
        """Let the system forget cached pages of a range; dirty pages start on their way to the drive.

        Args:
            num_bytes: Length of the range; 0 means up to the end of the file.
        """
        with self._lock:
            descriptor = self._descriptors.get(file.handle)
        if descriptor is not None:
            try:
                os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
            except OSError as error:  # pipes and some FUSE file systems have no page cache to drop
                logger.debug("page cache of %s was not dropped: %s", file.path, error)

    def close(self, file: File) -> None:
        """Close the file. Unwritten pages of a buffered file are written first, to be dropped."""
        descriptor = self.descriptor(file, "close")
        try:
            if not file.direct:
                if file.writable:
                    self.sync(file)
                else:
                    self.drop_cache(file, 0, 0)
        finally:
            with self._lock:
                open_descriptor = self._descriptors.pop(file.handle, None)
            if open_descriptor is not None:
                os.close(descriptor)

    def close_all(self) -> None:
        """Close what is still open, without flushing."""
        with self._lock:
            descriptors = list(self._descriptors.values())
            self._descriptors.clear()
        for descriptor in descriptors:
            os.close(descriptor)

    def _warn_once(self, path: Path, descriptor: int, reason: str) -> None:
        device = os.fstat(descriptor).st_dev
        with self._lock:
            if device in self._warned_devices:
                return
            self._warned_devices.add(device)
        logger.warning("%s: %s", path, reason)


class FileBackend:
    """Base of the host backends: everything of the `Backend` interface but the engine.

    Args:
        queue_depth: Most requests in flight.
        request_bytes: Size of one request; a multiple of `ALIGNMENT`.
    """

    name = ""
    takes_device_memory = False

    def __init__(self, *, queue_depth: int, request_bytes: int) -> None:
        if queue_depth < 1:
            raise ValueError(f"queue_depth is {queue_depth}; it must be at least 1")
        if request_bytes < ALIGNMENT or request_bytes % ALIGNMENT:
            raise ValueError(
                f"request_bytes is {request_bytes}; it must be a multiple of {ALIGNMENT}"
            )
        self.queue_depth = queue_depth
        self.request_bytes = request_bytes
        self._files = OpenFiles()
        self._pending: dict[int, list[FileTicket]] = {}
        self._pending_lock = threading.Lock()
        self._closed = False

    def open(
        self, path: Path, *, writable: bool = False, create: bool = False, direct: bool = True
    ) -> File:
        """Open a file; without direct I/O (and one logged warning) where the file system has none."""
        self._check_open()
        return self._files.open(path, writable=writable, create=create, direct=direct)

    def read(
        self, file: File, offset: int, buffer: memoryview, *, minimum: int | None = None
    ) -> FileTicket:
        """Start filling `buffer` from `offset`; see `Backend.read`."""
        view = _checked_view(file, offset, buffer)
        if view.readonly:
            raise ValueError("the buffer to read into is read-only")
        if minimum is not None and not 0 <= minimum <= view.nbytes:
            raise ValueError(f"minimum is {minimum}; the buffer has {view.nbytes} bytes")
        return self._submit(False, file, offset, view, view.nbytes if minimum is None else minimum)

    def write(self, file: File, offset: int, buffer: memoryview) -> FileTicket:
        """Start writing `buffer` at `offset`; see `Backend.write`."""
        view = _checked_view(file, offset, buffer)
        return self._submit(True, file, offset, view, view.nbytes)

    def register(self, memory: Memory) -> Callable[[], None]:
        """Refuse: this backend takes host memory only."""
        raise ValueError(f"the {self.name} backend takes no device memory")

    def sync(self, files: Iterable[File]) -> None:
        """Make what was written durable (fdatasync). Waits for no transfer: call `wait` first."""
        for file in files:
            self._files.sync(file)

    def close_file(self, file: File) -> None:
        """Wait for the file's transfers and close it; buffered files drop their page cache first."""
        self._drain(file.handle)
        self._files.close(file)

    def close(self) -> None:
        """Wait for all transfers and release everything. May be called again."""
        if self._closed:
            return
        self._closed = True
        with self._pending_lock:
            handles = list(self._pending)
        for handle in handles:
            self._drain(handle)
        self._stop()
        self._files.close_all()

    def __enter__(self) -> FileBackend:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(
        self, write: bool, descriptor: int, direct: bool, offset: int, view: memoryview
    ) -> Transfer:
        """Hand a transfer of at least one byte to the engine."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Release the engine; nothing is in flight."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the {self.name} backend is closed")

    def _submit(
        self, write: bool, file: File, offset: int, view: memoryview, minimum: int
    ) -> FileTicket:
        self._check_open()
        operation = "write" if write else "read"
        descriptor = self._files.descriptor(file, operation)
        transfer = (
            self._start(write, descriptor, file.direct, offset, view) if view.nbytes else None
        )
        ticket = FileTicket(self._files, transfer, view, operation, file, offset, minimum)
        # Tickets under way are held here, so that a dropped one neither loses its buffer nor its file.
        with self._pending_lock:
            pending = [t for t in self._pending.get(file.handle, ()) if not t.done()]
            pending.append(ticket)
            self._pending[file.handle] = pending
        return ticket

    def _drain(self, handle: int) -> None:
        with self._pending_lock:
            tickets = self._pending.pop(handle, [])
        for ticket in tickets:
            try:
                ticket.wait()
            except StorageError as error:
                # Its owner is told by its own `wait`; a dropped ticket has no other witness.
                logger.debug("at close: %s", error)


def _open_direct(path: Path, flags: int) -> tuple[int, str]:
    """Return a descriptor with direct I/O, or -1 and the reason why there is none."""
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno not in (errno_names.EINVAL, errno_names.EOPNOTSUPP):
            raise
        return -1, _why_not_direct(path, _is_in_memory(path))
    # Some file systems take the flag and then refuse, or ignore, every direct transfer: try one.
    in_memory = _is_in_memory(path)
    refused = False
    if not in_memory:
        with mmap.mmap(-1, ALIGNMENT) as page:
            try:
                os.preadv(descriptor, [page], 0)
            except OSError as error:
                refused = error.errno in (errno_names.EINVAL, errno_names.EOPNOTSUPP)
    if in_memory or refused:
        os.close(descriptor)
        return -1, _why_not_direct(path, in_memory)
    return descriptor, ""


def _is_in_memory(path: Path) -> bool:
    return mount_of(path).kind in IN_MEMORY


def _why_not_direct(path: Path, in_memory: bool) -> str:
    if in_memory:
        return (
            f"{path.parent} is on tmpfs: this is RAM, not a drive, and what is swapped there takes memory. "
            "Name a folder on an NVMe drive."
        )
    return (
        "the file system has no direct I/O (O_DIRECT); going through the page cache costs one more copy "
        "of every byte and memory that counts against the limit of a container."
    )


def _checked_view(file: File, offset: int, buffer: memoryview) -> memoryview:
    """Return the buffer as plain bytes after checking what a transfer needs."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous")
    if view.nbytes and (view.format != "B" or view.ndim != 1):
        view = view.cast("B")
    if offset < 0:
        raise ValueError(f"offset is {offset}; it must not be negative")
    if file.direct and view.nbytes:
        address = np.frombuffer(view, np.uint8).ctypes.data
        for what, value in (("offset", offset), ("length", view.nbytes), ("address", address)):
            if value % ALIGNMENT:
                raise ValueError(
                    f"{what} {value} is no multiple of {ALIGNMENT}, which direct I/O needs ({file.path})"
                )
    return view
