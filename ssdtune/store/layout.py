"""Where every byte of every unit lies: fixed places, computed once from names and sizes.

All states form one linear range of bytes: first `copies` equal regions that each hold the versioned states of
all units, then the states without versions. The range is dealt over the directories in stripe units, in
proportion to their bandwidth, so that a chunk of a large state uses all drives at once. There is no allocator
and no fragmentation. What checkpoints need stays in its place when there are more copies, or other states
without versions, which hold nothing between two runs: both only change the length of the files.

This module does no I/O. Read `ssdtune.store.versions` next, then `ssdtune.store.store`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ssdtune.io.backend import ALIGNMENT
from ssdtune.io.buffers import aligned_size

KINDS = ("weights", "master", "moments", "gradients", "activations")
"""What metrics count bytes by."""

STRIPE_BYTES = 4 << 20
"""Largest stripe unit: several full requests, yet a chunk of 16 MiB reaches four drives."""

_PATTERN_UNITS = 32  # stripe units in one period: resolves bandwidths to about 3 %


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One flat array of a unit.

    Attributes:
        nbytes: Its exact size; the place on the drive, `extent_bytes`, is rounded up to the alignment.
        kind: One of `KINDS`.
        versioned: Whether a checkpoint keeps it, so that it has several places.
    """

    name: str
    nbytes: int
    kind: str
    versioned: bool = True

    @property
    def extent_bytes(self) -> int:
        """Bytes of its place; transfers reach up to here."""
        return aligned_size(self.nbytes)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What is versioned as one: for example a block's weights and its optimizer states."""

    name: str
    states: tuple[StateSpec, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous range of one directory's file; offset and nbytes are aligned."""

    directory_index: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class StoreLayout:
    """The places of all states; made by `build`."""

    units: tuple[UnitSpec, ...]
    copies: int
    weights: tuple[float, ...]
    stripe_bytes: int
    pattern: tuple[int, ...]
    single_bytes: int
    copy_bytes: int
    _starts: dict[tuple[str, str], int] = field(repr=False)
    _states: dict[tuple[str, str], StateSpec] = field(repr=False)

    @classmethod
    def build(
        cls,
        units: Sequence[UnitSpec],
        copies: int,
        directories_weights: Sequence[float] = (1.0,),
        *,
        stripe_bytes: int | None = None,
    ) -> StoreLayout:
        """Place all states; equal arguments give the equal layout, on any machine.

        Args:
            units: All units, with unique names, and unique names of states within each.
            copies: Places of each versioned state, at least 1.
            directories_weights: Relative bandwidth of each directory, all above 0.
            stripe_bytes: Bytes in one directory before the next one follows; by default `STRIPE_BYTES`,
                or less where so little is stored that some directories would stay empty.

        Raises:
            ValueError: The arguments make no sense.
        """
        if copies < 1:
            raise ValueError(f"copies is {copies}; it must be at least 1")
        weights = [float(w) for w in directories_weights]
        if not weights or not all(math.isfinite(w) and w > 0 for w in weights):
            raise ValueError(f"weights of directories must be above 0, not {weights}")
        starts: dict[tuple[str, str], int] = {}
        states: dict[tuple[str, str], StateSpec] = {}
        ends = {True: 0, False: 0}  # by versioned
        for unit in units:
            for state in unit.states:
                key = (unit.name, state.name)
                if key in states:
                    raise ValueError(f"unit {unit.name} has two states named {state.name}")
                if state.kind not in KINDS or state.nbytes < 0:
                    raise ValueError(f"unit {unit.name}: bad state {state}")
                starts[key] = ends[state.versioned]
                states[key] = state
                ends[state.versioned] += state.extent_bytes
        if len({unit.name for unit in units}) != len(units):
            raise ValueError("two units have the same name")
        if stripe_bytes is None:
            share = sum(ends.values()) // (8 * len(weights)) // ALIGNMENT * ALIGNMENT
            stripe_bytes = min(STRIPE_BYTES, max(ALIGNMENT, share))
        if stripe_bytes <= 0 or stripe_bytes % ALIGNMENT:
            raise ValueError(
                f"stripe_bytes is {stripe_bytes}; it must be a multiple of {ALIGNMENT}"
            )
        return cls(
            units=tuple(units),
            copies=copies,
            weights=tuple(weights),
            stripe_bytes=stripe_bytes,
            pattern=_deal(weights),
            single_bytes=ends[False],
            copy_bytes=ends[True],
            _starts=starts,
            _states=states,
        )

    def with_copies(self, copies: int) -> StoreLayout:
        """Return the same layout with another number of copies; versioned places in common stay."""
        return replace(self, copies=copies)

    @property
    def num_directories(self) -> int:
        """How many directories the states are dealt over."""
        return len(self.weights)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return self.single_bytes + self.copies * self.copy_bytes

    @property
    def versioned_directory_bytes(self) -> tuple[int, ...]:
        """Size up to which each directory's file holds versioned states."""
        return replace(self, single_bytes=0).directory_bytes

    @property
    def directory_bytes(self) -> tuple[int, ...]:
        """Size of each directory's file."""
        sizes = [0] * self.num_directories
        whole_units, rest = divmod(self.total_bytes, self.stripe_bytes)
        cycles, tail = divmod(whole_units, len(self.pattern))
        for position, directory in enumerate(self.pattern):
            sizes[directory] += (cycles + (position < tail)) * self.stripe_bytes
        sizes[self.pattern[tail]] += rest
        return tuple(sizes)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides where versioned states lie, except the number of copies."""
        described = {
            "units": describe_units(versioned_units(self.units)),
            "stripe_bytes": self.stripe_bytes,
            "pattern": self.pattern,
        }
        text = json.dumps(described, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def state(self, unit: str, state: str) -> StateSpec:
        """Look a state up by the names of unit and state.

        Raises:
            ValueError: There is none.
        """
        try:
            return self._states[unit, state]
        except KeyError:
            raise ValueError(f"the store has no state {state} in a unit {unit}") from None

    def pieces(
        self, unit: str, state: str, copy: int = 0, offset: int = 0, nbytes: int | None = None
    ) -> list[Piece]:
        """Return where a range of a state lies, in order; the whole extent by default.

        Args:
            copy: Which of the places; 0 for a state without versions.
            offset: Aligned start within the state; `nbytes`, also aligned, are taken from there.
        """
        spec = self.state(unit, state)
        if nbytes is None:
            nbytes = spec.extent_bytes - offset
        if not 0 <= copy < (self.copies if spec.versioned else 1):
            raise ValueError(f"unit {unit}, {state}: there is no copy {copy}")
        if offset % ALIGNMENT or nbytes % ALIGNMENT:
            raise ValueError(
                f"unit {unit}, {state}: {offset} or {nbytes} is no multiple of {ALIGNMENT}"
            )
        if offset < 0 or nbytes < 0 or offset + nbytes > spec.extent_bytes:
            raise ValueError(
                f"unit {unit}, {state}: {nbytes} bytes at {offset} leave its {spec.extent_bytes} bytes"
            )
        start = self._starts[unit, state] + offset
        start += (copy if spec.versioned else self.copies) * self.copy_bytes
        if self.num_directories == 1:
            return [Piece(0, start, nbytes)] if nbytes else []
        return list(_merged(self._stripes(start, start + nbytes)))

    def _stripes(self, start: int, end: int) -> Iterator[Piece]:
        """Cut a linear range at the borders of stripe units and map each part."""
        while start < end:
            index, inside = divmod(start, self.stripe_bytes)
            cycle, position = divmod(index, len(self.pattern))
            directory = self.pattern[position]
            rank = cycle * self.pattern.count(directory) + self.pattern[:position].count(directory)
            size = min(self.stripe_bytes - inside, end - start)
            yield Piece(directory, rank * self.stripe_bytes + inside, size)
            start += size


def versioned_units(units: Sequence[UnitSpec]) -> list[UnitSpec]:
    """Return the units that a checkpoint keeps, with only those states of theirs."""
    kept = [UnitSpec(u.name, tuple(s for s in u.states if s.versioned)) for u in units]
    return [unit for unit in kept if unit.states]


def describe_units(units: Sequence[UnitSpec]) -> list[list[object]]:
    """Return units as JSON, in order: [name, [state, nbytes, kind, versioned] of each state]."""
    return [[u.name, [[s.name, s.nbytes, s.kind, s.versioned] for s in u.states]] for u in units]


def _merged(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Join neighbours that are contiguous in one file."""
    last: Piece | None = None
    for piece in pieces:
        if last and last.directory_index == piece.directory_index:
            last = Piece(last.directory_index, last.offset, last.nbytes + piece.nbytes)
            continue
        if last:
            yield last
        last = piece
    if last:
        yield last


def _deal(weights: Sequence[float]) -> tuple[int, ...]:
    """Return directory numbers in the order in which stripe units are dealt; each occurs at least once.

    Shares are rounded by largest remainder; equal weights give 0, 1, 2, ... once. The order is that of
    smooth weighted round robin, so that the units of each directory are spread evenly over the period.
    """
    period = max(_PATTERN_UNITS, 4 * len(weights))
    if len(set(weights)) == 1:
        period = len(weights)
    exact = [w / sum(weights) * period for w in weights]
    counts = [max(1, math.floor(e)) for e in exact]
    by_remainder = sorted(range(len(weights)), key=lambda d: (counts[d] - exact[d], d))
    for directory in by_remainder[: max(0, period - sum(counts))]:
        counts[directory] += 1
    divisor = math.gcd(*counts)
    counts = [c // divisor for c in counts]
    credit = [0] * len(counts)
    pattern = []
    for _ in range(sum(counts)):
        credit = [c + n for c, n in zip(credit, counts, strict=True)]
        chosen = max(range(len(counts)), key=lambda d: (credit[d], -d))
        credit[chosen] -= sum(counts)
        pattern.append(chosen)
    return tuple(pattern)
