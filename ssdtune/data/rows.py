"""Reads jsonl rows strictly: every line is one known shape with the right types, or one clear error.

It never guesses and never drops a line silently; it holds one line at a time. It knows nothing of tokens:
read `ssdtune.data.tokenize` next.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdtune.errors import ConfigError, FormatError
from ssdtune.units import format_memory

TEXT = "text"
PROMPT = "prompt/completion"
PROMPT_CHAT = "prompt/completion chat"
MESSAGES = "messages"
TOKENS = "input_ids"
ALPACA = "alpaca"
SHAREGPT = "sharegpt"

LONGEST_LINE_BYTES = 256 << 20
"""No row is longer; a file without line ends would fill the memory before it is seen to be none of ours."""

CHAT_SHAPES = (MESSAGES, SHAREGPT, PROMPT_CHAT)

_EXTRA_KEYS = {
    MESSAGES: ("tools", "chat_template_kwargs"),
    SHAREGPT: ("tools", "chat_template_kwargs", "system"),
    PROMPT_CHAT: ("tools", "chat_template_kwargs"),
    ALPACA: ("input",),
    TOKENS: ("labels", "attention_mask", "completion_mask", "assistant_masks"),
}
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_FOREIGN_FILES = (
    (b"\x1f\x8b", "gzip data", "Unpack it with gunzip."),
    (b"PAR1", "a Parquet file", "Convert it to jsonl first."),
    (b"PK\x03\x04", "a zip file", "Unpack it first."),
    (b"\xff\xfe", "UTF-16 text", "Save it as UTF-8."),
    (b"\xfe\xff", "UTF-16 text", "Save it as UTF-8."),
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the data",
        "Fetch the data with git lfs pull.",
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the file, with the types of its values checked.

    Attributes:
        line: Line number in the file, from 1.
        shape: One of this module's shape names.
        values: The keys that the shape uses. Text rows have `text` whatever their column is called; ShareGPT
            rows have `messages` with role and content.
        ignored: Keys of the line that nothing uses.
    """

    line: int
    shape: str
    values: dict[str, Any]
    ignored: tuple[str, ...] = ()


def read_rows(path: Path, *, text_field: str = "text") -> Iterator[Row]:
    """Read the rows of a jsonl file one by one; all of them have the same shape.

    Args:
        path: UTF-8 file, with or without byte order mark; LF or CRLF; blank lines are skipped.
        text_field: Name of the column of text rows. A name other than `text` wins over all other shapes.

    Raises:
        ConfigError: The file is missing or unreadable.
        FormatError: There are no rows, or a line is not a row; the message names file, line and, for bad
            JSON, the column.
    """
    first: Row | None = None
    for line, text in _lines(path):
        row = _row(path, line, text, text_field)
        if first is None:
            first = row
        elif row.shape != first.shape:
            raise FormatError(
                f"{path}:{line}: this row is {row.shape}, but line {first.line} is {first.shape}. "
                "All rows of a file must have one shape; split the file."
            )
        yield row
    if first is None:
        raise FormatError(f"{path}: no rows, the file is empty. Write one JSON object per line.")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist. Name an existing jsonl file.") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot read {path}: {reason}. Name a readable jsonl file.") from error
    with file:
        for number in itertools.count(1):
            raw = file.readline(LONGEST_LINE_BYTES + 1)
            if not raw:
                return
            if len(raw) > LONGEST_LINE_BYTES:
                raise FormatError(
                    f"{path}:{number}: the line has more than {format_memory(LONGEST_LINE_BYTES)}. Write one JSON object "
                    "per line; a JSON array is converted with: jq -c '.[]'"
                )
            if number == 1:
                for magic, what, remedy in _FOREIGN_FILES:
                    if raw.startswith(magic):
                        raise FormatError(f"{path} is {what}. {remedy}")
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            try:
                text = raw.decode("utf-8").rstrip(" \t\r\n")
            except UnicodeDecodeError as error:
                column = len(raw[: error.start].decode("utf-8")) + 1
                raise FormatError(
                    f"{path}:{number}:{column}: byte 0x{raw[error.start]:02x} is not UTF-8. "
                    "Save the file as UTF-8."
                ) from None
            if text:
                yield number, text


def _row(path: Path, line: int, text: str, text_field: str) -> Row:
    where = f"{path}:{line}"
    try:
        item = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "Each row is one JSON object on one line."
        if text.strip() in ("{", "[") or text.lstrip().startswith("[{"):
            hint = "This is one JSON document, not JSON lines; convert it with: jq -c '.[]'"
        raise FormatError(
            f"{where}:{error.colno}: bad JSON, {error.msg.lower().rstrip(':')}. {hint}"
        ) from None
    except (RecursionError, ValueError) as error:  # nested too deep, a number with too many digits
        raise FormatError(f"{where}:1: bad JSON, {error}. Fix or remove the line.") from None
    if not isinstance(item, dict):
        hint = 'Write for example {"prompt": ..., "completion": ...}.'
        if isinstance(item, list):
            hint = "Write one object per line; a JSON array is converted with: jq -c '.[]'"
        raise FormatError(f"{where}: the row is {_kind(item)}, not an object. {hint}")
    shape, used = _shape(where, item, text_field)
    values = _CHECKS[shape](where, item, text_field)
    if "\\u" in text:  # only an escape can name half of a surrogate pair
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise FormatError(
                f"{where}: a string has half of a surrogate pair (\\ud800 to \\udfff), which is no "
                "character. Repair or remove it."
            ) from None
    extra = _EXTRA_KEYS.get(shape, ())
    ignored = tuple(key for key in item if key not in used and key not in extra)
    return Row(line, shape, values, ignored)


def _shape(where: str, item: dict[str, Any], text_field: str) -> tuple[str, tuple[str, ...]]:
    """Name the row's shape and the keys that make it."""
    if text_field != "text" and text_field in item:
        return TEXT, (text_field,)
    if "input_ids" in item:
        return TOKENS, ("input_ids",)
    if "prompt" in item and "completion" in item:
        chat = isinstance(item["prompt"], list) or isinstance(item["completion"], list)
        return (PROMPT_CHAT if chat else PROMPT), ("prompt", "completion")
    if "messages" in item:
        return MESSAGES, ("messages",)
    if text_field in item:
        return TEXT, (text_field,)
    if "instruction" in item and "output" in item:
        return ALPACA, ("instruction", "output")
    if "conversations" in item:
        return SHAREGPT, ("conversations",)
    keys = ", ".join(f'"{key}"' for key in item) if item else "none"
    known = [
        text_field, "prompt", "completion", "messages", "input_ids", "instruction", "output", "conversations",
    ]  # fmt: skip
    near = [
        (key, match)
        for key in item
        if key not in known
        for match in difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    ]
    hint = "".join(f' Did you mean "{match}" by "{key}"?' for key, match in near[:1])
    raise FormatError(
        f"{where}: unknown row, its keys are {keys}.{hint} Accepted are: {text_field}; prompt and completion; "
        "messages; input_ids and labels; instruction, input and output; conversations. "
        "Another text column is named by dataset_text_field."
    )


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def _string(where: str, item: dict[str, Any], key: str) -> str:
    value = item[key]
    if not isinstance(value, str):
        raise FormatError(
            f'{where}: "{key}" is {_kind(value)}, not a string. Fix or remove the row.'
        )
    return value


def _check_text(where: str, item: dict[str, Any], text_field: str) -> dict[str, Any]:
    return {"text": _string(where, item, text_field)}


def _check_prompt(where: str, item: dict[str, Any], _: str) -> dict[str, Any]:
    return {key: _string(where, item, key) for key in ("prompt", "completion")}


def _check_alpaca(where: str, item: dict[str, Any], _: str) -> dict[str, Any]:
    values = {key: _string(where, item, key) for key in ("instruction", "output")}
    values["input"] = "" if item.get("input") is None else _string(where, item, "input")
    return values


def _check_messages(where: str, item: dict[str, Any], _: str) -> dict[str, Any]:
    return {"messages": _messages(where, item, "messages"), **_template_values(where, item)}


def _check_prompt_chat(where: str, item: dict[str, Any], _: str) -> dict[str, Any]:
    values = {key: _messages(where, item, key) for key in ("prompt", "completion")}
    return {**values, **_template_values(where, item)}


def _check_sharegpt(where: str, item: dict[str, Any], _: str) -> dict[str, Any]:
    turns = item["conversations"]
    if not isinstance(turns, list):
        raise FormatError(
            f'{where}: "conversations" is {_kind(turns)}, not a list. Fix or remove the row.'
        )
    messages = []
    if item.get("system"):
        messages.append({"role": "system", "content": _string(where, item, "system")})
    for number, turn in enumerate(turns, start=1):
        if isinstance(turn, dict) and "role" in turn:
            messages.append(_message(where, "conversations", number, turn))
            continue
        place = f"{where}: turn {number} of conversations"
        if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
            raise FormatError(f'{place} has no "from" and "value". Fix or remove the row.')
        role = _SHAREGPT_ROLES.get(str(turn["from"]))
        if role is None:
            raise FormatError(
                f'{place} is from "{turn["from"]}". Known are {", ".join(_SHAREGPT_ROLES)}.'
            )
        messages.append({"role": role, "content": _string(place, turn, "value")})
    return {"messages": messages, **_template_values(where, item)}


def _messages(where: str, item: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = item[key]
    if not isinstance(value, list):
        raise FormatError(
            f'{where}: "{key}" is {_kind(value)}, not a list of messages. '
            'Write [{"role": "user", "content": ...}, ...].'
        )
    return [_message(where, key, number, message) for number, message in enumerate(value, start=1)]


def _message(where: str, key: str, number: int, message: Any) -> dict[str, Any]:
    place = f"{where}: message {number} of {key}"
    if not isinstance(message, dict):
        raise FormatError(f"{place} is {_kind(message)}, not an object with role and content.")
    if not isinstance(message.get("role"), str):
        found = ", ".join(f'"{name}"' for name in message) or "none"
        raise FormatError(f'{place} has no "role" string, its keys are {found}. Add "role".')
    content = message.get("content")
    # A message that only calls tools carries no text.
    if content is None and message.get("tool_calls"):
        return message
    if not isinstance(content, str):
        what = "no content" if "content" not in message else f"content that is {_kind(content)}"
        raise FormatError(f"{place} has {what}. Only text can be trained on; write a string.")
    return message


def _template_values(where: str, item: dict[str, Any]) -> dict[str, Any]:
    """Return what else the chat template gets; `tools` may be JSON in a string, as in trl."""
    tools = item.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise FormatError(
                f'{where}: "tools" is a string that is not JSON. Write a list.'
            ) from None
    if tools is not None and not isinstance(tools, list):
        raise FormatError(f'{where}: "tools" is {_kind(tools)}, not a list.')
    kwargs = item.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise FormatError(f'{where}: "chat_template_kwargs" is {_kind(kwargs)}, not an object.')
    return {"tools": tools or None, "chat_template_kwargs": kwargs}


def _check_tokens(where: str, item: dict[str, Any], _: str) -> dict[str, Any]:
    ids = _integers(where, item, "input_ids")
    if ids and min(ids) < 0:
        raise FormatError(f'{where}: "input_ids" has {min(ids)}; ids are 0 or more.')
    columns = {
        key: _integers(where, item, key)
        for key in ("labels", "attention_mask", "completion_mask", "assistant_masks")
        if item.get(key) is not None
    }
    for key, column in columns.items():
        if len(column) != len(ids):
            raise FormatError(
                f'{where}: "{key}" has {len(column)} numbers, "input_ids" has {len(ids)}. '
                "They must be equally long."
            )
    if 0 in columns.pop("attention_mask", []):
        raise FormatError(
            f'{where}: "attention_mask" has zeros, so the row is padded. Remove the padding; '
            "rows are padded when batches are made."
        )
    labels = columns.pop("labels", ids)
    bad = next((label for label in labels if label < 0 and label != -100), None)
    if bad is not None:
        raise FormatError(
            f'{where}: "labels" has {bad}; a masked label is -100, others are token ids.'
        )
    for mask in columns.values():
        labels = [label if learned else -100 for label, learned in zip(labels, mask, strict=True)]
    return {"input_ids": ids, "labels": labels}


def _integers(where: str, item: dict[str, Any], key: str) -> list[int]:
    value = item[key]
    if not isinstance(value, list):
        raise FormatError(f'{where}: "{key}" is {_kind(value)}, not a list of integers.')
    for number in value:
        if type(number) is not int or not -(2**31) <= number < 2**31:
            raise FormatError(f'{where}: "{key}" holds {json.dumps(number)[:40]}, not a token id.')
    return value


_CHECKS = {
    TEXT: _check_text,
    PROMPT: _check_prompt,
    PROMPT_CHAT: _check_prompt_chat,
    MESSAGES: _check_messages,
    TOKENS: _check_tokens,
    ALPACA: _check_alpaca,
    SHAREGPT: _check_sharegpt,
}
