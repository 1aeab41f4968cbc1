"""The states of trained parts, and the pieces in which they are checked and updated: plain numbers.

| options | states of a part |
|---|---|
| fp32 | weights, exp_avg, exp_avg_sq |
| bf16 | weights, low (the lower halves of exact fp32 masters), exp_avg, exp_avg_sq |
| bf16 without masters | weights (rounded stochastically), exp_avg, exp_avg_sq |
| 8-bit moments | exp_avg and exp_avg_sq as codes of a byte, and a scale for 256 elements of each |

`ssdtune.swap.states` has them with their dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

PAGE_BYTES = 4096
"""Direct I/O moves multiples of this: every state, and every piece of one, lies on the drive in such."""
CODE_BLOCK = 256
"""Elements of 8-bit moments that share a scale."""
CHECK_BYTES = 1 << 20
"""Largest piece of a state that has a checksum of its own in the store."""

STATE_KINDS = {
    "weights": "weights",
    "low": "master",
    "exp_avg": "moments",
    "exp_avg_sq": "moments",
    "exp_avg_scale": "moments",
    "exp_avg_sq_scale": "moments",
    "gradient": "gradients",
    "inputs": "activations",
}
"""What the metrics call the traffic of each state."""


def extent_bytes(num_bytes: int) -> int:
    """Return the room on the drive for so many bytes: whole pages, for direct I/O."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class StateShape:
    """One state of a part: numbers one behind the other.

    Attributes:
        itemsize: Bytes of a number.
        block: Elements of the part for which there is one number.
    """

    name: str
    itemsize: int
    block: int

    @property
    def kind(self) -> str:
        """What the metrics call its traffic."""
        return STATE_KINDS[self.name]

    def size(self, elements: int) -> int:
        """Return the bytes of the numbers for so many elements of the part."""
        return -(-elements // self.block) * self.itemsize

    def nbytes(self, elements: int) -> int:
        """Return the bytes of a range of so many elements that begins on a piece, rounded up for direct I/O."""
        return extent_bytes(self.size(elements))

    def offset(self, start: int) -> int:
        """Return where in the state a range of the part begins, in bytes."""
        return start // self.block * self.itemsize


GRADIENT = StateShape("gradient", 4, 1)
"""Of a part whose gradient waits on SSD; it has no versions."""


@cache
def states_of(weight_bytes: int, *, split: bool, coded: bool) -> tuple[StateShape, ...]:
    """Return the versioned states of a trained part, the weights first.

    Args:
        weight_bytes: Of one weight.
        split: The master weight is split (bf16 and int16 halves).
        coded: Moments have 8 bits.
    """
    found = [StateShape("weights", weight_bytes, 1)]
    if split:
        found.append(StateShape("low", 2, 1))
    for name in ("exp_avg", "exp_avg_sq"):
        if coded:
            found += [StateShape(name, 1, 1), StateShape(f"{name}_scale", 4, CODE_BLOCK)]
        else:
            found.append(StateShape(name, 4, 1))
    return tuple(found)


def page_numel(*, coded: bool) -> int:
    """Return the elements whose numbers fill whole pages in every state: scales, or else halves, need most."""
    return PAGE_BYTES // 4 * CODE_BLOCK if coded else PAGE_BYTES // 2


def check_bytes_of(chunk_bytes: int, *, coded: bool = False) -> int:
    """Return the piece that has a checksum: it divides the chunks of the narrowest state, and so of all.

    Args:
        chunk_bytes: Of an fp32 state, that the optimizer works on at once.
        coded: Moments have 8 bits.
    """
    pages = max(chunk_bytes // 4 // page_numel(coded=coded), 1)
    return math.gcd(pages * PAGE_BYTES, CHECK_BYTES)


def chunk_numel(chunk_bytes: int, check_bytes: int | None = None, *, coded: bool = False) -> int:
    """Return the elements of a piece that the optimizer works on: whole pieces with a checksum, in every state.

    Args:
        chunk_bytes: Of an fp32 state.
        check_bytes: Of the store, whose size a resumed run takes over; by default that of a new one.
        coded: Moments have 8 bits.
    """
    check_bytes = check_bytes or check_bytes_of(chunk_bytes, coded=coded)
    piece = check_bytes // PAGE_BYTES * page_numel(coded=coded)
    return max(-(-chunk_bytes // 4 // piece), 1) * piece


def chunk_slot_bytes(states: Iterable[StateShape], numel: int, *, with_gradient: bool) -> int:
    """Return what a piece takes in a chunk slot: its states, but not its weights, which are updated where they lie.

    Args:
        with_gradient: So does a gradient that comes from SSD.
    """
    others = [state for state in states if state.name != "weights"]
    return sum(state.nbytes(numel) for state in [*others, *[GRADIENT] * with_gradient])
