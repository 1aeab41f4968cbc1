"""The loss scale follows torch's GradScaler step by step, survives a checkpoint, and gives up in words."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from ssdtune.errors import FormatError, SsdtuneError
from ssdtune.optim.loss_scale import FIRST, GROWTH_STEPS, LossScale


def torchs(scaler: torch.amp.GradScaler, weight: torch.Tensor, *, finite: bool) -> None:
    """Let torch's scaler take a step with a gradient that is finite or not."""
    optimizer = torch.optim.SGD([weight], lr=0.0)
    weight.grad = torch.full_like(weight, 1.0 if finite else float("inf"))
    scaler.scale(torch.ones(()))  # makes its tensors
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.3])
def test_it_changes_as_torchs_does(share: float) -> None:
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu")
    weight, chance = torch.nn.Parameter(torch.zeros(1)), random.Random(3)
    for _ in range(GROWTH_STEPS * 2 + 5 if share < 0.1 else 14):
        finite = chance.random() >= share
        ours.note(finite=finite)
        torchs(theirs, weight, finite=finite)
        assert ours.scale == theirs.get_scale()
    assert (ours.skipped_steps > 0) == (share > 0)


def test_it_does_not_grow_to_infinity() -> None:
    ours = LossScale(2.0**1023, GROWTH_STEPS - 1)
    ours.note(finite=True)
    assert ours == LossScale(2.0**1023, 0)


def test_it_gives_up_when_nothing_helps() -> None:
    ours = LossScale()
    for _ in range(16):
        ours.note(finite=False)
    assert ours.scale == 1.0
    with pytest.raises(SsdtuneError, match=r"not finite in fp16 .* \(17 steps were skipped\)"):
        ours.note(finite=False)


def test_it_survives_a_checkpoint() -> None:
    ours = LossScale(FIRST / 4, 17, 2)
    assert LossScale.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours


@pytest.mark.parametrize(
    "values", [{"scale": 0.0}, {"scale": float("inf")}, {"scale": "x"}, {"good_steps": -1}, {"x": 1}]
)  # fmt: skip
def test_a_damaged_one_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="loss scale of the checkpoint is damaged"):
        LossScale.from_dict(values)
