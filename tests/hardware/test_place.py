"""What is known of a directory without measuring: real mounts here, a made-up /sys for drives that aren't here."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ssdtune.errors import ConfigError
from ssdtune.hardware.figures import DriveFacts
from ssdtune.hardware.place import (
    drive_facts,
    drives_of,
    has_reflink,
    open_nameless,
    parse_smartctl,
    warnings_for,
)


def test_a_nameless_file_can_be_written_and_leaves_nothing(tmp_path: Path) -> None:
    descriptor = open_nameless(tmp_path)
    try:
        assert os.pwrite(descriptor, b"x", 0) == 1
        assert os.fstat(descriptor).st_nlink == 0
        assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
        assert list(tmp_path.iterdir()) == []
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_where_no_file_can_be_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot measure .*\. Name a directory on the drive"):
        open_nameless(tmp_path / name)


def test_reflinks_are_tried(tmp_path: Path) -> None:
    assert has_reflink(tmp_path) in (True, False)
    assert list(tmp_path.iterdir()) == []


def test_drives_that_are_warned_of() -> None:
    disk = DriveFacts(name="sda", rotational=True)
    virtual = DriveFacts(name="vda", rotational=True)  # virtio disks say so whatever they are
    worn = DriveFacts(name="nvme0n1", rotational=False, wear_share=0.93)
    found = warnings_for(Path("/swap"), "ext4", (disk, virtual, worn))
    assert len(found) == 2
    assert "memory and no drive" in warnings_for(Path("/swap"), "tmpfs", ())[0]
    assert "sda is a spinning disk" in found[0]
    assert "93%" in found[1]


def fake_sys(root: Path) -> Path:
    """An NVMe drive with two partitions, one of which is under a RAID."""
    drive = root / "block/nvme3n1"
    for path, text in {
        "device/model": "Fast 9000  \n", "device/hwmon4/temp1_input": "41850\n", "size": "2000000\n",
        "queue/rotational": "0\n", "queue/scheduler": "[none] mq-deadline\n", "queue/nr_requests": "1023\n",
        "queue/max_sectors_kb": "512\n", "queue/write_cache": "write back\n",
        "nvme3n1p1/partition": "1\n", "nvme3n1p2/partition": "2\n",
    }.items():  # fmt: skip
        (drive / path).parent.mkdir(parents=True, exist_ok=True)
        (drive / path).write_text(text)
    (root / "block/md0/slaves").mkdir(parents=True)
    (root / "block/md0/slaves/nvme3n1p2").symlink_to(drive / "nvme3n1p2")
    (root / "dev/block").mkdir(parents=True)
    return root


@pytest.mark.parametrize("node", ["nvme3n1", "nvme3n1/nvme3n1p1", "md0"])
def test_drives_are_found_through_partitions_and_raid(tmp_path: Path, node: str) -> None:
    root = fake_sys(tmp_path / "sys")
    number = tmp_path.stat().st_dev
    (root / f"dev/block/{os.major(number)}:{os.minor(number)}").symlink_to(root / "block" / node)
    (drive,) = drives_of(tmp_path, sys_root=root)
    assert (drive.name, drive.model, drive.size_bytes) == ("nvme3n1", "Fast 9000", 1024000000)
    assert (drive.rotational, drive.scheduler, drive.num_requests) == (False, "none", 1023)
    assert (drive.max_request_bytes, drive.temperature_c) == (512 << 10, 41.85)


def test_a_drive_that_the_kernel_says_nothing_of(tmp_path: Path) -> None:
    drive = drive_facts("nvme9n9", sys_root=tmp_path)
    assert (drive.model, drive.rotational, drive.temperature_c) == ("", None, None)
    assert drive.wear_note


def test_wear_counters() -> None:
    log = {"data_units_written": 2000, "percentage_used": 7}
    text = json.dumps({"nvme_smart_health_information_log": log})
    assert parse_smartctl(text) == (1_024_000_000, 0.07)
    assert parse_smartctl("{}") == parse_smartctl("[]") == parse_smartctl("no") == (None, None)


@pytest.mark.root
def test_a_directory_without_write_access(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    script = """
import os, sys
from pathlib import Path
from ssdtune.errors import ConfigError
from ssdtune.hardware.place import open_nameless
os.setgid(65534); os.setuid(65534)
try:
    open_nameless(Path(sys.argv[1]))
except ConfigError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, "/etc"], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("cannot measure /etc: permission denied. Name a directory")
