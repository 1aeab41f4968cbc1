"""Every error that ssdtune raises on purpose, with the exit code that the command line gives it.

Form of a message: what happened, with the values - where - what to do. See `ssdtune.cli.main` for how
they are shown. Misuse of a Python function raises plain `ValueError` or `TypeError` instead.
"""

from __future__ import annotations

import errno as errno_names
import os


class SsdtuneError(Exception):
    """Base of all errors whose message is meant for the user."""

    exit_code = 1


class ConfigError(SsdtuneError):
    """Wrong or contradictory settings, or a bad input folder or file that a setting names."""

    exit_code = 2


class CapacityError(SsdtuneError):
    """Something does not fit: memory or space on a drive. The message says needed and available."""

    exit_code = 2


class DeviceMemoryError(CapacityError):
    """A card's memory was full in the middle of a run.

    Attributes:
        budget_bytes: What the run could have had of it.
    """

    def __init__(self, message: str, budget_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes


class FormatError(SsdtuneError):
    """A file is damaged or isn't what it claims to be (shard, jsonl line, manifest)."""

    exit_code = 2


class UnsupportedModelError(ConfigError):
    """The model cannot be trained block by block (named reason), or its architecture is unknown."""


class BackendUnavailableError(SsdtuneError):
    """An I/O backend or device was asked for by name and does not work on this machine."""

    exit_code = 2


class MismatchError(SsdtuneError):
    """The streamed model and transformers' own disagree on the loss of the same batch."""


class Interrupted(SsdtuneError):
    """A signal ended the run after it was saved; `exit_code` is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StorageError(SsdtuneError, OSError):
    """A read, write, open or sync failed, or moved fewer bytes than wanted.

    Attributes:
        errno: The system's error number, or 0 where a transfer ended early without one.
        filename: Path of the file.
        operation: "read", "write", "open", "sync", "allocate".
        offset: Byte offset in the file where the transfer began.
        wanted: Bytes asked for.
        done: Bytes moved before the failure.
    """

    exit_code = 1

    def __init__(
        self,
        operation: str,
        path: str | os.PathLike[str],
        *,
        errno: int = 0,
        offset: int = 0,
        wanted: int = 0,
        done: int = 0,
        hint: str = "",
    ) -> None:
        name = errno_names.errorcode.get(errno, str(errno))
        reason = f"{os.strerror(errno).lower()} [{name}]" if errno else "end of file"
        text = f"{operation} of {path} failed"
        if wanted:
            text += f" at offset {offset}: {done} of {wanted} bytes done"
        text += f", {reason}."
        if not hint and errno == errno_names.ENOSPC:
            hint = "Free space there, then run again with --resume-from-checkpoint last."
        if hint:
            text += f" {hint}"
        super().__init__(text)
        self.errno = errno
        self.filename = str(path)
        self.operation = operation
        self.offset = offset
        self.wanted = wanted
        self.done = done

    def __str__(self) -> str:
        return str(self.args[0])


def first_line(error: BaseException) -> str:
    """Return the first line of what an error of a library says, without a full stop; its type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")
