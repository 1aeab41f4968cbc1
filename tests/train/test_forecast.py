"""The forecast of a step: what must hold for any rates, and that the command shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssdtune.config.load import load_config
from ssdtune.errors import ConfigError
from ssdtune.hardware.profile import Rates
from ssdtune.train.disk import plan_disk
from ssdtune.train.forecast import Forecaster
from ssdtune.train.prepare import Prepared, prepare
from tests.toy import make_checkpoint, make_rows

RATES = Rates(
    read_bytes_per_s=2e9, write_bytes_per_s=1e9, mixed_bytes_per_s=1.3e9, adam_parameters_per_s=1e9,
    adam_with_io_parameters_per_s=1e9, io_with_adam_bytes_per_s=1.3e9, memory_bytes_per_s=20e9,
    h2d_bytes_per_s=None, d2h_bytes_per_s=None, both_bytes_per_s=None,
    forward_flop_per_s={"fp32": 1e11, "bf16": 2e11}, backward_flop_per_s={"fp32": 1e11, "bf16": 2e11},
)  # fmt: skip


def _prepared(tmp_path: Path, **changes: Any) -> Prepared:
    model = tmp_path / "model"
    if not model.exists():
        make_checkpoint(model, "llama")
        make_rows(tmp_path / "rows.jsonl", 21)
    settings = {
        "model_name_or_path": str(model), "train_file": str(tmp_path / "rows.jsonl"),
        "output_dir": str(tmp_path / "out"), "dtype": "fp32", "device": "cpu", "host_cache": 0,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    return prepare(load_config(None, settings | changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": "bf16"}, {"max_grad_norm": 0}, {"method": "lora"}, {"host_cache": None}],
    ids=lambda changes: "-".join(map(str, changes.values())) or "plain",
)
def test_a_step_takes_at_least_what_each_part_of_the_machine_needs(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    prepared = _prepared(tmp_path, **changes)
    result = Forecaster(prepared, RATES).forecast(prepared.memory)
    assert result.step_s >= max(result.resource_s.values()) > 0
    assert result.step_s >= max(result.lane_s.values())
    assert result.run_s == pytest.approx(result.step_s * prepared.rows.total_steps)
    assert result.tokens_per_s * result.step_s == pytest.approx(
        round(4 * prepared.rows.train.lengths.mean()), abs=4
    )


def test_bytes_of_the_simulated_step_are_those_of_the_estimate(tmp_path: Path) -> None:
    """With endless compute and memory the drives' time is that of the bytes that the disk plan counts."""
    prepared = _prepared(tmp_path)
    traffic = plan_disk(prepared, tmp_path / "out").estimate.traffic
    fast = replace(RATES, memory_bytes_per_s=1e15, adam_parameters_per_s=1e15)
    result = Forecaster(prepared, fast).forecast(prepared.memory)
    needed = traffic.read_bytes / 2e9 + traffic.written_bytes / 1e9
    # The plan counts padding, and reads that slots save.
    assert result.resource_s["ssd"] == pytest.approx(needed, rel=0.2)


def test_faster_parts_never_make_it_slower(tmp_path: Path) -> None:
    prepared = _prepared(tmp_path)
    slow = Forecaster(prepared, RATES).forecast(prepared.memory).step_s
    for name in (
        "read_bytes_per_s",
        "write_bytes_per_s",
        "adam_parameters_per_s",
        "memory_bytes_per_s",
    ):
        faster = replace(RATES, **{name: 4 * getattr(RATES, name)})
        # States that are ready to be written sooner take drives from reads that are waited for sooner; in a model of
        # three blocks this shows.
        assert Forecaster(prepared, faster).forecast(prepared.memory).step_s <= slow * 1.06, name


def test_missing_rates_are_named(tmp_path: Path) -> None:
    rates = replace(RATES, forward_flop_per_s={}, adam_parameters_per_s=0.0)
    with pytest.raises(ConfigError, match=r"no figures for compute in fp32, AdamW\. Measure again"):
        Forecaster(_prepared(tmp_path), rates)


def test_the_command_uses_a_profile_of_any_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssdtune.cli.main import main
    from ssdtune.hardware.measure import measure
    from ssdtune.hardware.profile import save
    from tests.hardware.tiny import TINY

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _prepared(tmp_path)
    profile = measure([tmp_path], effort=TINY)
    save(profile, tmp_path / "other.json")
    flags = [
        str(tmp_path / "model"),
        "--train-file",
        str(tmp_path / "rows.jsonl"),
        "--dtype",
        "fp32",
    ]

    assert main(["plan", *flags, "--json", "--hardware", str(tmp_path / "other.json")]) == 0
    assert json.loads(capsys.readouterr().out)["forecast"]["step_s"] > 0
    assert main(["plan", *flags]) == 0
    assert "run ssdtune profile DIR once" in capsys.readouterr().out


def test_a_config_alone_is_planned_as_the_whole_model(tmp_path: Path) -> None:
    from ssdtune.train.planning import plan

    make_checkpoint(tmp_path / "model", "mixtral")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    found = {}
    for name in ("model", "bare"):
        settings = {"model_name_or_path": str(tmp_path / name), "dtype": "bf16", "device": "cpu"}
        result = plan(load_config(None, settings | {"host_memory": "4GiB", "host_cache": 0}))
        assert result.fits and result.estimate is not None
        found[name] = result.estimate.to_dict()
    del found["model"]["disk_bytes"], found["bare"]["disk_bytes"]  # the export's dtype is not known
    del found["model"]["wear"], found["bare"]["wear"]
    assert found["bare"] == found["model"]


def test_pictures_of_the_simulated_and_of_the_measured_step(tmp_path: Path) -> None:
    from ssdtune.train.finetune import finetune

    prepared = _prepared(tmp_path, max_steps=2, save_steps=0, verify=False)
    simulated = Forecaster(prepared, RATES).forecast(prepared.memory).picture()
    finetune(prepared.config, quiet=True)
    measured = (tmp_path / "out" / "timeline.svg").read_text()
    for picture in (simulated, measured):
        for name in ("backward block.1, micro-batch 1", "update block.2", "save-gradient head"):
            assert f"<title>{name}, " in picture
