"""How much host memory this process may still take, how much it has, and how much it may lock.

Containers are limited by cgroups, not by the machine's total, and a limit may sit on any directory between the
process's cgroup and the root. Everything is read from `/proc` and `/sys`; `root` lets tests put other files in
their place. Swap space is not counted: a page that must be swapped in costs more than the streaming it saves.
Read `ssdtune.hardware.profile` next.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ssdtune.errors import ConfigError
from ssdtune.units import format_memory

LARGE_BLOCK_BYTES = 1 << 20
KERNEL_BYTES = 800 << 10
"""What oneDNN keeps of a product that it has compiled: measured 487 to 716 KiB, and the gaps that dropped ones leave."""
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_ROOT = Path("/")
_STATM = Path("/proc/self/statm")
_NO_LIMIT = 1 << 60
"""Limits from here on mean "none"; cgroup v1 writes it as the largest multiple of a page in 63 bits."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory that the process can take in addition to what it has.

    Attributes:
        bytes: How much.
        source: What sets the limit, for people.
        total_bytes: How much there is, whoever has it now.
    """

    bytes: int
    source: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident memory of this process: now, and the most it ever had."""

    rss_bytes: int
    peak_rss_bytes: int


def available_host_memory(root: Path = _ROOT) -> MemoryLimit:
    """Return the smallest of what the system, every cgroup on the path and `ulimit -v` still allow.

    A cgroup allows its limit minus what it uses, plus its file cache, which the kernel gives up first.

    Args:
        root: Directory that stands for `/`.

    Raises:
        ConfigError: No figure can be found at all.
    """
    limits = _limits(root)
    if not limits:
        raise ConfigError(
            "cannot tell how much host memory is free: no MemAvailable in /proc/meminfo and no cgroup limit. "
            "Set host_memory."
        )
    return min(limits, key=lambda limit: limit.bytes)


def total_host_memory(root: Path = _ROOT) -> MemoryLimit | None:
    """Return what limits the memory of this process even if nobody else needs any: the machine, a cgroup, `ulimit -v`.

    None if no figure can be found.
    """
    return min(_limits(root), key=lambda limit: limit.total_bytes, default=None)


def process_memory(root: Path = _ROOT) -> ProcessMemory:
    """Return this process's resident memory, from the kernel's own accounting."""
    status = _read_table(root / "proc/self/status")
    rss = status.get("VmRSS", 0)
    # Some sandboxes have no VmHWM; getrusage then knows the peak (in KiB).
    peak = status.get("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return ProcessMemory(rss, max(rss, peak))


def return_memory() -> None:
    """Give freed memory back to the system (glibc keeps it otherwise)."""
    gc.collect()
    _trim()


def _trim() -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def map_large_blocks() -> None:
    """Let every large tensor have pages of its own, which go back to the system as soon as it is freed.

    Otherwise glibc raises the limit above which it does so to 32 MiB, and below it the peak of a step's temporary
    tensors depends on chance and on what lies between them: at 134M parameters it varied by 140 MiB from run to run, with
    this by 2 MiB. The price is page faults, a quarter of compute on a CPU: see `keep_freed_memory`.
    """
    _mallopt((_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES), (_M_TRIM_THRESHOLD, 128 << 10))


def keep_freed_memory() -> None:
    """Let the memory of freed tensors stay with the process, for the next ones: no page faults once a step has run.

    It takes more memory than is in use at once, for tensors of many sizes leave gaps
    (`ssdtune.train.prepare.GAPS`).
    """
    # Older versions of glibc take no more than 32 MiB.
    _mallopt((_M_MMAP_THRESHOLD, 32 << 20), (_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, -1))


class KeptMemory:
    """Lets freed memory stay with the process (`keep_freed_memory`) as long as all that it has is within the plan.

    How large the gaps get differs from run to run; here it cannot exceed what was planned for them.

    Args:
        most_bytes: Resident memory above which freed memory goes back.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        keep_freed_memory()

    def check(self) -> None:
        """Give freed memory back if there is too much; some microseconds if there is not."""
        pages = int(_STATM.read_bytes().split()[1])
        if pages * resource.getpagesize() > self._most_bytes:
            _trim()


def _mallopt(*settings: tuple[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL("libc.so.6")
        for parameter, value in settings:
            library.mallopt(parameter, value)


def prefer_huge_pages() -> None:
    """Let torch ask for huge pages for its large tensors. It looks once, so call this before torch is imported."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def bound_kernels(most: int) -> int:
    """Let oneDNN keep at most so many products of matrices of different shapes that it has compiled for bf16.

    It would keep 1024 of them, `KERNEL_BYTES` each, and as many descriptions of them, which need not be kept at all: rows of
    many lengths took 20 MiB for each. It looks once, before its first product in a process; what the user set stays.

    Returns:
        How many it keeps.
    """
    os.environ.setdefault("LRU_CACHE_CAPACITY", "1")
    kept = os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(most))
    return int(kept) if kept.isdigit() else 1024


def lockable_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes that may be locked in memory (RLIMIT_MEMLOCK); None for no limit."""
    return _resource_limit(root, "Max locked memory")


def _limits(root: Path) -> list[MemoryLimit]:
    return [*_system_limit(root), *_address_space_limit(root), *_cgroup_limits(root)]


def _system_limit(root: Path) -> Iterator[MemoryLimit]:
    table = _read_table(root / "proc/meminfo")
    total = table.get("MemTotal", _NO_LIMIT)
    if "MemAvailable" in table:
        yield MemoryLimit(table["MemAvailable"], "MemAvailable of the system", total)
    elif "MemFree" in table:
        # Kernels before 3.14; page cache counts as free, except shared memory.
        cache = table.get("Cached", 0) + table.get("Buffers", 0) - table.get("Shmem", 0)
        free = table["MemFree"] + max(0, cache)
        yield MemoryLimit(free, "MemFree and page cache of the system", total)


def _address_space_limit(root: Path) -> Iterator[MemoryLimit]:
    limit = _resource_limit(root, "Max address space")
    if limit is not None:
        used = _read_table(root / "proc/self/status").get("VmSize", 0)
        yield MemoryLimit(
            max(0, limit - used),
            f"ulimit -v: {format_memory(limit)} of address space, {format_memory(used)} in use",
            limit,
        )


def _resource_limit(root: Path, name: str) -> int | None:
    match = re.search(
        rf"^{re.escape(name)}\s+(\d+)\s", _read_text(root / "proc/self/limits"), re.MULTILINE
    )
    return int(match.group(1)) if match else None


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    for version, directory, name in _cgroup_directories(root):
        stat = _read_table(directory / "memory.stat", unit=1)
        files: tuple[str, ...]
        cache: tuple[str, ...]
        if version == 2:
            files = (
                "memory.max",
                "memory.high",
            )  # above memory.high the kernel throttles the process
            used = _read_number(directory / "memory.current")
            cache = ("active_file", "inactive_file", "slab_reclaimable")
        else:
            files = ("memory.limit_in_bytes",)
            used = _read_number(directory / "memory.usage_in_bytes")
            cache = ("total_active_file", "total_inactive_file")
        found = [(file, _read_number(directory / file)) for file in files]
        if version == 1:
            # The smallest limit of all ancestors, also of those outside of a cgroup namespace.
            found.append(("hierarchical_memory_limit", stat.get("hierarchical_memory_limit")))
        if used is None:
            used = process_memory(root).rss_bytes
        reclaimable = min(used, sum(stat.get(key, 0) for key in cache))
        for file, limit in found:
            if limit is not None and limit < _NO_LIMIT:
                yield MemoryLimit(
                    max(0, limit - used + reclaimable),
                    f"{file} of cgroup {name}: {format_memory(limit)}, "
                    f"{format_memory(used - reclaimable)} in use",
                    limit,
                )


def _cgroup_directories(root: Path) -> Iterator[tuple[int, Path, str]]:
    """Yield (version, directory, name) of the process's memory cgroups and all their ancestors."""
    own = {}
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if number == "0" and not controllers:
            own[2] = path
        elif "memory" in controllers.split(","):
            own[1] = path
    for version, mount_root, mount_point in _cgroup_mounts(root):
        if version not in own:
            continue
        mount = root / mount_point.lstrip("/")
        inside = _relative_path(own[version], mount_root)
        for part in (inside, *inside.parents):
            # A path that the mount does not show (namespaces) still has ancestors that it may show.
            if (mount / part).is_dir():
                yield version, mount / part, str("/" / part)


def _cgroup_mounts(root: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (version, cgroup that is mounted, mount point) of each memory hierarchy."""
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        mount_root, mount_point = (_unescape(text) for text in (fields.split() + [""] * 5)[3:5])
        kind, _, options = (rest.split() + [""] * 3)[:3]
        if kind == "cgroup2":
            yield 2, mount_root, mount_point
        elif kind == "cgroup" and "memory" in options.split(","):
            yield 1, mount_root, mount_point


def _relative_path(own: str, mount_root: str) -> PurePosixPath:
    """Return the cgroup's path below the mount point; `.` (the mount point) where it is not below it."""
    path = PurePosixPath(own)
    if ".." in path.parts:
        return PurePosixPath(".")  # the process's cgroup lies outside of its namespace's root
    if path.is_relative_to(mount_root):
        return path.relative_to(mount_root)
    return path.relative_to("/") if path.is_absolute() else PurePosixPath(".")


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # missing, or not ours to read: then it sets no limit that we could know of
        return ""


def _read_number(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _read_table(path: Path, unit: int = 1024) -> dict[str, int]:
    """Parse lines such as `MemFree:  12 kB` or `file 4096` into bytes."""
    pairs = re.findall(r"^(\w+):?\s+(\d+)", _read_text(path), re.MULTILINE)
    return {key: int(value) * unit for key, value in pairs}
