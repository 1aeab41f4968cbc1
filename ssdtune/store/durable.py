"""Files that survive a crash whole or not at all: write aside, sync, rename, sync the directory.

Used for owner records here, for checkpoints, exports and measured figures elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssdtune.errors import StorageError

REMOVED = ".removed"
"""Ends the name, hidden then, of a folder that is being removed."""


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace a JSON file, see `write_text_atomic`."""
    write_text_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a file; after a crash either the old or the new content is there, whole.

    Raises:
        StorageError: It could not be written; the old file is still there.
    """
    data = text.encode("utf-8", "surrogateescape")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _storage_errors("write", path):
        # Renaming would put a file in the place of a device.
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Make a file durable, or the names in a directory.

    Raises:
        StorageError: It could not be opened or synced.
    """
    with _storage_errors("sync", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_dir(tmp: Path, final: Path) -> None:
    """Make a folder durable and give it its final name, at once; `final` must not exist, or be empty.

    Raises:
        StorageError: A sync or the rename failed; `tmp` is still there.
    """
    for folder, _, names in os.walk(tmp, topdown=False):
        for name in names:
            fsync(Path(folder, name))
        fsync(Path(folder))
    with _storage_errors("rename", final):
        tmp.rename(final)
    fsync(final.parent)


def remove_dir(path: Path) -> None:
    """Remove a folder so that after a crash it is there whole or, under its name, not at all.

    When this returns it is durably gone, so that what it referred to may be overwritten.

    Raises:
        StorageError: It could not be removed.
    """
    doomed = path.with_name(f".{path.name}{REMOVED}")
    with _storage_errors("remove", path):
        if doomed.exists():  # a crash came between
            shutil.rmtree(doomed)
        path.rename(doomed)
        fsync(path.parent)
        shutil.rmtree(doomed)


@contextlib.contextmanager
def _storage_errors(operation: str, path: Path) -> Iterator[None]:
    """Turn the system's errors into ours, with operation and path."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(operation, path, errno=error.errno or 0) from error
