"""The store: units of states on one or several drives, with versions, checksums and byte counts.

It moves bytes between a state's place and a buffer, and knows which place is live. It does not know what
the bytes mean, when they are needed, or how a checkpoint's folder looks. Places are in
`ssdtune.store.layout`, versions in `ssdtune.store.versions`, owners in `ssdtune.store.lock`. One class holds
it all, as one lock guards it; half of the module's length is what its methods promise.

A checkpoint, in order: wait for and commit all writes; `freeze(label, folder)`; `sync()`; write the
returned manifest into a temporary folder; `durable.replace_dir`. To delete one: `durable.remove_dir`, then
`release(label)`. So a crash at any instant leaves every complete folder with intact states.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ssdtune.errors import ConfigError, FormatError, StorageError
from ssdtune.io.backend import ALIGNMENT, Backend, File, Ticket
from ssdtune.io.device_bytes import Memory
from ssdtune.store.checksums import Check, Checksums, Key
from ssdtune.store.claim import claim_again, claim_new
from ssdtune.store.directories import resolve_directories
from ssdtune.store.layout import (
    KINDS,
    StateSpec,
    StoreLayout,
    UnitSpec,
    describe_units,
    versioned_units,
)
from ssdtune.store.lock import DirectoryLock, Owner
from ssdtune.store.manifest import FORMAT, Manifest
from ssdtune.store.transfer import Transfer, as_bytes
from ssdtune.store.versions import Versions

logger = logging.getLogger(__name__)


class Store:
    """All states of a run. Thread-safe; made by `create` or `open`, a context manager.

    Attributes:
        layout: Where everything lies.
        directories: The swap directories, absolute, in order.
        run_id: The run that owns them.
    """

    def __init__(
        self,
        locks: list[DirectoryLock],
        layout: StoreLayout,
        versions: Versions,
        checksums: Checksums,
        owner: Owner,
        backend: Backend,
        direct: bool,
        activations: Backend | None = None,
    ) -> None:
        self.layout = layout
        self.directories = [lock.directory for lock in locks]
        self.run_id = owner.run_id
        self._locks = locks
        self._versions = versions
        self._checksums = checksums
        self._owner = owner
        self._folders: dict[str, Path] = {}
        self._record_checksums = False
        self._filled: set[tuple[str, str]] = set()  # states without versions that were written
        self._counters = {kind: {"read": 0, "written": 0} for kind in KINDS}
        self._lock = threading.Lock()
        paths = [lock.states_path for lock in locks]
        self._opened: list[tuple[Backend, list[File]]] = []
        """The files, once for each backend; the last one moves block inputs and activations."""
        for engine in dict.fromkeys((backend, activations or backend)):
            files = [engine.open(path, writable=True, direct=direct) for path in paths]
            self._opened.append((engine, files))
        self._identities = [_identity(path) for path in paths]

    @classmethod
    def create(
        cls,
        directories: Sequence[str | os.PathLike[str]],
        units: Sequence[UnitSpec],
        *,
        copies: int,
        run_id: str,
        backend: Backend,
        output_dir: Path,
        weights: Sequence[float] | None = None,
        stripe_bytes: int | None = None,
        check_bytes: int,
        direct: bool = True,
        activations: Backend | None = None,
    ) -> Self:
        """Take the directories for a new run and reserve all space there.

        Leftovers of a run that has ended and that no checkpoint needs are thrown away. See `space_needs`
        for asking before whether there is room.

        Args:
            directories: Swap directories; created if missing.
            units: All units of the run.
            copies: Places of each versioned state: checkpoints kept + 1, and 1 more for each lease.
            run_id: Unique name of the run.
            backend: Stays the caller's, who closes it after the store.
            activations: The same for block inputs and activations; `backend` by default.
            output_dir: Named to others who want the same directories.
            weights: Relative bandwidth of each directory; equal by default.
            stripe_bytes: See `StoreLayout.build`.
            check_bytes: Piece of a state with a checksum of its own, a multiple of 4096.
            direct: Bypass the page cache.

        Raises:
            ConfigError: A directory cannot be used, is in use, or holds what somebody may need.
            CapacityError: There is no room.
            StorageError: A file could not be made.
        """
        paths = resolve_directories(directories)
        if check_bytes <= 0 or check_bytes % ALIGNMENT:
            raise ValueError(f"check_bytes is {check_bytes}; it must be a multiple of {ALIGNMENT}")
        layout = StoreLayout.build(
            units, copies, weights or [1.0] * len(paths), stripe_bytes=stripe_bytes
        )
        if layout.num_directories != len(paths):
            raise ValueError(
                f"{len(directories)} directories, but {layout.num_directories} weights"
            )
        owner = Owner(
            run_id=run_id,
            output_dir=str(Path(output_dir).absolute()),
            num_directories=layout.num_directories,
            layout=layout.fingerprint,
        )
        with claim_new(paths, layout, owner) as locks:
            versions = Versions({unit.name: None for unit in versioned_units(units)}, copies)
            return cls(
                locks, layout, versions, Checksums(check_bytes), owner, backend, direct, activations
            )

    @classmethod
    def open(
        cls,
        directories: Sequence[str | os.PathLike[str]],
        units: Sequence[UnitSpec],
        *,
        checkpoints: Mapping[Path, Mapping[str, Any]],
        live: Path,
        backend: Backend,
        output_dir: Path,
        copies: int | None = None,
        direct: bool = True,
        activations: Backend | None = None,
    ) -> Self:
        """Take the directories of a run that has ended, to go on from one of its checkpoints.

        Args:
            directories: The same as before, in the same order; they may have moved.
            units: The same as before; only states without versions may be others.
            checkpoints: Folder -> manifest of every checkpoint of the run that must stay intact. Each is
                frozen with its folder's name as the label.
            live: The one of them to go on from.
            copies: More places than before are made if asked for; never fewer.

        Raises:
            ConfigError: The directories or units are not those of the checkpoint, or are in use.
            FormatError: A manifest or a file is damaged.
            CapacityError: There is no room for more copies.
        """
        manifests = {path: Manifest.from_dict(m, str(path)) for path, m in checkpoints.items()}
        manifest = manifests[live]
        num_copies = max([copies or 1, *(m.copies for m in manifests.values())])
        layouts = {
            path: m.build_layout(units, num_copies, str(path)) for path, m in manifests.items()
        }
        layout = layouts[live]
        for path, other in manifests.items():
            if (other.run_id, other.layout) != (manifest.run_id, manifest.layout):
                raise ConfigError(
                    f"{path} and {live} are not of the same run ({other.run_id}, {manifest.run_id}). "
                    "Move one of them out of output_dir."
                )
        if len(directories) != layout.num_directories:
            raise ConfigError(
                f"{live} has its states in {layout.num_directories} directories "
                f"({', '.join(manifest.directories)}), swap_dirs names {len(directories)}. "
                "Give the same, in the same order."
            )
        checksums = manifest.load_checksums(layout, str(live))
        with claim_again(directories, layout, manifest, list(manifests)) as (locks, owner):
            owner = replace(owner, output_dir=str(Path(output_dir).absolute()))
            frozen = {path.name: m.versions for path, m in manifests.items()}
            versions = Versions(manifest.versions, num_copies, frozen)
            store = cls(locks, layout, versions, checksums, owner, backend, direct, activations)
            store._folders = {path.name: path.absolute() for path in manifests}
            store._write_owners()
            return store

    def read(self, unit: str, state: str, view: Memory, *, offset: int = 0) -> Ticket:
        """Start reading from the live version into `view`.

        After `open`, the first read of each piece that has a checksum verifies it in `wait`. A read that
        covers a piece only in part cannot, and leaves that piece for a later one.

        Args:
            view: Writable bytes, a multiple of 4096 long; not to be touched until `wait`. States without versions may
                also lie in device memory, if the backend takes that.
            offset: Where to begin within the state, a multiple of 4096.

        Raises:
            ValueError: Nothing was written yet, or the range is not within the state.
        """
        spec = self.layout.state(unit, state)
        into = as_bytes(view)
        with self._lock:
            if spec.versioned:
                live = self._versions.live[unit]
                if live is None:
                    raise ValueError(f"read of unit {unit}, {state}: nothing was written yet")
            else:
                live = 0
                if (unit, state) not in self._filled and spec.nbytes:
                    raise ValueError(f"read of unit {unit}, {state}: nothing was written yet")
            key = (unit, state, live)
            checks = self._checksums.due(key, spec.extent_bytes, offset, into.nbytes)

        def finish(succeeded: bool) -> None:
            if not succeeded:
                return
            self._count(spec.kind, "read", into.nbytes)
            for check in checks:
                self._verify(key, check, into[check.offset - offset :][: check.nbytes])
            if checks:
                with self._lock:
                    self._checksums.verified(key, checks)

        return self._transfer(spec, False, key, into, offset, finish)

    def write(
        self, unit: str, state: str, view: Memory, *, offset: int = 0, beside: bool = False
    ) -> Ticket:
        """Start writing `view` to the pending version.

        The first write of a unit after a commit chooses the place: the live version if nothing holds it,
        else a free one. Wait for every ticket before `commit`.

        Args:
            view: Bytes, a multiple of 4096 long; not to be touched until `wait`.
            offset: Where to begin within the state, a multiple of 4096.
            beside: With the first write: choose a free place in any case, so that `discard` is possible. See
                `has_room_beside`.

        Raises:
            ValueError: The range is not within the state, or, with checksums on, not of whole pieces.
            CapacityError: All places of the unit are held.
        """
        spec = self.layout.state(unit, state)
        source = as_bytes(view)
        self.layout.pieces(unit, state, 0, offset, source.nbytes)  # refuses bad ranges
        with self._lock:
            with_checksums = self._record_checksums and spec.versioned
            if with_checksums and not self._checksums.covers_whole_pieces(
                spec.extent_bytes, offset, source.nbytes
            ):
                raise ValueError(
                    f"write of unit {unit}, {state}: {source.nbytes} bytes at {offset} are not whole pieces "
                    f"of {self._checksums.check_bytes}"
                )
            pending = None
            if spec.versioned:
                if unit not in self._versions.pending:
                    self._begin(unit, beside)
                pending = self._versions.pending[unit]
                pending.unfinished += 1
            else:
                self._filled.add((unit, state))
            key = (unit, state, pending.version if pending else 0)
            self._checksums.forget(key, offset, source.nbytes)

        def finish(succeeded: bool) -> None:
            if succeeded:
                self._count(spec.kind, "written", source.nbytes)
            if pending is None:
                return
            with self._lock:
                pending.unfinished -= 1
                pending.failed += not succeeded
                if succeeded:
                    written = pending.written_bytes
                    written[state] = written.get(state, 0) + source.nbytes

        ticket = self._transfer(spec, True, key, source, offset, finish)
        if with_checksums:  # while the drive works
            values = self._checksums.compute(source)
            with self._lock:
                self._checksums.record(key, spec.extent_bytes, offset, values)
        return ticket

    def commit(self, unit: str, *, states: Sequence[str] | None = None) -> None:
        """Make what was written of a unit its live version.

        Args:
            states: The states that must have been written whole; all versioned ones by default. Others of a
                fresh place hold nothing, and must not be read before they are written.

        Raises:
            ValueError: Nothing was written, a write failed or was not waited for, or, in a fresh place,
                some state was not written whole.
        """
        with self._lock:
            self._versions.commit(
                unit,
                {
                    s.name: s.extent_bytes
                    for s in self._versioned_states(unit)
                    if states is None or s.name in states
                },
            )

    def discard(self, unit: str) -> None:
        """Forget what was written of a unit since its last commit.

        Raises:
            ValueError: Nothing was written, or it was written in place; freeze before, or write `beside`, to
                prevent that.
        """
        with self._lock:
            version = self._versions.discard(unit)
            for state in self._versioned_states(unit):
                self._checksums.forget((unit, state.name, version))

    def has_room_beside(self) -> bool:
        """Say whether every unit has a place besides those of its live version and of checkpoints."""
        with self._lock:
            return self._versions.has_room_beside()

    def version(self, unit: str) -> int | None:
        """Return the live version of a unit; None if it was never written."""
        with self._lock:
            return self._versions.live[unit]

    def checksum_writes(self, enabled: bool) -> None:
        """Switch on or off that writes record checksums, for the steps before a checkpoint.

        While on, writes of versioned states must consist of whole pieces of `check_bytes`, or reach up to
        the state's end.
        """
        with self._lock:
            self._record_checksums = enabled

    def freeze(self, label: str, folder: Path | None = None) -> dict[str, Any]:
        """Keep the live versions of all units from being overwritten, until `release`.

        Args:
            label: Name of the checkpoint (its folder's name, as `open` uses it) or of a lease.
            folder: Where the checkpoint's folder will be. It is noted in the swap directories, so that no
                new run takes them as long as the folder is there.

        Returns:
            The manifest, as JSON values. It is not durable, nor are the states before `sync`.

        Raises:
            ValueError: The label is in use, or a unit is being overwritten: commit first.
            StorageError: The swap directories are gone or cannot be written to.
        """
        self.check_files()
        with self._lock:
            versions = self._versions.freeze(label)
            if folder is not None:
                self._folders[label] = folder.absolute()
                try:
                    self._write_owners()
                except BaseException:
                    del self._folders[label]
                    self._versions.release(label)
                    raise
            return self._manifest(versions).to_dict()

    def release(self, label: str) -> None:
        """Let the versions of a label be overwritten.

        Raises:
            ValueError: There is no such label, or its checkpoint's folder is still there.
        """
        with self._lock:
            folder = self._folders.get(label)
            if folder is not None and folder.exists():
                raise ValueError(f"release {label}: remove {folder} first")
            self._versions.release(label)
            if self._folders.pop(label, None):
                self._write_owners()

    @property
    def check_bytes(self) -> int:
        """Piece of a state that has a checksum of its own."""
        return self._checksums.check_bytes

    @property
    def frozen_labels(self) -> list[str]:
        """Labels of all checkpoints and leases, oldest first."""
        with self._lock:
            return list(self._versions.frozen)

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """Bytes moved so far: kind -> "read" and "written"."""
        with self._lock:
            return {kind: dict(counts) for kind, counts in self._counters.items()}

    def sync(self) -> None:
        """Make everything durable whose tickets were waited for.

        Raises:
            StorageError: A file is gone, or the drive failed.
        """
        self.check_files()
        for backend, files in self._opened[:1]:  # what the other one writes is of this step only
            backend.sync(files)

    def check_files(self) -> None:
        """Notice files that were removed or replaced under us; cheap enough for every step.

        Raises:
            StorageError: A file is not the one that was opened.
        """
        for lock, identity in zip(self._locks, self._identities, strict=True):
            if _identity(lock.states_path) != identity:
                raise StorageError(
                    "open",
                    lock.states_path,
                    hint="Another file was put in its place. Resume from a checkpoint that has its states.",
                )

    def close(self, *, delete_files: bool = False) -> None:
        """Wait for transfers, close the files and let the directories go; may be called again.

        Args:
            delete_files: Remove the states too, if no checkpoint's folder needs them.
        """
        with self._lock:
            opened, self._opened = self._opened, []
            needed = any(folder.exists() for folder in self._folders.values())
        try:
            for backend, files in opened:
                for file in files:
                    backend.close_file(file)
        finally:
            for lock in self._locks if opened else ():
                if delete_files and not needed:
                    lock.remove_files()
                lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self, unit: str, beside: bool) -> None:
        pending = self._versions.begin(unit, beside=beside)
        if not pending.in_place:
            for state in self._versioned_states(unit):
                self._checksums.forget((unit, state.name, pending.version))

    def _versioned_states(self, unit: str) -> list[StateSpec]:
        found = [u for u in self.layout.units if u.name == unit]
        if not found:
            raise ValueError(f"the store has no unit {unit}")
        return [state for state in found[0].states if state.versioned]

    def _transfer(
        self,
        spec: StateSpec,
        writes: bool,
        key: Key,
        view: memoryview,
        offset: int,
        finish: Callable[[bool], None],
    ) -> Ticket:
        """Start the parts of a striped range; together they are one ticket."""
        opened = self._opened
        if not opened:
            raise ValueError("the store is closed")
        backend, files = opened[-1 if spec.kind == "activations" else 0]
        submit = backend.write if writes else backend.read
        parts: list[Ticket] = []
        transfer = Transfer(parts, finish)
        try:
            start = 0
            for piece in self.layout.pieces(*key, offset, view.nbytes):
                part = view[start : start + piece.nbytes]
                parts.append(submit(files[piece.directory_index], piece.offset, part))
                start += piece.nbytes
        except BaseException:
            transfer.abandon()
            raise
        return transfer

    def _verify(self, key: Key, check: Check, view: memoryview) -> None:
        found = zlib.crc32(view)
        if found != check.expected:
            piece = self.layout.pieces(*key, check.offset, check.nbytes)[0]
            path = self._locks[piece.directory_index].states_path
            raise FormatError(
                f"unit {key[0]}, {key[1]}: checksum is {found:08x}, the manifest says "
                f"{check.expected:08x} ({path}, offset {piece.offset}, {check.nbytes} bytes). The drive or "
                "another program changed it. Resume from an intact checkpoint."
            )

    def _count(self, kind: str, direction: str, nbytes: int) -> None:
        with self._lock:
            self._counters[kind][direction] += nbytes

    def _manifest(self, versions: dict[str, int | None]) -> Manifest:
        checksums: dict[str, dict[str, str]] = {}
        for unit in versioned_units(self.layout.units):
            version = versions[unit.name]
            for state in unit.states:
                if version is not None:
                    text = self._checksums.to_text((unit.name, state.name, version))
                    if text is not None:
                        checksums.setdefault(unit.name, {})[state.name] = text
        return Manifest(
            format=FORMAT,
            run_id=self.run_id,
            layout=self.layout.fingerprint,
            copies=self.layout.copies,
            weights=list(self.layout.weights),
            stripe_bytes=self.layout.stripe_bytes,
            check_bytes=self._checksums.check_bytes,
            directories=[str(directory) for directory in self.directories],
            units=describe_units(self.layout.units),
            versions=versions,
            checksums=checksums,
        )

    def _write_owners(self) -> None:
        folders = [str(folder) for folder in self._folders.values()]
        for index, lock in enumerate(self._locks):
            lock.write_owner(replace(self._owner, directory_index=index, checkpoints=folders))


def _identity(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise StorageError(
            "open",
            path,
            errno=error.errno or 0,
            hint="It was removed or moved while the run used it. Put the directory back, or resume from a "
            "checkpoint that has its states.",
        ) from error
    return status.st_dev, status.st_ino
