"""A swap directory belongs to one run: a lock held by the process, and a durable record of the owner.

The lock (`ssdtune.lock`, flock) says whether a process uses the directory now; the system drops it when the
process ends, however it ends. The record (`ssdtune-owner.json`) says whose states lie there and which
checkpoint folders need them, so that leftovers of a dead run can be told from states that somebody will
resume from. Only files with names of ours are ever created, overwritten or removed.

Read `ssdtune.store.store` next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ssdtune.errors import ConfigError
from ssdtune.store.directories import directory_problem
from ssdtune.store.durable import fsync, write_json_atomic

logger = logging.getLogger(__name__)

LOCK_NAME = "ssdtune.lock"
OWNER_NAME = "ssdtune-owner.json"
STATES_NAME = "ssdtune-states.bin"

_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The record of a swap directory.

    Attributes:
        process_start: Start time of the process in clock ticks since boot; tells a reused pid.
        directory_index: Which of the run's `num_directories` directories this one is.
        layout: Fingerprint of the store's layout.
        checkpoints: Absolute paths of checkpoint folders that refer to states in this directory.
    """

    run_id: str
    output_dir: str
    directory_index: int = 0
    num_directories: int = 1
    layout: str = ""
    checkpoints: list[str] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)
    process_start: int = field(default_factory=lambda: _process_start(os.getpid()))
    host: str = field(default_factory=socket.gethostname)
    since: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def alive(self) -> bool:
        """Say whether the process that wrote the record still runs on this machine."""
        start = _process_start(self.pid)
        return self.host == socket.gethostname() and start != 0 and start == self.process_start

    def live_checkpoints(self) -> list[Path]:
        """Return the checkpoint folders that still need the states.

        A folder whose parent is missing as well counts: its drive may just not be mounted.
        """
        paths = [Path(text) for text in self.checkpoints]
        return [path for path in paths if path.exists() or not path.parent.exists()]


class DirectoryLock:
    """Holds one swap directory for this process, from `DirectoryLock(path)` to `release`.

    Raises:
        ConfigError: Another process holds it, or the lock file cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.owner_path = directory / OWNER_NAME
        self.states_path = directory / STATES_NAME
        self._path = directory / LOCK_NAME
        self._created = not os.path.lexists(self._path)
        self._by_record = False
        self._descriptor = self._acquire()
        for left in directory.glob(f".{OWNER_NAME}.*.tmp"):  # by a process that was killed
            left.unlink(missing_ok=True)

    def _acquire(self) -> int:
        while True:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise ConfigError(directory_problem(self.directory, error)) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The file may have been removed by its last holder between open and flock.
                if _same_file(descriptor, self._path):
                    return descriptor
                os.close(descriptor)
            except BlockingIOError:
                os.close(descriptor)
                raise ConfigError(self._held_by_another()) from None
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    os.close(descriptor)
                    raise ConfigError(directory_problem(self.directory, error)) from error
                self._check_by_record(descriptor)
                return descriptor

    def _held_by_another(self) -> str:
        start = f"swap directory {self.directory} is in use"
        try:
            owner = self.read_owner()
        except ConfigError:
            owner = None
        end = "Wait for it, end it, or name another directory in swap_dirs."
        if owner is None:
            return f"{start} by another process. {end}"
        who = f"process {owner.pid} on {owner.host} (output_dir {owner.output_dir}, since {owner.since})"
        if owner.host == socket.gethostname() and not owner.alive():
            return f"{start} by a process left over from {who}: fuser {shlex.quote(str(self._path))}. {end}"
        return f"{start} by {who}. {end}"

    def _check_by_record(self, descriptor: int) -> None:
        """Where the file system has no locks, go by the record; `release` sets its pid to 0 there."""
        self._by_record = True
        logger.warning(
            "%s: the file system has no locks; start only one run there.", self.directory
        )
        owner = self.read_owner()
        if owner and owner.pid and (owner.alive() or owner.host != socket.gethostname()):
            os.close(descriptor)
            raise ConfigError(
                f"{self._held_by_another()} If that run has ended, write 0 for its pid in "
                f"{self.owner_path}."
            )

    def read_owner(self) -> Owner | None:
        """Return the record, or None if there is none.

        Raises:
            ConfigError: There is one and it is damaged.
        """
        try:
            with self.owner_path.open(encoding="utf-8", errors="surrogateescape") as file:
                return _parse_owner(json.load(file))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(directory_problem(self.owner_path, error)) from error
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.owner_path} is damaged ({error}), so nobody can tell whose states lie there. "
                f"If no run needs them: {self._clean_command()}"
            ) from error

    def write_owner(self, owner: Owner) -> None:
        """Replace the record, durably."""
        write_json_atomic(self.owner_path, asdict(owner))

    def check_reclaimable(self) -> None:
        """Make sure that a new run may throw away what lies here.

        Raises:
            ConfigError: A checkpoint needs the states, or they cannot be shown to be a run's leftovers.
        """
        owner = self.read_owner()
        if owner is None:
            if self.states_path.exists():
                raise ConfigError(
                    f"{self.states_path} is there without {OWNER_NAME}, so nobody can tell whose it is. "
                    f"If no run needs it: {self._clean_command()}"
                )
            return
        needed = owner.live_checkpoints()
        if needed and self.states_path.exists():
            gone = [path for path in needed if not path.exists()]
            where = (
                f" (not to be found now: {gone[0].parent} moved, or not mounted?)" if gone else ""
            )
            folders = [path for path in needed if path.exists()]
            raise ConfigError(
                f"swap directory {self.directory} holds the states of "
                f"{', '.join(map(str, needed))}{where}. A new run would destroy them. "
                f"Go on with --resume-from-checkpoint {shlex.quote(str(needed[-1]))}, name another "
                f"directory in swap_dirs, or give them up: {self._clean_command(folders)}"
            )

    def check_resumable(self, run_id: str, index: int, num_directories: int, layout: str) -> Owner:
        """Make sure that the states here are those of a run, and return the record.

        Raises:
            ConfigError: They are not, or the files are not there.
        """
        owner = self.read_owner()
        remedy = (
            "Give the swap_dirs of the run, in the same order, or resume from another checkpoint."
        )
        if owner is None or not self.states_path.exists():
            raise ConfigError(
                f"swap directory {self.directory} holds no states of run {run_id}. {remedy}"
            )
        if owner.run_id != run_id:
            raise ConfigError(
                f"swap directory {self.directory} holds the states of run {owner.run_id} "
                f"(output_dir {owner.output_dir}), not of run {run_id}. {remedy}"
            )
        if (owner.directory_index, owner.num_directories) != (index, num_directories):
            raise ConfigError(
                f"swap directory {self.directory} was number {owner.directory_index + 1} of "
                f"{owner.num_directories} when the checkpoint was made, now it is number {index + 1} of "
                f"{num_directories}. {remedy}"
            )
        if owner.layout != layout:
            raise ConfigError(
                f"swap directory {self.directory} holds states with another layout ({owner.layout}, the "
                f"checkpoint says {layout}). {remedy}"
            )
        return owner

    def remove_files(self) -> None:
        """Remove the states and the record, and the lock file when released."""
        self.states_path.unlink(missing_ok=True)
        self.owner_path.unlink(missing_ok=True)
        self._created = True
        if self.directory.exists():  # or somebody removed all of it
            fsync(self.directory)

    def release(self, *, refused: bool = False) -> None:
        """Let the directory go; may be called twice.

        Args:
            refused: The run never began, so leave no lock file behind if there was none before.
        """
        if self._descriptor < 0:
            return
        if self._by_record and not refused and (owner := self.read_owner()):
            self.write_owner(replace(owner, pid=0))
        unused = not self.states_path.exists() and not self.owner_path.exists()
        if (refused or unused) and self._created:
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1

    def _clean_command(self, folders: Sequence[Path] = ()) -> str:
        names = [*folders, self.states_path, self.owner_path]
        return "rm -r " + " ".join(shlex.quote(str(name)) for name in names if name.exists())

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def lock_directories(directories: Sequence[Path]) -> list[DirectoryLock]:
    """Lock all directories, or none.

    Raises:
        ConfigError: One of them is in use, or cannot be locked.
    """
    locks: list[DirectoryLock] = []
    try:
        for directory in directories:
            locks.append(DirectoryLock(directory))
    except BaseException:
        for lock in locks:
            lock.release(refused=True)
        raise
    return locks


def renew(owner: Owner) -> Owner:
    """Return the record with this process as the owner."""
    fresh = Owner(run_id=owner.run_id, output_dir=owner.output_dir)
    return replace(
        owner, pid=fresh.pid, process_start=fresh.process_start, host=fresh.host, since=fresh.since
    )


def _parse_owner(value: Any) -> Owner:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    owner = Owner(**value)
    blank = asdict(Owner(run_id="", output_dir=""))
    for name, example in blank.items():
        if not isinstance(getattr(owner, name), type(example)):
            raise ValueError(f"bad value of {name}")
    if not all(isinstance(path, str) for path in owner.checkpoints):
        raise ValueError("bad value of checkpoints")
    return owner


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)


def _process_start(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])
