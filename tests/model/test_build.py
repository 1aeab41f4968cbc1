"""What a plan needs of a model with new adapters is the same whether their first values are drawn or not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ssdtune.config.schema import LoraSettings
from ssdtune.model.blocks import BlockModel
from ssdtune.model.build import BuiltModel, build_model
from ssdtune.model.checkpoint import HfCheckpoint
from tests.toy import make_checkpoint

SETTINGS = [
    LoraSettings(r=3),
    LoraSettings(r=3, bias="all", use_rslora=True),
    LoraSettings(r=3, modules_to_save=["embed_tokens", "lm_head"]),
    LoraSettings(r=3, target_modules=["q_proj", "embed_tokens"], bias="lora_only"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


def build(folder: Path, lora: LoraSettings) -> BuiltModel:
    return build_model(HfCheckpoint.open(folder), dtype=torch.bfloat16, lora=lora, seed=5)


def of_config(folder: Path, empty: Path, lora: LoraSettings) -> BuiltModel:
    shutil.copy(folder / "config.json", empty)
    return build_model(HfCheckpoint.open_config(str(empty)), dtype=torch.bfloat16, lora=lora)


def figures(built: BuiltModel) -> tuple[object, ...]:
    parameters = [
        (name, parameter.dtype, parameter.shape, parameter.requires_grad, parameter.device)
        for name, parameter in built.model.named_parameters()
    ]
    layout = BlockModel(built, torch.device("cpu")).layout
    return parameters, built.trained, built.decay, layout


@pytest.mark.parametrize("lora", SETTINGS, ids=["all", "bias", "modules_to_save", "embedding"])
def test_values_change_nothing_else(folder: Path, tmp_path: Path, lora: LoraSettings) -> None:
    drawn = build(folder, lora)
    assert drawn.initial.keys() == {name for name in drawn.trained if ".lora_" in name}
    expected = figures(drawn)
    planned = of_config(folder, tmp_path, lora)
    assert planned.initial == {}
    assert figures(planned) == expected


def test_values_are_those_that_peft_draws(folder: Path) -> None:
    lora = SETTINGS[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch.manual_seed(5)
    peft = get_peft_model(model, LoraConfig(r=3, target_modules=lora.target_modules))
    expected = dict(peft.get_base_model().named_parameters())
    initial = build(folder, lora).initial
    assert initial.keys() == {name for name in expected if ".lora_" in name}
    for name, values in initial.items():
        assert torch.equal(values, expected[name].detach().float())
