"""Which states a trained part has, by the precision options: the weights, what makes them exact, and two moments.

| options | states |
|---|---|
| fp32 | weights, exp_avg, exp_avg_sq |
| bf16 | weights, low (the lower halves of exact fp32 masters), exp_avg, exp_avg_sq |
| bf16 without masters | weights (rounded stochastically), exp_avg, exp_avg_sq |
| 8-bit moments | exp_avg and exp_avg_sq as codes of a byte, and a scale for 256 elements of each |
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ssdtune.io.buffers import aligned_size
from ssdtune.model.layout import Part
from ssdtune.optim.codes import CODE_BLOCK


@dataclass(frozen=True)
class State:
    """One state of a part.

    Attributes:
        block: Elements of the part for which there is one number.
        kind: What the metrics call its traffic.
    """

    name: str
    dtype: torch.dtype
    block: int
    kind: str

    def numel(self, elements: int) -> int:
        """Return the numbers for so many elements of the part."""
        return -(-elements // self.block)

    def nbytes(self, elements: int) -> int:
        """Return the bytes of a range of so many elements that begins on a piece, rounded up for direct I/O."""
        return aligned_size(self.numel(elements) * self.dtype.itemsize)

    def offset(self, start: int) -> int:
        """Return where in the state a range of the part begins, in bytes."""
        return start // self.block * self.dtype.itemsize


@dataclass(frozen=True)
class Precision:
    """The precision of states; the user's choice, never the planner's.

    Attributes:
        masters: bf16 weights have the lower halves of fp32 masters beside them; else they are rounded
            stochastically.
        coded_moments: Moments have 8 bits.
    """

    masters: bool = True
    coded_moments: bool = False

    def is_split(self, part: Part) -> bool:
        """Say whether a part's masters are in two halves."""
        return part.dtype != torch.float32 and self.masters

    def is_rounded(self, part: Part) -> bool:
        """Say whether a part's weights are rounded stochastically."""
        return part.dtype != torch.float32 and not self.masters

    def states(self, part: Part) -> Mapping[str, State]:
        """Return the versioned states of a trained part by name, the weights first."""
        return _states(part.dtype, self.is_split(part), self.coded_moments)


@functools.cache
def _states(dtype: torch.dtype, split: bool, coded_moments: bool) -> Mapping[str, State]:
    found = [State("weights", dtype, 1, "weights")]
    if split:
        found.append(State("low", torch.int16, 1, "master"))
    for name in ("exp_avg", "exp_avg_sq"):
        if coded_moments:
            found.append(State(name, torch.uint8, 1, "moments"))
            found.append(State(f"{name}_scale", torch.float32, CODE_BLOCK, "moments"))
        else:
            found.append(State(name, torch.float32, 1, "moments"))
    return MappingProxyType({state.name: state for state in found})
