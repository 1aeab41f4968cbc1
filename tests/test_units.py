"""Sizes, counts and times as people read them."""

import pytest

from ssdtune.units import format_count, parse_size


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (830, "830"), (55_800, "55.8k"), (2_764_992, "2.76M"), (1_100_048_384, "1.10B"),
     (70.6e9, "70.6B"), (1.5e12, "1.50T")],
)  # fmt: skip
def test_counts(number, text):
    assert format_count(number) == text


def test_sizes_in_both_systems():
    assert parse_size("3GiB") == 3 << 30
    assert parse_size("3 GB") == 3 * 10**9
    with pytest.raises(ValueError, match="is not a size"):
        parse_size("three")
