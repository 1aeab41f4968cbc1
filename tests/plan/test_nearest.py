"""The nearest plan that fits: never one that does not, and none that is larger was passed over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdtune.plan.nearest import LENGTH_GRAIN, Nearest, as_setting, largest, nearest_fit
from ssdtune.units import GIB, MIB, parse_size


@pytest.mark.parametrize(("power", "most_looks"), [(1, 6), (2, 32), (8, 45)])
def test_the_largest_is_found_with_few_looks(power: int, most_looks: int) -> None:
    looks: list[int] = []

    def needed(number: int) -> int:
        looks.append(number)
        return 5 + 3 * number**power

    assert largest(needed, 5 + 3 * 777**power + 1, 1, 1_000_000) == 777
    assert len(looks) <= most_looks


@given(st.integers(-5, 40), st.integers(-5, 40), st.integers(-10, 50), st.integers(0, 9))
def test_largest_of_any_range(low: int, high: int, limit: int, slope: int) -> None:
    expected = max((n for n in range(low, high + 1) if n <= limit), default=None)
    jump = {number: slope * number + (number > limit) * 1000 for number in range(-5, 41)}
    assert largest(jump.__getitem__, 500, low, high) == expected


@given(
    base=st.integers(0, 2000),
    token=st.integers(0, 9),
    square=st.integers(0, 2),
    batch_size=st.integers(1, 12),
    length=st.integers(2, 300),
    budget=st.integers(0, 20_000),
)
def test_what_is_named_fits_and_is_the_largest(
    base: int, token: int, square: int, batch_size: int, length: int, budget: int
) -> None:
    def needed(size: int, tokens: int) -> int:
        return base + token * size * tokens + square * tokens * tokens

    found = nearest_fit(needed, batch_size, length, budget)
    if needed(batch_size, length) <= budget:
        assert found is None
        return
    assert found is not None
    assert (found.needed_bytes, found.budget_bytes) == (needed(batch_size, length), budget)
    sizes = [n for n in range(1, batch_size) if needed(n, length) <= budget]
    assert found.batch_size == max(sizes, default=None)

    def check_length(got: int | None, size: int) -> None:
        best = max((n for n in range(2, length) if needed(size, n) <= budget), default=None)
        if best is None or got is None:
            assert got is best is None
        else:
            assert best - LENGTH_GRAIN < got <= best
            assert needed(size, got) <= budget

    check_length(found.max_length, batch_size)
    if found.batch_size is None and found.max_length is None:
        check_length(found.short_row, 1)
    else:
        assert found.short_row is None


def test_words() -> None:
    assert Nearest(3 * GIB + 1, GIB, 2, 512).text() == (
        "What would fit: per_device_train_batch_size 2, or max_length 512, or host_memory 3.1GiB if the "
        "machine has it."
    )
    assert (
        "batch_size 1 with max_length 64, or host" in Nearest(3 * GIB, GIB, None, None, 64).text()
    )
    assert Nearest(2 * GIB, GIB).text() == (
        "No batch size or length fits. What would fit: host_memory 2GiB if the machine has it."
    )


@pytest.mark.parametrize("num_bytes", [1, MIB, MIB + 1, GIB - 1, GIB, GIB + 1, 123_456_789_012])
def test_sizes_can_be_typed_in_and_are_enough(num_bytes: int) -> None:
    assert num_bytes <= parse_size(as_setting(num_bytes)) <= num_bytes + max(MIB, GIB // 10)


def test_two_budgets_that_are_too_small_are_both_named() -> None:
    host = Nearest(3 * GIB, 2 * GIB, batch_size=4, max_length=96)
    card = Nearest(9 * GIB, 8 * GIB, batch_size=2, setting="gpu_memory")
    assert host.with_another(card).text() == (
        "What would fit: per_device_train_batch_size 2, or host_memory 3GiB and gpu_memory 9GiB if the machine has it."
    )
