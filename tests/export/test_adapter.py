"""Adapters are saved as peft saves them, and merged as base + adapter in fp32."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ssdtune.errors import ConfigError, FormatError
from ssdtune.export.adapter import export_adapter, merge_adapter, read_adapter
from ssdtune.model.checkpoint import HfCheckpoint
from tests.export.test_weights import files
from tests.model.opened import meta_model, opened
from tests.toy import make_checkpoint

CASES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {"target_modules": "all-linear"}),
    "rslora": ("llama", {"target_modules": ["q_proj"], "use_rslora": True, "bias": "all"}),
    "patterns": ("llama", {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 5},
                           "alpha_pattern": {"q_proj": 3}}),
    "lora_bias": ("llama", {"target_modules": ["q_proj"], "lora_bias": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "saved": ("qwen2", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "saved_mlp": ("qwen2", {"target_modules": ["v_proj"], "modules_to_save": ["mlp"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "o_proj"]}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": [
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "oss_experts": ("gpt_oss", {"target_modules": ["q_proj"],
                                "target_parameters": ["mlp.experts.down_proj"]}),
}  # fmt: skip


def make_adapter(folder: Path, case: str, *, dtype: str = "float32") -> PeftModel:
    """Save a checkpoint in folder/base and a random adapter of it in folder/adapter; return peft's model."""
    arch, options = CASES[case]
    make_checkpoint(folder / "base", arch, tied=False, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=getattr(torch, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, LoraConfig(r=3, task_type="CAUSAL_LM", **options))
        torch.manual_seed(0)
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(std=0.2)
        peft.save_pretrained(folder / "adapter")
    return peft


def merge(folder: Path, target: Path) -> None:
    with opened(folder / "base") as all_:
        merge_adapter(
            target,
            adapter_dir=folder / "adapter",
            model=all_.model,
            checkpoint=all_.checkpoint,
            keymap=all_.keymap,
            source=all_.source,
        )


@pytest.mark.parametrize("case", [name for name in CASES if name != "embedding"])
def test_adapter_equals_that_of_peft(tmp_path, case: str) -> None:
    peft = make_adapter(tmp_path, case)
    trained = {name: p.detach() for name, p in peft.named_parameters() if p.requires_grad}
    if case == "saved":  # names may also be those of the model inside
        trained = {name.removeprefix("base_model.model."): p for name, p in trained.items()}
    with_weights = peft.peft_config["default"].base_model_name_or_path
    for (
        module
    ) in peft.modules():  # what is saved comes from `tensors`, so the model needs no values
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(
                    parameter.to("meta"), requires_grad=parameter.requires_grad
                )
    out = tmp_path / "out"
    export_adapter(
        out,
        peft_model=peft,
        tensors=trained,
        base_model_name_or_path=with_weights,
        checkpoint=HfCheckpoint.open(tmp_path / "base"),
    )
    ours, reference = files(out), files(tmp_path / "adapter")
    assert ours["adapter_model.safetensors"] == reference["adapter_model.safetensors"]
    settings = [json.loads(content["adapter_config.json"]) for content in (ours, reference)]
    for setting in settings:
        for key in ("target_modules", "target_parameters"):  # sets, in any order
            setting[key] = sorted(setting[key] or [])
    assert settings[0] == settings[1]
    assert ours.keys() == {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json",
                           "tokenizer_config.json"}  # fmt: skip


@pytest.mark.parametrize("case", ["llama", "saved", "experts"])
def test_adapter_loads_without_a_warning(tmp_path, case: str) -> None:
    peft = make_adapter(tmp_path, case)
    trained = {name: p.detach() for name, p in peft.named_parameters() if p.requires_grad}
    export_adapter(
        tmp_path / "out",
        peft_model=peft,
        tensors=trained,
        base_model_name_or_path=str(tmp_path / "base"),
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # transformers' own
        loaded = PeftModel.from_pretrained(base, tmp_path / "out")
    parameters = dict(loaded.named_parameters())
    for name, tensor in trained.items():
        assert torch.equal(parameters[name], tensor), name


def test_adapter_with_holes_is_not_written(tmp_path) -> None:
    peft = make_adapter(tmp_path, "llama")
    trained = {name: p.detach() for name, p in peft.named_parameters() if p.requires_grad}
    name = next(iter(trained))
    for tensor in (None, torch.empty(0), torch.ones(1, 1)):
        broken = {key: value for key, value in trained.items() if key != name}
        if tensor is not None:
            broken[name] = tensor
        with pytest.raises(ValueError, match=f'"{name}"'):
            export_adapter(
                tmp_path / "out", peft_model=peft, tensors=broken, base_model_name_or_path="x"
            )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", CASES)
def test_merged_equals_peft(tmp_path, case: str) -> None:
    peft = make_adapter(tmp_path, case)
    before = files(tmp_path / "base")
    merge(tmp_path, tmp_path / "out")
    assert files(tmp_path / "base") == before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = peft.merge_and_unload().state_dict()
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    changed = 0
    for name, tensor in merged.state_dict().items():
        # Same operations in fp32; expert updates may be summed in another order.
        torch.testing.assert_close(tensor, reference[name], rtol=0, atol=1e-6)
        changed += not torch.equal(tensor, base[name])
    assert changed >= 2


@pytest.mark.parametrize("case", ["llama", "conv1d", "experts", "saved"])
def test_bf16_merge_is_the_rounded_fp32_merge(tmp_path, case: str) -> None:
    make_adapter(tmp_path, case, dtype="bfloat16")
    merge(tmp_path, tmp_path / "bf16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    merge(tmp_path, tmp_path / "fp32")
    exact = load_file(tmp_path / "fp32/model.safetensors")
    rounded = load_file(tmp_path / "bf16/model.safetensors")
    assert rounded.keys() == exact.keys()
    for name, tensor in rounded.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, exact[name].bfloat16()), name


# -- bad adapters ----------------------------------------------------------------------------------------------


def test_not_an_adapter(tmp_path) -> None:
    make_checkpoint(tmp_path / "base", "llama")
    (tmp_path / "adapter").mkdir()
    with pytest.raises(ConfigError, match=r"is no PEFT adapter: it has no adapter_config\.json"):
        merge(tmp_path, tmp_path / "out")
    (tmp_path / "adapter/adapter_config.json").write_text("{")
    with pytest.raises(FormatError, match=r"adapter_config\.json is not valid JSON"):
        merge(tmp_path, tmp_path / "out")
    (tmp_path / "adapter/adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ConfigError, match="only LORA is supported"):
        merge(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def change_config(folder: Path, **values) -> None:
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_damaged_or_foreign_adapter(tmp_path) -> None:
    make_adapter(tmp_path, "rslora")
    path = tmp_path / "adapter/adapter_model.safetensors"
    good = path.read_bytes()
    tensors = load_file(path)
    os.truncate(path, len(good) - 10)
    with pytest.raises(FormatError, match=f"adapter_model.*truncated.*describes {len(good)} bytes"):
        merge(tmp_path, tmp_path / "out")
    name = next(name for name in tensors if "lora_A" in name)
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(FormatError, match=r"lacks .*lora_A.* \(1 missing, 0 unknown"):
        merge(tmp_path, tmp_path / "out")
    save_file(tensors | {name: torch.ones(3, 7)}, path)
    with pytest.raises(FormatError, match=r"has shape \[3, 7\].*base model"):
        merge(tmp_path, tmp_path / "out")
    path.unlink()
    with pytest.raises(FormatError, match=r"has no adapter_model\.safetensors"):
        merge(tmp_path, tmp_path / "out")
    path.write_bytes(good)
    change_config(tmp_path, target_modules=["absent"])
    with pytest.raises(ConfigError, match="does not fit the base model"):
        merge(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_adapters_that_cannot_be_merged(tmp_path) -> None:
    make_adapter(tmp_path, "llama")
    change_config(tmp_path, use_dora=True)
    with pytest.raises(ConfigError, match="use_dora; such adapters can't be merged"):
        merge(tmp_path, tmp_path / "out")


def test_adapter_of_a_tied_weight(tmp_path) -> None:
    make_adapter(tmp_path, "saved")
    make_checkpoint(tmp_path / "base", "qwen2", tied=True)
    with pytest.raises(ConfigError, match=r"trains .* shares .*lm_head\.weight.*unmerged"):
        merge(tmp_path, tmp_path / "out")


def test_read_adapter_gives_names_of_the_model(tmp_path) -> None:
    peft = make_adapter(tmp_path, "saved")
    trained = {name: p.detach() for name, p in peft.named_parameters() if p.requires_grad}
    model = get_peft_model(meta_model(tmp_path / "base"), peft.peft_config["default"])
    read = read_adapter(model, tmp_path / "adapter")
    assert read.keys() == trained.keys()
    assert all(torch.equal(read[name], trained[name]) for name in read)
    assert all(parameter.device.type == "meta" for name, parameter in model.named_parameters()
               if "lora" not in name)  # fmt: skip
