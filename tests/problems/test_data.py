"""Rows of whole runs: bad ones are named before a model is built, odd ones change nothing they should not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ssdtune import finetune
from ssdtune.errors import ConfigError, FormatError, SsdtuneError
from ssdtune.train import prepare as prepare_module
from tests.equality.harness import TRAINING, assert_matches, assert_same_bits, read_run, stream
from tests.equality.reference import train_in_memory
from tests.problems.process import command, run, settings_for
from tests.toy import EOS, VOCAB, make_checkpoint, make_rows, make_tokenizer, write_rows

SETTINGS: dict[str, Any] = {"num_train_epochs": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model."""
    make_checkpoint(tmp_path / "model", "llama")
    return tmp_path


def _run(folder: Path, name: str = "rows.jsonl", **changes: Any) -> Any:
    return stream(folder / "model", folder / name, folder / f"out-{name}", SETTINGS | changes)


GOOD = '{"input_ids": [5, 6, 7]}'


@pytest.mark.parametrize(
    "line, error, words",
    [
        ('{"input_ids": [5, 6', FormatError, ["rows.jsonl:3"]),
        ('{"input_ids": "5 6"}', FormatError, ["rows.jsonl:3", "input_ids"]),
        (f'{{"input_ids": [5, {VOCAB}]}}', FormatError, ["rows.jsonl:3", str(VOCAB)]),
        ('{"text": 5}', FormatError, ["rows.jsonl:3"]),
        ("[5]", FormatError, ["rows.jsonl:3"]),
    ],
    ids=["cut", "type", "beyond-the-embedding", "other-columns", "no-object"],
)
def test_a_bad_row_is_named_before_the_model_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, error: type, words: list[str]
) -> None:
    monkeypatch.setattr(prepare_module, "build", None)
    (folder / "rows.jsonl").write_text("\n".join([GOOD, GOOD, line, GOOD]) + "\n")
    with pytest.raises(error) as caught:
        _run(folder)
    for word in words:
        assert word in str(caught.value)
    assert not list(folder.glob("out*"))


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "rows.jsonl"),
        ("\n\n", "rows.jsonl"),
        ('{"input_ids": [5, 6], "labels": [-100, -100]}\n', "no learned token"),
        ('{"messages": [{"role": "user", "content": "w5"}]}\n', "chat template"),
    ],
    ids=["empty", "blank", "all-masked", "no-chat-template"],
)
def test_nothing_to_learn_from_is_an_error(folder: Path, text: str, words: str) -> None:
    (folder / "rows.jsonl").write_text(text)
    with pytest.raises(SsdtuneError, match=words) as caught:
        _run(folder)
    assert caught.value.exit_code == 2
    assert not list(folder.glob("out*"))


def test_text_rows_without_a_tokenizer_are_refused(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "w5 w6"}\n')
    for path in folder.glob("model/*token*"):
        path.unlink()
    with pytest.raises(ConfigError, match="text rows, which need a tokenizer"):
        finetune(**settings_for(folder, **SETTINGS))


def test_how_a_file_is_written_changes_nothing(folder: Path) -> None:
    rows = make_rows(folder / "rows.jsonl", 9)
    lines = [json.dumps(row, indent=None, separators=(",", ":")) for row in rows]
    lines.insert(4, "")
    twin = "\ufeff" + "\r\n".join(["", *lines]) + "\r\n \r\n"
    (folder / "twin.jsonl").write_bytes(twin.encode())
    (folder / "unended.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    wanted = _run(folder)
    assert_same_bits(_run(folder, "twin.jsonl"), wanted)
    assert_same_bits(_run(folder, "unended.jsonl"), wanted)


def test_rows_that_teach_nothing_are_skipped_and_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = make_rows(folder / "rows.jsonl", 9)
    wanted = _run(folder)
    masked = {"input_ids": [5, 6, 7], "labels": [-100] * 3}
    long = {"input_ids": [5] * 40, "labels": [-100] * 30 + [5] * 10}
    write_rows(folder / "more.jsonl", [masked, *rows[:4], masked, *rows[4:], long])
    caplog.set_level("INFO")
    assert_same_bits(_run(folder, "more.jsonl", max_length=20), wanted)
    assert "skipped, no learned token: 2 (lines 1, 6)" in caplog.text
    assert "skipped, no learned token within max_length: 1 (line 12)" in caplog.text
    settings = settings_for(folder, **SETTINGS, strict=True, max_length=20)
    code, text = run(command, settings | {"train_file": str(folder / "more.jsonl")})
    assert code == 2
    assert "more.jsonl:1" in text and "Traceback" not in text


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_end_is_learned_where_it_is_also_the_padding(folder: Path, side: str) -> None:
    texts = ["w5 w9 w7 w8", "w11 w3", "w20 w21 w22 w23 w24 w25", "w4 w4 w4"]
    write_rows(folder / "rows.jsonl", [{"text": text} for text in texts])  # type: ignore[dict-item]
    make_tokenizer(folder / "model", padding_side=side)
    for path in folder.glob("model/*token*"):
        path.write_text(path.read_text().replace('"pad_token": "<pad>"', '"pad_token": "</s>"'))
    assert AutoTokenizer.from_pretrained(folder / "model").pad_token_id == EOS
    rows = []
    for text in texts:
        ids = [int(word[1:]) for word in text.split()] + [EOS]
        rows.append({"input_ids": ids, "labels": [-100, *ids[1:]]})
    reference = train_in_memory(
        folder / "model", rows, TRAINING | SETTINGS | {"padding_side": side}
    )
    finetune(**settings_for(folder, **SETTINGS))
    assert_matches(read_run(folder / "out"), reference)


def test_long_rows_are_cut_where_the_setting_says(folder: Path) -> None:
    rows = make_rows(folder / "rows.jsonl", 9, lengths=(4, 30), mask_some_labels=False)
    cut = [{key: values[:10] for key, values in row.items()} for row in rows]
    reference = train_in_memory(folder / "model", cut, TRAINING | SETTINGS)
    assert_matches(_run(folder, max_length=10), reference)
