"""Budgets that cannot be kept or mean nothing are told, and `plan` states what `finetune` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ssdtune import finetune, plan
from ssdtune.errors import CapacityError, ConfigError
from ssdtune.hardware.memory import MemoryLimit
from ssdtune.units import GIB, MIB
from tests.problems.process import run
from tests.toy import make_checkpoint, make_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budgets")
    make_checkpoint(folder / "model", "llama", tied=False)
    make_rows(folder / "rows.jsonl", 6)
    return folder


def settings(folder: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model_name_or_path": str(folder / "model"), "train_file": str(folder / "rows.jsonl"),
        "output_dir": str(output_dir), "device": "cpu", "dtype": "fp32", "save_steps": 0, "max_steps": 1,
    } | changes  # fmt: skip


def test_more_host_memory_than_there_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A budget alone does no harm; a plan that needs it does."""
    given = settings(folder, tmp_path / "out", host_memory="64GiB")
    most = MemoryLimit(32 * GIB, "MemAvailable of the system", 48 * GIB)
    monkeypatch.setattr("ssdtune.train.prepare.total_host_memory", lambda: most)
    assert plan(**given).fits
    assert "host_memory is 64.0 GiB, more than the 48.0 GiB there are" in caplog.text
    most = MemoryLimit(32 * MIB, "memory.max of cgroup /x", 64 * MIB)
    planned = plan(**given)
    assert not planned.fits
    with pytest.raises(CapacityError) as refused:
        finetune(**given)
    for text in (planned.problems[0], str(refused.value)):
        assert "of the 64.0 GiB that host_memory allows, but there are only 64.0 MiB" in text
        assert "Lower host_memory, or leave it out" in text
    assert not (tmp_path / "out").exists()


def test_budgets_without_effect_are_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert plan(
        **settings(
            folder, tmp_path / "out", host_cache="900TiB", gpu_memory="4GiB", compute_threads=4096
        )
    ).fits
    cache, threads, card = [
        record.getMessage() for record in caplog.records if "_" in record.getMessage()
    ]
    assert cache.startswith("host_cache is") and "as much stays in memory as fits" in cache
    assert threads.startswith("compute_threads is 4096, more than the processors there are")
    assert card == "gpu_memory means nothing here: this run computes on the CPU"


def test_wear_budgets_that_nothing_can_keep(folder: Path, tmp_path: Path) -> None:
    nothing = settings(folder, tmp_path / "out", wear_budget_terabytes=0)
    with pytest.raises(CapacityError, match=r"io\.wear_budget_terabytes allows 0 B"):
        finetune(**nothing)
    assert not plan(**nothing).fits
    for wrong in ("nan", -1, "much"):
        with pytest.raises(ConfigError, match="wear_budget_terabytes must be"):
            plan(**settings(folder, tmp_path / "out", wear_budget_terabytes=wrong))
    assert not (tmp_path / "out").exists()


def _planned(given: dict[str, Any], where: str) -> None:
    Path(where).write_text(json.dumps(plan(**given).to_dict()["memory"]))


def _trained(given: dict[str, Any]) -> None:
    finetune(**given)


def test_plan_states_the_memory_that_finetune_takes(folder: Path, tmp_path: Path) -> None:
    given = settings(folder, tmp_path / "out", host_memory="2GiB", dtype="bf16", method="lora")
    code, text = run(_planned, given, str(tmp_path / "planned"))
    assert code == 0, text
    code, text = run(_trained, given)
    assert code == 0, text
    planned = json.loads((tmp_path / "planned").read_text())
    taken = json.loads((tmp_path / "out/plan.json").read_text())["memory"]
    assert planned["host_bytes"] == pytest.approx(taken["host_bytes"], rel=0.01)
    for breakdown in (planned, taken):
        del breakdown["breakdown"]["process"], breakdown["host_bytes"]
    assert planned == taken
