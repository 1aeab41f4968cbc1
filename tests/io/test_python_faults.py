"""Faults of the system calls, one by one, in the Python backend. The C++ engines have theirs in tests/native."""

import errno
import os
import threading

import pytest

from ssdtune.errors import StorageError
from ssdtune.io.backend import ALIGNMENT
from ssdtune.io.threads import PythonBackend
from tests.io.conftest import REQUEST_BYTES, file_with, memory

SIZE = 5 * REQUEST_BYTES + ALIGNMENT


class Faulty:
    """A system call that misbehaves as its plan says: per call an errno, a shorter length, or None."""

    def __init__(self, call, plan):
        self.call = call
        self.plan = list(plan)
        self.lock = threading.Lock()
        self.calls = 0

    def __call__(self, descriptor, buffers, offset):
        with self.lock:
            self.calls += 1
            kind, value = self.plan.pop(0) if self.plan else ("", 0)
        if kind == "error":
            raise OSError(value, os.strerror(value))
        if kind == "short":
            buffers = [buffers[0][:value]]
        if kind == "nothing":
            return 0
        return self.call(descriptor, buffers, offset)


def backend_with(plan):
    faulty = {"preadv": Faulty(os.preadv, plan), "pwritev": Faulty(os.pwritev, plan)}
    return PythonBackend(queue_depth=3, request_bytes=REQUEST_BYTES, **faulty)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize(
    "plan",
    [
        [("short", ALIGNMENT)] * 20,
        [("short", 100 * ALIGNMENT // 101), ("short", 513)],
        [("error", errno.EINTR)] * 5,
        [("error", errno.EAGAIN)] * 3,
        [("short", ALIGNMENT), ("error", errno.EINTR), ("error", errno.EAGAIN)] * 4,
    ],
    ids=["short", "odd", "interrupted", "busy", "all"],
)
def test_short_interrupted_and_busy_calls_are_completed(tmp_path, plan, direct):
    if direct:  # a direct transfer itself cannot be odd
        plan = [(k, max(v // ALIGNMENT, 1) * ALIGNMENT if k == "short" else v) for k, v in plan]
    with backend_with(plan) as backend:
        file = backend.open(tmp_path / "a", writable=True, create=True, direct=direct)
        content, back = memory(SIZE), memory(SIZE, fill=0)
        backend.write(file, 0, content).wait()
        backend.read(file, 0, back).wait()
    assert back == content


def test_a_failing_request_stops_the_transfer(tmp_path):
    with backend_with([("", 0), ("", 0), ("", 0), ("error", errno.EIO)]) as backend:
        file = backend.open(file_with(tmp_path / "a", memory(40 * REQUEST_BYTES)))
        with pytest.raises(StorageError, match=r"input/output error \[EIO\]") as caught:
            backend.read(file, 0, memory(40 * REQUEST_BYTES)).wait()
        assert caught.value.done % REQUEST_BYTES == 0
        assert caught.value.done < 8 * REQUEST_BYTES
        assert backend._preadv.calls < 10  # the rest was not tried
        backend.read(file, 0, memory(40 * REQUEST_BYTES)).wait()  # and the backend goes on


def test_full_drive_and_busy_for_ever(tmp_path):
    with backend_with([("error", errno.ENOSPC)]) as backend:
        file = backend.open(tmp_path / "a", writable=True, create=True)
        with pytest.raises(StorageError, match=r"0 of 4096 bytes done, no space .* Free space"):
            backend.write(file, 0, memory(ALIGNMENT)).wait()
    with backend_with([("error", errno.EAGAIN)] * 2000) as backend:
        file = backend.open(tmp_path / "a", writable=True)
        with pytest.raises(StorageError, match=r"\[EAGAIN\]"):
            backend.write(file, 0, memory(ALIGNMENT)).wait()


def test_a_write_that_does_nothing_is_an_error(tmp_path):
    with backend_with([("nothing", 0)]) as backend:
        file = backend.open(tmp_path / "a", writable=True, create=True)
        with pytest.raises(StorageError, match="EIO"):
            backend.write(file, 0, memory(ALIGNMENT)).wait()


def test_transfers_take_turns(tmp_path):
    # While the first request of a long write is under way, a short read is submitted: from then on they alternate.
    both_are_there = threading.Event()
    order = []

    def preadv(descriptor, buffers, offset):
        order.append("r")
        return os.preadv(descriptor, buffers, offset)

    def pwritev(descriptor, buffers, offset):
        both_are_there.wait()
        order.append("w")
        return os.pwritev(descriptor, buffers, offset)

    calls = {"preadv": preadv, "pwritev": pwritev}
    path = file_with(tmp_path / "a", memory(32 * REQUEST_BYTES))
    with PythonBackend(queue_depth=1, request_bytes=REQUEST_BYTES, **calls) as backend:
        file = backend.open(path, writable=True)
        write = backend.write(file, 0, memory(32 * REQUEST_BYTES))
        read = backend.read(file, 0, memory(3 * REQUEST_BYTES))
        both_are_there.set()
        read.wait()
        write.wait()
    assert "".join(order).startswith(("wrwrwrw", "wwrwrwrw"))
    assert len(order) == 35
