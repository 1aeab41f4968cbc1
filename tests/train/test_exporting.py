"""Exports of checkpoints and finished adapters: the weights of a run that ends there, and nothing else touched."""

import hashlib
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ssdtune import export, finetune
from ssdtune.errors import ConfigError, FormatError
from ssdtune.store.lock import STATES_NAME, DirectoryLock
from ssdtune.train import exporting
from tests.toy import make_checkpoint, make_rows

SETTINGS = {
    "dtype": "fp32", "learning_rate": 1e-3, "lr_scheduler_type": "constant", "host_cache": 0,
    "device": "cpu", "verify": False, "compute_threads": 1, "max_steps": 4, "save_steps": 2,
    "save_total_limit": 2, "activations": "host",
}  # fmt: skip
LORA = {"method": "lora", "lora_r": 3}


def run(folder: Path, name: str, **settings) -> Path:
    output = folder / name
    finetune(
        None,
        **SETTINGS | settings,
        model_name_or_path=str(folder / "base"),
        train_file=str(folder / "rows.jsonl"),
        output_dir=str(output),
    )
    return output


def make(folder: Path, arch: str = "llama", **options) -> None:
    make_checkpoint(folder / "base", arch, **options)
    make_rows(folder / "rows.jsonl", 12)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    assert found
    return found


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert sorted(first) == sorted(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


def hashes(folder: Path) -> dict[str, str]:
    """Return what must not change; the record of the owner names the last process that looked."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("ssdtune-owner.json", "ssdtune.lock")
    }


@pytest.mark.parametrize(
    ("arch", "settings", "options"),
    [
        ("llama", {}, {}),
        ("qwen3", {"dtype": "bf16"}, {"dtype": "bfloat16", "tied": True}),
        ("mixtral", {}, {"sharded": True}),
        ("gpt2", LORA | {"bias": "all"}, {}),
    ],
    ids=["llama", "bf16-tied", "moe-sharded", "lora"],
)
def test_checkpoint_is_the_run_that_ends_there(tmp_path, arch, settings, options):
    make(tmp_path, arch, **options)
    long = run(tmp_path, "long", **settings)
    short = run(tmp_path, "short", **settings | {"max_steps": 2, "save_steps": 0})
    before = hashes(long)
    for step, end in ((2, short), (4, long)):
        out = export(long / f"checkpoint-{step}", tmp_path / f"out-{step}")
        assert_same_weights(out, end)
        names = {path.name for path in end.iterdir() if path.is_file()}
        assert {path.name for path in out.iterdir()} == names - {
            "config.yaml", "plan.json", "metrics.jsonl", "timeline.svg",
        }  # fmt: skip
    assert hashes(long) == before


def test_run_goes_on_after_an_export(tmp_path):
    make(tmp_path)
    settings = {"lr_scheduler_type": "linear"}
    whole = run(tmp_path, "whole", **settings)
    resumed = run(tmp_path, "resumed", **settings)
    for path in resumed.glob("*.safetensors"):
        path.unlink()
    export(resumed / "checkpoint-2", tmp_path / "out")
    run(
        tmp_path,
        "resumed",
        **settings,
        resume_from_checkpoint=str(resumed / "checkpoint-2"),
    )
    assert_same_weights(resumed, whole)


def test_merged_from_checkpoint_and_from_adapter_are_what_peft_merges(tmp_path, monkeypatch):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    make(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)  # a base that is named relative to here
    output = run(Path(), "run", **LORA, target_modules=["q_proj", "down_proj"])
    monkeypatch.chdir("/")
    output = tmp_path / output
    one = export(output / "checkpoint-4", tmp_path / "one", merge=True)
    two = export(output, tmp_path / "two", merge=True)
    assert_same_weights(one, two)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, str(output)).merge_and_unload()
    wanted, found = merged.state_dict(), weights(one)
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
    AutoModelForCausalLM.from_pretrained(two)


def test_small_shards(tmp_path):
    make(tmp_path)
    output = run(tmp_path, "run")
    out = export(output / "checkpoint-4", tmp_path / "out", max_shard_size="30KB")
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    assert_same_weights(out, output)


def test_a_run_that_moved_with_its_swap_folder(tmp_path):
    make(tmp_path)
    output = run(tmp_path, "run")
    moved = output.rename(tmp_path / "moved ä")
    assert_same_weights(export(moved / "checkpoint-4", tmp_path / "out"), moved)


def test_alive_run_is_named(tmp_path):
    make(tmp_path)
    output = run(tmp_path, "run")
    with DirectoryLock(output / "swap"):
        with pytest.raises(ConfigError, match=r"belongs to a run that is still alive.*process"):
            export(output / "checkpoint-4", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_is_found_and_nothing_is_left(tmp_path):
    make(tmp_path)
    output = run(tmp_path, "run")
    states = output / "swap" / STATES_NAME
    with states.open("r+b") as file:
        for offset in range(0, states.stat().st_size, 4096):
            file.seek(offset)
            file.write(b"\xff")
    with pytest.raises(FormatError, match=r"checksum is .* the manifest says"):
        export(output / "checkpoint-4", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_folders_get_one_clear_answer(tmp_path):
    make(tmp_path)
    full = run(tmp_path, "full")
    adapter = run(tmp_path, "adapter", **LORA, save_steps=0)
    used = tmp_path / "used"
    used.mkdir()
    (used / "mine.txt").write_text("x")
    new = tmp_path / "new"

    def refused(source: Path, message: str, target: Path = new, **options) -> None:
        with pytest.raises(ConfigError, match=message):
            export(source, target, **options)
        assert not new.exists()

    last = full / "checkpoint-4"
    refused(tmp_path / "none", "none does not exist")
    refused(tmp_path / "rows.jsonl", "is a file")
    refused(full, f"folder of a run. Name one of its checkpoints, such as {re.escape(str(last))}")
    refused(used, "no checkpoint of a run")
    refused(tmp_path / "base", "nothing to export")
    refused(adapter, "Give --merge")
    refused(last, "no adapter to merge", merge=True)
    refused(last, "used is not empty", used)
    refused(last, "is a file. Name a new", used / "mine.txt")
    refused(last, "max_shard_size", max_shard_size="huge")
    (tmp_path / "base").rename(tmp_path / "gone")
    refused(last, "base model is needed for an export")
    refused(adapter, "base model is needed for an export", merge=True)
    assert [path.name for path in used.iterdir()] == ["mine.txt"]


def test_no_more_than_a_tensor_and_two_pieces_in_memory(tmp_path, monkeypatch):
    make(tmp_path)
    output = run(tmp_path, "run", max_steps=2)
    real = exporting.read_stored

    def watched(store, part, state, spec, piece_bytes):
        tensor = real(store, part, state, spec, piece_bytes)
        assert tensor.untyped_storage().nbytes() <= 4 * spec.numel + 2 * store.check_bytes
        return tensor

    monkeypatch.setattr(exporting, "read_stored", watched)
    export(output / "checkpoint-2", tmp_path / "out")
