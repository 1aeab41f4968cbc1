"""`ssdtune plan` for another machine, the cost of a run, and what would fit where the wanted settings do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdtune import plan
from ssdtune.cli.main import main
from ssdtune.config.load import load_config
from ssdtune.config.schema import Config
from ssdtune.errors import CapacityError
from ssdtune.hardware.figures import DirectoryProfile
from ssdtune.hardware.profile import HardwareProfile, save
from ssdtune.plan.nearest import LENGTH_GRAIN
from ssdtune.plan.residency import ComputeSize, plan_memory
from ssdtune.store.space import MARGIN_BYTES
from ssdtune.train.prepare import compute_size, prepare
from ssdtune.train.smaller import nearest_settings
from ssdtune.units import MIB
from tests import invented
from tests.toy import make_checkpoint, make_rows

pytestmark = pytest.mark.usefixtures("short_rehearsals")
GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planning")
    make_checkpoint(folder / "model", "llama")
    make_rows(folder / "rows.jsonl", 21)
    return folder


def settings(folder: Path, **changes: Any) -> Config:
    return load_config(
        None,
        {
            "model_name_or_path": str(folder / "model"), "train_file": str(folder / "rows.jsonl"),
            "output_dir": str(folder / "out"), "device": "cpu", "per_device_train_batch_size": 2,
        } | changes,
    )  # fmt: skip


def machine(*places: DirectoryProfile, **changes: Any) -> HardwareProfile:
    """Return a machine of 8 GiB with two drives that read 2 GB/s and write 1 GB/s."""
    figures = {
        "machine": {"cpu": "Zen", "cores": 16, "memory_bytes": 8 * GIB, "cards": ""},
        "directories": places or (place("/nvme/0", 10**12), place("/nvme/1", 10**12)),
        "blocks": (invented.block([("fp32", 64, 1e11), ("bf16", 64, 1e11)]),),
        **invented.rates(
            read=2e9, write=1e9, mixed=1.3e9, memory=2e10, adam=1e9, num_file_systems=2
        ),
    }
    return invented.profile(**figures | changes)


def place(path: str, free_bytes: int, rate: float = 1e9) -> DirectoryProfile:
    return DirectoryProfile(
        path=path, file_system="ext4", device=f"/dev{path}", free_bytes=free_bytes, read_bytes_per_s=rate,
        write_bytes_per_s=rate / 2, mixed_bytes_per_s=0.65 * rate,
    )  # fmt: skip


def test_another_machine_gives_memory_dtype_and_directories(folder: Path) -> None:
    result = plan(settings(folder), hardware=machine(), other_machine=True)
    assert result.fits and result.memory is not None and result.forecast is not None
    assert result.memory.budget_bytes == int(8 * GIB * 0.9)
    first, model, _, io, swap = result.summary
    assert first.startswith("planned for another machine: Zen, 16 cores, 8.00 GiB; measured")
    assert "computed in bfloat16" in model and io.startswith("I/O: ")
    assert swap.endswith("in /nvme/0, /nvme/1")
    old = plan(settings(folder), hardware=machine(compute_dtypes=("fp32",)), other_machine=True)
    assert "computed in float32" in old.summary[1]


def test_settings_that_are_given_win_over_the_machine(folder: Path) -> None:
    config = settings(folder, host_memory="4GiB", dtype="fp32", swap_dirs=["/nvme/1"])
    result = plan(config, hardware=machine(), other_machine=True)
    assert result.memory is not None and result.memory.budget_bytes == 4 * GIB
    assert "computed in float32" in result.summary[1]
    assert result.summary[-1].endswith("in /nvme/1")


def test_the_space_is_that_of_the_other_machine(folder: Path) -> None:
    config = settings(folder, host_cache=0)
    full = machine(place("/nvme/0", MARGIN_BYTES + 1000))
    (problem,) = plan(config, hardware=full, other_machine=True).problems
    assert problem.startswith("not enough space on /dev/nvme/0 (/nvme/0) of the hardware profile")
    # With the rates alone it is this machine that must have room.
    assert plan(config, hardware=full).fits


def test_too_little_memory_there_is_refused_with_its_figures(folder: Path) -> None:
    small = machine(machine={"cpu": "Zen", "memory_bytes": 64 * MIB})
    result = plan(settings(folder), hardware=small, other_machine=True)
    assert not result.fits
    assert "the budget is 57.6 MiB" in result.problems[0]
    assert result.text().startswith("planned for another machine: Zen, 64.0 MiB;")


def test_a_machine_without_profile_is_no_machine(folder: Path) -> None:
    with pytest.raises(ValueError, match="needs the profile"):
        plan(settings(folder), other_machine=True)


def test_the_command_plans_for_the_machine_of_the_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(machine(), tmp_path / "other.json")
    flags = [str(folder / "model"), "--hardware", str(tmp_path / "other.json"), "--device", "cpu"]
    assert main(["plan", *flags, "--max-steps", "100", "--max-length", "32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["budget_bytes"] == int(8 * GIB * 0.9)
    assert (found["run"]["num_steps"], found["run"]["tokens"]) == (100, 3200)
    assert found["run"]["seconds"] == pytest.approx(100 * found["forecast"]["step_s"])
    assert found["run"]["written_bytes"] == found["estimate"]["wear"]["run_bytes"]

    save(replace(machine(), machine={"cpu": "Zen"}), tmp_path / "other.json")
    assert main(["plan", *flags]) == 2
    assert "does not say how much memory the machine has" in capsys.readouterr().err
    assert main(["plan", *flags, "--host-memory", "4GiB"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 1}, "schema_version is 1"),
        ({"directories": [place("/nvme/0", 10**12, rate=0).__dict__]}, "no figures for drives"),
        ({"adam": []}, "no figures for AdamW"),
        ({"blocks": []}, "no figures for compute in bf16"),
        ({"directories": []}, "no directory with measured drives"),
        ({"machine": {"memory_bytes": -1}}, "machine.memory_bytes is -1"),
        ({"machine": {"memory_bytes": "64 GB"}}, "machine.memory_bytes is '64 GB'"),
        ({"compute_dtypes": None}, "compute_dtypes must be a list"),
        ({"adam": [{"form": "split", "threads": 1, "parameters_per_s": float("nan")}]}, "is nan"),
    ],
)  # fmt: skip
def test_a_bad_profile_is_one_message(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:  # fmt: skip
    path = tmp_path / "other.json"
    path.write_text(json.dumps(machine().to_dict() | change))
    assert main(["plan", str(folder / "model"), "--hardware", str(path), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert message in err and str(path) in err


def test_the_command_plans_for_the_machine_of_a_data_sheet_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A device that this machine may lack: nothing is computed here.
    flags = ["plan", str(folder / "model"), "--hardware", "rtx-4090", "--device", "cuda", "--max-length", "32"]  # fmt: skip
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rates_from"] == "data sheet"
    assert found["memory"]["budget_bytes"] == int(64 * GIB * 0.9)
    assert 22 * GIB < found["memory"]["device_budget_bytes"] < 24 * GIB
    wear = found["estimate"]["wear"]
    assert (wear["rated_bytes"], wear["rated_is_assumed"]) == (2 * 1200 * 10**12, False)
    assert main(flags) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == (
        "planned for another machine: PC with a GeForce RTX 4090, 16 cores, 64.0 GiB, GeForce RTX 4090 with 24.0 GiB, "
        "2 drives of 2.00 TB (6.50 GB/s read, 1.50 GB/s written); by its data sheet (rtx-4090), nothing was measured"
    )
    assert last == "It fits."


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hardware", "rtx4090"], 'no data sheet of a machine "rtx4090", only of '),
        (["--hardware", "t4", "--dtype", "bf16"], "by the data sheet t4, Tesla T4 computes in fp32 and fp16, not in bf16"),
    ],
)  # fmt: skip
def test_what_no_data_sheet_has_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["plan", str(folder / "model"), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_a_profile_that_is_missing_or_damaged_is_one_message(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    for content, message in ((None, "no such file"), ("{", "is no hardware profile"), ("[1]", "no hardware")):  # fmt: skip
        if content is not None:
            path.write_text(content)
        assert main(["plan", str(folder / "model"), "--hardware", str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and message in err and str(path) in err and "Traceback" not in err


def test_cost_of_a_run_with_rows(folder: Path) -> None:
    config = settings(folder, num_train_epochs=2, save_steps=5)
    result = plan(config, hardware=machine())
    rows = prepare(config).rows
    assert rows is not None and result.cost is not None and result.forecast is not None
    assert rows.total_steps == result.cost.num_steps == 22
    assert result.cost.tokens == 2 * int(rows.train.lengths.sum())
    assert result.cost.num_saves == 4
    assert result.cost.save_s is not None and result.cost.seconds is not None
    assert result.cost.seconds == pytest.approx(
        22 * result.forecast.step_s + 4 * result.cost.save_s
    )
    assert "\nrun       22 steps, " in result.text() and " with 4 saves of " in result.text()
    timeless = plan(config)
    assert timeless.cost is not None and timeless.cost.seconds is None


def test_a_run_of_unknown_length_has_no_cost(folder: Path) -> None:
    result = plan(settings(folder, train_file=""))
    assert result.cost is None and result.to_dict()["run"] is None


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_what_is_named_as_nearest_fits_and_a_little_less_does_not(
    folder: Path, method: str
) -> None:
    """By the planner itself: with the settings that were named, or the memory, it finds a plan."""
    wanted = settings(
        folder, train_file="", per_device_train_batch_size=64, max_length=1024, method=method
    )
    prepared = prepare(wanted, with_rows=False, host_budget_bytes=1 << 40)

    def compute(config: Config, length: int) -> ComputeSize:
        return compute_size(config, prepared.blocks, length, prepared.dtype)

    def fits(config: Config, budget_bytes: int) -> bool:
        limits = replace(prepared.limits, budget_bytes=budget_bytes)
        try:
            plan_memory(prepared.parts, compute(config, config.data.max_length), limits)
        except CapacityError:
            return False
        return True

    budget = 300 * MIB + prepared.limits.base_bytes
    limits = replace(prepared.limits, budget_bytes=budget)
    assert not fits(wanted, budget)
    found = nearest_settings(wanted, prepared.parts, limits, 1024, compute)
    assert found is not None
    assert found.batch_size and 1 <= found.batch_size < 64
    assert found.max_length and 16 <= found.max_length < 1024
    size, length = "per_device_train_batch_size", "max_length"
    assert fits(load_config(wanted, {size: found.batch_size}), budget)
    assert not fits(load_config(wanted, {size: found.batch_size + 1}), budget)
    assert fits(load_config(wanted, {length: found.max_length}), budget)
    assert not fits(load_config(wanted, {length: found.max_length + LENGTH_GRAIN}), budget)
    assert fits(wanted, found.needed_bytes)
    assert not fits(wanted, found.needed_bytes - 1)
    enough = replace(limits, budget_bytes=found.needed_bytes)
    assert nearest_settings(wanted, prepared.parts, enough, 1024, compute) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 10**12}, "config.json: hidden_size is 1000000000000; it must be"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; it must be"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be"),
        ({"hidden_size": 40.5}, "cannot build this"),
        ({"hidden_size": None}, "model"),
        ({"num_attention_heads": 7}, "cannot build this"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "it is an encoder"),
        ({"model_type": "nothing"}, "nothing"),
    ],
)
def test_a_configuration_without_sense_is_one_message(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:  # fmt: skip
    config = json.loads((folder / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    assert main(["plan", str(tmp_path), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and message in err
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
