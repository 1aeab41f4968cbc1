"""An exported folder is the one that save_pretrained makes of the same parameters."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssdtune.errors import CapacityError, ConfigError, StorageError
from ssdtune.export.safetensors_writer import ShardWriter, Staging
from ssdtune.export.weights import export_weights, round_to
from ssdtune.model.safetensors_file import SafetensorsFile, SavedTensor
from tests.model.opened import Opened, opened
from tests.toy import ARCHITECTURES, make_checkpoint


def reader(all_: Opened, change=lambda tensor: tensor):
    """Give each parameter as fp32, through one buffer that the next call reuses, and note the order."""
    sizes = [torch.Size(shape).numel() for shape in all_.keymap.shapes.values()]
    buffer = torch.empty(max(sizes))
    calls: list[str] = []

    def get_tensor(name: str) -> torch.Tensor:
        shape = all_.keymap.shapes[name]
        tensor = buffer[: torch.Size(shape).numel()].view(shape)
        all_.source.load([name], {name: tensor})
        calls.append(name)
        return change(tensor)

    return get_tensor, calls


def export(folder: Path, target: Path, *, change=lambda tensor: tensor, **options) -> list[str]:
    with opened(folder) as all_:
        get_tensor, calls = reader(all_, change)
        export_weights(
            target, checkpoint=all_.checkpoint, keymap=all_.keymap, get_tensor=get_tensor, **options
        )
    return calls


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_folder_equals_save_pretrained(tmp_path, arch: str) -> None:
    tied = sorted(ARCHITECTURES).index(arch) % 2 == 0  # both, without twice the time
    dtype = "float32" if tied else "bfloat16"
    folder = make_checkpoint(tmp_path / "m", arch, tied=tied, dtype=dtype, sharded=not tied)
    limit = 10**9 if tied else 30_000
    calls = export(folder, tmp_path / "out", max_shard_bytes=limit)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.save_pretrained(tmp_path / "reference", max_shard_size=limit)
    ours, reference = files(tmp_path / "out"), files(tmp_path / "reference")
    weights = {name for name in reference if "safetensors" in name}
    assert {name for name in ours if "safetensors" in name} == weights
    for name in weights:
        assert ours[name] == reference[name], name  # the very bytes, index included
    original = files(folder)
    for name in {name for name in original if "safetensors" not in name}:
        assert ours[name] == original[name], name
    assert len(calls) == len(set(calls)) == len(list(model.parameters()))
    blocks = [re.search(r"\.(\d+)\.", name) for name in calls]
    numbers = [int(match[1]) for match in blocks if match]
    assert numbers == sorted(numbers)  # block by block


def test_changed_weights_reload(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "mixtral", sharded=True)
    export(folder, tmp_path / "out", change=lambda tensor: tensor * 2 + 1)
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", output_loading_info=True
        )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name] * 2 + 1), name
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 131


def test_each_tensor_keeps_its_dtype(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "qwen3_moe", dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    kept = [name for name in tensors if "gate.weight" in name or "experts.1.up_proj" in name]
    assert len(kept) >= 4
    tensors |= {name: tensors[name].float() + 1e-4 for name in kept}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    export(folder, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name


def test_tied_weights_are_stored_once_even_if_the_original_has_both(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama", tied=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    export(folder, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_persistent_buffers_are_kept(tmp_path) -> None:
    from transformers import AutoConfig

    folder = tmp_path / "m"
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=131, hidden_size=40, intermediate_size=84, moe_intermediate_size=28,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    buffer = dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    buffer.copy_(torch.arange(4.0))
    model.save_pretrained(folder)
    calls = export(folder, tmp_path / "out")
    assert not any("correction" in name for name in calls)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == load_file(folder / "model.safetensors").keys()
    assert torch.equal(
        written["model.layers.1.mlp.gate.e_score_correction_bias"], torch.arange(4.0)
    )


def test_earlier_export_is_replaced_and_other_files_stay(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama")
    out = tmp_path / "out"
    export(folder, out, max_shard_bytes=30_000)
    (out / "metrics.jsonl").write_text("kept")
    assert (out / "model.safetensors.index.json").exists()
    export(folder, out)
    names = {path.name for path in out.iterdir()}
    assert {name for name in names if "safetensors" in name} == {"model.safetensors"}
    assert (out / "metrics.jsonl").read_text() == "kept"


def test_failure_leaves_the_earlier_export_whole(tmp_path, monkeypatch) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama", sharded=True)
    out = tmp_path / "out"
    export(folder, out)
    before = files(out)
    real = os.pwrite
    left = [60_000]

    def full(descriptor: int, data: bytes, offset: int) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr("ssdtune.model.safetensors_file.os.pwrite", full)
    with pytest.raises(StorageError, match=r"write of .*model\.safetensors failed .*ENOSPC"):
        export(folder, out, change=lambda tensor: tensor + 1)
    assert files(out) == before


def test_no_space_is_known_before(tmp_path, monkeypatch) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CapacityError, match=r"export needs 22\d kB in .*out; 1.00 kB are free"):
        export(folder, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_original_is_never_written(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama")
    before = files(folder)
    with pytest.raises(ConfigError, match="never written"):
        export(folder, folder)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot write to"):
        export(folder, tmp_path / "file" / "out")
    assert files(folder) == before


# -- rounding and files ----------------------------------------------------------------------------------------


def test_bf16_rounds_halves_up_in_magnitude() -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, -0x407F8000, 0x00000000, 0x7F800000],
                        dtype=torch.int32)  # fmt: skip
    made = round_to(bits.view(torch.float32), torch.bfloat16).view(torch.int16)
    assert made.tolist() == [0x3F81, 0x3F82, 0x3F80, -0x407F + 0, 0, 0x7F80]
    values = torch.randn(10_000)
    assert torch.equal(round_to(values, torch.bfloat16), values.to(torch.bfloat16))
    assert round_to(torch.tensor([float("nan")]), torch.bfloat16).isnan().all()
    tie = torch.tensor([0x3F808000], dtype=torch.int32).view(torch.float32)
    assert round_to(tie, torch.bfloat16, half_up=False).view(torch.int16).tolist() == [0x3F80]


def test_fp16_overflow_is_refused() -> None:
    with pytest.raises(ConfigError, match='"w" has values up to 7e\\+04'):
        round_to(torch.tensor([1.0, -7e4]), torch.float16, name="w")


@pytest.mark.parametrize("order", [1, -1])
def test_file_is_that_of_the_library(tmp_path, order: int) -> None:
    tensors = {
        "b": torch.randn(3, 5), "a": torch.randn(7).to(torch.bfloat16), "ä": torch.tensor(2.5),
        "empty": torch.empty(0, 4), "i": torch.arange(3), "z.bool": torch.tensor([True, False]),
        "half": torch.randn(2).half(), "i8": torch.ones(3, dtype=torch.int8),
    }  # fmt: skip
    announced = [
        SavedTensor(name, tuple(tensor.shape), {
            torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL",
            torch.float16: "F16", torch.int8: "I8"}[tensor.dtype])
        for name, tensor in tensors.items()
    ]  # fmt: skip
    save_file(tensors, tmp_path / "reference", metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "ours", announced) as file:
        for name in list(tensors)[::order]:
            file.write(name, tensors[name])
        file.finish()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "reference").read_bytes()


def test_incomplete_or_wrong_tensors_are_refused(tmp_path) -> None:
    announced = [SavedTensor("a", (2,), "F32"), SavedTensor("b", (2,), "F32")]
    with Staging(tmp_path / "out") as staging, ShardWriter(staging.path, announced) as writer:
        for wrong in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
            with pytest.raises(ValueError, match=r"expected .* got"):
                writer.write("a", wrong)
        writer.write("a", torch.ones(2))
        with pytest.raises(ValueError, match="once"):
            writer.write("a", torch.ones(2))
        with pytest.raises(ValueError, match="lacks 1 tensors"):
            writer.finish()
    assert list((tmp_path / "out").iterdir()) == []


def test_shard_without_room_is_split_as_transformers_does(tmp_path) -> None:
    announced = [SavedTensor(name, (2,), "F32") for name in "abc"]
    with ShardWriter(tmp_path, announced, max_shard_bytes=16, num_parameters=6) as writer:
        for name in "cab":
            writer.write(name, torch.ones(2))
        writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 6, "total_size": 24}
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / shard, "pt") as file:
            assert name in file.keys() and file.metadata() == {"format": "pt"}  # noqa: SIM118
