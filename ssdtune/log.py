"""Where the command line's notes and warnings go; library code only calls `logging.getLogger`.

Everything below the logger `ssdtune` is shown on stderr, never on stdout and never through the root
logger, so programs that import ssdtune keep their own logging.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno == logging.INFO:
            return text
        return f"{record.levelname.lower()}: {text}"


class _CurrentStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what sys.stderr is now, so that it may be replaced (by a live bar, by a test)."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stderr


@contextmanager
def shown_on_stderr(verbosity: int = 0) -> Iterator[None]:
    """Show messages of ssdtune on stderr while what is inside runs; what was set before holds again afterwards.

    Args:
        verbosity: -1 warnings and errors, 0 also notes, 1 also debug lines.
    """
    logger = logging.getLogger("ssdtune")
    propagate, level = logger.propagate, logger.level
    handler = _CurrentStderr()
    handler.setFormatter(_Format("%(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel({-1: logging.WARNING, 0: logging.INFO}.get(verbosity, logging.DEBUG))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)
