"""NVIDIA's kvikio as a backend: also to and from device memory, with GPUDirect Storage where the machine has it.

kvikio (`pip install "ssdtune[gds]"`) has threads of its own that call pread and pwrite on host memory. Device memory
goes directly between drive and card if cuFile can do that (GDS), else through kvikio's bounce buffers
(compatibility mode). Which of these it is, kvikio itself says: see `KvikioBackend.describe`. Files, checks and
tickets are in `ssdtune.io.files`; whether kvikio works and what its errors mean is in `ssdtune.io.kvikio_probe`.
"""

from __future__ import annotations

import importlib
import logging
import os
import queue
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from ssdtune.errors import BackendUnavailableError, StorageError
from ssdtune.io.backend import File
from ssdtune.io.device_bytes import DeviceArray, DeviceBytes, Memory
from ssdtune.io.files import FileBackend, FileTicket
from ssdtune.io.kvikio_probe import KvikioState, explain, kvikio_problem, kvikio_state
from ssdtune.units import format_memory

logger = logging.getLogger(__name__)

MAX_THREADS = 64
"""Threads of kvikio at most, however deep the queue: each has one request in flight."""


class _KvikioTransfer:
    """The requests of one transfer; `settle` is called once, by the backend's thread."""

    def __init__(self, requests: list[tuple[int, int, Any]], there: int) -> None:
        self._requests = requests
        self._outcome = (0, there)
        self._finished = threading.Event()
        self.hint = ""

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> tuple[int, int]:
        self._finished.wait()
        return self._outcome

    def settle(self) -> None:
        """Wait for every request, whatever became of those before, and keep the first failure."""
        failed = False
        for start, num_bytes, future in self._requests:
            number, hint, moved = 0, "", 0
            try:
                if isinstance(future, Exception):
                    raise future
                moved = int(future.get())
            except Exception as error:
                number, hint = explain(error)
            if not failed and moved < num_bytes:
                failed = True
                self._outcome = (number, start + moved)
                self.hint = hint
        self._requests = []
        self._finished.set()


class KvikioBackend(FileBackend):
    """Moves bytes with kvikio; buffers are host memory, or anything with `__cuda_array_interface__`.

    The caller sees to it that the device is done with a device buffer before a transfer starts.

    kvikio's settings belong to the process, so backends share them: the number of threads is that of the last one
    made; and once a file is opened for direct I/O, aligned parts of transfers are direct, also those of files
    that are opened later without it.

    Args:
        queue_depth: Most requests in flight; also the number of kvikio's threads, up to `MAX_THREADS`.
        request_bytes: Size of one request.

    Raises:
        BackendUnavailableError: It does not work on this machine; says why and what helps.
    """

    name = "kvikio"
    takes_device_memory = True
    _switch = threading.Lock()

    def __init__(self, *, queue_depth: int, request_bytes: int) -> None:
        super().__init__(queue_depth=queue_depth, request_bytes=request_bytes)
        problem = kvikio_problem()
        if problem:
            raise BackendUnavailableError(f"I/O backend kvikio is not available: {problem}")
        self._kvikio: Any = importlib.import_module("kvikio")
        self._defaults: Any = importlib.import_module("kvikio.defaults")
        num_threads = min(queue_depth, MAX_THREADS)
        if self._defaults.get("num_threads") != num_threads:  # setting it makes new threads
            self._defaults.set("num_threads", num_threads)
        self._defaults.set({"task_size": request_bytes, "bounce_buffer_size": request_bytes})
        counter = getattr(self._kvikio, "SummaryMonitor", None)  # from 26.10 on
        self._counter = counter() if counter else None
        self._handles: dict[int, Any] = {}
        self._under_way: queue.SimpleQueue[_KvikioTransfer | None] = queue.SimpleQueue()
        # A thread asks kvikio for results, so that a waiting main thread can be interrupted and loses none.
        self._thread = threading.Thread(target=self._settle, name="ssdtune-kvikio", daemon=True)
        self._thread.start()
        logger.info("I/O backend %s", self.describe())

    def describe(self) -> KvikioState:
        """Return what kvikio says of itself and of what it has moved."""
        return kvikio_state(self._counter)

    def open(
        self, path: Path, *, writable: bool = False, create: bool = False, direct: bool = True
    ) -> File:
        """Open a file; without direct I/O (and one logged warning) where the file system has none."""
        file = super().open(path, writable=writable, create=create, direct=direct)
        descriptor = self._files.descriptor(file, "open")
        self._let_be_direct(file.direct)
        try:
            handle = self._kvikio.CuFile(f"/proc/self/fd/{descriptor}", "r+" if writable else "r")
        except Exception as error:
            self._files.close(file)
            number, hint = explain(error)
            raise StorageError("open", path, errno=number, hint=hint) from None
        self._handles[descriptor] = handle
        return file

    def read(
        self,
        file: File,
        offset: int,
        buffer: memoryview | DeviceArray,
        *,
        minimum: int | None = None,
    ) -> FileTicket:
        """Start filling `buffer` from `offset`; see `Backend.read`.

        A device buffer may have any address and length, and lie anywhere in the file: kvikio reads what is not whole
        pages aside.
        """
        if not isinstance(buffer, DeviceArray):
            return super().read(file, offset, buffer, minimum=minimum)
        view = _checked_device(offset, buffer)
        if view.readonly:
            raise ValueError("the buffer to read into is read-only")
        wanted = view.nbytes if minimum is None else minimum
        return self._submit(False, file, offset, cast(memoryview, view), wanted)

    def write(self, file: File, offset: int, buffer: memoryview | DeviceArray) -> FileTicket:
        """Start writing `buffer` at `offset`; the same rules as for `read`."""
        if not isinstance(buffer, DeviceArray):
            return super().write(file, offset, buffer)
        view = _checked_device(offset, buffer)
        return self._submit(True, file, offset, cast(memoryview, view), view.nbytes)

    def register(self, memory: Memory) -> Callable[[], None]:
        """Register device memory with cuFile, which saves GDS a copy on the card; without GDS kvikio does nothing."""
        try:
            self._kvikio.memory_register(memory)
        except Exception as error:
            logger.warning(
                "%s of device memory were not registered for GPUDirect Storage, which costs a copy: %s",
                format_memory(memory.nbytes), error,
            )  # fmt: skip
            return lambda: None
        return partial(self._kvikio.memory_deregister, memory)

    def close_file(self, file: File) -> None:
        """Wait for the file's transfers and close it; buffered files drop their page cache first."""
        descriptor = self._files.descriptor(file, "close")
        self._drain(file.handle)
        handle = self._handles.pop(descriptor, None)
        if handle is not None:
            handle.close()
        super().close_file(file)

    def _start(
        self, write: bool, descriptor: int, direct: bool, offset: int, view: memoryview
    ) -> _KvikioTransfer:
        handle = self._handles[descriptor]
        call = handle.pwrite if write else handle.pread
        # Reading beyond the end of a file is an error for kvikio; here it depends on what the caller needs.
        there = view.nbytes if write else _bytes_there(descriptor, offset, view.nbytes)
        requests: list[tuple[int, int, Any]] = []
        for start in range(0, there, self.request_bytes):
            size = min(self.request_bytes, there - start)
            try:
                future = call(view[start : start + size], size, offset + start, size)
            except Exception as error:
                requests.append((start, size, error))
                break
            requests.append((start, size, future))
        transfer = _KvikioTransfer(requests, there)
        self._under_way.put(transfer)
        return transfer

    def _settle(self) -> None:
        while (transfer := self._under_way.get()) is not None:
            transfer.settle()

    def _stop(self) -> None:
        self._under_way.put(None)
        self._thread.join()
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
        if self._counter is not None:
            self._counter.stop()

    def _let_be_direct(self, direct: bool) -> None:
        """Set kvikio's switch for direct I/O, one for all files of the process: on from the first direct file on.

        kvikio looks at it when it opens a file, and again at every request.
        """
        with self._switch:
            direct = direct or self._defaults.get("auto_direct_io_read")
            self._defaults.set({"auto_direct_io_read": direct, "auto_direct_io_write": direct})


def _bytes_there(descriptor: int, offset: int, wanted: int) -> int:
    """Return how many of the wanted bytes the file has."""
    status = os.fstat(descriptor)
    return min(wanted, max(status.st_size - offset, 0)) if stat.S_ISREG(status.st_mode) else wanted


def _checked_device(offset: int, buffer: DeviceArray) -> DeviceBytes:
    """Return a device buffer's bytes after checking what a transfer needs."""
    view = DeviceBytes.of(buffer)
    if offset < 0:
        raise ValueError(f"offset is {offset}; it must not be negative")
    return view
