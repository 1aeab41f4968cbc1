"""The nearest plan that fits where the wanted one does not: found with few looks, said as settings to change.

Plain numbers: what a run needs is a function of its batch size and sequence length, given by the caller, who knows
the model (`ssdtune.train.planning`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ssdtune.units import GIB, MIB

LENGTH_GRAIN = 16
"""Lengths are rounded down to multiples of this, where they are longer."""
SHORTEST_LENGTH = 2
"""Shorter sequences have nothing to learn."""


@dataclass(frozen=True)
class Nearest:
    """Changes of which each alone makes a run fit; None where none of its kind does.

    Attributes:
        needed_bytes: What the wanted run needs at least: a budget of this size works.
        budget_bytes: What there is.
        batch_size: Largest one at the wanted length.
        max_length: Longest one at the wanted batch size.
        short_row: Longest one with a batch size of 1, where neither of the two helps alone.
        setting: What the budget is set by.
        also: Another budget that is too small, where two are.
    """

    needed_bytes: int
    budget_bytes: int
    batch_size: int | None = None
    max_length: int | None = None
    short_row: int | None = None
    setting: str = "host_memory"
    also: Nearest | None = None

    def with_another(self, other: Nearest) -> Nearest:
        """Return the changes that fit two budgets, both of which are too small."""

        def least(one: int | None, two: int | None) -> int | None:
            return None if one is None or two is None else min(one, two)

        return replace(
            self,
            batch_size=least(self.batch_size, other.batch_size),
            max_length=least(self.max_length, other.max_length),
            short_row=least(self.short_row, other.short_row),
            also=other,
        )

    def text(self) -> str:
        """Return the changes for people, as settings that can be typed in."""
        ways = []
        if self.batch_size is not None:
            ways.append(f"per_device_train_batch_size {self.batch_size}")
        if self.max_length is not None:
            ways.append(f"max_length {self.max_length}")
        if self.short_row is not None:
            ways.append(f"per_device_train_batch_size 1 with max_length {self.short_row}")
        budgets = [self, *([self.also] if self.also else [])]
        needed = " and ".join(f"{b.setting} {as_setting(b.needed_bytes)}" for b in budgets)
        ways.append(f"{needed} if the machine has it")
        text = f"What would fit: {', or '.join(ways)}."
        if len(ways) == 1:
            text = f"No batch size or length fits. {text}"
        return text


def nearest_fit(
    needed: Callable[[int, int], int],
    batch_size: int,
    max_length: int,
    budget_bytes: int,
    *,
    setting: str = "host_memory",
) -> Nearest | None:
    """Find what to change so that a run fits.

    Args:
        needed: Bytes that a run needs at least, by batch size and length; never less for more of either.
        batch_size, max_length: What is wanted.
        setting: What the budget is set by.

    Returns:
        None if the wanted run fits.
    """
    wanted = needed(batch_size, max_length)
    if wanted <= budget_bytes:
        return None

    def longest(size: int) -> int | None:
        grains = largest(
            lambda n: needed(size, n * LENGTH_GRAIN),
            budget_bytes,
            1,
            (max_length - 1) // LENGTH_GRAIN,
        )
        if grains is not None:
            return grains * LENGTH_GRAIN
        most = min(max_length, LENGTH_GRAIN) - 1
        return largest(lambda n: needed(size, n), budget_bytes, SHORTEST_LENGTH, most)

    size = largest(lambda n: needed(n, max_length), budget_bytes, 1, batch_size - 1)
    length = longest(batch_size)
    alone = size is not None or length is not None
    return Nearest(wanted, budget_bytes, size, length, None if alone else longest(1), setting)


def largest(needed: Callable[[int], int], budget_bytes: int, low: int, high: int) -> int | None:
    """Return the largest number from `low` to `high` that needs no more than the budget; None if there is none.

    What is needed grows nearly in proportion, so proportion says where to look; every second time the middle does, so that
    no other growth takes many looks.

    Args:
        needed: Never less for a larger number. Each call may take a while.
    """
    if high < low or (least := needed(low)) > budget_bytes:
        return None
    if (most := needed(high)) <= budget_bytes:
        return high
    looks = 0
    while high - low > 1:
        looks += 1
        share = 0.5 if looks % 2 == 0 else (budget_bytes - least) / (most - least)
        number = low + min(max(int((high - low) * share), 1), high - low - 1)
        size = needed(number)
        if size <= budget_bytes:
            low, least = number, size
        else:
            high, most = number, size
    return low


def as_setting(num_bytes: int) -> str:
    """Write bytes as a size that can be typed in, rounded up: `3.2GiB`, `640MiB`."""
    if num_bytes < GIB:
        return f"{-(-num_bytes // MIB)}MiB"
    tenths = -(-num_bytes * 10 // GIB)
    return f"{tenths // 10}.{tenths % 10}GiB" if tenths % 10 else f"{tenths // 10}GiB"
