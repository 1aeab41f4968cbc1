"""What this machine can do, as measured numbers: drives, memory, AdamW, matrix products.

`measure` takes the figures, `cached` takes them only if the machine or its software changed. The planner reads
them; nothing about results depends on them. How each figure is taken: `ssdtune.hardware.drives` and
`ssdtune.hardware.compute`; for people: `ssdtune.hardware.table`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ssdtune.errors import StorageError
from ssdtune.hardware import compute
from ssdtune.hardware.drives import (
    Clock,
    DirectoryProfile,
    existing_parent,
    measure_directory,
)
from ssdtune.io.select import open_backend, probe_backends

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
DEFAULT_SECONDS = 8.0
QUICK_SECONDS = 2.5

_SHARES = {"drives": 0.5, "memory": 0.05, "adam": 0.2, "matmul": 0.25}


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """All figures; rates are per second.

    Attributes:
        machine_id: Hash of what the figures depend on; see `machine_id`.
        machine: Processor, cores, memory and versions, for people.
        measured_at: When, in UTC, as ISO 8601.
        backend: I/O backend that measured the drives; `queue_depth` and `request_bytes` are its settings.
        backends: All I/O backends: "" for those that work, else why not.
        directories: One for each directory that was asked for, in order.
        memory_bytes_per_s: Copying with all cores; a copied byte counts two.
        adam_parameters_per_s: By number of threads.
        matmul_flop_per_s: By device, then dtype.
    """

    schema_version: int = SCHEMA_VERSION
    machine_id: str
    machine: Mapping[str, str | int]
    measured_at: str
    backend: str
    queue_depth: int
    request_bytes: int
    backends: Mapping[str, str]
    directories: tuple[DirectoryProfile, ...]
    memory_bytes_per_s: float
    adam_parameters_per_s: Mapping[str, float]
    matmul_flop_per_s: Mapping[str, Mapping[str, float]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self) | {"directories": [asdict(d) for d in self.directories]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HardwareProfile:
        """Return the profile that `to_dict` described. Keys that later versions added are passed over.

        Raises:
            ValueError: It is of another schema, or damaged.
        """
        try:
            if values["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema_version is {values['schema_version']}")
            known = {f.name: values[f.name] for f in fields(cls)}
            names = [f.name for f in fields(DirectoryProfile)]
            known["directories"] = tuple(
                DirectoryProfile(**{name: entry[name] for name in names})
                for entry in values["directories"]
            )
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a hardware profile: {error!r}") from error

    def text(self) -> str:
        """Return a table for people."""
        from ssdtune.hardware.table import render

        return render(self)


def measure(
    directories: Sequence[Path],
    *,
    quick: bool = False,
    seconds: float | None = None,
    backend: str = "auto",
    queue_depth: int = 16,
    request_bytes: int = 1 << 20,
    direct: bool = True,
    clock: Clock = time.perf_counter,
) -> HardwareProfile:
    """Measure this machine and the drives under some directories.

    Args:
        directories: Directories on the drives; several on one file system are measured once.
        quick: Take less time, for rougher figures.
        seconds: Time for everything together, besides importing torch.
        backend: I/O backend; "auto" for the best that works.
        direct: Bypass the page cache.

    Raises:
        BackendUnavailableError: The backend that was asked for does not work.
        ConfigError: A directory can't be written to.
    """
    total = seconds if seconds is not None else QUICK_SECONDS if quick else DEFAULT_SECONDS
    directories = [Path(directory) for directory in directories]
    engine = open_backend(backend, queue_depth=queue_depth, request_bytes=request_bytes)
    try:
        drives = _measure_drives(directories, engine, total * _SHARES["drives"], direct, clock)
    finally:
        engine.close()
    return HardwareProfile(
        machine_id=machine_id(directories),
        machine=describe_machine(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        backend=engine.name,
        queue_depth=queue_depth,
        request_bytes=request_bytes,
        backends={probe.name: probe.reason for probe in probe_backends()},
        directories=drives,
        memory_bytes_per_s=compute.memory_bandwidth(seconds=total * _SHARES["memory"], clock=clock),
        adam_parameters_per_s=compute.adam_rates(seconds=total * _SHARES["adam"], clock=clock),
        matmul_flop_per_s=compute.matmul_rates(seconds=total * _SHARES["matmul"], clock=clock),
    )


def cached(directories: Sequence[Path], path: Path, **options: Any) -> HardwareProfile:
    """Return the profile in a file if it is of this machine, else measure and write it there.

    Args:
        path: The file, such as profile.json in the user's cache folder.
        **options: Of `measure`.
    """
    profile = load(path)
    wanted = [str(directory) for directory in directories]
    if (
        profile is not None
        and profile.machine_id == machine_id(directories)
        and [directory.path for directory in profile.directories] == wanted
    ):
        return profile
    logger.info("Measuring this machine, once; the figures are kept in %s.", path)
    profile = measure(directories, **options)
    try:
        save(profile, path)
    except StorageError as error:  # the figures are good without the file
        logger.warning("%s They will be taken again next time.", error)
    return profile


def load(path: Path) -> HardwareProfile | None:
    """Return the profile in a file; None if there is none, or none that this version can read."""
    try:
        return HardwareProfile.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        logger.debug("no profile from %s: %s", path, error)
        return None


def save(profile: HardwareProfile, path: Path) -> None:
    """Write a profile; a reader sees the old file or the new one, never a part.

    Raises:
        StorageError: The file can't be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(profile.to_dict(), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StorageError("write", path, errno=error.errno or 0) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def machine_id(directories: Sequence[Path], *, root: Path = Path("/")) -> str:
    """Return a hash of what the figures depend on: the machine, the versions, and the drives.

    Args:
        root: Directory that stands for `/` when the machine is looked at.
    """
    devices = [existing_parent(Path(directory)).stat().st_dev for directory in directories]
    facts = [describe_machine(root), devices, SCHEMA_VERSION]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def describe_machine(root: Path = Path("/")) -> dict[str, str | int]:
    """Return processor, cores, memory and versions."""
    import ssdtune

    def find(file: str, pattern: str) -> str:
        try:
            match = re.search(pattern, (root / file).read_text(errors="replace"), re.MULTILINE)
        except OSError:
            return ""
        return match.group(1).strip() if match else ""

    return {
        "cpu": find("proc/cpuinfo", r"^model name\s*:\s*(.+)$") or platform.machine(),
        "cores": compute.num_cores(),
        "memory_bytes": int(find("proc/meminfo", r"^MemTotal:\s+(\d+) kB") or 0) << 10,
        "ssdtune": ssdtune.__version__,
        "torch": _version("torch"),
    }


def _measure_drives(
    directories: Sequence[Path], engine: Any, seconds: float, direct: bool, clock: Clock
) -> tuple[DirectoryProfile, ...]:
    devices = [existing_parent(directory).stat().st_dev for directory in directories]
    share = seconds / max(1, len(set(devices)))
    by_device: dict[int, DirectoryProfile] = {}
    for directory, device in zip(directories, devices, strict=True):
        if device not in by_device:
            by_device[device] = measure_directory(
                directory, engine, seconds=share, direct=direct, clock=clock
            )
    return tuple(
        replace(by_device[device], path=str(directory))
        for directory, device in zip(directories, devices, strict=True)
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
