"""`eval` and `generate` take models and adapters, and say in one line why they do not take anything else."""

import json
import os
from pathlib import Path

import pytest

from ssdtune import finetune
from ssdtune.cli.main import main
from tests.toy import make_checkpoint, make_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("in memory")
    make_checkpoint(folder / "base", "llama", sharded=True)
    make_rows(folder / "rows.jsonl", 8)
    before = Path.cwd()
    os.chdir(folder)  # the base is named relative to here
    try:
        finetune(
            model_name_or_path="base", train_file="rows.jsonl", eval_file="rows.jsonl", output_dir="run",
            method="lora", max_steps=2, save_steps=1, learning_rate=1e-2, dtype="fp32", verify=False,
        )  # fmt: skip
    finally:
        os.chdir(before)
    return folder


def loss(folder: Path, name: str, capsys) -> float:
    args = ["eval", str(folder / name), "--eval-file", str(folder / "rows.jsonl"), "--json"]
    assert main([*args, "--dtype", "fp32"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)["loss"]


def test_an_adapter_has_the_loss_that_the_run_reported(folder, capsys):
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    reported = [json.loads(line) for line in lines][-1]["eval_loss"]
    assert loss(folder, "run", capsys) == pytest.approx(reported, abs=2e-5)
    assert abs(loss(folder, "base", capsys) - reported) > 1e-3


def test_an_adapter_generates(folder, capsys):
    args = ["generate", str(folder / "run"), "--prompt", "w5 w7", "--max-new-tokens", "3"]
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert len(out.split()) <= 3
    assert err == ""


def test_what_cannot_be_loaded_gets_one_line(folder, tmp_path, capsys):
    cut = tmp_path / "cut"
    cut.mkdir()
    for path in (folder / "base").iterdir():
        (cut / path.name).write_bytes(path.read_bytes())
    shard = min(cut.glob("model-*.safetensors"))
    os.truncate(shard, 9000)
    orphan = tmp_path / "orphan"
    orphan.mkdir()
    for path in (folder / "run").glob("*.*"):
        (orphan / path.name).write_bytes(path.read_bytes())
    settings = json.loads((orphan / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "/no/such/base"
    (orphan / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "empty").mkdir()
    checkpoint = folder / "run" / "checkpoint-2"
    for model, message in [
        (cut, f"{shard.name} is truncated"),
        (orphan, "needs its base model, base_model_name_or_path in adapter_config.json"),
        (tmp_path / "empty", "has no config.json"),
        (checkpoint, f"ssdtune export '{checkpoint}' OUT"),
        ("nobody/nothing", "neither a folder"),
    ]:
        for args in (
            ["eval", model, "--eval-file", folder / "rows.jsonl"],
            ["generate", model, "--prompt", "w5"],
        ):
            assert main([str(arg) for arg in args]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert message in err
            assert len(err.splitlines()) == 1


def test_rows_are_read_before_the_model(folder, tmp_path, capsys, monkeypatch):
    from ssdtune.cli import in_memory

    monkeypatch.setattr(in_memory, "load_model", lambda *args, **kwargs: pytest.fail("loaded"))
    (tmp_path / "bad.jsonl").write_text('{"text": \n')
    assert main(["eval", str(folder / "base"), "--eval-file", str(tmp_path / "bad.jsonl")]) == 2
    assert "bad.jsonl:1:" in capsys.readouterr().err
