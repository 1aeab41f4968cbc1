"""Several transfers of a backend that are waited for as one.

Used by `ssdtune.store.store`, where a striped range of a state is one transfer for each piece.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import cast

from ssdtune.errors import SsdtuneError
from ssdtune.io.backend import ALIGNMENT, Ticket
from ssdtune.io.device_bytes import DeviceBytes, Memory

logger = logging.getLogger(__name__)


class Transfer:
    """Several transfers that are waited for as one; `finish` runs once, when all have ended."""

    def __init__(self, parts: list[Ticket], finish: Callable[[bool], None]) -> None:
        self._parts = parts
        self._finish: Callable[[bool], None] | None = finish
        self._error: SsdtuneError | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Say whether all parts have ended."""
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        """Block until all parts have ended; raise the first error, at every call."""
        with self._lock:
            if self._finish is not None:
                for part in self._parts:
                    try:
                        part.wait()
                    except SsdtuneError as error:  # the others still use the buffer
                        self._error = self._error or error
                finish, self._finish = self._finish, None
                try:
                    finish(self._error is None)
                except SsdtuneError as error:
                    self._error = error
            if self._error is not None:
                raise self._error

    def abandon(self) -> None:
        """Wait for the parts that were started when a later one could not be."""
        with self._lock:
            for part in self._parts:
                try:
                    part.wait()
                except SsdtuneError as error:
                    logger.debug("a part of an abandoned transfer failed: %s", error)
            finish, self._finish = self._finish, None
            if finish is not None:
                finish(False)


def as_bytes(view: Memory) -> memoryview:
    """Return a buffer as plain bytes.

    Raises:
        ValueError: Its length is no multiple of the alignment, or it is not contiguous.
    """
    if isinstance(view, DeviceBytes):
        return cast(memoryview, view)  # can be sliced, and that is all that is done with it
    view = memoryview(view)
    if not view.nbytes:
        return memoryview(bytearray())
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B")
    if view.nbytes % ALIGNMENT:
        raise ValueError(f"a buffer of {view.nbytes} bytes is no multiple of {ALIGNMENT}")
    return view
