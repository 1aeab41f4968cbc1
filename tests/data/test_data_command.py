"""`ssdtune data` shows what training would see."""

import json

import pytest

from ssdtune.cli import data_command
from ssdtune.config.schema import Config, DataConfig, ModelConfig
from ssdtune.errors import ConfigError, FormatError

ROWS = [
    {"prompt": "How do I", "completion": " keep [bold]bread\n"},
    {"prompt": "", "completion": ""},
]


@pytest.fixture
def config(tmp_path, write, tokenizer):
    folder = tmp_path / "model é"
    tokenizer.save_pretrained(folder)

    def make(*rows, vocab_size=400, **data):
        (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
        path = write(*(rows or ROWS))
        return Config(
            model=ModelConfig(model_name_or_path=str(folder)),
            data=DataConfig(train_file=str(path), **data),
        )

    return make


def test_json_is_one_document_with_the_labels(config, capsys, tokenizer):
    settings = config()
    assert data_command.run(settings, json_output=True, limit=5) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["schema_version"] == 1 and captured.err == ""
    part = document["train_file"]
    assert part["report"]["rows_read"] == 2 and part["report"]["rows_used"] == 1
    assert part["report"]["skipped"] == {"empty": {"num_rows": 1, "first_lines": [2]}}
    (row,) = part["rows"]
    prompt = tokenizer("How do I")["input_ids"]
    assert row["line"] == 1
    assert row["ids"] == tokenizer("How do I keep [bold]bread\n</s>")["input_ids"]
    assert row["labels"] == [-100] * len(prompt) + row["ids"][len(prompt) :]
    assert "".join(row["tokens"]) == "How do I keep [bold]bread\n</s>"


def test_text_marks_learned_tokens_and_takes_nothing_for_markup(config, capsys):
    data_command.run(config(), json_output=False, limit=1)
    out = capsys.readouterr().out
    assert "1 of 2 rows used (prompt/completion)" in out
    assert "skipped, empty: 1 (line 2)" in out
    assert "How do I[" in out and "[⏎][</s>]" in out
    joined = out.split("learned\n")[-1].replace("[", "").replace("]", "")
    assert "How do I keep boldbread⏎</s>" in joined
    assert "\x1b" not in out


def test_limit_bounds_what_is_shown_not_what_is_read(config, capsys):
    settings = config(*[{"text": "bread"}] * 3)
    data_command.run(settings, json_output=True, limit=0)
    part = json.loads(capsys.readouterr().out)["train_file"]
    assert part["rows"] == [] and part["report"]["rows_used"] == 3


def test_wrong_rows_and_settings_are_errors(config):
    with pytest.raises(ConfigError, match="train_file is not set"):
        data_command.run(Config(), json_output=True, limit=1)
    with pytest.raises(FormatError, match=r"rows\.jsonl:1: token .* 20 rows"):
        data_command.run(config(vocab_size=20), json_output=True, limit=1)


def test_tokenized_rows_need_no_model(write, capsys):
    settings = Config(data=DataConfig(train_file=str(write({"input_ids": [7, 8, 9]}))))
    data_command.run(settings, json_output=False, limit=1)
    assert "7[8][9]" in capsys.readouterr().out
