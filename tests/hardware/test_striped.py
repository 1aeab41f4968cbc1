"""Rates of a run by the directories that it uses: which were measured, what they share, and who sets the pace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdtune.errors import ConfigError
from ssdtune.hardware.figures import DirectoryProfile, DriveFacts, TogetherProfile
from ssdtune.hardware.striped import StripedRates, measured_places, shares, striped_rates


def place(path: str, rate: float, **changes: Any) -> DirectoryProfile:
    made = DirectoryProfile(
        path=path, file_system="ext4", device=f"/dev/{path.strip('/')}", free_bytes=10**12,
        read_bytes_per_s=rate, write_bytes_per_s=rate / 2, mixed_bytes_per_s=rate * 0.7,
    )  # fmt: skip
    return replace(made, **changes)


def together(rate: float) -> TogetherProfile:
    return TogetherProfile(
        num_file_systems=2, read_bytes_per_s=rate, write_bytes_per_s=rate, mixed_bytes_per_s=rate
    )


def reads(*places: DirectoryProfile, most: float = 1e12) -> float:
    return striped_rates(places, together(most)).read_bytes_per_s


def test_one_directory_of_several_has_its_own_rates() -> None:
    found = striped_rates([place("/a", 4e9)], together(1e9))
    assert found == StripedRates(4e9, 2e9, 2.8e9)


def test_several_add_up_to_what_they_reached_at_once() -> None:
    assert reads(place("/a", 4e9), place("/b", 4e9)) == 8e9
    assert reads(place("/a", 4e9), place("/b", 4e9), most=6e9) == 6e9


def test_the_slowest_sets_the_pace() -> None:
    # Half of everything lies on /b: 7 GB/s and 1 GB/s make 2 GB/s, whatever both could do by themselves.
    assert reads(place("/a", 7e9), place("/b", 1e9), most=8e9) == 2e9


def test_directories_on_the_same_drives_count_once() -> None:
    assert reads(place("/a", 4e9), place("/a/b", 4e9, device="/dev/a")) == 4e9
    # Two thirds lie on one drive.
    assert reads(
        place("/a", 4e9), place("/a/b", 4e9, device="/dev/a"), place("/c", 4e9)
    ) == pytest.approx(6e9)
    drives = (DriveFacts(name="nvme0n1"),)  # two partitions of it
    assert reads(place("/a", 4e9, drives=drives), place("/b", 3e9, drives=drives)) == 4e9


def test_without_directories_only_the_sum_is_known() -> None:
    assert striped_rates([], together(3.0)) == StripedRates(3.0, 3.0, 3.0)
    assert striped_rates([], None) == StripedRates()


def test_directories_are_found_by_path_or_file_system(tmp_path: Path) -> None:
    here = place(str(tmp_path), 1e9)
    other = place("/proc", 2e9)  # another file system on every machine
    known = [other, here]
    wanted = [Path("/proc"), tmp_path, tmp_path / "not yet" / "there", Path("/proc/sys")]
    assert measured_places(known, wanted) == [other, here, here, other]


def test_what_was_not_measured_is_named_with_the_command(tmp_path: Path) -> None:
    full = place("/proc", 0.0, problem="only 1 GB are free")
    with pytest.raises(ConfigError) as caught:
        measured_places([place(str(tmp_path), 1e9), full], [tmp_path, Path("/proc/sys")])
    assert str(caught.value) == (
        f"the drives of /proc/sys were not measured, only those of {tmp_path} (/proc: only 1 GB are free). "
        f"Measure all directories of the run together: ssdtune profile {tmp_path} /proc/sys"
    )


def test_shares_are_by_rate_where_that_gains() -> None:
    fast, slow = place("/a", 7e9), place("/b", 1e9)
    assert shares([fast, slow], together(1e12)) == (4.9e9, 0.7e9)
    # Whoever has seven eighths of everything and seven times the rate is done at the same time.
    found = striped_rates([fast, slow], together(1e12), shares([fast, slow], together(1e12)))
    assert found.read_bytes_per_s == pytest.approx(8e9)
    # Two directories on one drive share what it gets.
    twice = [fast, place("/a/b", 7e9, device="/dev/a"), slow]
    assert shares(twice, together(1e12)) == (2.45e9, 2.45e9, 0.7e9)
    assert striped_rates(
        twice, together(1e12), (2.45, 2.45, 0.7)
    ).read_bytes_per_s == pytest.approx(8e9)


def test_shares_are_equal_where_nothing_is_gained() -> None:
    assert shares([place("/a", 4.1e9), place("/b", 4e9)], together(1e12)) == ()
    assert (
        shares([place("/a", 7e9), place("/b", 1e9)], together(1.4e9)) == ()
    )  # a link that all share
    assert shares([place("/a", 7e9), place("/b", 0)], together(1e12)) == ()
    assert shares([place("/a", 7e9)], None) == ()
