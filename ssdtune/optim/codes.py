"""Moments in 8 bits: blocks of 256 numbers, a code of one byte each and a scale for the block, in numpy.

The codes are those of bitsandbytes' 8-bit optimizers. The numpy form of AdamW uses this module; the native one has
the same arithmetic in native/src/codes.cpp, operation by operation, and so the same bits. Letter: N elements.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022), section 2.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ssdtune.plan.states import CODE_BLOCK

_SIGNED_ZERO = 127  # the signed code of 0
_DECADES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_SMALLEST = np.finfo(np.float32).tiny


def num_scales(numel: int) -> int:
    """Return the number of blocks, the last of which may be short."""
    return -(-numel // CODE_BLOCK)


@cache
def code_values(signed: bool) -> Any:
    """Return the numbers from -1 (signed) or 0 to 1 that the codes mean, float32 [256], in ascending order.

    They are the middles of even divisions of seven decades: in decade i, which ends at 10^(i-6), a signed table
    has 2^i for each sign, an unsigned one 2^(i+1); and 0 and 1. In a signed table 0 has code 127.
    """
    table, values = _table(signed), np.zeros(256, np.float32)
    places = np.arange(1 if signed else 2, 129 if signed else 257)
    decade = np.frexp(places)[1] - (1 if signed else 2)
    positive = (places.astype(np.float32) + table.offset[decade]) * table.factor[decade]
    if not signed:
        values[1:] = positive
    else:
        values[_SIGNED_ZERO + 1 :] = positive
        values[:_SIGNED_ZERO] = -positive[-2::-1]  # without -1
    return values


def decode(codes: Any, scales: Any, *, signed: bool) -> Any:
    """Return the numbers, float32 [N], of codes, uint8 [N], and scales, float32 [ceil(N / 256)]."""
    with np.errstate(all="ignore"):
        return code_values(signed)[codes] * np.repeat(scales, CODE_BLOCK)[: codes.size]


def encode(values: Any, codes: Any, scales: Any, *, signed: bool) -> bool:
    """Write the nearest codes of numbers, float32 [N], and their scales; False if a scale is not finite.

    An unsigned number above 0 never gets the code of 0: it would leave only epsilon below an update's fraction bar.
    If the largest of a block is below the smallest normal number, its scale is 0.
    """
    table = _table(signed)
    blocks = np.zeros((num_scales(values.size), CODE_BLOCK), np.float32)
    blocks.reshape(-1)[: values.size] = values
    largest = np.abs(blocks).view(np.uint32).max(axis=1, initial=0).view(np.float32)
    scales[:] = np.where(largest < _SMALLEST, np.float32(0), largest)
    with np.errstate(all="ignore"):
        inverse = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
        scaled = np.abs(blocks * inverse[:, None]).reshape(-1)[: values.size]
    # As bits, what is not a number is larger than 1.
    magnitude = np.minimum(scaled.view(np.uint32), np.float32(1).view(np.uint32)).view(np.float32)
    decade = np.searchsorted(table.threshold[1:], magnitude, side="right")
    place = magnitude * table.slope[decade] + table.intercept[decade]
    place = np.minimum(place, table.last[decade]).astype(np.int32)
    if signed:
        place = np.where(np.signbit(values), -place, place)
        codes[:] = np.maximum(place + _SIGNED_ZERO, 0)  # no code of -1
    else:
        codes[:] = np.maximum(place - 1, magnitude > 0)
    return bool(np.isfinite(scales).all())


class _Table(NamedTuple):
    """The arithmetic of a table, by decade, float32 [8]; the last decade is the number 1 alone.

    A code's place is its distance from 0, one more in an unsigned table. With n codes in a decade these are the
    places n ... 2 n - 1, at (place + offset) * factor. The place of a number is number * slope + intercept, rounded
    down, but at most `last`; a decade begins at its threshold, halfway between two codes.
    """

    offset: Any
    factor: Any
    threshold: Any
    slope: Any
    intercept: Any
    last: Any


@cache
def _table(signed: bool) -> _Table:
    rows = []
    for i, top in enumerate(_DECADES):
        n = (1 if signed else 2) << i
        threshold = 0.1 * top * (1 + 1.8 / n)
        slope, intercept = n / (0.9 * top), 8 * n / 9
        if signed and i == 0:  # the only code of its decade, from halfway to 0
            slope, intercept = 1 / (0.275 * top), 0
        rows.append((0.5 - 8 * n / 9, 0.9 * top / n, threshold, slope, intercept, 2 * n - 1))
    n *= 2
    rows.append((0, 1 / n, 1 - 0.45 / n, 0, n, n))
    return _Table(*np.array(rows, np.float32).T.copy())
