"""Stopped in any phase, taken up again, or refused: a run goes on as if nothing had happened, or not at all."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ssdtune import finetune
from ssdtune.errors import ConfigError, FormatError, Interrupted, SsdtuneError
from ssdtune.train.engine import Engine
from tests.equality.harness import (
    TRAINING,
    Streamed,
    assert_matches,
    assert_same_bits,
    hash_folder,
    read_run,
    stream,
)
from tests.equality.reference import train_in_memory
from tests.problems.process import command, run, settings_for
from tests.toy import make_checkpoint, make_rows, write_rows

SETTINGS: dict[str, Any] = {"max_steps": 4, "eval_steps": 2, "shuffle": True, "save_steps": 0}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Streamed]:
    """A model with rows, and what a run in peace makes of them."""
    folder = tmp_path_factory.mktemp("plain")
    model_dir = make_checkpoint(folder / "model", "llama")
    make_rows(folder / "rows.jsonl", 9)
    make_rows(folder / "eval.jsonl", 3, seed=1)
    SETTINGS["eval_file"] = str(folder / "eval.jsonl")
    return folder, stream(model_dir, folder / "rows.jsonl", folder / "wanted", SETTINGS)


def _signal_in(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, times: int = 1
) -> None:
    """Send this process a real signal when a function is called for the first time."""
    original = getattr(owner, name)
    left = [times]

    def called(*arguments: Any, **named: Any) -> Any:
        while left[0]:
            left[0] -= 1
            signal.raise_signal(number)
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "ctrl-c"]
)
@pytest.mark.parametrize("phase, steps_done", [("train_step", 1), ("evaluate", 2), ("verify", 1)])
def test_a_signal_in_any_phase_saves_and_the_rest_follows(
    plain: tuple[Path, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    number: int, code: int, phase: str, steps_done: int,
) -> None:  # fmt: skip
    folder, wanted = plain
    settings = settings_for(folder, **SETTINGS) | {"output_dir": str(tmp_path / "out")}
    with monkeypatch.context() as patch:
        # verification is the first evaluation of a run that verifies
        _signal_in(patch, Engine, "evaluate" if phase == "verify" else phase, number)
        with pytest.raises(Interrupted) as caught:
            finetune(**settings | {"verify": phase == "verify"})
    assert caught.value.exit_code == code
    assert f"checkpoint-{steps_done}" in str(caught.value)
    finetune(**settings | {"resume_from_checkpoint": "last"})
    assert_same_bits(read_run(tmp_path / "out"), wanted)


def test_a_signal_does_not_wait_for_a_long_evaluation(
    plain: tuple[Path, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after the group of rows that is under way; the resumed run evaluates first."""
    folder, _ = plain
    make_rows(tmp_path / "eval.jsonl", 12, seed=1)
    settings = settings_for(folder, **SETTINGS | {"eval_file": str(tmp_path / "eval.jsonl")})
    finetune(**settings | {"output_dir": str(tmp_path / "wanted")})
    settings["output_dir"] = str(tmp_path / "out")
    with monkeypatch.context() as patch:
        groups = []
        original = Engine.evaluate
        patch.setattr(Engine, "evaluate", lambda *a, **k: groups.append(1) or original(*a, **k))
        _signal_in(patch, Engine, "evaluate", signal.SIGTERM)
        with pytest.raises(Interrupted, match="checkpoint-2"):
            finetune(**settings)
    assert len(groups) == 1
    finetune(**settings | {"resume_from_checkpoint": "last"})
    assert_same_bits(read_run(tmp_path / "out"), read_run(tmp_path / "wanted"))


def test_a_signal_before_the_first_step_leaves_nothing(
    plain: tuple[Path, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssdtune.train import run as module

    _signal_in(monkeypatch, module, "reference_loss", signal.SIGTERM)
    settings = settings_for(plain[0], **SETTINGS, swap_dirs=[str(tmp_path / "swap")])
    with pytest.raises(Interrupted, match="nothing was written") as caught:
        finetune(**settings | {"output_dir": str(tmp_path / "out"), "verify": True})
    assert caught.value.exit_code == 143
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_quits_at_once_and_the_last_checkpoint_stays(
    plain: tuple[Path, Streamed], tmp_path: Path
) -> None:
    folder, wanted = plain
    settings = settings_for(folder, **SETTINGS | {"save_steps": 1})
    settings["output_dir"] = str(tmp_path / "out")
    code, text = run(_two_signals_in_evaluation, settings)
    assert code == 143, text
    assert "quitting at once" in text
    assert [p.name for p in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    finetune(**settings | {"resume_from_checkpoint": "last"})
    assert_same_bits(read_run(tmp_path / "out"), wanted)


def _two_signals_in_evaluation(settings: dict[str, Any]) -> int:
    from ssdtune.train import finetune as module
    from ssdtune.train.signals import StopSignals

    def evaluate(*_: Any, **__: Any) -> None:
        while True:  # as somebody who presses Ctrl-C again and again
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(0.01)

    class Impatient(StopSignals):
        def __init__(self) -> None:
            super().__init__(same_press_s=0)

    Engine.evaluate = evaluate  # type: ignore[method-assign,assignment]
    module.StopSignals = Impatient  # type: ignore[misc,attr-defined]
    return command(settings)


def test_the_learning_rates_of_a_resumed_run_are_those_of_the_whole(
    plain: tuple[Path, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = plain
    settings = settings_for(folder, **SETTINGS | {"max_steps": 6, "lr_scheduler_type": "cosine"})
    finetune(**settings | {"output_dir": str(tmp_path / "whole")})
    settings["output_dir"] = str(tmp_path / "out")
    with monkeypatch.context() as patch:
        _signal_in(patch, Engine, "evaluate", signal.SIGTERM)
        with pytest.raises(Interrupted):
            finetune(**settings)
    finetune(**settings | {"resume_from_checkpoint": "last"})
    whole = read_run(tmp_path / "whole")
    assert_same_bits(read_run(tmp_path / "out"), whole)
    assert len(set(whole.series("learning_rate"))) == 5  # up, and down again


@pytest.fixture(scope="module")
def saved(plain: tuple[Path, Streamed]) -> dict[str, Any]:
    """Settings of a run that kept its checkpoint after step 2."""
    folder, _ = plain
    settings = settings_for(folder, **SETTINGS | {"save_steps": 2, "max_steps": 3})
    settings["output_dir"] = str(folder / "saved")
    finetune(**settings)
    return settings


@pytest.mark.parametrize(
    "change, words",
    [
        ({"max_steps": 5}, "total_steps was 3, is 5"),
        ({"max_steps": None, "num_train_epochs": 4}, "total_steps was 3, is 12"),
        ({"learning_rate": 2e-3}, "learning_rate was 0.001, is 0.002"),
        ({"seed": 3}, "seed was 42, is 3"),
        ({"gradient_accumulation_steps": 1, "max_steps": 3}, "gradient_accumulation_steps"),
        ({"adam_beta2": 0.95, "weight_decay": 0.0}, "adam_beta2 was 0.999, is 0.95; weight_decay"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"optim": "adamw_8bit"}, "optim was 'adamw', is 'adamw_8bit'. Resume with the settings"),
        ({"dtype": "bf16", "master_weights": False}, "master_weights was True, is False. Resume"),
        ({"max_length": 6}, "the tokenized rows are others (train_file, max_length"),
        ({"method": "lora"}, "method was 'full', is 'lora'"),
        ({"attn_implementation": "eager"}, "attn_implementation was 'sdpa', is 'eager'"),
        ({"packing": True, "max_length": 48}, "packed_length was None, is 48"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_another_run_is_not_taken_for_the_saved_one(
    saved: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    before = hash_folder(Path(saved["output_dir"]))
    with pytest.raises(ConfigError) as caught:
        finetune(**saved | change | {"resume_from_checkpoint": "last"})
    assert words in str(caught.value)
    assert hash_folder(Path(saved["output_dir"])) == before


def test_another_scale_of_an_adapter_is_not_taken_for_the_saved_one(
    plain: tuple[Path, Streamed], tmp_path: Path
) -> None:
    """The adapter's weights come from the checkpoint, its scale from where it was."""
    folder, _ = plain
    settings = settings_for(
        folder, **SETTINGS | {"method": "lora", "save_steps": 1, "max_steps": 2}
    )
    finetune(**settings | {"output_dir": str(tmp_path / "adapter"), "save_steps": 0})
    settings |= {"adapter": str(tmp_path / "adapter"), "output_dir": str(tmp_path / "out")}
    finetune(**settings)
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 1}))
    with pytest.raises(ConfigError, match=r"another adapter_config\.json"):
        finetune(**settings | {"resume_from_checkpoint": "last"})


def test_a_run_that_goes_back_drops_what_came_later(
    plain: tuple[Path, Streamed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own checkpoint is the last one, at any time, though fewer are kept now; nothing of a kill is left."""
    folder, wanted = plain
    settings = settings_for(folder, **SETTINGS | {"save_steps": 1, "save_total_limit": 4})
    out = tmp_path / "out"
    settings["output_dir"] = str(out)
    finetune(**settings)
    settings["save_total_limit"] = 1
    with monkeypatch.context() as patch:
        _signal_in(patch, Engine, "train_step", signal.SIGTERM)
        with pytest.raises(Interrupted, match="checkpoint-2"):
            finetune(**settings | {"resume_from_checkpoint": str(out / "checkpoint-1")})
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    for name in (".checkpoint-1.removed", "checkpoint-3.partial"):
        (out / name).mkdir()
    (out / "swap/.ssdtune-owner.json.1.tmp").touch()
    (out / ".config.yaml.1.tmp").touch()
    finetune(**settings | {"resume_from_checkpoint": "last"})
    assert_same_bits(read_run(out), wanted)
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"checkpoint-4", "swap"}
    assert not list(out.rglob(".*.tmp"))


def test_half_a_checkpoint_is_never_the_last(saved: dict[str, Any]) -> None:
    out = Path(saved["output_dir"])
    for name in ("checkpoint-9", "checkpoint-8.partial"):
        (out / name).mkdir()
        (out / name / "manifest.json").write_text("{}")
    finetune(**saved | {"resume_from_checkpoint": "last"})
    assert [line["step"] for line in read_run(out).steps] == [1, 2, 3]
    with pytest.raises(ConfigError, match="checkpoint-9 is not a checkpoint"):
        finetune(**saved | {"resume_from_checkpoint": str(out / "checkpoint-9")})


def test_a_new_run_does_not_overwrite_a_saved_one(saved: dict[str, Any]) -> None:
    before = hash_folder(Path(saved["output_dir"]))
    with pytest.raises(ConfigError, match="--resume-from-checkpoint last"):
        finetune(**saved)
    assert hash_folder(Path(saved["output_dir"])) == before


@pytest.mark.parametrize("name", ["trainer_state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"format": 1}'])
def test_a_damaged_checkpoint_is_named(saved: dict[str, Any], name: str, damage: str) -> None:
    path = Path(saved["output_dir"]) / "checkpoint-2" / name
    intact = path.read_text()
    path.write_text(damage)
    try:
        with pytest.raises((FormatError, ConfigError), match="checkpoint-2"):
            finetune(**saved | {"resume_from_checkpoint": "last"})
    finally:
        path.write_text(intact)
    json.loads(intact)


def test_saved_states_that_changed_on_the_drive_are_found(saved: dict[str, Any]) -> None:
    states = Path(saved["output_dir"]) / "swap" / "ssdtune-states.bin"
    intact = states.read_bytes()
    states.write_bytes(bytes(byte ^ 1 for byte in intact))
    try:
        with pytest.raises(SsdtuneError, match="checksum"):
            finetune(**saved | {"resume_from_checkpoint": "last"})
    finally:
        with states.open("r+b") as file:
            file.write(intact)


def test_the_seed_decides(plain: tuple[Path, Streamed], tmp_path: Path) -> None:
    """The same seed gives the same run, another one other adapters and another order of rows."""
    folder, _ = plain
    runs = [
        stream(
            folder / "model", folder / "rows.jsonl", tmp_path / f"out{number}",
            SETTINGS | {"method": "lora", "lora_dropout": 0.1, "max_steps": 2, "seed": seed},
        )
        for number, seed in enumerate((1, 1, 2))
    ]  # fmt: skip
    assert_same_bits(runs[0], runs[1])
    assert runs[0].series("rows") != runs[2].series("rows")
    assert runs[0].bits() != runs[2].bits()


def test_rotary_frequencies_that_grow_with_rows_are_those_before(tmp_path: Path) -> None:
    """With dynamic scaling a row of 30 tokens changes what later rows give, and none that come before it."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    sizes = {"max_position_embeddings": 16, "rope_parameters": rope}
    model = make_checkpoint(tmp_path / "model", "llama", **sizes)
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows = [make_rows(path, 1, lengths=(n, n), seed=n)[0] for n in (20, 30, 21)]
    write_rows(path, rows)
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    saving = {"save_steps": 1, "save_total_limit": 3, "num_train_epochs": 1}
    whole = stream(model, path, out, settings | saving)
    one_epoch = TRAINING | settings | {"num_train_epochs": 1}
    assert_matches(whole, train_in_memory(model, rows, one_epoch))
    losses, bits = whole.series("loss"), whole.bits()
    checkpoint = str(out / "checkpoint-2")
    again = stream(model, path, out, settings | saving | {"resume_from_checkpoint": checkpoint})
    assert (again.series("loss"), again.bits()) == (losses, bits)
