"""Is there room, and keeping it: free bytes per file system, refusal with numbers, real reservation.

Nothing here knows what a unit is. The caller sums up what a whole run will write and asks once, before
anything is written. Read `ssdtune.store.directories` next.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ssdtune.errors import CapacityError, StorageError
from ssdtune.io.backend import ALIGNMENT
from ssdtune.io.mounts import existing_parent, mount_of
from ssdtune.units import format_disk

logger = logging.getLogger(__name__)

MARGIN_BYTES = 256 << 20
"""What `check_space` leaves free on every drive, for logs and for everybody else."""


class Need(NamedTuple):
    """Bytes that something will take at a path, which need not exist yet.

    If the path is a file that exists, what it holds already is counted as room.
    """

    path: Path
    nbytes: int
    purpose: str


@dataclass(frozen=True)
class FileSystem:
    """The file system that a path is on, or will be on.

    Attributes:
        device: Number that tells file systems apart (st_dev).
        mount_point: Where it is mounted.
        type: Name such as "ext4" or "tmpfs", or "unknown".
        free_bytes: What an ordinary user may still write.
    """

    device: int
    mount_point: Path
    type: str
    free_bytes: int


def file_system_of(path: Path) -> FileSystem:
    """Return the file system of a path, or of its nearest existing parent.

    Raises:
        StorageError: It cannot be asked.
    """
    try:
        path = existing_parent(path)
        device = path.stat().st_dev
        figures = os.statvfs(path)
    except OSError as error:
        raise StorageError("open", path, errno=error.errno or 0) from error
    mount = mount_of(path)
    return FileSystem(device, mount.point, mount.kind, figures.f_bavail * figures.f_frsize)


def check_space(needs: Iterable[Need | tuple[Path, int, str]]) -> None:
    """Refuse a run that won't fit, before it begins.

    Args:
        needs: Everything that the run will write; summed up per file system.

    Raises:
        CapacityError: Some file systems are too small; all of them are named, with numbers.
    """
    by_device: dict[int, list[Need]] = defaultdict(list)
    systems: dict[int, FileSystem] = {}
    for need in (Need(*n) for n in needs):
        system = file_system_of(need.path)
        systems.setdefault(system.device, system)
        by_device[system.device].append(need)
    problems = []
    for device, items in by_device.items():
        system = systems[device]
        needed = sum(need.nbytes for need in items)
        held = sum(_allocated_bytes(need.path) for need in items)
        missing = needed + MARGIN_BYTES - system.free_bytes - held
        if missing <= 0:
            continue
        what = ", ".join(f"{format_disk(n.nbytes)} for {n.purpose} in {n.path}" for n in items)
        kept = f" and {format_disk(held)} are held there by ssdtune's own files" if held else ""
        problems.append(
            f"not enough space on {system.mount_point} ({system.type}): "
            f"{format_disk(needed)} needed ({what}), {format_disk(system.free_bytes)} are free{kept}, "
            f"{format_disk(MARGIN_BYTES)} must stay free. "
            f"Free {format_disk(missing)} or more there, or name other or more drives"
        )
    if problems:
        raise CapacityError(
            "\n".join(problems)
            + " (swap_dirs, output_dir), lower save_total_limit, or set method: lora."
        )


def reserve(path: Path, nbytes: int) -> bool:
    """Make a file at least so long, with all its blocks allocated, so that no write meets a full drive.

    What the file holds stays; new bytes read as zero. Existing blocks are kept. The new size is durable.

    Returns:
        False if the file system cannot reserve; the file then has holes, and a warning was logged.

    Raises:
        CapacityError: There is no room, or the file would be larger than allowed.
        StorageError: Any other failure.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError("open", path, errno=error.errno or 0) from error
    before = os.fstat(descriptor)
    try:
        free = file_system_of(path).free_bytes
        # Asked first: a failing allocation takes all that is free before it fails, from others too.
        if nbytes - before.st_blocks * 512 > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        code = _fallocate(descriptor, nbytes) if nbytes else 0
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            logger.warning(
                "%s: the file system cannot reserve space; the run may find the drive full later.",
                path,
            )
            if before.st_size < nbytes:
                os.ftruncate(descriptor, nbytes)
        elif code:
            # What was allocated before the failure is kept by some file systems: give it back.
            os.ftruncate(descriptor, before.st_size + ALIGNMENT)
            os.ftruncate(descriptor, before.st_size)
            raise OSError(code, os.strerror(code))
        os.fsync(descriptor)
        return code == 0
    except OSError as error:
        raise _cannot_reserve(path, nbytes, error) from error
    finally:
        os.close(descriptor)


def _cannot_reserve(path: Path, nbytes: int, error: OSError) -> Exception:
    """Make the error for a file that could not be reserved."""
    start = f"cannot reserve {format_disk(nbytes)} for {path}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = format_disk(file_system_of(path).free_bytes)
        return CapacityError(
            f"{start}: {free} are free [{errno.errorcode[error.errno]}]. Free space there, or name other "
            "or more drives in swap_dirs."
        )
    if error.errno == errno.EFBIG:
        return CapacityError(
            f'{start}: larger than a file may be there [EFBIG]. Check "ulimit -f", or name more or other '
            "directories in swap_dirs."
        )
    if isinstance(error, StorageError):
        return error
    return StorageError("allocate", path, errno=error.errno or 0, wanted=nbytes)


def _fallocate(descriptor: int, nbytes: int) -> int:
    """Allocate blocks and return an errno.

    Not `os.posix_fallocate`: the C library's version writes to every block where the file system has no
    such call, which takes hours for the sizes used here.
    """
    library = ctypes.CDLL(None, use_errno=True)
    call = getattr(library, "fallocate64", None) or library.fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    call.restype = ctypes.c_int
    while True:
        if call(descriptor, 0, 0, nbytes) == 0:
            return 0
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code


def _allocated_bytes(path: Path) -> int:
    """Return the bytes of blocks that a file holds; 0 if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
