"""The native backends: io_uring, the kernel's aio, and C++ threads, behind one class.

The engine is the extension `ssdtune._native`; this module turns its failures into errors with a remedy. Files
and tickets are in `ssdtune.io.files`, the C++ in `native/`.
"""

from __future__ import annotations

import errno as errno_names
import os
import resource
from pathlib import Path

from ssdtune.errors import BackendUnavailableError
from ssdtune.io.files import FileBackend, Transfer
from ssdtune.units import format_memory


class NativeBackend(FileBackend):
    """A backend whose engine is C++ and never holds the interpreter lock.

    Args:
        name: "io_uring", "libaio" or "threads".
        queue_depth: Most requests in flight ("threads" has no more than 64).
        request_bytes: Size of one request.

    Raises:
        BackendUnavailableError: It does not work on this machine; says why and what helps.
    """

    def __init__(self, name: str, *, queue_depth: int, request_bytes: int) -> None:
        super().__init__(queue_depth=queue_depth, request_bytes=request_bytes)
        self.name = name
        problem = extension_problem()
        if problem:
            raise BackendUnavailableError(f"I/O backend {name} is not available: {problem}")
        from ssdtune import _native

        try:
            self._engine = _native.Engine(name, queue_depth, request_bytes)
        except OSError as error:
            raise BackendUnavailableError(
                f"I/O backend {name} is not available: {_explain(name, error)}"
            ) from None

    def _start(
        self, write: bool, descriptor: int, direct: bool, offset: int, view: memoryview
    ) -> Transfer:
        return self._engine.submit(write, descriptor, direct, offset, view)

    def _stop(self) -> None:
        self._engine.close()
        del self._engine  # with it go the ring and its memory


def extension_problem() -> str:
    """Return why the native extension cannot be used, with the remedy; empty if it can."""
    try:
        from ssdtune import _native  # noqa: F401
    except ImportError as error:
        return (
            f"the native extension is missing ({error}). Install ssdtune again where there is a C++20 "
            "compiler; until then the slower python backend works."
        )
    return ""


def _explain(name: str, error: OSError) -> str:
    """Say why an engine could not be made, and what helps."""
    number = error.errno or 0
    code = errno_names.errorcode.get(number, str(number))
    what = f"{error.strerror} failed, {os.strerror(number).lower()} [{code}]."
    if name == "io_uring" and number in (errno_names.EPERM, errno_names.EACCES):
        return (
            f"{what} A container's seccomp profile or the sysctl kernel.io_uring_disabled forbids it. "
            "Allow io_uring there, or use the libaio backend."
        )
    if name == "io_uring" and number == errno_names.ENOMEM:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "unlimited" if limit == resource.RLIM_INFINITY else format_memory(limit)
        return (
            f"{what} The limit of locked memory (RLIMIT_MEMLOCK) is {shown}. Raise it with "
            '"ulimit -l unlimited", or use the libaio backend.'
        )
    if name == "libaio" and number == errno_names.EAGAIN:
        return (
            f"{what} {_read('/proc/sys/fs/aio-nr')} of {_read('/proc/sys/fs/aio-max-nr')} requests "
            "of all programs are in use. Raise the sysctl fs.aio-max-nr, or use the threads backend."
        )
    if number == errno_names.ENOSYS:
        return (
            f"{what} This kernel, or the sandbox around it, has no {name}. Use the threads backend."
        )
    if name == "threads" or number == errno_names.EAGAIN:
        return f"{what} Raise the limit of processes and threads (ulimit -u), or lower queue_depth."
    return f"{what} Use another backend."


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "?"
