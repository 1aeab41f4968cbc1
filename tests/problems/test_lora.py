"""Adapters of whole runs, as peft takes them up elsewhere: complete, trained, mergeable, base untouched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ssdtune import export, finetune
from tests.equality.harness import TRAINING, hash_folder, stream
from tests.equality.reference import train_in_memory
from tests.problems.process import settings_for
from tests.toy import make_checkpoint, make_rows

LORA = {"method": "lora", "max_steps": 3, "lora_alpha": 7}


def _loss(model: torch.nn.Module, rows: list[dict[str, list[int]]]) -> list[float]:
    model.eval()
    with torch.no_grad():
        return [
            model(
                input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])
            ).loss.item()
            for row in rows
        ]


@pytest.mark.parametrize("arch", ["llama", "gpt2", "bloom"])
def test_the_adapter_is_complete_and_loads_silently(
    tmp_path: Path, arch: str, recwarn: pytest.WarningsRecorder
) -> None:
    model_dir = make_checkpoint(tmp_path / "model", arch)
    rows = make_rows(tmp_path / "rows.jsonl", 9)
    reference = train_in_memory(model_dir, rows, TRAINING | LORA)
    before = hash_folder(model_dir)
    out = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", LORA).output_dir
    saved = load_file(out / "adapter_model.safetensors")
    assert saved.keys() == reference.state.keys()
    for name, tensor in saved.items():
        assert tensor.numel() > 0 and tensor.shape == reference.state[name].shape
        assert tensor.abs().max() > 0, f"{name} is zero"
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (TRAINING["lora_r"], 7)
    assert config["target_modules"]
    assert not list(out.glob("model*.safetensors"))
    recwarn.clear()
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    adapted = PeftModel.from_pretrained(base, out)
    assert [str(w.message) for w in recwarn if "adapter" in str(w.message).lower()] == []
    assert _loss(adapted, rows) != _loss(AutoModelForCausalLM.from_pretrained(model_dir), rows)
    assert {k: v for k, v in hash_folder(model_dir).items() if k in before} == before


def test_the_base_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "model", "llama")
    rows = make_rows(tmp_path / "rows.jsonl", 5)
    monkeypatch.chdir(tmp_path)
    settings = settings_for(tmp_path, **LORA)
    finetune(**settings | {"model_name_or_path": "model", "output_dir": "out"})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(_loss(model, rows)) == 5


@pytest.mark.parametrize("arch", ["gpt2", "mixtral"])
def test_merged_weights_compute_what_base_and_adapter_do(tmp_path: Path, arch: str) -> None:
    model_dir = make_checkpoint(tmp_path / "model", arch)
    rows = make_rows(tmp_path / "rows.jsonl", 5)
    out = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", LORA).output_dir
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), out)
    wanted = _loss(adapted, rows)
    before = hash_folder(tmp_path / "model") | hash_folder(out)
    export(out, tmp_path / "merged", merge=True)
    assert hash_folder(tmp_path / "model") | hash_folder(out) == before
    merged = _loss(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), rows)
    torch.testing.assert_close(merged, wanted, atol=5e-5, rtol=0)
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "merged", moved)
    assert _loss(AutoModelForCausalLM.from_pretrained(moved), rows) == merged
