"""What a run is said to write and to need is what it writes and takes; `plan` and the run say the same."""

import json
import logging
import os
from pathlib import Path

import pytest

from ssdtune import plan
from ssdtune.config.load import load_config
from ssdtune.errors import CapacityError
from ssdtune.hardware.figures import DirectoryProfile, DriveFacts
from ssdtune.report.progress import Progress
from ssdtune.store import space
from ssdtune.store.lock import STATES_NAME
from ssdtune.train.disk import plan_disk
from ssdtune.train.finetune import finetune
from ssdtune.train.prepare import prepare
from tests.equality.child import device_bytes
from tests.toy import make_checkpoint, make_rows

# Blocks of some 700 kB, beside which the pages of metrics.jsonl and the file system's own writes are small.
SIZES = {"hidden_size": 120, "intermediate_size": 332, "num_hidden_layers": 4}


class Watcher(Progress):
    """Notes what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("disk")
    make_checkpoint(folder / "model", "llama", **SIZES)
    make_rows(folder / "rows.jsonl", 21)
    return folder


def settings(folder: Path, output: Path, **changes):
    return load_config(
        None,
        {
            "model_name_or_path": str(folder / "model"), "train_file": str(folder / "rows.jsonl"),
            "output_dir": str(output), "dtype": "fp32", "device": "cpu", "verify": False,
            "host_cache": 0, "max_steps": 6, "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 2, "save_steps": 0,
        } | changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bf16"},
        {"max_grad_norm": 0, "activations": "host"},
        {"host_cache": None},
        {"host_cache": 6_000_000},
        {"method": "lora", "r": 64},
        {"save_steps": 2, "save_total_limit": 2},
    ],
    ids=lambda changes: "-".join(f"{value}" for value in changes.values()) or "streamed",
)
def test_written_bytes_are_as_predicted(folder, tmp_path, changes):
    if space.file_system_of(tmp_path).type in ("tmpfs", "overlay"):
        pytest.skip("no drive under the folder of tests")
    changes = {("lora_r" if key == "r" else key): value for key, value in changes.items()}
    config = settings(folder, tmp_path / "out", **changes)
    watcher = Watcher()
    before = device_bytes()["written"]
    result = finetune(config, progress=watcher)
    measured = device_bytes()["written"] - before
    figures = json.loads((tmp_path / "out" / "plan.json").read_text())["estimate"]

    step = figures["wear"]["step_bytes"]
    assert step == sum(figures["step_bytes_written"].values())
    # Small files and the file system's own writes come on top.
    run_bytes = figures["wear"]["run_bytes"]
    assert abs(measured - run_bytes) <= 0.1 * 6 * step + 400_000, (measured, run_bytes)
    for kind, num_bytes in figures["step_bytes_written"].items():
        times = 7 if kind in ("weights", "master") else 6  # first values, too
        if not changes.get("save_steps"):  # else resident states are written for checkpoints, too
            assert result.bytes_written[kind] == pytest.approx(times * num_bytes, rel=0.1), kind

    assert any(note.count("written per step") == 1 for note in watcher.notes)
    said = plan(config)
    assert said.estimate.to_dict() == figures
    assert said.fits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bf16", "save_steps": 2, "save_total_limit": 3},
        {"method": "lora", "save_steps": 6},
        {"host_cache": None, "save_steps": 500},
    ],
    ids=["streamed", "checkpoints", "lora", "cached"],
)
def test_room_is_as_predicted(folder, tmp_path, changes):
    config = settings(
        folder, tmp_path / "out", swap_dirs=[str(tmp_path / "a b"), str(tmp_path / "ä")]
    )
    config = load_config(config, changes)
    disk = plan_disk(prepare(config), tmp_path / "out")
    assert (
        disk.estimate.disk.swap_bytes == disk.layout.total_bytes == sum(disk.layout.directory_bytes)
    )
    sizes = []

    class Looking(Watcher):
        def show_step(self, metrics) -> None:
            sizes.append([(path / STATES_NAME).stat().st_size for path in disk.directories])

    finetune(config, progress=Looking())
    assert sizes == [list(disk.layout.directory_bytes)] * 6


def test_plan_and_run_refuse_the_same_with_the_same_words(folder, tmp_path, monkeypatch):
    config = settings(folder, tmp_path / "out")
    needed = sum(need.nbytes for need in plan_disk(prepare(config), tmp_path / "out").needs)
    free = needed + space.MARGIN_BYTES
    real = os.statvfs

    class Full:
        """The figures of a drive with `free` bytes left."""

        f_frsize = 1

        def __init__(self, path) -> None:
            self._real = real(path)
            self.f_bavail = free

        def __getattr__(self, name):
            return getattr(self._real, name)

    monkeypatch.setattr(space.os, "statvfs", Full)
    assert plan(config).fits
    free -= 1
    said = plan(config)
    assert not said.fits
    with pytest.raises(CapacityError) as caught:
        finetune(config, progress=Progress())
    assert str(caught.value) == "\n".join(said.problems)
    assert "not enough space" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_warns_above_the_share_of_the_rated_life(folder, tmp_path, caplog):
    def warned(**changes) -> list[str]:
        config = settings(folder, tmp_path / "out", **changes)
        said = plan(config)
        text = said.text()
        assert ("\nwarning: this run writes" in text) == (said.wear_warning is not None)
        return [said.wear_warning] if said.wear_warning else []

    assert warned() == []
    assert "(assumed; set io.rated_terabytes_written)" in plan(settings(folder, tmp_path)).text()
    # One step writes some 10 MB, so the run writes 6 % of a drive for 1 GB.
    (text,) = warned(rated_terabytes_written=0.001)
    assert "of the 1.00 GB that the drives are rated for" in text
    assert warned(rated_terabytes_written=0.001, wear_warning=0.5) == []
    config = settings(
        folder, tmp_path / "out", rated_terabytes_written=0.001, max_steps=2, wear_warning=0
    )
    with caplog.at_level(logging.WARNING, "ssdtune"):
        finetune(config, progress=Progress())
    assert [record.message for record in caplog.records if "this run writes" in record.message]


def test_a_wear_budget_is_kept_or_the_run_refused(folder, tmp_path):
    written = plan(settings(folder, tmp_path / "out")).estimate.wear.run_bytes
    enough = settings(folder, tmp_path / "out", wear_budget_terabytes=written / 1e12)
    assert plan(enough).fits
    config = settings(folder, tmp_path / "out", wear_budget_terabytes=(written - 1) / 1e12)
    said = plan(config)
    (problem,) = said.problems
    assert not said.fits
    assert "io.wear_budget_terabytes allows" in problem and "up to 5 of its 6 steps" in problem
    assert plan(load_config(config, {"max_steps": 5})).fits
    with pytest.raises(CapacityError) as caught:
        finetune(config, progress=Progress())
    assert str(caught.value) == problem
    assert not (tmp_path / "out").exists()


def test_the_drives_themselves_tell_what_is_left_of_their_life(folder, tmp_path):
    def wear(rated: float | None, *shares: float | None):
        config = settings(folder, tmp_path / "out", rated_terabytes_written=rated)
        drives = tuple(
            DriveFacts(name=f"nvme{i}n1", wear_share=share, written_bytes=60 * 10**12)
            for i, share in enumerate(shares)
        )
        # Two folders on the same drives, which count once.
        places = [
            DirectoryProfile(path=path, file_system="ext4", device="/dev/md0", free_bytes=10**12, drives=drives)
            for path in ("/a", "/b")
        ]  # fmt: skip
        return plan_disk(prepare(config), tmp_path / "out", places=places).estimate.wear

    assert "assumed" in wear(None, None).text()
    told = wear(None, 0.1, 0.2).to_dict()
    assert (told["rated_bytes"], told["used_share"]) == (900 * 10**12, 0.2)
    assert (told["rated_is_read"], told["rated_is_assumed"]) == (True, False)
    assert told["left_bytes"] == 720 * 10**12
    assert "20 % of that is used up, what is left lasts" in wear(500, 0.2).text()


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_run_goes_on_with_other_memory_to_the_same_bits(folder, tmp_path, method):
    """What waits on the drives depends on the memory that is free, which another day is another."""
    streamed = {"host_cache": 0}
    cached = {"host_cache": None, "activations": "host", "prefetch_depth": 3}
    results = []
    for number, (first, second) in enumerate(
        [(streamed, cached), (cached, streamed), (cached, {})]
    ):
        output = tmp_path / f"out-{number}"
        common = {"save_steps": 2, "save_total_limit": 3, "method": method, "dtype": "bf16"}
        finetune(settings(folder, output, **common | first), progress=Progress())
        again = common | second | {"save_total_limit": 4}
        again["resume_from_checkpoint"] = str(output / "checkpoint-2")
        if second:
            finetune(settings(folder, output, **again), progress=Progress())
        stem = "adapter_model" if method == "lora" else "model"
        results.append((output / f"{stem}.safetensors").read_bytes())
    assert results[0] == results[1] == results[2]
