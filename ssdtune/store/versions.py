"""Which place of each unit is live, which is being written, and which ones checkpoints hold.

Pure bookkeeping without files or locks; `ssdtune.store.store` guards it with its own lock. A version is
the number of a place. A frozen version is never written until its label is released.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ssdtune.errors import CapacityError


@dataclass
class Pending:
    """A version that is being written.

    Attributes:
        in_place: It is the live version itself, so that it cannot be discarded.
        unfinished: Transfers that nobody has waited for yet.
        failed: Transfers that failed.
        written_bytes: Bytes written of each state.
    """

    version: int
    in_place: bool
    unfinished: int = 0
    failed: int = 0
    written_bytes: dict[str, int] = field(default_factory=dict)


class Versions:
    """Live, pending and frozen versions of a set of units.

    Args:
        live: Version of each unit; None where nothing was written yet.
        copies: Places of each unit.
        frozen: Versions that labels hold already.
    """

    def __init__(
        self,
        live: Mapping[str, int | None],
        copies: int,
        frozen: Mapping[str, Mapping[str, int | None]] | None = None,
    ) -> None:
        self.live = dict(live)
        self.copies = copies
        self.pending: dict[str, Pending] = {}
        self.frozen = {label: dict(versions) for label, versions in (frozen or {}).items()}

    def begin(self, unit: str, *, beside: bool = False) -> Pending:
        """Return what is being written of a unit; on the first call choose its place.

        Args:
            beside: Not in the place of the live version, though no checkpoint holds that.

        Raises:
            CapacityError: Checkpoints, and the live version, hold all places.
        """
        if unit in self.pending:
            return self.pending[unit]
        live = self.live[unit]
        held = {versions.get(unit) for versions in self.frozen.values()}
        if beside:
            held.add(live)
        if live is not None and live not in held:
            version = live
        else:
            free = [v for v in range(self.copies) if v not in held]
            if not free:
                raise CapacityError(
                    f"unit {unit}: all {self.copies} places are held by {', '.join(self.frozen) or 'its live version'}. "
                    "Lower save_total_limit only together with the checkpoints kept, or report this "
                    "as a defect of ssdtune."
                )
            version = free[0]
        self.pending[unit] = Pending(version, in_place=version == live)
        return self.pending[unit]

    def has_room_beside(self) -> bool:
        """Say whether every unit has a place that neither is live nor held by a checkpoint."""
        for unit, live in self.live.items():
            held = {versions.get(unit) for versions in self.frozen.values()} - {None}
            if len(held | {live}) >= self.copies:  # one that was never written will take a place
                return False
        return True

    def commit(self, unit: str, extents: Mapping[str, int]) -> None:
        """Make what was written the live version.

        Args:
            extents: Bytes that each versioned state must have been written with, unless it was in place.

        Raises:
            ValueError: Nothing was written, or not everything, or not successfully.
        """
        pending = self._settled(unit, "commit")
        if pending.failed:
            raise ValueError(f"commit of unit {unit}: {pending.failed} writes failed")
        missing = [s for s, size in extents.items() if pending.written_bytes.get(s, 0) < size]
        if missing and not pending.in_place:
            raise ValueError(
                f"commit of unit {unit}: version {pending.version} lacks part of {', '.join(missing)}"
            )
        del self.pending[unit]
        self.live[unit] = pending.version

    def discard(self, unit: str) -> int:
        """Forget what was written; the live version stays. Returns the version that was dropped.

        Raises:
            ValueError: Nothing was written, or it was written in place: freeze the live version before.
        """
        pending = self._settled(unit, "discard")
        if pending.in_place:
            raise ValueError(f"discard of unit {unit}: its live version was overwritten")
        del self.pending[unit]
        return pending.version

    def freeze(self, label: str) -> dict[str, int | None]:
        """Hold the live versions of all units under a label, and return them.

        Raises:
            ValueError: The label is in use, or a live version is being overwritten.
        """
        if label in self.frozen:
            raise ValueError(f"freeze: {label} is frozen already")
        torn = [unit for unit, pending in self.pending.items() if pending.in_place]
        if torn:
            raise ValueError(
                f"freeze {label}: {', '.join(torn)} are being overwritten; commit them first"
            )
        self.frozen[label] = dict(self.live)
        return dict(self.live)

    def release(self, label: str) -> None:
        """Let the versions go that a label holds.

        Raises:
            ValueError: There is no such label.
        """
        if label not in self.frozen:
            raise ValueError(f"release: nothing is frozen as {label}")
        del self.frozen[label]

    def _settled(self, unit: str, action: str) -> Pending:
        pending = self.pending.get(unit)
        if pending is None:
            raise ValueError(f"{action} of unit {unit}: nothing was written")
        if pending.unfinished:
            raise ValueError(
                f"{action} of unit {unit}: wait for its {pending.unfinished} writes first"
            )
        return pending
