"""What is known about a directory without measuring: file system, space, drives, wear, and what to warn of.

Everything is read from the kernel, except reflinks, which are tried on two files without a name, and wear counters,
for which `smartctl` is asked if it is installed. `ssdtune.hardware.drives` measures.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path

from ssdtune.errors import ConfigError
from ssdtune.hardware.figures import DriveFacts
from ssdtune.io.mounts import kind_warning, mount_of

_FICLONE = 0x40049409  # linux/fs.h
_SMARTCTL_SECONDS = 5


def open_nameless(place: Path) -> int:
    """Open a new file without a name for reading and writing; whatever happens, nothing is left behind.

    Returns:
        Its descriptor, to be closed by the caller.

    Raises:
        ConfigError: No file can be made there.
    """
    with contextlib.suppress(OSError):  # not every file system has files that never had a name
        return os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    path = place / f".ssdtune-profile-{secrets.token_hex(8)}"
    try:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot measure {place}: {os.strerror(error.errno or 0).lower()}. Name a directory on the drive "
            "that you may write to."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def has_reflink(place: Path) -> bool | None:
    """Say whether files there can share their blocks; None if that can't be tried.

    Raises:
        ConfigError: No file can be made there.
    """
    with contextlib.ExitStack() as stack:
        source, target = (open_nameless(place) for _ in range(2))
        stack.callback(os.close, source)
        stack.callback(os.close, target)
        try:
            os.pwrite(source, bytes(4096), 0)
            fcntl.ioctl(target, _FICLONE, source)
        except OSError as error:
            no = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS)
            return False if error.errno in no else None
        return True


def warnings_for(place: Path, file_system: str, drives: tuple[DriveFacts, ...]) -> tuple[str, ...]:
    """Return what a user should know about keeping states in this place."""
    warning = kind_warning(place, file_system)
    found = [warning] if warning else []
    for drive in drives:
        if drive.rotational and not re.match(r"(vd|xvd|zram)", drive.name):
            found.append(
                f"{place}: {drive.name} is a spinning disk; training would wait for it. Use an SSD."
            )
        if drive.wear_share is not None and drive.wear_share >= 0.9:
            found.append(
                f"{place}: {drive.wear_share:.0%} of the rated endurance of {drive.name} are used up. Full "
                "fine-tuning writes 12 bytes per parameter and step; use another drive or LoRA."
            )
    return tuple(found)


def drives_of(place: Path, *, sys_root: Path = Path("/sys")) -> tuple[DriveFacts, ...]:
    """Return the drives under a directory, through partitions, LVM and RAID; empty if the kernel names none.

    Args:
        sys_root: Directory that stands for `/sys`.
    """
    number = place.stat().st_dev
    names = _names_of(sys_root, os.major(number), os.minor(number))
    if not names:  # btrfs and others have numbers of their own; what is mounted may be a device
        source = mount_of(place).source
        with contextlib.suppress(OSError):
            number = Path(source).stat().st_rdev if source.startswith("/dev/") else 0
            names = _names_of(sys_root, os.major(number), os.minor(number)) if number else []
    return tuple(drive_facts(name, sys_root=sys_root) for name in names)


def drive_facts(name: str, *, sys_root: Path = Path("/sys")) -> DriveFacts:
    """Return what `/sys/block` and, for wear, `smartctl` say about a drive."""
    block = sys_root / "block" / name
    rotational = _read(block / "queue/rotational")
    chosen = re.search(r"\[([\w-]+)\]", scheduler := _read(block / "queue/scheduler"))
    written, share, note = _wear(name)
    return DriveFacts(
        name=name,
        model=_read(block / "device/model"),
        size_bytes=512 * _number(block / "size"),
        rotational={"0": False, "1": True}.get(rotational),
        scheduler=chosen.group(1) if chosen else scheduler,
        num_requests=_number(block / "queue/nr_requests"),
        max_request_bytes=1024 * _number(block / "queue/max_sectors_kb"),
        write_cache=_read(block / "queue/write_cache"),
        temperature_c=_temperature(block),
        wear_share=share,
        written_bytes=written,
        wear_note=note,
    )


def parse_smartctl(text: str) -> tuple[int | None, float | None]:
    """Return bytes written and share of endurance used up from `smartctl --json -A`, where it gives them."""
    try:
        values = json.loads(text)
        log = values.get("nvme_smart_health_information_log", {})
        units, used = log.get("data_units_written"), log.get("percentage_used")
        return (
            None if units is None else int(units) * 512_000,  # NVMe counts thousands of 512 bytes
            None if used is None else int(used) / 100,
        )
    except (ValueError, TypeError, AttributeError):
        return None, None


def _wear(name: str) -> tuple[int | None, float | None, str]:
    program = shutil.which("smartctl")
    if not program:
        return None, None, "wear counters need smartctl (package smartmontools)"
    try:
        result = subprocess.run(
            [program, "--json", "-A", f"/dev/{name}"],
            capture_output=True, text=True, timeout=_SMARTCTL_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None, None, "smartctl does not answer"
    written, share = parse_smartctl(result.stdout)
    if written is None and share is None:
        return (
            None,
            None,
            "smartctl gives no wear counters; it needs root, and a drive that has them",
        )
    return written, share, ""


def _names_of(sys_root: Path, major: int, minor: int) -> list[str]:
    node = sys_root / "dev/block" / f"{major}:{minor}"
    if not node.exists():
        return []
    return _physical(node.resolve())


def _physical(node: Path) -> list[str]:
    if (node / "partition").exists():
        node = node.parent
    slaves = sorted((node / "slaves").iterdir()) if (node / "slaves").is_dir() else []
    names = [name for slave in slaves for name in _physical(slave.resolve())]
    return list(dict.fromkeys(names)) or [node.name]


def _temperature(block: Path) -> float | None:
    for pattern in (
        "device/hwmon*/temp1_input",
        "device/hwmon/hwmon*/temp1_input",
        "device/device/hwmon*/temp1_input",
    ):
        for path in block.glob(pattern):
            text = _read(path)
            if text.isdigit():
                return int(text) / 1000
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _read(path)
    return int(text) if text.isdigit() else 0
