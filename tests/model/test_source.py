"""Parameters read from the original files are what from_pretrained loads, bit for bit."""

from __future__ import annotations

import hashlib
import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ssdtune.errors import ConfigError, FormatError, StorageError
from ssdtune.model.checkpoint import HfCheckpoint
from ssdtune.model.keys import KeyMap
from tests.model.opened import meta_model, opened
from tests.toy import ARCHITECTURES, make_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    bits = master.contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16
    high.view(torch.int16).copy_(upper)
    low.copy_(bits - (upper << 16))


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return ((high.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


def assert_equals_transformers(
    folder, dtype: torch.dtype, *, scratch_bytes: int = 48 << 10
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    with opened(folder, scratch_bytes=scratch_bytes) as all_:
        into = {
            name: torch.full(shape, 7.0, dtype=dtype) for name, shape in all_.keymap.shapes.items()
        }
        all_.source.load(list(into), into)
        assert into.keys() == reference.keys()
        for name, tensor in reference.items():
            assert torch.equal(into[name], tensor), name


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_parameter_equals_from_pretrained(tmp_path, arch: str, tied: bool) -> None:
    # The two halves of the cases swap dtype and sharding, so that each is met with each architecture's layout.
    dtype = "bfloat16" if tied else "float32"
    folder = make_checkpoint(tmp_path / "m", arch, tied=tied, dtype=dtype, sharded=tied)
    assert_equals_transformers(folder, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_rounded_as_transformers_rounds(tmp_path, dtype: torch.dtype) -> None:
    folder = make_checkpoint(tmp_path / "m", "mixtral")
    assert_equals_transformers(folder, dtype)


@pytest.mark.parametrize("scratch_bytes", [1, 1 << 16, 1 << 20])
def test_scratch_of_any_size_gives_the_same(tmp_path, scratch_bytes: int) -> None:
    # A single byte becomes the smallest buffers that work, far smaller than the tensors.
    folder = make_checkpoint(tmp_path / "m", "gpt2", sharded=True)
    assert_equals_transformers(folder, torch.float32, scratch_bytes=scratch_bytes)


def test_master_weights_are_split_exactly(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "qwen3_moe")
    with opened(folder) as all_:
        shapes = all_.keymap.shapes
        names = [name for name in shapes if name not in all_.keymap.aliases]
        high = {name: torch.empty(shapes[name], dtype=torch.bfloat16) for name in names}
        low = {name: torch.empty(shapes[name], dtype=torch.int16) for name in names}
        all_.source.load_split(names, high, low, split)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name in names:
        assert torch.equal(join(high[name], low[name]), reference[name]), name


def test_bytes_are_counted_once_and_the_folder_stays(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama", tied=True, sharded=True)
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    with opened(folder) as all_:
        into = {name: torch.empty(shape) for name, shape in all_.keymap.shapes.items()}
        all_.source.load(list(into), into)
        assert all_.source.bytes_read == all_.checkpoint.num_bytes
        assert all_.pool.peak_bytes <= 48 << 10
    assert before == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_several_threads_share_a_source(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "qwen2")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    wrong: list[str] = []
    with opened(folder) as all_:

        def work(part: list[str]) -> None:
            into = {name: torch.empty(all_.keymap.shapes[name]) for name in part}
            all_.source.load(part, into)
            wrong.extend(name for name in part if not torch.equal(into[name], reference[name]))

        names = sorted(reference)
        threads = [threading.Thread(target=work, args=(names[i::3],)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_file_cut_while_running_is_reported(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama")
    with opened(folder) as all_:
        file = folder / "model.safetensors"
        with file.open("r+b") as handle:
            handle.truncate(file.stat().st_size - 100)
        into = {name: torch.empty(shape) for name, shape in all_.keymap.shapes.items()}
        with pytest.raises(StorageError, match=r"model\.safetensors"):
            all_.source.load(list(into), into)


def test_wrong_destinations_are_refused(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama")
    name = "model.norm.weight"
    with opened(folder) as all_:
        for tensor in (torch.empty(41), torch.empty(80)[::2]):
            with pytest.raises(ValueError, match=r"model.norm.weight.*\[40\]"):
                all_.source.load([name], {name: tensor})
        with pytest.raises(ValueError, match="no parameter"):
            all_.source.load(["nonsense"], {"nonsense": torch.empty(1)})


def rewrite(folder, change) -> None:
    """Apply `change` to the tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    tensors = change(dict(tensors)) or tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_names_without_prefix_and_old_names(tmp_path) -> None:
    # Early gpt2 checkpoints lack the prefix, hold masks, and call norms gamma and beta.
    folder = make_checkpoint(tmp_path / "m", "gpt2", tied=True)

    def change(tensors):
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
        return tensors

    rewrite(folder, change)
    assert_equals_transformers(folder, torch.float32)
    with opened(folder) as all_:
        assert all_.keymap.unexpected == ("h.0.attn.bias",)


@pytest.mark.parametrize("equal", [True, False])
def test_both_copies_of_a_tied_weight(tmp_path, equal: bool, caplog) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama", tied=True)

    def change(tensors):
        head = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"] = head if equal else head + 1
        return tensors

    rewrite(folder, change)
    assert_equals_transformers(folder, torch.float32)
    with opened(folder) as all_:
        tied = all_.model.lm_head.weight is all_.model.model.embed_tokens.weight
        assert tied == equal
        assert bool(all_.keymap.aliases) == equal
    assert ("trained apart" in caplog.text) == (not equal)


def test_only_the_head_is_there(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama", tied=True)
    rewrite(
        folder,
        lambda t: t | {"lm_head.weight": t.pop("model.embed_tokens.weight")},
    )
    assert_equals_transformers(folder, torch.float32)
    with opened(folder) as all_:
        assert all_.keymap.canonical("lm_head.weight") == "model.embed_tokens.weight"
        assert all_.keymap.canonical("model.embed_tokens.weight") == "model.embed_tokens.weight"


def build(folder) -> KeyMap:
    return KeyMap.build(meta_model(folder), HfCheckpoint.open(folder))


def test_missing_tensor(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama", tied=False)

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]

    rewrite(folder, lambda t: change(t) or t)
    with pytest.raises(
        FormatError, match=r"lacks 2 of .*: lm_head.weight, model.layers.1.mlp.up_proj.weight\."
    ):
        build(folder)


def test_missing_expert(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "qwen3_moe")
    rewrite(folder, lambda t: t.pop("model.layers.2.mlp.experts.3.down_proj.weight") is None or t)
    with pytest.raises(
        FormatError, match=r"experts.down_proj.*shape \[5, 40, 28\].*config.json says \[6"
    ):
        build(folder)


def test_wrong_shape(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 85
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=r"model.safetensors; config.json says \[40, 85\]"):
        build(folder)


def test_dtype_that_cannot_be_trained(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda t: t | {name: t[name].to(torch.int8)})
    with pytest.raises(ConfigError, match=f"{name}.*dtype I8, which can't be trained"):
        build(folder)


def test_unused_tensors_are_named(tmp_path, caplog) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama")
    rewrite(
        folder,
        lambda t: t | {"extra.weight": torch.ones(3), "model.rotary_emb.inv_freq": torch.ones(3)},
    )
    assert set(build(folder).unexpected) == {"extra.weight", "model.rotary_emb.inv_freq"}
    assert "not used by LlamaForCausalLM" in caplog.text and "extra.weight" in caplog.text
    assert "inv_freq" not in caplog.text
