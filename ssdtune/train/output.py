"""A run's output folder: no two runs write into one, and none replaces files that no run has written.

The lock is on the folder itself: it leaves no file behind, and the system drops it when the process ends.
Swap directories have locks of their own, see `ssdtune.store.lock`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ssdtune.config.load import to_yaml, with_absolute_paths
from ssdtune.config.schema import Config
from ssdtune.errors import ConfigError
from ssdtune.store.durable import write_text_atomic

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
SETTINGS = "config.yaml"
PLAN = "plan.json"
_TITLE = "# All settings of the run.\n"
"""First line of the settings that a run writes: a file without it is somebody's own."""


def refuse_foreign(output_dir: Path) -> None:
    """Make sure that a new run replaces no files of others.

    Raises:
        ConfigError: The folder holds a model, an adapter or settings, and no run was there.
    """
    if (output_dir / METRICS).exists() or not output_dir.is_dir():
        return
    settings = output_dir / SETTINGS
    names = [path.name for path in output_dir.iterdir() if path.is_file() and _is_of_a_model(path)]
    if settings.is_file() and not settings.read_bytes().startswith(_TITLE.encode()):
        names.append(SETTINGS)
    if names:
        raise ConfigError(
            f"output_dir {output_dir} holds {', '.join(sorted(names)[:3])}, which no run of ssdtune wrote and this one "
            "would replace. Name another output_dir."
        )


def write_settings(output_dir: Path, config: Config) -> None:
    """Write all settings of a run: from here on the folder is that of a run.

    Raises:
        StorageError: They cannot be written.
    """
    # Where a resumed run went on from is no setting of the run.
    training = replace(config.training, resume_from_checkpoint=None)
    settings = with_absolute_paths(replace(config, training=training))
    write_text_atomic(output_dir / SETTINGS, _TITLE + to_yaml(settings))


def write_plan(output_dir: Path, **figures: Any) -> None:
    """Write what a run is going to do.

    Args:
        **figures: Plain data by name.

    Raises:
        StorageError: It cannot be written.
    """
    text = json.dumps({"schema_version": 1, **figures}, indent=2) + "\n"
    write_text_atomic(output_dir / PLAN, text)


def _is_of_a_model(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name in ("config.json", "adapter_config.json")


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
