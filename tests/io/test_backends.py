"""Bytes written are bytes read, over every backend, size, alignment and number of files."""

import ctypes
import gc
import logging
import mmap
import os
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from ssdtune.io.backend import ALIGNMENT
from ssdtune.io.select import open_backend
from tests.io.conftest import REQUEST_BYTES, memory, run_python

SIZES = [0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1]
SIZES += [REQUEST_BYTES - ALIGNMENT, REQUEST_BYTES, REQUEST_BYTES + ALIGNMENT]
SIZES += [REQUEST_BYTES * 11 + 4 * ALIGNMENT]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read(backend, tmp_path, size, direct):
    if direct and size % ALIGNMENT:
        size = size // ALIGNMENT * ALIGNMENT + ALIGNMENT
    file = backend.open(tmp_path / "a", writable=True, create=True, direct=direct)
    assert file.direct == direct  # the test folder is on a real drive
    content, back = memory(size), memory(size, fill=0)
    backend.write(file, ALIGNMENT, content).wait()
    ticket = backend.read(file, ALIGNMENT, back)
    ticket.wait()
    ticket.wait()
    assert ticket.done()
    assert back == content
    backend.sync([file])
    backend.close_file(file)
    assert (tmp_path / "a").read_bytes()[ALIGNMENT:] == content


def test_many_files_and_transfers_at_once(backend, tmp_path):
    num_files, num_transfers, size = 6, 5, 3 * REQUEST_BYTES + ALIGNMENT
    files = [backend.open(tmp_path / str(i), writable=True, create=True) for i in range(num_files)]
    contents, tickets = {}, []
    for j in range(num_transfers):
        for i, file in enumerate(files):
            contents[i, j] = memory(size, fill=i * num_transfers + j + 1)
            tickets.append(backend.write(file, j * size, contents[i, j]))
    for ticket in reversed(tickets):
        ticket.wait()
    # Reads and writes under way together, on the same files.
    reads = []
    for (i, j), content in contents.items():
        back = memory(size, fill=0)
        reads.append((backend.read(files[i], j * size, back), back, content))
        tickets.append(backend.write(files[i], (num_transfers + j) * size, content))
    for ticket, back, content in reads:
        ticket.wait()
        assert back == content
    for ticket in tickets:
        ticket.wait()


def test_threads_may_submit_and_wait_side_by_side(backend, tmp_path):
    file = backend.open(tmp_path / "a", writable=True, create=True)
    size = 2 * REQUEST_BYTES + ALIGNMENT
    wrong = []

    def work(number: int) -> None:
        content, back = memory(size, fill=number + 1), memory(size, fill=0)
        for _ in range(5):
            backend.write(file, number * size, content).wait()
            backend.read(file, number * size, back).wait()
            if back != content:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_close_finishes_what_is_under_way(backend, tmp_path):
    size = 40 * REQUEST_BYTES
    file = backend.open(tmp_path / "a", writable=True, create=True)
    ticket = backend.write(file, 0, memory(size, fill=3))
    backend.close()
    assert ticket.done()
    ticket.wait()
    assert (tmp_path / "a").read_bytes() == bytes([3]) * size
    backend.close()
    with pytest.raises(ValueError, match=f"the {backend.name} backend is closed"):
        backend.open(tmp_path / "a")
    with pytest.raises(ValueError, match="closed"):
        backend.read(file, 0, memory(ALIGNMENT))


def test_a_dropped_ticket_keeps_its_buffer_until_it_is_done(backend, tmp_path):
    file = backend.open(tmp_path / "a", writable=True, create=True, direct=False)
    array = np.full(20 * REQUEST_BYTES, 9, np.uint8)
    alive = weakref.ref(array)
    backend.write(file, 0, memoryview(array))
    del array
    gc.collect()
    backend.close_file(file)
    assert (tmp_path / "a").read_bytes() == bytes([9]) * (20 * REQUEST_BYTES)
    gc.collect()
    assert alive() is None


def test_descriptors_and_threads_are_given_back(backend, tmp_path):
    def count(kind: str) -> int:
        return sum(1 for _ in Path("/proc/self", kind).iterdir())

    descriptors, tasks = count("fd"), count("task")
    for _ in range(20):
        with open_backend(backend.name, queue_depth=4, request_bytes=REQUEST_BYTES) as other:
            file = other.open(tmp_path / "a", writable=True, create=True)
            other.write(file, 0, memory(ALIGNMENT)).wait()
    assert count("fd") == descriptors
    assert count("task") <= tasks + 4  # a joined thread may take a moment to leave /proc


def test_tmpfs_is_named_as_memory_once(backend, caplog):
    path = Path("/dev/shm") / f"ssdtune-test-{os.getpid()}"
    try:
        with caplog.at_level(logging.WARNING):
            file = backend.open(path, writable=True, create=True)
            again = backend.open(path)
        assert not file.direct
        assert not again.direct
        assert [r.message for r in caplog.records] == [
            f"{path}: /dev/shm is on tmpfs: this is RAM, not a drive, and what is swapped there takes "
            "memory. Name a folder on an NVMe drive."
        ]
        content, back = memory(REQUEST_BYTES + 1), memory(REQUEST_BYTES + 1, fill=0)
        backend.write(file, 13, content).wait()
        backend.read(again, 13, back).wait()
        assert back == content
    finally:
        path.unlink(missing_ok=True)


def test_buffered_files_leave_no_page_cache(backend, tmp_path):
    size = 16 * REQUEST_BYTES
    path = tmp_path / "a"
    file = backend.open(path, writable=True, create=True, direct=False)
    backend.write(file, 0, memory(size)).wait()
    backend.sync([file])
    assert cached_bytes(path) == 0
    backend.read(file, 0, memory(size)).wait()
    assert cached_bytes(path) == 0
    backend.write(file, 0, memory(size)).wait()
    backend.close_file(file)
    assert cached_bytes(path) == 0


def cached_bytes(path: Path) -> int:
    """Bytes of the file in the page cache, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        flags = (ctypes.c_ubyte * -(-len(mapping) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapping)
        address = ctypes.c_void_p(ctypes.addressof(first))
        assert libc.mincore(address, ctypes.c_size_t(len(mapping)), flags) == 0
        del first
        return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


# Only rings read an eventfd, which is a read that ends when told to; pread refuses it. The C++ threads are waited
# for by the same code.
rings = pytest.mark.parametrize("backend", ["io_uring", "libaio"], indirect=True)


@rings
def test_an_interrupt_reaches_a_waiting_main_thread(backend):
    # A read of an empty eventfd does not end by itself: Ctrl-C must still get through, and a value ends the read.
    script = f"""
        import os, signal
        from ssdtune.io.select import open_backend

        backend = open_backend({backend.name!r}, queue_depth=1, request_bytes=4096)
        event = os.eventfd(0)
        transfer = backend._start(False, event, False, 0, memoryview(bytearray(8)))
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            transfer.wait()
        except KeyboardInterrupt:
            print("interrupted")
        os.eventfd_write(event, 1)
        print(transfer.wait())
        backend.close()
        """
    assert run_python(script).splitlines() == ["interrupted", "(0, 8)"]


@rings
def test_waiting_lets_other_python_threads_run(backend):
    # With an endless switch interval the helper runs only if the main thread gives up the lock by itself, and
    # only the helper ends the read that the main thread waits for.
    event = os.eventfd(0)
    gate = threading.Lock()
    gate.acquire()

    def helper() -> None:
        with gate:
            os.eventfd_write(event, 1)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=helper)
    thread.start()
    try:
        sys.setswitchinterval(1000)
        transfer = backend._start(False, event, False, 0, memoryview(bytearray(8)))
        gate.release()
        assert transfer.wait() == (0, 8)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
        os.close(event)
