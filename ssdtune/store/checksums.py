"""CRC-32 of fixed pieces of states: recorded by writes, kept in manifests, verified by first reads.

Pure bookkeeping without files or locks; `ssdtune.store.store` guards it with its own lock.
"""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass

Key = tuple[str, str, int]
"""Unit, state, version."""

UNKNOWN = -1
_UNKNOWN_TEXT = "-" * 8


@dataclass(frozen=True, slots=True)
class Check:
    """A piece that a read has to verify: its number, place in the state, and checksum."""

    index: int
    offset: int
    nbytes: int
    expected: int


class Checksums:
    """Checksums of the pieces of states.

    Args:
        check_bytes: Size of a piece; the last one of a state is shorter.
    """

    def __init__(self, check_bytes: int) -> None:
        self.check_bytes = check_bytes
        self._values: dict[Key, array[int]] = {}
        self._unverified: dict[Key, set[int]] = {}

    def whole_pieces(self, extent_bytes: int, offset: int, nbytes: int) -> range:
        """Return the numbers of the pieces that lie entirely in a range."""
        first = -(-offset // self.check_bytes)
        end = offset + nbytes
        last = self._count(extent_bytes) if end >= extent_bytes else end // self.check_bytes
        return range(first, last)

    def covers_whole_pieces(self, extent_bytes: int, offset: int, nbytes: int) -> bool:
        """Say whether a range begins and ends at borders of pieces."""
        end = offset + nbytes
        return offset % self.check_bytes == 0 and (
            end == extent_bytes or end % self.check_bytes == 0
        )

    def compute(self, view: memoryview) -> list[int]:
        """Return the checksums of the pieces of a buffer that starts at a border. Releases the GIL."""
        size = self.check_bytes
        return [zlib.crc32(view[at : at + size]) for at in range(0, view.nbytes, size)]

    def record(self, key: Key, extent_bytes: int, offset: int, values: list[int]) -> None:
        """Keep the checksums of what was just written."""
        known = self._values.setdefault(key, array("q", [UNKNOWN] * self._count(extent_bytes)))
        first = offset // self.check_bytes
        known[first : first + len(values)] = array("q", values)

    def forget(self, key: Key, offset: int = 0, nbytes: int | None = None) -> None:
        """Drop what is known of a range that is overwritten, or of the whole state."""
        if nbytes is None:
            self._values.pop(key, None)
            self._unverified.pop(key, None)
        elif key in self._values and nbytes:
            touched = range(offset // self.check_bytes, -(-(offset + nbytes) // self.check_bytes))
            for index in touched:
                self._values[key][index] = UNKNOWN
            self._unverified.get(key, set()).difference_update(touched)

    def due(self, key: Key, extent_bytes: int, offset: int, nbytes: int) -> list[Check]:
        """Return what a read of a range has to verify."""
        waiting = self._unverified.get(key)
        if not waiting:
            return []
        size = self.check_bytes
        return [
            Check(i, i * size, min(size, extent_bytes - i * size), self._values[key][i])
            for i in self.whole_pieces(extent_bytes, offset, nbytes)
            if i in waiting
        ]

    def verified(self, key: Key, checks: list[Check]) -> None:
        """Note that pieces were found intact."""
        self._unverified.get(key, set()).difference_update(check.index for check in checks)

    def to_text(self, key: Key) -> str | None:
        """Return the checksums of a state, 8 hex digits each, or None if none is known."""
        values = self._values.get(key)
        if values is None or all(value == UNKNOWN for value in values):
            return None
        return "".join(_UNKNOWN_TEXT if value == UNKNOWN else f"{value:08x}" for value in values)

    def load(self, key: Key, extent_bytes: int, text: str) -> None:
        """Take over checksums from `to_text`; first reads will verify them.

        Raises:
            ValueError: The text is not what `to_text` gives for a state of this size.
        """
        parts = [text[at : at + 8] for at in range(0, len(text), 8)]
        values = [UNKNOWN if part == _UNKNOWN_TEXT else int(part, 16) for part in parts]
        if len(values) != self._count(extent_bytes):
            raise ValueError(f"{len(values)} checksums for {extent_bytes} bytes")
        self._values[key] = array("q", values)
        self._unverified[key] = {i for i, value in enumerate(values) if value != UNKNOWN}

    def _count(self, extent_bytes: int) -> int:
        return -(-extent_bytes // self.check_bytes)
