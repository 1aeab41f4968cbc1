"""Odd names of swap directories: each works, or gives one clear error before anything is made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssdtune.errors import ConfigError
from ssdtune.store.directories import prepare_directories, resolve_directories
from tests.store.helpers import check_unit, create, write_unit


@pytest.mark.parametrize(
    "name", ["with space", "ünïcode-硬盘", "trailing/", "a/b/c", "dot/../x", "quote'\"$", "x" * 200]
)
def test_odd_names_work(tmp_path, backend, name):
    directories = [f"{tmp_path}/{name}", tmp_path / "second"]
    with create(tmp_path, backend, directories=directories) as store:
        write_unit(store, "block.0", 1)
        check_unit(store, "block.0", 1)
        assert all(d.is_absolute() for d in store.directories)
        assert (tmp_path / name).resolve() == store.directories[0]
        assert (store.directories[0] / "ssdtune-states.bin").exists()


def test_a_relative_name_is_resolved_at_once(tmp_path, backend, monkeypatch):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    with create(tmp_path, backend, directories=["swap"]) as store:
        monkeypatch.chdir(tmp_path / "two")
        write_unit(store, "head", 1)
        store.freeze("checkpoint-1", tmp_path / "out" / "checkpoint-1")
        check_unit(store, "head", 1)
    assert (tmp_path / "one" / "swap" / "ssdtune-states.bin").exists()
    assert not list((tmp_path / "two").iterdir())


def test_home_and_links(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    assert prepare_directories(["~/swap", tmp_path / "link", tmp_path / "dangling"]) == [
        tmp_path / "swap",
        tmp_path / "real",
        tmp_path / "later",
    ]
    assert (tmp_path / "later").is_dir()


def test_a_directory_that_holds_other_files_keeps_them(tmp_path, backend):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("years of work")
    with create(tmp_path, backend) as store:
        write_unit(store, "head", 1)
        store.close(delete_files=True)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["thesis.txt"]
    assert (tmp_path / "a" / "thesis.txt").read_text() == "years of work"


def test_the_same_directory_twice_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "swap")
    for other in (
        tmp_path / "swap",
        f"{tmp_path}/swap/",
        f"{tmp_path}/x/../swap",
        tmp_path / "link",
    ):
        with pytest.raises(ConfigError, match="same directory as one before it"):
            resolve_directories([tmp_path / "swap", other])
    assert [p.name for p in tmp_path.iterdir()] == ["link"]


def test_bad_names_are_all_named_at_once(tmp_path):
    (tmp_path / "file").write_text("12345")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    names = ["", f"{tmp_path}/file", f"{tmp_path}/file/below", "a\0b", f"{tmp_path}/{'y' * 300}"]
    names += [f"{tmp_path}/loop", "~no-such-user-here/swap"]
    with pytest.raises(ConfigError) as caught:
        prepare_directories([*names, tmp_path / "good"])
    lines = str(caught.value).splitlines()
    assert len(lines) == len(names)
    assert "'' is not the name of a directory" in lines[0]
    assert f"{tmp_path}/file is a file of 5 bytes; name a directory" in lines[1]
    assert "One of its parents is a file" in lines[2]
    assert "not the name of a directory" in lines[3]
    assert "shorter path" in lines[4]
    assert "points to itself" in lines[5]
    assert "Write the path out" in lines[6]
    assert not (tmp_path / "good").exists()


def test_a_path_of_too_many_characters_is_shortened_in_the_message(tmp_path):
    with pytest.raises(ConfigError, match="shorter path") as caught:
        prepare_directories([str(tmp_path) + "/deep" * 1200])
    assert len(str(caught.value)) < 500


def test_a_path_with_no_room_for_our_file_names_is_refused(tmp_path, backend):
    room = os.pathconf(tmp_path, "PC_PATH_MAX") - len(str(tmp_path)) - 10
    deep = tmp_path / Path("/".join(["d" * 200] * (room // 201)))
    deep = deep / ("e" * (room % 201 - 1)) if room % 201 > 2 else deep
    with pytest.raises(ConfigError, match="shorter path"):
        create(tmp_path, backend, directories=[deep])


def test_no_directory_is_refused(tmp_path, backend):
    with pytest.raises(ConfigError, match="no swap directory"):
        create(tmp_path, backend, directories=[])


def test_a_place_where_nothing_can_be_made_is_refused(tmp_path, backend):
    with pytest.raises(ConfigError, match="cannot use /proc/ssdtune"):
        create(tmp_path, backend, directories=["/proc/ssdtune"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory_is_refused(tmp_path, backend):
    (tmp_path / "a").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match=r"permission denied .* right to write there"):
        create(tmp_path, backend, directories=[tmp_path / "a"])


@pytest.mark.root
def test_a_read_only_file_system_is_refused(tmp_path):
    """Runs in a mount namespace of its own, so that nothing outside sees the mount."""
    script = (
        "import sys; from ssdtune.store.directories import prepare_directories\n"
        "from ssdtune.errors import ConfigError\n"
        "try: prepare_directories([sys.argv[1]])\n"
        "except ConfigError as error: print(error)"
    )
    target = tmp_path / "ro"
    target.mkdir()
    mount = 'mount -t tmpfs -o ro none "$1" && exec "$2" -c "$3" "$1"'
    found = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", str(target), sys.executable, script],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    if "unshare" in found.stderr or "mount:" in found.stderr:
        pytest.skip(f"cannot mount here: {found.stderr.strip()}")
    assert "read-only file system [EROFS]. Name a directory on" in found.stdout
