"""Which backend is chosen, and what is said where one does not work: with a real kernel that refuses."""

import errno
import logging
import sys

import pytest

import ssdtune
from ssdtune.errors import BackendUnavailableError
from ssdtune.io.native import extension_problem
from ssdtune.io.select import BACKENDS, open_backend, probe_backends
from tests.io.conftest import run_python

native = pytest.mark.skipif(bool(extension_problem()), reason=extension_problem())

# Installs a seccomp filter by which the system calls with these numbers fail with this errno, as in a container.
DENY = """
    import ctypes, struct
    def deny(number_of_error, *calls):
        statements = [(0x20, 0, 0, 0)]  # load the number of the call
        for i, call in enumerate(calls):
            statements.append((0x15, len(calls) - i, 0, call))  # equal: jump to the refusal
        statements += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | number_of_error)]
        code = b"".join(struct.pack("HBBI", *s) for s in statements)
        program = ctypes.create_string_buffer(code)
        class Filter(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
        filter = Filter(len(statements), ctypes.cast(program, ctypes.c_void_p))
        assert libc.prctl(22, 2, ctypes.byref(filter)) == 0
    SETUP, ENTER, REGISTER, AIO_SETUP = 425, 426, 427, 206 if struct.calcsize("P") == 8 else 245
    import logging, platform, sys
    if platform.machine() == "aarch64":
        AIO_SETUP = 0
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    from ssdtune.errors import BackendUnavailableError
    from ssdtune.io.select import open_backend, probe_backends
    def attempt(name):
        try:
            with open_backend(name, queue_depth=4, request_bytes=4096) as backend:
                print(backend.name)
        except BackendUnavailableError as error:
            print(error)
"""


@native
@pytest.mark.parametrize("calls", ["SETUP", "ENTER", "SETUP, ENTER, REGISTER"])
def test_forbidden_io_uring_gives_way_to_aio(calls):
    out = run_python(
        DENY + f"    deny({errno.EPERM}, {calls})\n    attempt('auto')\n    attempt('io_uring')"
    )
    log, name, error = out.splitlines()
    assert name == "libaio"
    assert log == f"using I/O backend libaio. {error}"
    assert error.startswith("I/O backend io_uring is not available: io_uring_")
    assert "operation not permitted [EPERM]" in error
    assert "seccomp" in error
    assert "kernel.io_uring_disabled" in error
    assert "use the libaio backend" in error


@native
def test_without_kernel_queues_there_are_threads():
    out = run_python(
        DENY
        + f"    deny({errno.ENOSYS}, SETUP, AIO_SETUP)\n    attempt('auto')\n    attempt('libaio')"
    )
    log, name, error = out.splitlines()
    assert name == "threads"
    assert "I/O backend io_uring is not available" in log
    assert error in log
    assert "io_setup failed, function not implemented [ENOSYS]" in error
    assert "Use the threads backend" in error


@native
def test_used_up_aio_requests_name_the_limit():
    script = DENY + f"    deny({errno.EAGAIN}, AIO_SETUP)\n    attempt('libaio')"
    (error,) = run_python(script).splitlines()
    assert "requests of all programs are in use. Raise the sysctl fs.aio-max-nr" in error


@native
def test_locked_memory_is_named_where_it_is_the_cause():
    script = DENY + f"    deny({errno.ENOMEM}, SETUP)\n    attempt('io_uring')"
    (error,) = run_python(script).splitlines()
    assert "RLIMIT_MEMLOCK" in error
    assert "ulimit -l unlimited" in error


def test_without_the_extension_python_does_it(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "ssdtune._native", None)
    monkeypatch.delattr(ssdtune, "_native", raising=False)
    with caplog.at_level(logging.WARNING):
        with open_backend(queue_depth=2, request_bytes=4096) as backend:
            assert backend.name == "python"
    (record,) = caplog.records
    assert "the native extension is missing" in record.message
    with pytest.raises(
        BackendUnavailableError, match=r"threads is not available: .*C\+\+20 compiler"
    ):
        open_backend("threads", queue_depth=2, request_bytes=4096)
    assert [p.available for p in probe_backends()] == [False, False, False, True]


def test_probing_says_what_works():
    probes = probe_backends()
    assert [p.name for p in probes] == list(BACKENDS)
    for name, available, reason in probes:
        assert available != bool(reason), name


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match='unknown I/O backend "uring"; there are auto, io_uring'):
        open_backend("uring", queue_depth=1, request_bytes=4096)
    with pytest.raises(ValueError, match="queue_depth is 0"):
        open_backend(queue_depth=0, request_bytes=4096)
    with pytest.raises(ValueError, match="request_bytes is 5000"):
        open_backend(queue_depth=1, request_bytes=5000)
