"""Where the command line's notes and warnings go; library code only calls `logging.getLogger`.

Everything below the logger `ssdtune` is shown on stderr, never on stdout and never through the root
logger, so programs that import ssdtune keep their own logging.
"""

from __future__ import annotations

import logging
import sys


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


def show_on_stderr(verbosity: int = 0) -> None:
    """Show messages of ssdtune on stderr.

    Args:
        verbosity: -1 warnings and errors, 0 also notes, 1 also debug lines.
    """
    logger = logging.getLogger("ssdtune")
    for handler in list(logger.handlers):
        if isinstance(handler, _CurrentStderr):
            logger.removeHandler(handler)
    handler = _CurrentStderr()
    handler.setFormatter(_Format("%(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel({-1: logging.WARNING, 0: logging.INFO}.get(verbosity, logging.DEBUG))
