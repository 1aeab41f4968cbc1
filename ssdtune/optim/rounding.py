"""Stochastic rounding of float32 to bfloat16, with random bits that depend on where and when alone.

A number between two bfloat16 becomes the upper one as often as it is near it, so that updates far below half a unit
in the last place add up on average. The random bits are a hash of seed, step and the element's index: no generator
has a state to save, and neither order, pieces nor threads matter. This is the numpy form; native/src/adam.cpp has
the same hash. Letter: N elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_MASK = (1 << 64) - 1


def rounding_key(seed: int, step: int) -> tuple[int, int]:
    """Return the two 32-bit keys of a step's random bits.

    Source: the splitmix64 finalizer (Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014).
    """
    value = 0
    for part in (seed, step):
        value = (value + part + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value >> 32, value & 0xFFFFFFFF


def random_bits(key: tuple[int, int], first: int, size: int) -> Any:
    """Return 16 random bits, as uint32 [N], for each of the elements first ... first + size - 1.

    The index counts modulo 2^32.

    Source: a keyed variant of the hash lowbias32 (Wellons, Prospecting for Hash Functions, 2018).
    """
    x = np.arange(size, dtype=np.uint32) + np.uint32(first & 0xFFFFFFFF)
    x ^= np.uint32(key[0])
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x += np.uint32(key[1])
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    return x >> np.uint32(16)


def round_to_bfloat16(bits: Any, random: Any) -> Any:
    """Return the bits of bfloat16, uint16 [N], that float32 bits, uint32 [N], round to with these random bits."""
    return ((bits + random) >> np.uint32(16)).astype(np.uint16)
