"""Owners of swap directories: never shared, never destroyed, leftovers of the dead reclaimed."""

import errno
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

from ssdtune.errors import ConfigError
from ssdtune.store.lock import DirectoryLock, Owner, lock_directories
from tests.store.helpers import UNITS, check_unit, create, write_unit

HOLDER = """
import sys
from pathlib import Path
from ssdtune.io.select import open_backend
from tests.store.helpers import create, write_unit
store = create(Path(sys.argv[1]), open_backend("python", queue_depth=2, request_bytes=16384), run_id="dead")
write_unit(store, "head", 1)
if len(sys.argv) > 2:
    store.freeze("checkpoint-1", Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


def hold(path, *arguments):
    """Start another process that holds the directories under `path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


def names(path):
    return sorted(p.name for p in path.iterdir())


def test_a_directory_in_use_is_refused_naming_the_owner(tmp_path, backend):
    process = hold(tmp_path)
    try:
        with pytest.raises(ConfigError) as caught:
            create(tmp_path, backend, run_id="mine")
        text = str(caught.value)
        assert f"swap directory {tmp_path}/a is in use by process {process.pid} on " in text
        assert f"output_dir {tmp_path}/out" in text and "another directory in swap_dirs" in text
        # One of two being in use is enough, and the free one is left as it was.
        with pytest.raises(ConfigError, match="in use"):
            create(tmp_path, backend, directories=[tmp_path / "free", tmp_path / "b"])
        assert names(tmp_path / "free") == []
    finally:
        kill(process)


def test_the_same_process_cannot_take_a_directory_twice(tmp_path, backend):
    with create(tmp_path, backend):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} "):
            create(tmp_path, backend)
    create(tmp_path, backend).close()


def test_leftovers_of_a_killed_run_are_reclaimed_without_growth(tmp_path, backend):
    sizes = set()
    for _ in range(3):
        kill(hold(tmp_path))
        sizes.add(tuple((p.name, p.stat().st_blocks) for p in sorted((tmp_path / "a").iterdir())))
    assert len(sizes) == 1
    with create(tmp_path, backend, run_id="mine") as store:
        assert store.version("head") is None
        assert DirectoryLock.read_owner(store._locks[0]).run_id == "mine"


def test_states_of_a_checkpoint_are_not_destroyed_by_a_new_run(tmp_path, backend):
    checkpoint = tmp_path / "out folder" / "checkpoint-1"
    kill(hold(tmp_path, checkpoint))
    checkpoint.mkdir(parents=True)
    before = (tmp_path / "a" / "ssdtune-states.bin").read_bytes()
    with pytest.raises(ConfigError) as caught:
        create(tmp_path, backend, run_id="mine")
    text = str(caught.value)
    assert f"holds the states of {checkpoint}" in text
    assert f"--resume-from-checkpoint '{checkpoint}'" in text
    assert (tmp_path / "a" / "ssdtune-states.bin").read_bytes() == before
    # The command that it gives does what it says, and no more than that.
    command = shlex.split(text[text.index("rm -r ") :])
    (tmp_path / "a" / "mine.txt").write_text("stays")
    subprocess.run(command, check=True)
    assert not checkpoint.exists()
    assert names(tmp_path / "a") == ["mine.txt", "ssdtune.lock"]
    create(tmp_path, backend, run_id="mine").close()


def test_a_checkpoint_whose_drive_is_gone_counts_as_needed(tmp_path, backend):
    kill(hold(tmp_path, tmp_path / "unmounted" / "checkpoint-1"))
    with pytest.raises(ConfigError, match=r"unmounted moved, or not mounted\?"):
        create(tmp_path, backend, run_id="mine")


def test_a_checkpoint_that_was_removed_is_not_needed(tmp_path, backend):
    (tmp_path / "out").mkdir()
    kill(hold(tmp_path, tmp_path / "out" / "checkpoint-1"))
    create(tmp_path, backend, run_id="mine").close()


def test_states_without_a_record_are_refused_with_the_command(tmp_path, backend):
    (tmp_path / "a").mkdir()
    states = tmp_path / "a" / "ssdtune-states.bin"
    states.write_text("?")
    with pytest.raises(ConfigError) as caught:
        create(tmp_path, backend)
    assert f"If no run needs it: rm -r {states}" in str(caught.value)
    assert names(tmp_path / "a") == ["ssdtune-states.bin"]
    assert states.read_text() == "?"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run_id": 3}', '{"run_id": "x", "new": 1}'])
def test_a_damaged_record_is_refused_with_the_command(tmp_path, backend, text):
    with create(tmp_path, backend):
        pass
    (tmp_path / "b" / "ssdtune-owner.json").write_text(text)
    with pytest.raises(ConfigError, match=r"b/ssdtune-owner\.json is damaged .*: rm -r "):
        create(tmp_path, backend)
    assert (tmp_path / "b" / "ssdtune-states.bin").exists()


def test_a_child_that_outlives_the_run_is_named_as_such(tmp_path):
    script = (
        "import os, sys; from pathlib import Path\n"
        "from ssdtune.store.lock import DirectoryLock, Owner\n"
        "lock = DirectoryLock(Path(sys.argv[1]))\n"
        "lock.write_owner(Owner(run_id='r', output_dir='/o'))\n"
        "if os.fork() == 0:\n"
        "    os.close(1); sys.stdin.read(); os._exit(0)\n"
        "print(os.getpid(), flush=True); os._exit(0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = process.stdout.read().strip()
    process.wait()
    with pytest.raises(ConfigError, match=f"left over from process {pid} .*: fuser "):
        DirectoryLock(tmp_path)
    process.stdin.close()


def test_a_reused_pid_is_not_taken_for_the_owner():
    owner = Owner(run_id="r", output_dir="/o")
    assert owner.alive()
    assert not Owner(run_id="r", output_dir="/o", process_start=owner.process_start - 1).alive()
    assert not Owner(run_id="r", output_dir="/o", host="elsewhere").alive()


def test_a_lock_file_removed_by_its_last_holder_is_made_anew(tmp_path, monkeypatch):
    real = fcntl.flock
    removed = []

    def flock(descriptor, operation):
        if not removed:
            removed.append((tmp_path / "ssdtune.lock").unlink())
        real(descriptor, operation)

    monkeypatch.setattr("ssdtune.store.lock.fcntl.flock", flock)
    with DirectoryLock(tmp_path):
        with pytest.raises(ConfigError, match="in use"):
            DirectoryLock(tmp_path)


def test_without_locks_of_the_file_system_the_record_decides(tmp_path, monkeypatch, caplog):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    # No such file system can be counted on here.
    monkeypatch.setattr("ssdtune.store.lock.fcntl.flock", flock)
    with DirectoryLock(tmp_path) as lock:
        lock.write_owner(Owner(run_id="r", output_dir="/o"))
        assert "the file system has no locks" in caplog.text
        with pytest.raises(ConfigError, match=r"in use by process .* write 0 for its pid in "):
            DirectoryLock(tmp_path)
        lock.write_owner(Owner(run_id="r", output_dir="/o", process_start=1))
        DirectoryLock(tmp_path).release()  # that process is gone
        lock.write_owner(Owner(run_id="r", output_dir="/o", host="elsewhere"))
        with pytest.raises(ConfigError, match="on elsewhere"):
            DirectoryLock(tmp_path)
    DirectoryLock(tmp_path).release()  # released in order


def test_all_or_none_are_locked(tmp_path):
    directories = [tmp_path / name for name in "abc"]
    for directory in directories:
        directory.mkdir()
    with DirectoryLock(directories[2]):
        with pytest.raises(ConfigError):
            lock_directories(directories)
        assert names(directories[0]) == names(directories[1]) == []
    for lock in lock_directories(directories):
        lock.release()
        lock.release()


def test_resuming_checks_that_it_is_the_same_run_and_order(tmp_path, backend):
    from ssdtune.store.store import Store

    checkpoint = tmp_path / "out" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    with create(tmp_path, backend) as store:
        write_unit(store, "head", 1)
        manifest = store.freeze("checkpoint-1", checkpoint)
    good = [tmp_path / "a", tmp_path / "b"]
    with create(tmp_path, backend, directories=[tmp_path / "c", tmp_path / "d"], run_id="run-2"):
        pass

    def reopen(directories, **changes):
        return Store.open(
            directories,
            UNITS,
            checkpoints={checkpoint: manifest | changes},
            live=checkpoint,
            backend=backend,
            output_dir=tmp_path / "out",
        )

    for directories, message in [
        (good[::-1], "b was number 2 of 2 when the checkpoint was made, now it is number 1 of 2"),
        ([tmp_path / "c", tmp_path / "d"], "holds the states of run run-2 .* not of run run-1"),
        ([tmp_path / "new", tmp_path / "b"], "new holds no states of run run-1"),
        (good[:1], "has its states in 2 directories .* swap_dirs names 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            reopen(directories)
    assert names(tmp_path / "new") == []
    with reopen(good) as store:
        check_unit(store, "head", 1)
    assert json.loads((tmp_path / "a" / "ssdtune-owner.json").read_text())["checkpoints"] == [
        str(checkpoint)
    ]
