"""Several transfers that end together: no buffer is left with a transfer under way, whatever fails."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

from ssdtune.errors import SsdtuneError
from ssdtune.io.backend import Ticket

logger = logging.getLogger(__name__)


class Tickets:
    """Collects tickets and waits for all of them at the end of its context, also if that fails.

    Raises:
        StorageError: At the end: the first failure, unless the context failed itself.
    """

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []

    def add(self, ticket: Ticket) -> Ticket:
        """Take a transfer that was started, and return it."""
        self._tickets.append(ticket)
        return ticket

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        first: SsdtuneError | None = None
        for ticket in self._tickets:
            try:
                ticket.wait()
            except SsdtuneError as failure:
                logger.debug("a transfer failed: %s", failure)
                first = first or failure
        if first is not None and error is None:
            raise first
