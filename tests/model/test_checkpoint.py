"""Damaged or unsuitable checkpoint folders: each is named at once, with what is wrong and what helps."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssdtune.errors import CapacityError, ConfigError, FormatError
from ssdtune.model.checkpoint import HfCheckpoint, same_bytes
from tests.toy import make_checkpoint

SHARD = "model-00002-of-"


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama", tied=False)


@pytest.fixture
def sharded(tmp_path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama", tied=False, sharded=True)


def shard(folder: Path) -> Path:
    return next(folder.glob(SHARD + "*"))


def refused(folder: Path | str, kind: type[Exception], *patterns: str) -> None:
    """Expect one error that matches all patterns."""
    with pytest.raises(kind) as info:
        HfCheckpoint.open(folder)
    for pattern in patterns:
        assert re.search(pattern, str(info.value)), (pattern, str(info.value))


def write_raw(path: Path, header: dict | bytes, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


# -- what is good ----------------------------------------------------------------------------------------------


def test_extents_are_where_the_tensors_lie(sharded) -> None:
    checkpoint = HfCheckpoint.open(sharded)
    tensors = {}
    for file in sharded.glob("*.safetensors"):
        tensors |= load_file(file)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, extent in checkpoint.tensors.items():
        raw = extent.path.read_bytes()[extent.offset : extent.offset + extent.num_bytes]
        assert torch.equal(
            torch.frombuffer(bytearray(raw), dtype=torch.float32).view(extent.shape), tensors[name]
        )


@pytest.mark.parametrize("spelling", ["relative", "slash", "symlink", "home", "odd"])
def test_ways_to_name_a_folder(folder, tmp_path, monkeypatch, spelling: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(folder)
    odd = tmp_path / "ein Ordner, ümläut"
    odd.symlink_to(folder)
    names = {"relative": "model", "slash": f"{folder}/", "symlink": "link", "home": "~/model",
             "odd": str(odd)}  # fmt: skip
    assert HfCheckpoint.open(names[spelling]).path == folder.resolve()


def test_fingerprint_tells_changes(folder, tmp_path) -> None:
    first = HfCheckpoint.open(folder).fingerprint
    assert HfCheckpoint.open(folder).fingerprint == first
    file = folder / "model.safetensors"
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert HfCheckpoint.open(folder).fingerprint != first
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert HfCheckpoint.open(folder).fingerprint == first
    config = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (folder / "config.json").write_text(json.dumps(config))
    assert HfCheckpoint.open(folder).fingerprint != first


def test_sidecars_are_all_but_weights(folder) -> None:
    extra = ["merges.txt", "chat_template.jinja", "additional_chat_templates/tool.jinja", "LICENSE",
             "modeling_x.py", "sub/helper.py", "spiece.model"]  # fmt: skip
    other = ["README.md", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
             "trainer_state.json", ".cache/x.py", "__pycache__/y.py"]  # fmt: skip
    for name in extra + other:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    found = {str(path) for path in HfCheckpoint.open(folder).sidecar_files()}
    assert found == {*extra, "config.json", "generation_config.json", "tokenizer.json",
                     "tokenizer_config.json"}  # fmt: skip


def test_hub_id_from_the_local_cache(folder, tmp_path, monkeypatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    refused("some/model", ConfigError, '"some/model" is neither a folder', "hf download some/model")
    snapshot = cache / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (cache / "models--some--model" / "refs").mkdir()
    (cache / "models--some--model" / "refs" / "main").write_text("0" * 40)
    checkpoint = HfCheckpoint.open("some/model")
    assert checkpoint.path == snapshot.resolve() and checkpoint.name_or_path == "some/model"


def test_same_bytes(tmp_path) -> None:
    model = make_checkpoint(tmp_path / "m", "gpt2")
    tensors = HfCheckpoint.open(model).tensors
    one, two = (tensors[f"transformer.h.{i}.ln_1.weight"] for i in (0, 1))
    assert same_bytes(one, one) and not same_bytes(one, two)
    assert not same_bytes(one, tensors["transformer.wte.weight"])


# -- folders ---------------------------------------------------------------------------------------------------


def test_no_such_folder(tmp_path, folder) -> None:
    refused(tmp_path / "absent", ConfigError, "there is no folder .*absent")
    refused("", ConfigError, "Set model_name_or_path")
    refused(folder / "config.json", ConfigError, "is a file", f"Its folder is {folder.resolve()}")


def test_not_a_checkpoint(tmp_path, folder) -> None:
    refused(tmp_path, ConfigError, "has no config.json")
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, ConfigError, "is a PEFT adapter", "as adapter")
    (folder / "model.safetensors").unlink()
    (folder / "model.gguf").write_text("x")
    refused(folder, ConfigError, "has no weights", r"found model\.gguf")
    (folder / "model.safetensors").symlink_to("/nowhere/weights")
    refused(folder, ConfigError, "is a link to /nowhere/weights, which leads to no file")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("{", FormatError, "config.json .*not valid JSON"),
        ("[]", FormatError, "not a JSON object"),
        ("", FormatError, r"config.json \(0 bytes\)"),
        ("version https://git-lfs.github.com/spec/v1\n", FormatError, "Git LFS pointer"),
        ("{}", ConfigError, 'no "model_type"'),
    ],
)
def test_bad_config(folder, text: str, kind: type[Exception], message: str) -> None:
    (folder / "config.json").write_text(text)
    refused(folder, kind, message)


def test_quantized(folder) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, ConfigError, "quant_method: mxfp4", "dequantize")


def test_fp8_weights(folder) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    refused(folder, ConfigError, f'"{name}" .*dtype F8_E4M3')


# -- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, 5000, "header"])
def test_truncated_shard(sharded, lost: int | str) -> None:
    path = shard(sharded)
    size = path.stat().st_size
    keep = 100 if lost == "header" else size - lost
    os.truncate(path, keep)
    needs = r"needs \d+ bytes" if lost == "header" else f"describes {size} bytes"
    refused(sharded, FormatError, path.name, "truncated", needs, f"has {keep}", "Download again")


def test_trailing_bytes(sharded) -> None:
    path = shard(sharded)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\0" * 7)
    refused(sharded, FormatError, path.name, "trailing", f"describes {size} bytes.*has {size + 7}")


@pytest.mark.parametrize("size", [0, 5])
def test_empty_shard(sharded, size: int) -> None:
    shard(sharded).write_bytes(b"\0" * size)
    refused(sharded, FormatError, shard(sharded).name, f"has {size} bytes", "Download again")


def test_lfs_pointer(sharded) -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
    shard(sharded).write_text(text)
    refused(sharded, FormatError, shard(sharded).name, f"LFS pointer of {len(text)} bytes", "4976698672 bytes",
            "git lfs pull")  # fmt: skip


def test_not_safetensors_at_all(folder) -> None:
    (folder / "model.safetensors").write_bytes(b"<!DOCTYPE html><html>" + b"x" * 1000)
    refused(folder, FormatError, "no safetensors file", "1021 bytes", "Download again")


F32 = {"dtype": "F32", "shape": [2]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"[1, 2]  ", 0, "header of 8 bytes is not valid"),
        (b'{"a": }', 0, "not valid"),
        ({"a": {"dtype": "F32"}}, 0, "not valid"),
        ({"a": F32 | {"data_offsets": [0, 12]}}, 12, '"a".*needs 8 bytes, its offsets give 12'),
        ({"a": F32 | {"data_offsets": [0, 8]}, "b": F32 | {"data_offsets": [4, 12]}}, 12, '"b" .*overlaps "a"'),
        ({"a": F32 | {"data_offsets": [0, 8]}, "b": F32 | {"data_offsets": [12, 20]}}, 20, "gap after"),
        ({"a": F32 | {"data_offsets": [-8, 0]}}, 0, "offsets -8 to 0"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
         b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0, "twice"),
    ],
)  # fmt: skip
def test_header_that_contradicts_itself(folder, header, data: int, message: str) -> None:
    write_raw(folder / "model.safetensors", header, b"\0" * data)
    refused(folder, FormatError, r"model\.safetensors", message, "Download again")


# -- index -----------------------------------------------------------------------------------------------------


def change_index(folder: Path, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_missing_shard(sharded) -> None:
    path = shard(sharded)
    path.unlink()
    refused(sharded, FormatError, path.name, "is missing", "Download it again")


def test_index_names_a_tensor_that_is_nowhere(sharded) -> None:
    path = shard(sharded)
    change_index(sharded, lambda weights: weights.update(ghost=path.name))
    refused(sharded, FormatError, f'"ghost" is in .*{path.name}; it is in no file')


def test_index_names_the_wrong_shard(sharded) -> None:
    def change(weights) -> None:
        first, last = sorted(set(weights.values()))[:2]
        name = next(name for name, file in weights.items() if file == first)
        weights[name] = last

    change_index(sharded, change)
    refused(sharded, FormatError, "index.json says that tensor", "it is in model-00001")


def test_tensor_in_two_shards(sharded) -> None:
    first = next(sharded.glob("model-00001-of-*"))
    save_file(load_file(shard(sharded)) | load_file(first), first)
    refused(sharded, FormatError, "is both in", "model-00001", "model-00002")


def test_index_that_leaves_the_folder(sharded) -> None:
    change_index(sharded, lambda weights: weights.update(ghost="../secret.safetensors"))
    refused(sharded, FormatError, r"\.\./secret\.safetensors")


def test_broken_index(sharded) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text("{}")
    refused(sharded, FormatError, 'index.json has no "weight_map"')


# -- pickled weights -------------------------------------------------------------------------------------------


class Bomb:
    """Would make a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def to_bin(
    folder: Path, *, old_format: bool = False, extra: object = None
) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    content = tensors | ({} if extra is None else {"extra": extra})
    torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old_format)
    (folder / "model.safetensors").unlink()
    return tensors


@pytest.mark.parametrize("old_format", [False, True])
def test_pickled_weights_are_converted_once(folder, tmp_path, old_format: bool, caplog) -> None:
    tensors = to_bin(folder, old_format=old_format)
    before = sorted(path.name for path in folder.iterdir())
    refused(folder, ConfigError, r"only as pickled pytorch_model\.bin", "safetensors")
    checkpoint = HfCheckpoint.open(folder, convert_dir=tmp_path / "new" / "cache")
    assert "converting them to safetensors" in caplog.text
    loaded = load_file(checkpoint.path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert (checkpoint.path / "tokenizer.json").read_bytes() == (
        folder / "tokenizer.json"
    ).read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == before
    caplog.clear()
    again = HfCheckpoint.open(folder, convert_dir=tmp_path / "new" / "cache")
    assert again.fingerprint == checkpoint.fingerprint and not caplog.text


def test_pickled_shards(folder, tmp_path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i in range(2):
        file = f"pytorch_model-{i + 1:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in names[i::2]}, folder / file)
        weight_map |= {name: file for name in names[i::2]}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    checkpoint = HfCheckpoint.open(folder, convert_dir=tmp_path / "cache")
    assert checkpoint.tensors.keys() == tensors.keys() and checkpoint.index is not None
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(FormatError, match=r"model-00002-of-00002\.bin is missing"):
        HfCheckpoint.open(folder, convert_dir=tmp_path / "other")


@pytest.mark.parametrize("old_format", [False, True])
def test_pickled_code_never_runs(folder, tmp_path, old_format: bool) -> None:
    to_bin(folder, old_format=old_format, extra=Bomb(tmp_path / "ran"))
    with pytest.raises(FormatError, match=r"pytorch_model\.bin .*nothing in it was run"):
        HfCheckpoint.open(folder, convert_dir=tmp_path / "cache")
    assert not (tmp_path / "ran").exists()
    assert list((tmp_path / "cache").iterdir()) == []


def test_truncated_pickle_and_other_content(folder, tmp_path) -> None:
    to_bin(folder)
    path = folder / "pytorch_model.bin"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(FormatError, match=r"pytorch_model\.bin .*damaged"):
        HfCheckpoint.open(folder, convert_dir=tmp_path / "cache")
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(FormatError, match="LFS pointer"):
        HfCheckpoint.open(folder, convert_dir=tmp_path / "cache")
    torch.save([1, 2], path)
    with pytest.raises(FormatError, match="no dictionary of named tensors"):
        HfCheckpoint.open(folder, convert_dir=tmp_path / "cache")


def test_no_space_for_the_conversion(folder, tmp_path, monkeypatch) -> None:
    to_bin(folder)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CapacityError, match=r"needs .* kB in .*; 1.00 kB are free"):
        HfCheckpoint.open(folder, convert_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
