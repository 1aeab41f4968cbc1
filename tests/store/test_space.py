"""Space: refusal with numbers before anything is written, and real reservation."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from ssdtune.errors import CapacityError, StorageError
from ssdtune.store.claim import space_needs
from ssdtune.store.layout import StoreLayout
from ssdtune.store.space import (
    Need,
    check_space,
    file_system_of,
    reserve,
)
from tests.store.helpers import UNITS, create

MIB = 1 << 20
PETABYTE = 10**15


def test_petabytes_are_refused_with_numbers(tmp_path):
    needs = [
        Need(tmp_path / "swap" / "not" / "yet", 2 * PETABYTE, "states"),
        (tmp_path / "out", 10**9, "the export"),
    ]
    with pytest.raises(CapacityError) as caught:
        check_space(needs)
    text = str(caught.value)
    assert f"2000 TB for states in {tmp_path}/swap/not/yet" in text
    assert f"1.00 GB for the export in {tmp_path}/out" in text
    assert "are free" in text and "swap_dirs" in text
    assert str(file_system_of(tmp_path).mount_point) in text
    assert not list(tmp_path.iterdir())


def test_two_directories_on_one_file_system_are_summed_up(tmp_path):
    free = file_system_of(tmp_path).free_bytes
    part = free * 3 // 5
    check_space([Need(tmp_path / "a", part, "states")])
    with pytest.raises(CapacityError, match=r"needed \(.* for states in .*/a, .* for states in "):
        check_space([Need(tmp_path / "a", part, "states"), Need(tmp_path / "b", part, "states")])


def test_what_a_file_holds_already_counts_as_room(tmp_path):
    held = tmp_path / "held"
    try:
        reserve(held, 1024 * MIB)  # much, as other programs use the drive at the same time
        free = file_system_of(tmp_path).free_bytes
        check_space([Need(held, free + 512 * MIB, "states")])
        with pytest.raises(CapacityError, match=r"1\.07 GB are held there"):
            check_space([Need(held, 2 * free + PETABYTE, "states")])
    finally:
        held.unlink()  # pytest keeps folders of the last runs


def test_nothing_is_needed():
    check_space([])


def test_needs_of_a_store_add_up_to_its_layout(tmp_path, backend):
    layout = StoreLayout.build(UNITS, 2, [1, 1])
    needs = space_needs([tmp_path / "a", tmp_path / "b"], layout)
    with create(tmp_path, backend):
        assert [n.path.stat().st_size for n in needs] == [n.nbytes for n in needs]
    assert sum(n.nbytes for n in needs) == layout.total_bytes


def test_reserved_space_is_really_there_and_content_stays(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert reserve(path, 8 * MIB)
    status = path.stat()
    assert status.st_size == 8 * MIB
    assert status.st_blocks * 512 >= 8 * MIB
    assert path.read_bytes()[:5] == b"abc\0\0"
    assert reserve(path, MIB)
    assert path.stat().st_size == 8 * MIB


def test_reserving_nothing_makes_an_empty_file(tmp_path):
    assert reserve(tmp_path / "file", 0)
    assert (tmp_path / "file").stat().st_size == 0


def test_reserving_too_much_is_refused_before_anything_is_taken(tmp_path):
    with pytest.raises(CapacityError, match=r"cannot reserve 1000 TB .* are free \[ENOSPC\]"):
        reserve(tmp_path / "file", PETABYTE)
    assert (tmp_path / "file").stat().st_blocks == 0


@pytest.mark.root
def test_a_failed_reservation_gives_everything_back(tmp_path):
    """On a small file system of its own: never fill the drive that others use."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(24 * MIB)
    mount = tmp_path / "mount"
    mount.mkdir()
    script = (
        "import os, sys; from pathlib import Path; from dataclasses import replace\n"
        "from ssdtune.store import space; from ssdtune.errors import CapacityError\n"
        "path = Path(sys.argv[1]) / 'file'; path.write_bytes(b'abc')\n"
        "real = space.file_system_of; before = real(path).free_bytes\n"
        # As if others had taken the space between question and allocation.
        "space.file_system_of = lambda p: replace(real(p), free_bytes=1 << 60)\n"
        "try: space.reserve(path, 64 << 20)\n"
        "except CapacityError as error: print('ENOSPC' in str(error))\n"
        "os.sync(); print(before - real(path).free_bytes, path.read_bytes())"
    )
    setup = 'mkfs.ext4 -q "$0" && mount -o loop "$0" "$1" && exec "$2" -c "$3" "$1"'
    found = subprocess.run(
        ["unshare", "-m", "sh", "-c", setup, str(image), str(mount), sys.executable, script],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"] + ":/sbin:/usr/sbin"},
        capture_output=True,
        text=True,
    )
    if found.returncode and "Traceback" not in found.stderr:
        pytest.skip(f"cannot mount an image here: {found.stderr.strip()}")
    assert found.stdout.splitlines() == ["True", "0 b'abc'"], found.stderr


def test_a_limit_of_file_size_is_named(tmp_path):
    script = (
        "import resource, sys; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from ssdtune.store.space import reserve\n"
        "from ssdtune.errors import CapacityError\n"
        "try: reserve(Path(sys.argv[1]), 2 << 20)\n"
        "except CapacityError as error: print(error)"
    )
    path = tmp_path / "file"
    found = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        f"cannot reserve 2.10 MB for {path}: larger than a file may be there [EFBIG]"
        in found.stdout
    )
    assert "ulimit -f" in found.stdout
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != MIB


def test_failing_to_open_says_where(tmp_path):
    with pytest.raises(StorageError, match=r"open of .*missing/file failed") as caught:
        reserve(tmp_path / "missing" / "file", MIB)
    assert caught.value.errno == errno.ENOENT


def test_a_file_system_that_cannot_reserve_gets_a_sparse_file(tmp_path, caplog, monkeypatch):
    # No such file system can be counted on here, so the answer of the system call is replaced.
    monkeypatch.setattr("ssdtune.store.space._fallocate", lambda *_: errno.EOPNOTSUPP)
    assert not reserve(tmp_path / "file", 64 * MIB)
    assert (tmp_path / "file").stat().st_size == 64 * MIB
    assert (tmp_path / "file").stat().st_blocks == 0
    assert [r.message for r in caplog.records if "cannot reserve space" in r.message]


def test_the_file_system_of_a_path(tmp_path):
    system = file_system_of(tmp_path / "x" / "y")
    assert system.device == tmp_path.stat().st_dev
    assert os.path.ismount(system.mount_point)
    assert system.type
