"""Which machine this is: what the figures of a profile depend on, and its hash."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from ssdtune.hardware.compute import num_cores
from ssdtune.io.mounts import existing_parent

KVIKIO = ("kvikio-cu13", "kvikio-cu12")
_MEMORY_GRAIN = 256 << 20
"""Kernels of different versions keep a few MiB more or less for themselves."""


def machine_id(directories: Sequence[Path], *, root: Path = Path("/")) -> str:
    """Return a hash of what the figures depend on: the machine, the versions, and the drives.

    Args:
        root: Directory that stands for `/` when the machine is looked at.
    """
    machine = describe_machine(root)
    machine["memory_bytes"] = int(machine["memory_bytes"]) // _MEMORY_GRAIN
    devices = [existing_parent(Path(directory)).stat().st_dev for directory in directories]
    return hashlib.sha256(json.dumps([machine, devices], sort_keys=True).encode()).hexdigest()[:16]


def describe_machine(root: Path = Path("/")) -> dict[str, str | int]:
    """Return processor, cores, memory, cards and versions."""
    import ssdtune

    def find(file: Path, pattern: str) -> str:
        try:
            match = re.search(pattern, file.read_text(errors="replace"), re.MULTILINE)
        except OSError:
            return ""
        return match.group(1).strip() if match else ""

    cards = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    found: dict[str, str | int] = {
        "cpu": find(root / "proc/cpuinfo", r"^model name\s*:\s*(.+)$") or platform.machine(),
        "cores": num_cores(),
        "memory_bytes": int(find(root / "proc/meminfo", r"^MemTotal:\s+(\d+) kB") or 0) << 10,
        "cards": ", ".join(find(card, r"^Model:\s*(.+)$") for card in cards),
        "ssdtune": ssdtune.__version__,
        "torch": _version("torch"),
    }
    if cards:  # kvikio moves bytes to them
        found["kvikio"] = ", ".join(f"{name} {_version(name)}" for name in KVIKIO)
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
