"""Why kvikio is not there, in one sentence with a remedy; and what its errors mean. Needs neither kvikio nor a GPU."""

import ctypes
import errno
import importlib.util
import sys
import types

import pytest

from ssdtune.errors import BackendUnavailableError
from ssdtune.io.kvikio_backend import _KvikioTransfer
from ssdtune.io.kvikio_probe import explain, kvikio_problem
from ssdtune.io.select import BACKENDS, open_backend

PLACE = "KvikIO failure at: /__w/kvikio/kvikio/cpp/include/kvikio/detail/posix_io.hpp:96: "


def attempt() -> str:
    with pytest.raises(BackendUnavailableError) as caught:
        open_backend("kvikio", queue_depth=2, request_bytes=4096)
    return str(caught.value)


def test_a_missing_kvikio_is_named_with_the_command_to_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert attempt() == (
        "I/O backend kvikio is not available: kvikio is not installed. Install it, 2 to 3 GB: pip install "
        '"ssdtune[gds]" ("ssdtune[gds-cu12]" if torch is built for CUDA 12).'
    )


def test_a_part_of_kvikio_that_is_missing_is_named(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "kvikio":
                raise ModuleNotFoundError("No module named 'rapids_logger'", name="rapids_logger")
            return None

    monkeypatch.delitem(sys.modules, "kvikio", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert "kvikio cannot be imported (No module named 'rapids_logger'). Install it" in attempt()


def test_an_old_kvikio_is_refused(monkeypatch):
    def get(name):
        raise KeyError(name)

    old = types.ModuleType("kvikio")
    old.__version__ = "25.10.00"
    old.defaults = types.ModuleType("kvikio.defaults")
    old.defaults.get = get
    monkeypatch.setitem(sys.modules, "kvikio", old)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", old.defaults)
    assert "kvikio 25.10.00 is too old. Install 26.2 or newer: pip install" in attempt()


@pytest.mark.gds
def test_a_missing_driver_is_named():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert attempt() == (
            "I/O backend kvikio is not available: there is no NVIDIA driver (libcuda.so.1), which kvikio needs "
            "even for host memory. Use another backend where there is no GPU."
        )
    else:
        pytest.skip("there is a driver, or a stub of one")


def test_auto_does_not_choose_it():
    assert "kvikio" not in BACKENDS
    assert importlib.util.find_spec("kvikio") is None or isinstance(kvikio_problem(), str)


@pytest.mark.parametrize(
    ("text", "number", "hint"),
    [
        (PLACE + "POSIX error on pwrite: No space left on device", errno.ENOSPC, ""),
        (PLACE + "POSIX error on pread: Input/output error", errno.EIO, ""),
        (PLACE + "POSIX error: Operation not permitted", errno.EBADF, ""),
        (PLACE + "POSIX error on pwrite: Operation not permitted", errno.EPERM, ""),
        (PLACE + "POSIX error on pread: EOF", 0, ""),
        (
            "Unable to open file. Linux system/library function call error at: /a/b.cpp:7: Too many open files",
            errno.EMFILE,
            "",
        ),
        (
            "CUDA error at: /a/b.hpp:270: CUDA_ERROR_OUT_OF_MEMORY(out of memory)",
            errno.EIO,
            "kvikio says: CUDA_ERROR_OUT_OF_MEMORY(out of memory).",
        ),
        ("", errno.EIO, "kvikio says: RuntimeError."),
    ],
)
def test_errors_of_kvikio_become_numbers(text, number, hint):
    assert explain(RuntimeError(text)) == (number, hint)


@pytest.mark.parametrize(
    ("results", "outcome"),
    [
        ((4096, 4096, 100), (0, 8292)),
        ((4096, 4096, 4), (0, 8196)),
        ((4096, 4000, 100), (0, 8096)),  # what comes after a gap does not count
        ((4096, RuntimeError("POSIX error on pread: Input/output error"), 50), (errno.EIO, 4096)),
        ((1000, RuntimeError("POSIX error on pread: Input/output error"), 100), (0, 1000)),
    ],
)
def test_a_transfer_ends_at_its_first_short_request(results, outcome):
    # cuFile returns what it moved and fails no short read; it cannot be had without a card
    class Future:
        def __init__(self, result):
            self.result = result

        def get(self):
            if isinstance(self.result, Exception):
                raise self.result
            return self.result

    futures = [Future(result) for result in results]
    transfer = _KvikioTransfer(
        [(0, 4096, futures[0]), (4096, 4096, futures[1]), (8192, 100, futures[2])], 8292
    )
    assert not transfer.done()
    transfer.settle()
    assert transfer.done()
    assert transfer.wait() == outcome
