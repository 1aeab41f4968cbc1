"""Which file system a path is on, by the kernel's table of mounts, and which kinds are a bad place for states.

Only reads. How much room there is: `ssdtune.store.space`; which drives lie underneath: `ssdtune.hardware.place`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
NETWORK = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs",
    "afs", "ocfs2", "gfs2", "fuse.sshfs", "fuse.s3fs", "fuse.glusterfs", "fuse.gcsfuse", "fuse.rclone",
})  # fmt: skip
OVERLAY = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs"})

_TABLE = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """A mounted file system: where, its kind such as "ext4", and what is mounted, such as "/dev/nvme0n1p2"."""

    point: Path
    kind: str
    source: str


def mount_of(path: Path) -> Mount:
    """Return the file system of a path, links resolved, by the longest mount point above it.

    Kind and source are "unknown" if the kernel does not say.
    """
    path = Path(os.path.realpath(path))
    best = Mount(Path("/"), "unknown", "unknown")
    try:
        lines = _TABLE.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return best
    for line in lines:
        left, _, right = line.partition(" - ")
        point = Path(_unescaped(left.split(" ")[4]))
        if path.is_relative_to(point) and len(point.parts) >= len(best.point.parts):
            kind, source = right.split(" ")[:2]
            best = Mount(point, kind, _unescaped(source))
    return best


def kind_warning(path: Path, kind: str) -> str | None:
    """Return what a user should know about keeping states on a kind of file system; None if nothing."""
    if kind in IN_MEMORY:
        return (
            f"{path} is on {kind}, which is memory and no drive: what is kept there takes the memory that it should "
            "save, and rates measured there say nothing about a drive. Name a directory on an SSD."
        )
    if kind in NETWORK:
        return (
            f"{path} is on {kind}, a network or host file system: every step moves all states over it, and its rate "
            "changes with what others do. Name a directory on a local NVMe drive."
        )
    if kind in OVERLAY:
        return (
            f"{path} is on {kind}, a container's own layer: it is slower than the drive, and what is kept there goes "
            "with the container. Mount a volume from a drive and name it."
        )
    if kind in COPY_ON_WRITE:
        return (
            f"{path} is on {kind}, which writes every change elsewhere: files of states fragment, and space reserved "
            "there is no guarantee that the drive will not be full later. Prefer ext4 or xfs, or switch it off for an "
            'empty folder with "chattr +C".'
        )
    if kind.startswith("fuse"):
        return (
            f"{path} is on {kind}: a program stands between ssdtune and the drive. Name a directory on a local file "
            "system such as ext4 or xfs."
        )
    return None


def existing_parent(path: Path) -> Path:
    """Return the path with links resolved, or its nearest parent that exists."""
    path = Path(os.path.realpath(path.expanduser()))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _unescaped(name: str) -> str:
    """Undo the table's octal escapes of blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), name)
