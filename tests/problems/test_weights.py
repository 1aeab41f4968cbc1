"""Weights in and out of whole runs: what is exported is what was given, tuned; bad folders are named early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ssdtune.errors import SsdtuneError
from tests.equality.harness import TRAINING, assert_matches, hash_folder, stream
from tests.equality.reference import train_in_memory
from tests.toy import EOS, VOCAB, make_checkpoint, make_rows

ONE_EPOCH = {"num_train_epochs": 1}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all stored tensors; one that is stored twice is an error."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_index_and_config_are_those_of_what_is_written(tmp_path: Path, tied: bool) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "qwen2", sharded=True, tied=tied)
    make_rows(tmp_path / "rows.jsonl", 5)
    out = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", ONE_EPOCH).output_dir
    tensors = _tensors(out)
    assert ("lm_head.weight" in tensors) != tied
    assert tensors.keys() == _tensors(model_dir).keys()
    index = out / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        for name, shard in content["weight_map"].items():
            assert name in load_file(out / shard)
        assert content["weight_map"].keys() == tensors.keys()
        sizes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        assert content["metadata"]["total_size"] == sizes
    before, after = (json.loads((d / "config.json").read_text()) for d in (model_dir, out))
    assert after == before
    assert after["tie_word_embeddings"] == tied


def test_companions_are_copied_byte_for_byte(tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "llama")
    make_rows(tmp_path / "rows.jsonl", 3)
    stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "first", {"max_steps": 1})  # tokenizer
    template = "{% for m in messages %}{{ m['role'] }}:  {{ m['content'] }}\n{% endfor %}"
    (model_dir / "chat_template.jinja").write_text(template)
    (model_dir / "generation_config.json").write_text(
        '{"temperature": 0.25,\n\n "eos_token_id":[2,7]}'
    )
    (model_dir / "special_tokens_map.json").write_text('{ "eos_token":"</s>" }')
    (model_dir / "LICENSE").write_text("as before")
    before = hash_folder(model_dir)
    out = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", {"max_steps": 1}).output_dir
    after = hash_folder(out)
    names = ["chat_template.jinja", "generation_config.json", "special_tokens_map.json"]
    names += ["tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert after[name] == before[name], name
    assert AutoTokenizer.from_pretrained(out).chat_template == template
    assert hash_folder(model_dir) == before


@pytest.mark.parametrize("given", ["bfloat16", "float16", "mixed"])
def test_every_tensor_keeps_its_dtype(tmp_path: Path, given: str) -> None:
    """Checkpoints of other dtypes train in fp32 here, as in memory, and come back as they were."""
    model_dir = make_checkpoint(
        tmp_path / "model", "llama", dtype="bfloat16" if given == "mixed" else given
    )
    if given == "mixed":
        path = model_dir / "model.safetensors"
        tensors = {n: t.float() if "norm" in n else t for n, t in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    rows = make_rows(tmp_path / "rows.jsonl", 9)
    reference = train_in_memory(model_dir, rows, TRAINING | ONE_EPOCH)
    run = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", ONE_EPOCH)
    assert_matches(run, reference, atol=0.02)  # weights are rounded to 8 or 11 bits
    assert max(abs(a - b) for a, b in zip(run.series("loss"), reference.losses)) < 2e-5
    before, after = _tensors(model_dir), _tensors(run.output_dir)
    assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in before.items()}
    for name, tensor in after.items():
        # three steps of 1e-3 are less than half a bf16 step of a norm's weights near 1
        assert "norm" in name or not torch.equal(tensor, before[name]), name
    config = json.loads((run.output_dir / "config.json").read_text())
    assert config["dtype"] == json.loads((model_dir / "config.json").read_text())["dtype"]


def test_auto_takes_a_dtype_that_this_machine_computes_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ssdtune.device import open_device

    model_dir = make_checkpoint(tmp_path / "model", "llama", dtype="float16")
    make_rows(tmp_path / "rows.jsonl", 3)
    settings = {"dtype": "auto", "max_steps": 1}
    run = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", settings)
    has_bf16 = open_device("cpu").supports(torch.bfloat16)
    assert (run.moved("written", "master") > 0) == has_bf16
    if not has_bf16:
        stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "bf16", settings | {"dtype": "bf16"})
        assert sum("emulated" in r.getMessage() for r in caplog.records) == 1


def test_a_larger_embedding_than_the_tokenizer_needs_stays_so(tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "llama", vocab_size=VOCAB + 61)
    rows = make_rows(tmp_path / "rows.jsonl", 5)
    run = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", ONE_EPOCH)
    assert len(AutoTokenizer.from_pretrained(run.output_dir)) == VOCAB
    assert _tensors(run.output_dir)["model.embed_tokens.weight"].shape[0] == VOCAB + 61
    assert_matches(run, train_in_memory(model_dir, rows, TRAINING | ONE_EPOCH))


def test_pickled_weights_train_like_safetensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "llama")
    rows = make_rows(tmp_path / "rows.jsonl", 9)
    reference = train_in_memory(model_dir, rows, TRAINING | ONE_EPOCH)
    weights = load_file(model_dir / "model.safetensors")
    torch.save(weights, model_dir / "pytorch_model.bin")
    (model_dir / "model.safetensors").unlink()
    before = hash_folder(model_dir)
    run = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", ONE_EPOCH)
    assert_matches(run, reference)
    said = [r.getMessage() for r in caplog.records if "only pickled weights" in r.getMessage()]
    assert len(said) == 1 and "safetensors" in said[0]
    assert hash_folder(model_dir) == before
    assert not list(run.output_dir.glob("*.bin"))


class _Trap:
    """Leaves a file behind if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": _Trap(folder / "sprung")}, folder / "pytorch_model.bin")


def _lfs_pointer(folder: Path) -> None:
    digest = "0" * 64
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize 4976698672\n"
    (folder / "model.safetensors").write_text(text)


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _unknown(folder: Path) -> None:
    _set(folder, model_type="never_heard_of")


def _remote_code(folder: Path) -> None:
    (folder / "modeling_new.py").write_text(f"open({str(folder / 'sprung')!r}, 'w')\n")
    _set(
        folder,
        model_type="new",
        auto_map={"AutoConfig": "modeling_new.C", "AutoModelForCausalLM": "modeling_new.M"},
    )


def _set(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    "spoil, words",
    [
        (_pickle, ["pytorch_model.bin"]),
        (_lfs_pointer, ["model.safetensors", "LFS", "4976698672"]),
        (_cut, ["model.safetensors", "truncated", "Download"]),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), ["model.safetensors"]),
        (_unknown, ["never_heard_of"]),
        (_remote_code, ["trust_remote_code"]),
        (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["no weights"]),
    ],
    ids=[
        "pickled-code",
        "lfs",
        "cut",
        "empty",
        "unknown",
        "remote-code",
        "no-config",
        "no-weights",
    ],
)
def test_bad_folders_are_named_before_anything_is_written(
    tmp_path: Path, spoil: Any, words: list[str]
) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "llama")
    make_rows(tmp_path / "rows.jsonl", 3)
    spoil(model_dir)
    with pytest.raises(SsdtuneError) as caught:
        stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", ONE_EPOCH)
    text = str(caught.value)
    assert str(model_dir) in text or "never_heard_of" in text, text
    for word in words:
        assert word in text, text
    assert "\n" not in text and caught.value.exit_code == 2
    assert not list(tmp_path.glob("out/**/*.bin")) and not list(tmp_path.glob("out/*.safetensors"))
    assert not (model_dir / "sprung").exists()


def test_loads_as_before(tmp_path: Path) -> None:
    """transformers reads the result without a word, and generates from it."""
    model_dir = make_checkpoint(tmp_path / "model", "gemma2")
    make_rows(tmp_path / "rows.jsonl", 3)
    out = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", {"max_steps": 1}).output_dir
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert AutoConfig.from_pretrained(out).model_type == "gemma2"
    ids = model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False)
    assert ids.shape[1] <= 5 and model.config.eos_token_id == EOS
