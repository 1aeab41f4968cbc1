"""Choosing an I/O backend: the best that works, or the one that was asked for.

Each backend is probed by making it: its constructor sets up all that it needs of the kernel.
Why one is missing is a sentence for people, shown by `doctor` and in the one line that a fallback logs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from ssdtune.errors import BackendUnavailableError
from ssdtune.io.backend import Backend
from ssdtune.io.kvikio_backend import KvikioBackend
from ssdtune.io.native import NativeBackend, extension_problem
from ssdtune.io.threads import PythonBackend

logger = logging.getLogger(__name__)

BACKENDS = ("io_uring", "libaio", "threads", "python")
"""All backends that need nothing but the system, the preferred first."""

DEVICE_BACKENDS = ("kvikio",)
"""Backends that also move bytes between drives and a card; they are taken if named, or for what goes to a card where they were
measured to be the fastest way there (`ssdtune.hardware.ways`)."""


class BackendProbe(NamedTuple):
    """Whether a backend works here; `reason` says why not and what helps."""

    name: str
    available: bool
    reason: str


QUEUE_DEPTH = 16
REQUEST_BYTES = 1 << 20


def open_backend(
    name: str = "auto", *, queue_depth: int | None = None, request_bytes: int | None = None
) -> Backend:
    """Open an I/O backend.

    Args:
        name: One of `BACKENDS` or `DEVICE_BACKENDS`, or "auto" for the first of `BACKENDS` that works (one logged
            line says which were passed over, and why).
        queue_depth: Requests in flight; `QUEUE_DEPTH` by default.
        request_bytes: Size of one request, a multiple of 4096; `REQUEST_BYTES` by default.

    Raises:
        BackendUnavailableError: The named backend does not work on this machine.
        ValueError: Unknown name, or sizes that make no sense.
    """
    queue_depth = QUEUE_DEPTH if queue_depth is None else queue_depth
    request_bytes = REQUEST_BYTES if request_bytes is None else request_bytes
    if name != "auto":
        return _make(name, queue_depth, request_bytes)
    problem = extension_problem()
    reasons = [f"The native backends are not available: {problem}"] if problem else []
    for candidate in BACKENDS[-1:] if problem else BACKENDS:
        try:
            backend = _make(candidate, queue_depth, request_bytes)
        except BackendUnavailableError as error:
            reasons.append(str(error))
            continue
        if reasons:
            logger.warning("using I/O backend %s. %s", candidate, " ".join(reasons))
        return backend
    raise AssertionError("the python backend always works")


def probe_backends(
    names: Sequence[str] = BACKENDS,
    *,
    queue_depth: int = QUEUE_DEPTH,
    request_bytes: int = REQUEST_BYTES,
) -> list[BackendProbe]:
    """Try backends with these settings and say what works."""
    probes = []
    for name in names:
        try:
            _make(name, queue_depth, request_bytes).close()
        except BackendUnavailableError as error:
            probes.append(BackendProbe(name, False, str(error)))
        else:
            probes.append(BackendProbe(name, True, ""))
    return probes


def _make(name: str, queue_depth: int, request_bytes: int) -> Backend:
    if name == "python":
        return PythonBackend(queue_depth=queue_depth, request_bytes=request_bytes)
    if name == "kvikio":
        return KvikioBackend(queue_depth=queue_depth, request_bytes=request_bytes)
    if name not in BACKENDS:
        known = ", ".join(("auto", *BACKENDS, *DEVICE_BACKENDS))
        raise ValueError(f'unknown I/O backend "{name}"; there are {known}')
    return NativeBackend(name, queue_depth=queue_depth, request_bytes=request_bytes)
