"""Holds a run's output folder, so that no two runs write their metrics, checkpoints and weights into one.

The lock is on the folder itself: it leaves no file behind, and the system drops it when the process ends.
Swap directories have locks of their own, see `ssdtune.store.lock`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ssdtune.errors import ConfigError

logger = logging.getLogger(__name__)


@contextmanager
def hold_output(output_dir: Path) -> Iterator[None]:
    """Make the folder if it is missing, and hold it while the context lasts; remove it at the end if it is empty.

    Raises:
        ConfigError: It cannot be made, or another run holds it.
    """
    fresh = not output_dir.exists()
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(output_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"output_dir {output_dir} cannot be made or opened: {error.strerror}. Name another folder."
        ) from error
    try:
        _lock(descriptor, output_dir)
        yield
    finally:
        os.close(descriptor)
        if fresh:
            _remove_if_empty(output_dir)


def _lock(descriptor: int, output_dir: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"output_dir {output_dir} is in use by {_holder(descriptor)}. "
            "Wait for it, end it, or name another output_dir."
        ) from None
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        # some network file systems lock no folders
        logger.debug("%s cannot be locked: %s", output_dir, error)


def _holder(descriptor: int) -> str:
    """Name the process that holds the lock, from the system's table of locks."""
    wanted = str(os.fstat(descriptor).st_ino)
    try:
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()  # number, kind, mode, access, pid, device:inode, ...
            if "FLOCK" in fields and fields[-3].rpartition(":")[2] == wanted:
                return f"process {fields[-4]}"
    except (OSError, IndexError):
        pass
    return "another run"


def _remove_if_empty(output_dir: Path) -> None:
    for folder in (output_dir / "swap", output_dir):
        with suppress(OSError):
            folder.rmdir()
