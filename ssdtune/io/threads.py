"""The backend that is always there: Python threads that call preadv and pwritev.

The system calls release the interpreter lock, so it reaches a good share of a drive's bandwidth; the native
backends (`ssdtune.io.native`) need less of the processor. Files and tickets are in `ssdtune.io.files`.
"""

from __future__ import annotations

import errno as errno_names
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from ssdtune.io.backend import ALIGNMENT
from ssdtune.io.files import FileBackend

MAX_THREADS = 16
"""More Python threads than this take turns at the interpreter lock instead of helping."""

BUSY_RETRIES = 1000
"""How often EAGAIN is tried again, a millisecond apart, before it counts as an error."""

SystemCall = Callable[[int, list[memoryview], int], int]


class _PythonTransfer:
    """One transfer; all fields but `finished` are guarded by the backend's lock."""

    def __init__(
        self, write: bool, descriptor: int, direct: bool, offset: int, view: memoryview
    ) -> None:
        self.write = write
        self.descriptor = descriptor
        self.direct = direct
        self.offset = offset
        self.view = view
        self.wanted = view.nbytes
        self.next_start = 0
        self.in_flight = 0
        self.errno = 0
        self.moved = view.nbytes  # lowered to where the first request stopped early
        self.finished = threading.Event()

    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self) -> tuple[int, int]:
        self.finished.wait()
        return self.errno, self.moved


class PythonBackend(FileBackend):
    """Pure Python backend; its name is "python".

    Args:
        queue_depth: Most requests in flight; also the number of threads, up to `MAX_THREADS`.
        request_bytes: Size of one request.
        preadv: The system call; tests replace it to inject faults. Likewise `pwritev`.
    """

    name = "python"

    def __init__(
        self,
        *,
        queue_depth: int,
        request_bytes: int,
        preadv: SystemCall = os.preadv,
        pwritev: SystemCall = os.pwritev,
    ) -> None:
        super().__init__(queue_depth=queue_depth, request_bytes=request_bytes)
        self._preadv = preadv
        self._pwritev = pwritev
        self._condition = threading.Condition()
        self._active: deque[_PythonTransfer] = deque()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"ssdtune-io-{i}", daemon=True)
            for i in range(min(queue_depth, MAX_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def _start(
        self, write: bool, descriptor: int, direct: bool, offset: int, view: memoryview
    ) -> _PythonTransfer:
        transfer = _PythonTransfer(write, descriptor, direct, offset, view)
        num_requests = -(-view.nbytes // self.request_bytes)
        with self._condition:
            self._active.append(transfer)
            self._condition.notify(num_requests)
        return transfer

    def _stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._active and not self._stopping:
                    self._condition.wait()
                if not self._active:
                    return
                # One request of each transfer in turn, so that a read does not queue behind a long write.
                transfer = self._active.popleft()
                start = transfer.next_start
                end = min(start + self.request_bytes, transfer.wanted)
                transfer.next_start = end
                transfer.in_flight += 1
                if end < transfer.wanted:
                    self._active.append(transfer)
            number, moved = self._move(transfer, start, end)
            with self._condition:
                transfer.in_flight -= 1
                if number or moved < end:
                    transfer.errno = transfer.errno or number
                    transfer.moved = min(transfer.moved, moved)
                    if transfer.next_start < transfer.wanted:  # issue no more of it
                        transfer.next_start = transfer.wanted
                        self._active.remove(transfer)
                if transfer.in_flight == 0 and transfer.next_start == transfer.wanted:
                    transfer.view = memoryview(b"")
                    transfer.finished.set()

    def _move(self, transfer: _PythonTransfer, start: int, end: int) -> tuple[int, int]:
        """Move bytes [start, end) of the transfer; return the error number and where it stopped."""
        call = self._pwritev if transfer.write else self._preadv
        position = reached = start
        busy = 0
        while reached < end:
            try:
                piece = transfer.view[position:end]
                count = call(transfer.descriptor, [piece], transfer.offset + position)
            except OSError as error:
                number = error.errno or errno_names.EIO
                if number == errno_names.EINTR:
                    continue
                if number == errno_names.EAGAIN and busy < BUSY_RETRIES:
                    busy += 1
                    time.sleep(0.001)
                    continue
                return number, reached
            if (
                position + count <= reached
            ):  # no progress: the end of the file, or a write that does nothing
                return (errno_names.EIO if transfer.write else 0), reached
            reached = position + count
            # Direct transfers must start aligned: repeat the odd bytes. At the end of a file that shows no progress.
            position = reached // ALIGNMENT * ALIGNMENT if transfer.direct else reached
        return 0, reached
