"""Free host memory as told by fake `/proc` and `/sys` trees, and by this machine's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssdtune.errors import ConfigError
from ssdtune.hardware.memory import (
    KeptMemory,
    available_host_memory,
    lockable_memory,
    map_large_blocks,
    process_memory,
)
from ssdtune.units import GIB, MIB

V2_MOUNT = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


class FakeSystem:
    """A tree of files that stands for `/`; all sizes in bytes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def meminfo(self, available: int) -> None:
        self.write(
            "proc/meminfo",
            f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB\n",
        )

    def v2(self, path: str, own: str, limits: dict[str, str], *, mount_root: str = "/") -> None:
        """Describe one cgroup v2 directory; `own` is the process's cgroup."""
        self.write("proc/self/cgroup", f"0::{own}\n")
        self.write("proc/self/mountinfo", V2_MOUNT.format(root=mount_root))
        for name, text in limits.items():
            self.write(f"sys/fs/cgroup{path}/{name}", text)


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    fake = FakeSystem(tmp_path)
    fake.meminfo(32 * GIB)
    return fake


def test_without_cgroups_the_system_decides(system: FakeSystem) -> None:
    limit = available_host_memory(system.root)
    assert limit.bytes == 32 * GIB
    assert "MemAvailable" in limit.source


def test_old_kernel_counts_free_and_cache(system: FakeSystem) -> None:
    system.write("proc/meminfo", "MemFree: 100 kB\nBuffers: 20 kB\nCached: 50 kB\nShmem: 30 kB\n")
    assert available_host_memory(system.root).bytes == 140 << 10


def test_v2_limit_minus_use_plus_file_cache(system: FakeSystem) -> None:
    system.v2(
        "",
        "/",
        {
            "memory.max": str(4 * GIB),
            "memory.high": "max\n",
            "memory.current": str(3 * GIB),
            "memory.stat": f"anon {1 * GIB}\nfile {2 * GIB}\nshmem {512 * MIB}\n"
            f"active_file {1 * GIB}\ninactive_file {512 * MIB}\nslab_reclaimable 0\n",
        },
    )
    limit = available_host_memory(system.root)
    assert limit.bytes == int(2.5 * GIB)
    assert limit.source == "memory.max of cgroup /: 4.00 GiB, 1.50 GiB in use"


@pytest.mark.parametrize("tightest", ["/", "/a", "/a/b c"])
def test_v2_every_directory_of_the_path_counts(system: FakeSystem, tightest: str) -> None:
    for path in ("", "/a", "/a/b c"):
        limit = 2 * GIB if (path or "/") == tightest else 8 * GIB
        system.v2(path, "/a/b c", {"memory.max": str(limit), "memory.current": str(GIB)})
    result = available_host_memory(system.root)
    assert result.bytes == GIB
    assert f"cgroup {tightest}:" in result.source


def test_v2_a_parent_that_others_fill_counts(system: FakeSystem) -> None:
    system.v2("/a", "/a/b", {"memory.max": str(10 * GIB), "memory.current": str(9 * GIB)})
    system.v2("/a/b", "/a/b", {"memory.max": str(4 * GIB), "memory.current": str(GIB)})
    assert available_host_memory(system.root).bytes == GIB


def test_v2_memory_high_counts(system: FakeSystem) -> None:
    limits = {"memory.max": "max\n", "memory.high": str(GIB), "memory.current": "0"}
    system.v2("/a", "/a", limits)
    assert available_host_memory(system.root).bytes == GIB


def test_v2_max_is_no_limit(system: FakeSystem) -> None:
    system.v2(
        "/a", "/a", {"memory.max": "max\n", "memory.high": "max\n", "memory.current": str(GIB)}
    )
    assert available_host_memory(system.root).bytes == 32 * GIB


def test_use_above_the_limit_leaves_nothing(system: FakeSystem) -> None:
    system.v2("/a", "/a", {"memory.max": str(GIB), "memory.current": str(2 * GIB)})
    assert available_host_memory(system.root).bytes == 0


def test_without_a_usage_file_the_process_itself_is_the_use(system: FakeSystem) -> None:
    system.write("proc/self/status", f"VmRSS:  {256 << 10} kB\n")
    system.v2("/a", "/a", {"memory.max": str(GIB)})
    assert available_host_memory(system.root).bytes == 768 * MIB


@pytest.mark.parametrize(
    ("own", "mount_root"),
    [
        ("/", "/"),
        ("/docker/abc", "/docker/abc"),
        ("/docker/abc", "/"),
        ("/../x", "/"),
        ("/", "/../.."),
    ],
)
def test_namespaces_that_show_only_the_mount_point(
    system: FakeSystem, own: str, mount_root: str
) -> None:
    system.v2(
        "", own, {"memory.max": str(GIB), "memory.current": str(256 * MIB)}, mount_root=mount_root
    )
    assert available_host_memory(system.root).bytes == 768 * MIB


def test_mount_of_a_part_of_the_hierarchy(system: FakeSystem) -> None:
    system.v2(
        "/job", "/slice/job", {"memory.max": str(GIB), "memory.current": "0"}, mount_root="/slice"
    )
    limit = available_host_memory(system.root)
    assert limit.bytes == GIB
    assert "cgroup /job:" in limit.source


def test_v1_limits_and_cache(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n")
    system.write("proc/self/mountinfo", V1_MOUNT.format(root="/"))
    base = "sys/fs/cgroup/memory"
    system.write(f"{base}/memory.limit_in_bytes", "9223372036854771712\n")
    system.write(f"{base}/a/memory.limit_in_bytes", str(6 * GIB))
    system.write(f"{base}/a/memory.usage_in_bytes", str(5 * GIB))
    system.write(
        f"{base}/a/memory.stat",
        f"total_active_file {GIB}\ntotal_inactive_file {GIB}\ncache {4 * GIB}\n",
    )
    system.write(f"{base}/a/b/memory.limit_in_bytes", "9223372036854771712\n")
    limit = available_host_memory(system.root)
    assert limit.bytes == 3 * GIB
    assert "cgroup /a:" in limit.source


def test_v1_limit_of_an_ancestor_outside_the_namespace(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "4:memory:/\n")
    system.write("proc/self/mountinfo", V1_MOUNT.format(root="/"))
    base = "sys/fs/cgroup/memory"
    system.write(f"{base}/memory.limit_in_bytes", "9223372036854771712\n")
    system.write(f"{base}/memory.usage_in_bytes", str(GIB))
    system.write(f"{base}/memory.stat", f"hierarchical_memory_limit {3 * GIB}\n")
    assert available_host_memory(system.root).bytes == 2 * GIB


def test_hybrid_systems_use_the_hierarchy_that_has_memory(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "4:memory:/a\n0::/b\n")
    system.write(
        "proc/self/mountinfo",
        V1_MOUNT.format(root="/")
        + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        + "36 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n",
    )
    system.write("sys/fs/cgroup/unified/b/cgroup.procs", "1\n")
    system.write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", str(GIB))
    system.write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "0\n")
    assert available_host_memory(system.root).bytes == GIB


def test_mount_points_with_escaped_spaces(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "0::/\n")
    system.write("proc/self/mountinfo", "1 2 0:1 / /my\\040groups rw - cgroup2 none rw\n")
    system.write("my groups/memory.max", str(GIB))
    system.write("my groups/memory.current", "0")
    assert available_host_memory(system.root).bytes == GIB


def test_address_space_limit(system: FakeSystem) -> None:
    system.write(
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units\n"
        f"Max locked memory         65536                65536                bytes\n"
        f"Max address space         {5 * GIB}           unlimited            bytes\n",
    )
    system.write("proc/self/status", f"VmSize: {1 << 20} kB\nVmRSS: 4 kB\n")
    limit = available_host_memory(system.root)
    assert limit.bytes == 4 * GIB
    assert "ulimit -v" in limit.source
    assert lockable_memory(system.root) == 65536


def test_damaged_files_set_no_limit(system: FakeSystem) -> None:
    system.write("proc/self/cgroup", "nonsense\n4\n")
    system.write("proc/self/mountinfo", "nonsense\n1 2 3\n - cgroup2\n")
    assert available_host_memory(system.root).bytes == 32 * GIB


def test_nothing_known_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Set host_memory"):
        available_host_memory(tmp_path)


def test_this_machine() -> None:
    limit = available_host_memory()
    assert 0 < limit.bytes < 1 << 60
    before = process_memory()
    block = bytearray(64 * MIB)
    block[::4096] = b"x" * len(block[::4096])
    after = process_memory()
    assert 0 < before.rss_bytes <= before.peak_rss_bytes
    assert after.peak_rss_bytes >= after.rss_bytes >= before.rss_bytes + 60 * MIB
    assert lockable_memory() is None or lockable_memory() >= 0


def test_freed_memory_stays_only_as_far_as_it_was_planned() -> None:
    kept = KeptMemory(1 << 50)
    try:
        held = []
        for _ in range(64):
            torch.ones(1 << 18)  # 1 MiB each, with something small behind it
            held.append(torch.ones(1 << 18))
            held.append(torch.ones(64))
        del held[::2]
        before = process_memory().rss_bytes
        kept.check()
        assert process_memory().rss_bytes >= before - (8 << 20)
        KeptMemory(before - (1 << 20)).check()
        assert process_memory().rss_bytes < before - (32 << 20)
    finally:
        map_large_blocks()
