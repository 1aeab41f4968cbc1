"""Combinations of test parameters: a covering part always runs, all of them with --run-slow."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def covering(*axes: Iterable[Any], every: int) -> list[Any]:
    """Return all combinations of the axes' values for `pytest.mark.parametrize`; one in `every` isn't slow.

    Those are the ones whose indices add up to a multiple of `every`. So with any values of all axes but one, each
    `every`-th value of that one runs: of three axes of which none is shorter than `every`, each pair of values does.
    """
    combinations = product(*(list(enumerate(axis)) for axis in axes))
    return [
        pytest.param(
            *(value for _, value in combination),
            marks=pytest.mark.slow if sum(index for index, _ in combination) % every else (),
        )
        for combination in combinations
    ]
