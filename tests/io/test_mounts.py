"""Which file system a path is on: real mounts, and a made-up table for what is not mounted here."""

import os
from pathlib import Path

import pytest

from ssdtune.io import mounts
from ssdtune.io.mounts import Mount, existing_parent, kind_warning, mount_of


def test_real_mounts() -> None:
    assert mount_of(Path("/proc/self"))[:2] == (Path("/proc"), "proc")
    assert mount_of(Path("/")).kind != "unknown"


def test_the_longest_mount_point_wins_and_blanks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table").write_text(
        f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"2 1 0:9 / {tmp_path}/a\\040b rw,nosuid shared:1 - nfs4 server:/x\\040y rw\n"
    )
    monkeypatch.setattr(mounts, "_TABLE", tmp_path / "table")
    assert mount_of(tmp_path / "a b" / "swap") == Mount(tmp_path / "a b", "nfs4", "server:/x y")
    assert mount_of(tmp_path / "a") == Mount(Path("/"), "ext4", "/dev/sda1")
    monkeypatch.setattr(mounts, "_TABLE", tmp_path / "none")
    assert mount_of(tmp_path).kind == "unknown"


def test_existing_parent(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert existing_parent(tmp_path / "link" / "later" / "swap") == Path(os.path.realpath(tmp_path))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tmpfs", "memory and no drive"),
        ("nfs4", "a local NVMe drive"),
        ("overlay", "goes with the container"),
        ("btrfs", "space reserved there is no guarantee"),
        ("fuse.mergerfs", "a program stands between"),
    ],
)
def test_places_that_suit_states_badly_are_warned_of(kind: str, words: str) -> None:
    warning = kind_warning(Path("/x"), kind)
    assert warning is not None and f"/x is on {kind}" in warning and words in warning


def test_local_file_systems_are_fine() -> None:
    assert kind_warning(Path("/x"), "ext4") is None and kind_warning(Path("/x"), "xfs") is None
