"""Bad input by the command line: one line that names what is wrong, the right exit code, and nothing left behind."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssdtune.cli.main import main
from ssdtune.hardware.memory import MemoryLimit
from ssdtune.report.metrics import read_metrics
from tests.toy import make_checkpoint, make_rows, make_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with tokenizer, in one file and in shards, and rows for it."""
    folder = tmp_path_factory.mktemp("input")
    make_tokenizer(make_checkpoint(folder / "model", "llama"))
    make_checkpoint(folder / "sharded", "llama", sharded=True)
    make_rows(folder / "rows.jsonl", 6)
    return folder


def refused(
    args: list[Any],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    where: Path,
    code: int = 2,
) -> None:
    """Run a command and make sure that it ends with an exit code, one line with these words, and no new file."""
    before = sorted(where.rglob("*"))
    capsys.readouterr()
    found = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert found == code, err
    assert len(errors) == 1 and "Traceback" not in err, err
    for word in words:
        assert word in errors[0]
    assert out == "" and sorted(where.rglob("*")) == before


CONFIGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    # name: (changes of config.json, words of the message)
    "picture": ({"model_type": "vit"}, ["config.json", "vit is no causal language model"]),
    "speech": ({"model_type": "whisper"}, ["whisper is an encoder-decoder model"]),
    "picture-and-text": ({"model_type": "llava"}, ["config.json", "llava"]),
    "gptq": ({"quantization_config": {"quant_method": "gptq"}}, ["config.json", "gptq", "bf16"]),
    "odd-quantization": ({"quantization_config": "yes"}, ["quantization_config"]),
    "no-blocks": ({"num_hidden_layers": -1}, ["config.json: num_hidden_layers is -1", "from 1"]),
    "size-as-text": ({"hidden_size": "768"}, ["hidden_size", "'768'"]),
    "heads-as-text": ({"num_attention_heads": "4"}, ["transformers cannot build this"]),
    "shared-heads": ({"num_key_value_heads": 3}, ["no multiple of num_key_value_heads, 3"]),
    "no-type": ({"model_type": 3}, ["config.json", "model_type"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_cannot_be_trained(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    changes, words = CONFIGS[case]
    config = json.loads((folder / "model" / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(["plan", tmp_path, "--device", "cpu"], [str(tmp_path), *words], capsys, tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 10**5, "caf\udce9"], ids=range(5))
def test_a_configuration_that_is_no_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    for args in (["plan", tmp_path], ["data", tmp_path, "--train-file", tmp_path / "config.json"]):
        refused(args, ["config.json", "JSON"], capsys, tmp_path)


def _cut(model: Path) -> None:
    file = model / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def _reshape(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _lose(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _spoil_a_number(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 2] = math.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _lose_shard(model: Path) -> None:
    next(model.glob("model-00001-*")).unlink()


SPOILED: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {
    "half": ("model", _cut, ["model.safetensors is truncated", "Download again"]),
    "other-shape": ("model", _reshape, ["q_proj.weight", "39"]),
    "tensor-gone": ("model", _lose, ["q_proj.weight"]),
    "not-a-number": (
        "model",
        _spoil_a_number,
        ["is not finite", "layers.1.mlp.down_proj.weight"],
    ),
    "shard-gone": ("sharded", _lose_shard, ["model-00001-", "is missing"]),
}


@pytest.mark.parametrize("case", SPOILED)
def test_weights_that_are_not_the_models(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    source, spoil, words = SPOILED[case]
    shutil.copytree(folder / source, tmp_path / "model")
    spoil(tmp_path / "model")
    code = 1 if case == "not-a-number" else 2  # found out by computing
    args = run(folder, tmp_path, tmp_path / "model", "--dtype", "fp32")
    refused(args, words, capsys, tmp_path, code)


def run(folder: Path, tmp_path: Path, model: Path | None = None, *more: Any) -> list[Any]:
    return [
        "finetune", model or folder / "model", "--train-file", folder / "rows.jsonl", "--output-dir",
        tmp_path / "out", "--max-steps", 1, "--device", "cpu", *more,
    ]  # fmt: skip


def test_a_tokenizer_that_is_cut_off(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    os.truncate(tmp_path / "model" / "tokenizer.json", 100)
    (tmp_path / "text.jsonl").write_text('{"text": "hello"}\n')
    args = ["data", tmp_path / "model", "--train-file", tmp_path / "text.jsonl"]
    refused(args, ["cannot load the tokenizer of", "Copy its files"], capsys, tmp_path)


def test_a_line_without_end(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ssdtune.data.rows.LONGEST_LINE_BYTES", 1 << 20)
    for file in (Path("/dev/zero"), tmp_path / "long.jsonl"):
        if not file.exists():
            file.write_text('{"text": "a"}\n' + "x" * (1 << 21))
        args = ["data", folder / "model", "--train-file", file]
        refused(args, [f"{file}:", "more than 1.00 MiB", "per line"], capsys, tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_config.json", "config.yaml"])
def test_nobodys_files_are_replaced(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine: 1\n")
    words = [f"output_dir {tmp_path / 'out'} holds {name}", "Name another output_dir"]
    refused(run(folder, tmp_path), words, capsys, tmp_path)
    assert (tmp_path / "out" / name).read_text() == "mine: 1\n"


def test_states_never_go_to_the_models_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = run(folder, tmp_path, None, "--swap-dirs", folder / "model")
    refused(args, ["io.swap_dirs names the model's own folder"], capsys, folder)


def test_an_adapter_that_takes_all_memory(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = run(folder, tmp_path, None, "--lora", "--lora-r", 10**9)
    refused(args, ["--lora-r must be at most 65536"], capsys, tmp_path)


def test_names_that_are_too_long(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["plan", "x" * 5000], ["name too long"], capsys, tmp_path)
    refused(["plan", folder / "model", "--config", "y" * 300], ["name too long"], capsys, tmp_path)


@pytest.mark.parametrize("output", ["/dev/full", "/dev/null", "/dev/stdout", "/proc/x.json", "."])
def test_a_profile_goes_to_a_file_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ssdtune.hardware.measure.measure", lambda *a, **k: 1 // 0)
    refused(
        ["profile", ".", "--output", output], ["--output: the figures cannot"], capsys, tmp_path
    )
    assert Path(output).exists() or output == "/proc/x.json"


def test_a_full_standard_output_is_no_bug() -> None:
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "ssdtune", "doctor"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == (
        "error: write of standard output failed, no space left on device [ENOSPC]. Send it elsewhere.\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["finetune", "plan", "profile", "eval", "export"])
def test_a_signal_ends_any_command_with_one_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    number: signal.Signals,
) -> None:
    """Where it works longest; a training that has begun has handlers of its own (`tests.problems.test_resume`)."""
    places = {
        "finetune": "ssdtune.train.prepare.build",
        "plan": "ssdtune.train.prepare.build",
        "profile": "ssdtune.hardware.measure.measure",
        "eval": "ssdtune.cli.in_memory.load_model",
        "export": "ssdtune.train.exporting._merge",
    }
    rows, model, new = folder / "rows.jsonl", folder / "model", tmp_path / "new"
    shutil.copytree(model, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(model)})
    )
    args = {
        "finetune": [model, "--train-file", rows, "--output-dir", new],
        "plan": [model, "--train-file", rows],
        "profile": [tmp_path, "--output", new],
        "eval": [model, "--eval-file", rows],
        "export": [tmp_path / "adapter", new, "--merge"],
    }[command]
    monkeypatch.setattr(places[command], lambda *_, **__: signal.raise_signal(number))
    before = sorted(tmp_path.rglob("*"))
    code = main([command, *map(str, args)])
    out, err = capsys.readouterr()
    assert code == 128 + number
    assert out == "" and "Traceback" not in err
    words = "interrupted" if number == signal.SIGINT else "ended by SIGTERM"
    assert err.splitlines()[-1] == f"error: {words}"
    assert sorted(tmp_path.rglob("*")) == before
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_plan_converts_no_pickled_weights(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["plan", "model", "--train-file", str(folder / "rows.jsonl")]) == 0
    assert "It fits." in capsys.readouterr().out and sorted(tmp_path.rglob("*")) == before


def test_a_model_larger_than_memory_is_not_loaded_whole(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "ssdtune.cli.in_memory.available_host_memory",
        lambda: MemoryLimit(1 << 10, "a test", 1 << 30),
    )
    words = ["of memory, 1.00 KiB are free", "inference program"]
    refused(["generate", folder / "model", "--prompt", "w5"], words, capsys, tmp_path)


def test_steps_larger_than_all_rows_take_the_memory_of_these(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = ["--gradient-accumulation-steps", 10**6, "--per-device-eval-batch-size", 10**6]
    for number, size in enumerate((1, 10**6)):
        args = run(folder, tmp_path, None, *many, "--per-device-train-batch-size", size)
        args += ["--output-dir", tmp_path / str(number), "--eval-file", folder / "rows.jsonl"]
        assert main([str(arg) for arg in args]) == 0, capsys.readouterr().err
        (line,) = read_metrics(tmp_path / str(number) / "metrics.jsonl", "step")
        assert sorted(line["rows"]) == list(range(6))
