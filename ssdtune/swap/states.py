"""Which states a trained part has, by the precision options, with their dtypes; `ssdtune.plan.states` has the table."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ssdtune.model.layout import Part
from ssdtune.plan import states as plan_states
from ssdtune.plan.states import StateShape, states_of

_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.float32}
"""Dtypes of states that are not weights: codes, lower halves, moments and scales."""


@dataclass(frozen=True)
class State(StateShape):
    """One state of a part."""

    dtype: torch.dtype

    @classmethod
    def of(cls, shape: StateShape, dtype: torch.dtype | None = None) -> State:
        """Return the state of a shape; by default with the dtype of those that are not weights."""
        return cls(shape.name, shape.itemsize, shape.block, dtype or _BY_SIZE[shape.itemsize])


GRADIENT = State.of(plan_states.GRADIENT)


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
    weights, *others = states_of(dtype.itemsize, split=split, coded=coded_moments)
    states = [State.of(weights, dtype), *map(State.of, others)]
    return MappingProxyType({state.name: state for state in states})
