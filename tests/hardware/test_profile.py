"""The whole profile, taken for real in a fraction of a second, and kept until the machine changes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from ssdtune.errors import StorageError
from ssdtune.hardware.profile import (
    HardwareProfile,
    cached,
    describe_machine,
    load,
    machine_id,
    measure,
    save,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drive")


@pytest.fixture(scope="module")
def profile(folder: Path) -> HardwareProfile:
    return measure([folder, folder / "later"], seconds=0.1, backend="python")


def test_every_figure_is_there(profile: HardwareProfile, folder: Path) -> None:
    first, second = profile.directories
    assert second == replace(first, path=str(folder / "later"))  # one file system, measured once
    assert (
        first.read_bytes_per_s > 0 and first.write_bytes_per_s > 0 and first.mixed_bytes_per_s > 0
    )
    assert profile.backend == "python" and profile.backends["python"] == ""
    assert profile.memory_bytes_per_s > 0
    assert profile.adam_parameters_per_s["1"] > 0
    assert set(profile.matmul_flop_per_s["cpu"]) == {"fp32", "bf16"}
    assert min(profile.matmul_flop_per_s["cpu"].values()) > 0
    assert list(folder.iterdir()) == []


def test_round_trip_through_json(profile: HardwareProfile, tmp_path: Path) -> None:
    values = json.loads(json.dumps(profile.to_dict(), allow_nan=False))
    assert HardwareProfile.from_dict({**values, "key of a later version": 1}) == profile
    path = tmp_path / "a folder" / "profile.json"
    save(profile, path)
    assert load(path) == profile
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema_version": 99}', '"x"', "\x00"])
def test_damaged_files_are_no_profile(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    assert load(path) is None
    assert load(tmp_path / "missing.json") is None


def test_table(profile: HardwareProfile, folder: Path) -> None:
    failed = replace(profile.directories[0], path="/other", problem="only 1 GB", read_bytes_per_s=0)
    text = replace(profile, directories=(*profile.directories, failed)).text()
    for part in ("AdamW, threads: 1", "GB/s", "TFLOP/s", "I/O backend python", "/other: only 1 GB"):
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_kept_profile_is_used_until_something_changes(
    profile: HardwareProfile, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    save(profile, path)
    wanted = [folder, folder / "later"]
    nowhere = {"backend": "no such backend"}  # measuring with it fails, so it was not measured
    assert cached(wanted, path, **nowhere) == profile
    with pytest.raises(ValueError, match="no such backend"):
        cached([folder], path, **nowhere)
    save(replace(profile, machine_id="0" * 16), path)
    with pytest.raises(ValueError, match="no such backend"):
        cached(wanted, path, **nowhere)


def test_a_new_profile_is_kept(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("damaged")
    taken = cached([folder], path, seconds=0, backend="python")
    assert load(path) == taken


def test_a_profile_that_cannot_be_kept_is_still_good(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, profile: HardwareProfile
) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "profile.json"
    with pytest.raises(StorageError, match="write of"):
        save(profile, path)
    with caplog.at_level(logging.WARNING, "ssdtune"):
        assert cached([folder], path, seconds=0, backend="python").backend == "python"
    assert "taken again next time" in caplog.text


def test_machine_id_follows_machine_and_drives(tmp_path: Path) -> None:
    def machine(name: str, cpu: str, memory: int) -> Path:
        root = tmp_path / name
        (root / "proc").mkdir(parents=True)
        (root / "proc/cpuinfo").write_text(f"processor : 0\nmodel name\t: {cpu}\nmodel name\t: x\n")
        (root / "proc/meminfo").write_text(f"MemTotal:  {memory} kB\n")
        return root

    one = machine("one", "Fast CPU 9000", 100)
    assert describe_machine(one)["cpu"] == "Fast CPU 9000"
    assert describe_machine(one)["memory_bytes"] == 102400
    ids = {
        machine_id([], root=one),
        machine_id([], root=machine("two", "Slow CPU", 100)),
        machine_id([], root=machine("three", "Fast CPU 9000", 101)),
        machine_id([tmp_path], root=one),
        machine_id([Path("/proc")], root=one),
    }
    assert len(ids) == 5
    assert machine_id([tmp_path], root=one) == machine_id([tmp_path / "missing"], root=one)


def test_unknown_backend(folder: Path) -> None:
    with pytest.raises(ValueError, match="unknown I/O backend"):
        measure([folder], backend="floppy")
