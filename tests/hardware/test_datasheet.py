"""Data sheets of machines: those that come along are whole and sensible, others are read or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssdtune.errors import ConfigError, FormatError
from ssdtune.hardware.datasheet import (
    EFFORT,
    named_machine,
    names,
    profile_of,
    read_sheet,
    sheet_text,
)
from ssdtune.hardware.known import known
from ssdtune.hardware.profile import HardwareProfile, save
from ssdtune.units import GIB


def test_the_sheets_that_come_along_are_machines() -> None:
    assert {"rtx-3090", "rtx-4090", "t4", "laptop-8gb", "h200"} <= set(names())
    for name in names():
        machine = named_machine(name)
        rates = machine.rates(directories=[Path(place.path) for place in machine.directories])
        assert machine.effort == EFFORT
        # Nobody's card, link or drive is slower or faster than that: a figure would have the wrong unit.
        for dtype in machine.compute_dtypes:
            assert 1e12 < rates.forward_flop_per_s[dtype] == rates.backward_flop_per_s[dtype] < 2e15
        assert rates.h2d_bytes_per_s is not None and 5e9 < rates.h2d_bytes_per_s < 1e11
        assert 1e9 < rates.read_bytes_per_s < 1e11 and 5e8 < rates.write_bytes_per_s < 5e10
        assert rates.write_bytes_per_s < rates.read_bytes_per_s < rates.memory_bytes_per_s
        # AdamW moves 28 bytes for each parameter, and others want some of the memory too.
        assert 28 * rates.adam_parameters_per_s < 0.75 * rates.memory_bytes_per_s
        assert all(place.free_bytes <= place.total_bytes for place in machine.directories)


def test_units_are_those_of_the_sheet() -> None:
    machine = named_machine("rtx-4090")
    first = machine.directories[0]
    assert machine.machine["card_bytes"] == 24 * GIB and machine.machine["memory_bytes"] == 64 * GIB
    assert (first.read_bytes_per_s, first.total_bytes) == (6.5e9, 2 * 10**12)
    assert first.drives[0].rated_bytes == 1200 * 10**12
    assert machine.rates().forward_flop_per_s["bf16"] == pytest.approx(0.65 * 165.2e12)
    assert machine.rates().adam_parameters_per_s == pytest.approx(1.1e9)
    assert named_machine("t4").compute_dtypes == ("fp32", "fp16")


def test_drives_share_what_they_have_in_common() -> None:
    many = sheet_text("rtx-4090").replace("count = 2", "count = 12\nlink_gb_per_s = 32")
    machine = profile_of(many, "many")
    folders = [Path(place.path) for place in machine.directories]
    assert len(folders) == 12
    alone = machine.rates(directories=folders[:1])
    assert (alone.read_bytes_per_s, alone.write_bytes_per_s) == (6.5e9, 1.5e9)
    together = machine.rates(directories=folders)
    assert together.read_bytes_per_s == pytest.approx((1 / 78e9**2 + 1 / 32e9**2) ** -0.5)
    assert together.write_bytes_per_s == pytest.approx((1 / 18e9**2 + 1 / 32e9**2) ** -0.5)


def test_the_model_lies_on_one_drive_only(tmp_path: Path) -> None:
    machine = named_machine("h200")
    folders = [Path(place.path) for place in machine.directories]
    rates = machine.rates(directories=folders, model=tmp_path)
    assert rates.source_read_bytes_per_s == 6.5e9 < rates.read_bytes_per_s


def test_a_sheet_can_be_copied_and_changed(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(sheet_text("t4").replace("memory_gib = 32", "memory_gib = 64.5"))
    found = known(str(mine))
    assert found is not None and found.machine["memory_bytes"] == 64.5 * GIB
    assert found.machine["file"] == str(mine)


def test_a_machine_is_named_or_in_a_file(tmp_path: Path) -> None:
    machine = known("h200")
    assert machine is not None and machine.machine["card"] == "H200"
    save(machine, tmp_path / "h200.json")
    assert known(str(tmp_path / "h200.json")) == HardwareProfile.from_dict(
        machine.to_dict() | {"machine": {**machine.machine, "file": str(tmp_path / "h200.json")}}
    )
    with pytest.raises(
        ConfigError, match=r'no data sheet of a machine "rtx4090", only of .*rtx-4090'
    ):
        known("rtx4090")
    for missing in ("mine.toml", "mine.json", "./h200"):
        with pytest.raises(FormatError, match=r"cannot be read: no such file"):
            known(str(tmp_path / missing))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("efficiency = 0.65", "efficiency = 65", r"card\.efficiency is 65; it must be from 0\.01 to 1"),
        ("count = 2", "count = 0", r"drives\.count is 0; it must be from 1 to 1000"),
        ("count = 2", "count = 1.5", r"drives\.count is 1\.5; it must be a whole number"),
        ("count = 2", "count = true", r"drives\.count is True; it must be a number"),
        ("cores = 16", "cores = nan", r"host\.cores is nan; it must be from 1 to 10000"),
        ("cores = 16", 'cores = "16"', r"host\.cores is '16'; it must be a number"),
        ("memory_gib = 64", "memory_gib = 68719476736", r"host\.memory_gib is 6\.8.*; it must be from"),
        ("cores = 16\n", "", r"host\.cores is missing"),
        ("cores = 16", "cores = 16\nthreads = 32", r"host\.threads is not known"),
        ("[drives]", "[disks]", r"disks is not known; there is no section \[drives\]"),
        ("free_tb = 1.8 ", "free_tb = 3 ", r"drives\.free_tb is 3, more than drives\.capacity_tb"),
        ("bf16_tflops", "bf8_tflops", r"card\.bf8_tflops is not known"),
        ("[card]", "[card", "is no data sheet: "),
        ("[card]", "[[card]]", r"there is no section \[card\]"),
        ('machine = "PC', 'machine = ""  # "', r"machine is ''; it must be a text"),
    ],
)  # fmt: skip
def test_a_bad_sheet_is_one_message(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = sheet_text("rtx-4090")
    assert old in text
    path = tmp_path / "bad.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(FormatError, match=message) as caught:
        read_sheet(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value).strip()


def test_what_is_no_text_is_no_sheet(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match=r"binary\.toml is no data sheet: it is not text"):
        read_sheet(tmp_path / "binary.toml")
