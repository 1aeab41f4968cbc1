"""Taking swap directories for a run: all of them or none, with their space, or a clear refusal.

Joins names, locks, owner records and reservation. Read `ssdtune.store.store` next.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ssdtune.errors import ConfigError, FormatError
from ssdtune.io.mounts import IN_MEMORY, kind_warning, mount_of
from ssdtune.store.directories import prepare_directories
from ssdtune.store.layout import StoreLayout
from ssdtune.store.lock import STATES_NAME, DirectoryLock, Owner, lock_directories, renew
from ssdtune.store.manifest import Manifest
from ssdtune.store.space import Need, reserve

logger = logging.getLogger(__name__)


@contextmanager
def claim_new(
    directories: Sequence[Path], layout: StoreLayout, owner: Owner
) -> Iterator[list[DirectoryLock]]:
    """Take directories for a new run, throw away leftovers, write records and reserve all space.

    If the block fails, everything is removed again and let go; else the locks stay with the caller.

    Raises:
        ConfigError: A directory cannot be used, is in use, or holds what somebody may need.
        CapacityError: There is no room.
    """
    locks = lock_directories(prepare_directories(directories))
    ours = False
    try:
        for lock in locks:
            lock.check_reclaimable()
        ours = True
        for index, lock in enumerate(locks):
            lock.remove_files()
            lock.write_owner(replace(owner, directory_index=index))
        _reserve_all(locks, layout)
        yield locks
    except BaseException:
        for lock in locks:
            if ours:
                lock.remove_files()
            lock.release(refused=True)
        raise


@contextmanager
def claim_again(
    directories: Sequence[str | os.PathLike[str]],
    layout: StoreLayout,
    manifest: Manifest,
    folders: Sequence[Path],
) -> Iterator[tuple[list[DirectoryLock], Owner]]:
    """Take the directories of a run that has ended; nothing in them is changed or removed.

    Args:
        layout: With as many copies as are wanted now; more than before make the files longer.
        manifest: Of the checkpoint to go on from.
        folders: All checkpoints that will be kept.

    Raises:
        ConfigError: They are not the run's directories, or are in use, or a checkpoint was forgotten.
        FormatError: A file was cut short.
        CapacityError: There is no room for more copies.
    """
    locks = lock_directories(prepare_directories(directories))
    try:
        owner = _check_owners(locks, manifest, folders)
        _check_sizes(locks, layout.with_copies(manifest.copies))
        _reserve_all(locks, layout)
        yield locks, renew(owner)
    except BaseException:
        for lock in locks:
            lock.release(refused=True)
        raise


def space_needs(
    directories: Sequence[Path], layout: StoreLayout, purpose: str = "states"
) -> list[Need]:
    """Return what a store will take in each directory, for `space.check_space`."""
    sizes = layout.directory_bytes
    return [
        Need(directory / STATES_NAME, size, purpose)
        for directory, size in zip(directories, sizes, strict=True)
    ]


def _reserve_all(locks: Sequence[DirectoryLock], layout: StoreLayout) -> None:
    for lock, size in zip(locks, layout.directory_bytes, strict=True):
        kind = mount_of(lock.directory).kind
        warning = kind_warning(lock.directory, kind)
        # Of memory backends warn themselves, also where model files are on it.
        if warning and kind not in IN_MEMORY:
            logger.warning("%s", warning)
        reserve(lock.states_path, size)


def _check_sizes(locks: Sequence[DirectoryLock], layout: StoreLayout) -> None:
    """Find files that were cut short since the checkpoint was made."""
    for lock, size in zip(locks, layout.versioned_directory_bytes, strict=True):
        found = lock.states_path.stat().st_size
        if found < size:
            raise FormatError(
                f"{lock.states_path} has {found} bytes, the checkpoint needs {size}: it was cut short. "
                "Resume from an intact checkpoint."
            )


def _check_owners(
    locks: Sequence[DirectoryLock], manifest: Manifest, folders: Sequence[Path]
) -> Owner:
    """Make sure that the directories are those of the run and that no checkpoint is forgotten."""
    owners = [
        lock.check_resumable(manifest.run_id, index, len(locks), manifest.layout)
        for index, lock in enumerate(locks)
    ]
    given = {os.path.realpath(path) for path in folders}
    for name in owners[0].checkpoints:
        if Path(name).is_dir() and os.path.realpath(name) not in given:
            raise ConfigError(
                f"{name} has its states in the same swap directories and would be destroyed. "
                "Keep it in output_dir to go on from another checkpoint, or remove it."
            )
    return owners[0]
