"""Steps simulated with pieces and micro-batches taken together, as a search does, against steps with every single one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ssdtune.train.forecast as forecast
from ssdtune.config.load import load_config
from ssdtune.plan.residency import MemoryPlan, Proportions, plan_memory
from ssdtune.train.forecast import Forecaster
from ssdtune.train.prepare import Prepared, prepare
from ssdtune.units import MIB
from tests.plan.test_search import MACHINES

FEW = 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 6 blocks with 52 million parameters each."""
    found = tmp_path_factory.mktemp("model")
    (found / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6,
        "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632,
        "vocab_size": 8192,
    }))  # fmt: skip
    return found


def prepared(folder: Path, **changes: Any) -> Prepared:
    settings = {
        "model_name_or_path": str(folder), "dtype": "bf16", "device": "cpu", "max_length": 512,
        "host_memory": "4GiB",
    }  # fmt: skip
    return prepare(load_config(None, settings | changes), with_rows=False)


def quick_and_whole(
    run: Prepared, machine: str, plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, float]:
    """Return the step's seconds with few operations and with all."""
    forecaster = Forecaster(run, MACHINES[machine])
    found = []
    for most in (FEW, 10**9):
        monkeypatch.setattr(forecast, "QUICK_OPERATIONS", most)
        found.append(forecaster.step_s(plan))
    return found[0], found[1]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_grad_norm": 0, "host_memory": "3GiB"},
        {"gradient_accumulation_steps": 30},
        {"gradient_accumulation_steps": 7, "activations": "ssd", "max_grad_norm": 0},
    ],
    ids=["clipping", "no clipping", "micro-batches", "inputs on SSD"],
)
def test_taking_operations_together_hardly_changes_a_step(
    folder: Path, machine: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(folder, **changes)
    for proportions in (Proportions(chunk_bytes=4 * MIB), Proportions(chunk_slots=12)):
        plan = plan_memory(run.parts, run.compute, run.limits, proportions)
        quick, whole = quick_and_whole(run, machine, plan, monkeypatch)
        assert quick == pytest.approx(whole, rel=0.02)


def test_a_forecast_has_few_bars_whatever_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(folder, gradient_accumulation_steps=100)
    plan = plan_memory(run.parts, run.compute, run.limits, Proportions(chunk_bytes=4 * MIB))
    forecaster = Forecaster(run, MACHINES["balanced"])
    whole = forecaster.forecast(plan)
    monkeypatch.setattr(forecast, "MOST_OPERATIONS", FEW)
    few = forecaster.forecast(plan)
    assert len(few.bars) < 2.5 * FEW < 1500 < len(whole.bars)
    assert few.resource_s == pytest.approx(whole.resource_s)
    assert few.lane_s["compute"] == pytest.approx(whole.lane_s["compute"], rel=0.02)
