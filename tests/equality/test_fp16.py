"""fp16 with loss scaling: a streamed run follows one in memory that torch's own GradScaler leads.

The reference has fp32 masters; its model computes in fp16 with their rounding to bf16, as what is stored is bf16. Too large
a first scale makes the first steps overflow: both must skip the same ones, and change nothing by them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ssdtune.errors import ConfigError
from ssdtune.optim.loss_scale import LossScale
from tests.equality.harness import Streamed, assert_close, assert_same_bits, stream
from tests.equality.reference import _collate, _count_learned, _cut, round_half_up
from tests.toy import make_checkpoint, make_rows

SETTINGS: dict[str, Any] = {
    "dtype": "fp16", "max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3, "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.0,
    "max_grad_norm": 0.5, "lora_r": 3,
}  # fmt: skip
NUM_ROWS = 24
TOO_LARGE = {"full": 2.0**20, "lora": 2.0**23}
"""The toy model's gradients overflow with it, and no longer after some halvings."""


@dataclass
class Reference:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)


def train_in_memory(
    model_dir: Path, rows: list[Any], method: str, first: float, max_grad_norm: float
) -> Reference:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float16)
    whole: dict[str, Tensor] = {}
    if method == "full":
        exact = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        whole = dict(exact.named_parameters())
    else:
        torch.manual_seed(42)
        lora = LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=16, target_modules="all-linear")
        model = get_peft_model(model, lora)
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {
        name: nn.Parameter(whole.get(name, p).detach().float().clone())
        for name, p in trained.items()
    }

    def publish() -> None:
        for name, parameter in trained.items():
            halved = parameter.dtype == torch.float16  # peft computes adapters in fp32
            parameter.data = (
                round_half_up(masters[name]).half() if halved else masters[name].data.clone()
            )

    publish()
    found = Reference(start={name: m.detach().clone() for name, m in masters.items()})
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=first)
    for window in _cut(_cut(rows, 2), 2)[: SETTINGS["max_steps"]]:
        batches = [_collate(micro, "right") for micro in window]
        learned = sum(_count_learned(batch) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = model(**batch, use_cache=False, num_items_in_batch=torch.tensor(learned)).loss
            scaler.scale(loss).backward()
            total += loss.item()
            for name, parameter in trained.items():
                gradient, master = parameter.grad.float(), masters[name]
                master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None
        scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_(masters.values(), max_grad_norm or math.inf))
        found.losses.append(total)
        found.norms.append(norm)
        found.skipped.append(not math.isfinite(norm))
        scaler.step(optimizer)
        scaler.update()
        found.scales.append(scaler.get_scale())
        optimizer.zero_grad()
        publish()
    found.masters = {name: m.detach().clone() for name, m in masters.items()}
    return found


@pytest.fixture
def method(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "full")


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch, method: str) -> float:
    """Begin with a scale that is too large."""
    monkeypatch.setattr("ssdtune.train.engine.LossScale", lambda: LossScale(TOO_LARGE[method]))
    return TOO_LARGE[method]


def made(tmp_path: Path) -> tuple[Path, list[Any]]:
    model = make_checkpoint(tmp_path / "model", "llama", tied=False)
    return model, make_rows(tmp_path / "rows.jsonl", NUM_ROWS)


def run(tmp_path: Path, name: str = "out", **changes: Any) -> Streamed:
    return stream(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / name, SETTINGS | changes)


@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
@pytest.mark.parametrize("method", ["full", "lora"], indirect=True)
def test_fp16_follows_torchs_scaler(
    tmp_path: Path, first: float, method: str, max_grad_norm: float
) -> None:
    model, rows = made(tmp_path)
    reference = train_in_memory(model, rows, method, first, max_grad_norm)
    ours = run(tmp_path, method=method, max_grad_norm=max_grad_norm)
    assert ours.series("skipped") == reference.skipped
    assert ours.series("loss_scale") == reference.scales
    assert 1 <= sum(reference.skipped) < 4
    assert_close("losses", ours.series("loss"), reference.losses, atol=2e-4)
    taken = [n for n, skipped in enumerate(reference.skipped) if not skipped]
    norms = ours.series("grad_norm")
    assert [n for n, norm in enumerate(norms) if norm is not None] == taken
    assert_close("norms", [norms[n] for n in taken], [reference.norms[n] for n in taken], rtol=5e-3)
    if method == "full":
        state = ours.state()
        off = sum((state[n] - m).double().square().sum() for n, m in reference.masters.items())
        moved = sum(
            (reference.start[n] - m).double().square().sum() for n, m in reference.masters.items()
        )
        assert float((off / moved).sqrt()) < 0.02


def test_a_skipped_step_changes_nothing(tmp_path: Path, first: float) -> None:
    """All steps skipped: the weights are those of the checkpoint, to the bit."""
    made(tmp_path)
    ours = run(tmp_path, max_steps=1)
    assert ours.series("skipped") == [True]
    assert "gradient of" in ours.series("not_finite")[0]
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    state = ours.state()
    for name, parameter in start.named_parameters():
        assert torch.equal(state[name], parameter)


@pytest.mark.parametrize("host_cache", [0, "1GiB"])
def test_the_scale_goes_on_after_a_resume(tmp_path: Path, first: float, host_cache: Any) -> None:
    made(tmp_path)
    whole = run(tmp_path, "whole")
    run(tmp_path, "cut", save_steps=2, save_total_limit=3, host_cache=host_cache)
    state = json.loads((tmp_path / "cut/checkpoint-2/trainer_state.json").read_text())
    assert state["loss_scale"]["scale"] == whole.series("loss_scale")[1]
    assert state["loss_scale"]["skipped_steps"] == sum(whole.series("skipped")[:2])
    resumed = run(
        tmp_path, "cut", save_steps=2, save_total_limit=3, host_cache=host_cache,
        resume_from_checkpoint=str(tmp_path / "cut/checkpoint-2"),
    )  # fmt: skip
    assert_same_bits(resumed, whole)
    assert resumed.series("loss_scale") == whole.series("loss_scale")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clipping": "speculative"}, "speculative updates before"),
        ({"recompute": "never"}, "recompute: never"),
        ({"master_weights": False}, "master_weights: false"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    made(tmp_path)
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, **changes)
