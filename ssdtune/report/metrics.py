"""`metrics.jsonl`: one JSON object per line, for programs.

Each line has an `event` (`start`, `step`, `evaluation`, `note`, `end`) and the `step` it belongs to. Events and
keys are only ever added. Lines of a `step`, made by the trainer and also shown by `ssdtune.report.progress`:

| key | meaning |
|---|---|
| `loss` | mean loss per learned token of the step |
| `learning_rate`, `grad_norm` | of the step; the norm before clipping |
| `learned_tokens`, `tokens` | tokens with a label; all tokens without padding |
| `rows` | numbers of the rows in the training file |
| `epoch` | passes over the rows so far, as a fraction |
| `step_s`, `tokens_per_s` | duration of the step; `tokens` per second |
| `stall_share` | share of the step in which compute waited for I/O, 0 to 1 |
| `bytes_read`, `bytes_written` | by kind: weights, master, moments, gradients, activations |

JSON has no words for numbers that are not finite: they are written as the strings "nan", "inf" and "-inf",
which Python's `float` reads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ssdtune.errors import StorageError


class MetricsWriter:
    """Appends lines to a metrics file; every line is in the kernel's hands when `write` returns.

    Args:
        path: The file; made if it is missing.
        resume_step: Remove what was written for later steps than this one (they are about to run again),
            and a last line that a crash cut off. None appends to what is there.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError("open", path, errno=error.errno or 0) from error
        try:
            os.ftruncate(self._file, _end_of_kept_lines(path, resume_step))
        except OSError as error:
            os.close(self._file)
            raise StorageError("write", path, errno=error.errno or 0) from error

    def write(self, event: str, step: int, values: Mapping[str, Any] | None = None) -> None:
        """Append one line.

        Args:
            event: Kind of the line, such as "step".
            step: Optimizer step, counted from 1; 0 before the first.
            values: What else there is to say: numbers, strings, and lists and dicts of them.

        Raises:
            StorageError: The line could not be written whole.
        """
        line = {"event": event, "step": step, **json_values(values or {})}
        text = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")) + "\n"
        data = text.encode("utf-8", errors="backslashreplace")
        done = 0
        while done < len(data):
            try:
                done += os.write(self._file, data[done:])
            except OSError as error:
                raise StorageError(
                    "write", self.path, errno=error.errno or 0, wanted=len(data), done=done
                ) from error

    def sync(self) -> None:
        """Make all lines durable, as part of a checkpoint."""
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise StorageError("sync", self.path, errno=error.errno or 0) from error

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, or those of one event; a last line that was cut off is left out."""
    lines = path.read_bytes().split(b"\n")[:-1]
    values = [json.loads(line) for line in lines]
    return [value for value in values if event is None or value["event"] == event]


def json_values(value: Any) -> Any:
    """Return the value with everything that JSON cannot say turned into text or plain lists and dicts."""
    if isinstance(value, Mapping):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_values(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    number = float(value)  # also numpy's scalars and tensors of one element
    if math.isfinite(number):
        return number
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"


def _end_of_kept_lines(path: Path, resume_step: int | None) -> int:
    """Return the offset at which the file is cut; lines come in the order of their steps."""
    offset = 0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break  # a crash cut it off
        if resume_step is not None and _step_of(line) > resume_step:
            break
        offset += len(line)
    return offset


def _step_of(line: bytes) -> int:
    """Return the step that the line belongs to, 0 if that can't be told."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0
