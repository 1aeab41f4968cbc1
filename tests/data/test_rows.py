"""Reading jsonl: what is accepted, and the one error that everything else gets."""

import re

import pytest

from ssdtune.config.schema import DataConfig
from ssdtune.data import load_rows
from ssdtune.data.rows import read_rows
from ssdtune.errors import ConfigError, FormatError


def read(path, **options):
    return list(read_rows(path, **options))


def test_byte_order_mark_crlf_and_blank_lines_change_nothing(tmp_path, tokenizer):
    plain, odd = tmp_path / "plain.jsonl", tmp_path / "with space é.jsonl"
    plain.write_bytes('{"text": "one"}\n{"text": "tw\u2028ö"}\n'.encode())
    odd.write_bytes(b'\xef\xbb\xbf\r\n{"text": "one"}\r\n  \r\n' + '{"text": "tw\u2028ö"}'.encode())
    assert [row.values for row in read(odd)] == [row.values for row in read(plain)]
    assert [row.line for row in read(odd)] == [2, 4]
    rows = [load_rows(path, tokenizer, DataConfig()) for path in (plain, odd)]
    assert rows[0].fingerprint() == rows[1].fingerprint()


def test_named_text_column_wins_and_unused_keys_are_listed(write, tokenizer):
    path = write({"body": "The garden", "text": "other", "id": 7})
    rows = read(path, text_field="body")
    assert rows[0].values == {"text": "The garden"} and rows[0].ignored == ("text", "id")
    loaded = load_rows(path, tokenizer, DataConfig(dataset_text_field="body"))
    assert loaded.report.notes == ["keys that are not used: text, id."]


GOOD = '{"prompt": "a", "completion": "b"}'
CASES = [
    (['{"text": "a"}', '{"text": "a" "b"}'], r":2:14: bad JSON, expecting ',' delimiter"),
    (["[", '{"text": "a"}', "]"], r":1:2: bad JSON.*jq -c"),
    (['[{"text": "a"}]'], r":1: the row is a list, not an object.*jq -c"),
    (["17"], r":1: the row is a number, not an object"),
    (["[" * 100_000], r":1:1: bad JSON"),
    (
        ['{"prompt": "a", "completon": "b"}'],
        r':1: .*"prompt", "completon".* mean "completion" by "completon"\?',
    ),
    (["{}"], r":1: unknown row, its keys are none"),
    (['{"text": null}'], r':1: "text" is null, not a string'),
    ([GOOD, '{"prompt": "a", "completion": 3}'], r':2: "completion" is a number'),
    ([GOOD, '{"text": "a"}'], r":2: this row is text, but line 1 is prompt/completion"),
    (
        [GOOD, '{"prompt": [], "completion": []}'],
        r":2: this row is prompt/completion chat, but line 1",
    ),
    (['{"prompt": "a", "completion": []}'], r':1: "prompt" is a string, not a list of messages'),
    (['{"messages": "hi"}'], r':1: "messages" is a string, not a list'),
    (['{"messages": ["hi"]}'], r":1: message 1 of messages is a string"),
    (['{"messages": [{"content": "a"}]}'], r':1: message 1 .* no "role".*"content"'),
    (['{"messages": [{"role": "user"}]}'], r":1: message 1 of messages has no content"),
    (
        ['{"messages": [{"role": "user", "content": []}]}'],
        r":1: message 1 .* content that is a list\. Only text",
    ),
    (['{"messages": [], "tools": "{"}'], r':1: "tools" is a string that is not JSON'),
    (['{"conversations": [{"from": "bing", "value": ""}]}'], r':1: turn 1 .* from "bing".*human'),
    (['{"conversations": [{"value": ""}]}'], r':1: turn 1 .* no "from" and "value"'),
    (['{"instruction": "a", "output": "b", "input": 3}'], r':1: "input" is a number'),
    (['{"input_ids": [1, 2.5]}'], r':1: "input_ids" holds 2.5, not a token id'),
    (['{"input_ids": [true]}'], r':1: "input_ids" holds true'),
    (['{"input_ids": [99999999999]}'], r":1: .* not a token id"),
    (['{"input_ids": [-1]}'], r":1: .*-1; ids are 0 or more"),
    (['{"input_ids": [1, 2], "labels": [1]}'], r':1: "labels" has 1 numbers, "input_ids" has 2'),
    (['{"input_ids": [1], "labels": [-1]}'], r':1: "labels" has -1; a masked label is -100'),
    (['{"input_ids": [1, 0], "attention_mask": [1, 0]}'], r":1: .* the row is padded"),
    (['{"text": "\\ud800"}'], r":1: .*half of a surrogate pair"),
    (["version https://git-lfs.github.com/spec/v1"], r" is a Git LFS pointer"),
    ([], r": no rows, the file is empty"),
    (["", "  "], r": no rows, the file is empty"),
]


@pytest.mark.parametrize(("lines", "message"), CASES, ids=[message for _, message in CASES])
def test_bad_line_is_named(write, lines, message):
    path = write(*lines)
    with pytest.raises(FormatError, match=re.escape(str(path)) + message) as raised:
        read(path)
    assert "\n" not in str(raised.value) and raised.value.exit_code == 2


def test_bytes_that_are_not_utf8_are_placed(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(FormatError, match=r"latin\.jsonl:2:14: byte 0xe9 is not UTF-8"):
        read(path)
    path.write_bytes('{"text": "a"}'.encode("utf-16"))
    with pytest.raises(FormatError, match="UTF-16"):
        read(path)


def test_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl does not exist"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="is a directory"):
        read(tmp_path)


def test_tools_and_tool_calls_are_kept(write):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    row = read(write({"messages": [call], "tools": '[{"name": "f"}]', "id": 1}))[0]
    assert row.values["messages"] == [call] and row.values["tools"] == [{"name": "f"}]
    assert row.ignored == ("id",)


def test_rows_are_kept_compactly(tmp_path):
    """Memory is that of the tokens: about 8 bytes for each, not that of Python's objects or of the text."""
    import tracemalloc

    path = tmp_path / "big.jsonl"
    ids = ", ".join(["12345"] * 500)
    with path.open("w") as file:
        for _ in range(200):
            file.write(f'{{"input_ids": [{ids}]}}\n')
    tracemalloc.start()
    rows = load_rows(path, None, DataConfig())
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows.ids) == 100_000
    assert kept < 100_000 * 8 * 1.25
    # Growing an array may copy it once; lists of the same numbers would take 16 bytes per token alone.
    assert peak < 100_000 * 8 * 2
