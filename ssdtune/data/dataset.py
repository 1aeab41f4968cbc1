"""A jsonl file as tokenized rows: two flat int32 arrays, offsets, line numbers, and a report of what was used.

Text is dropped as soon as its row is tokenized, so memory is 8 bytes per token. Rows that cannot teach anything
are skipped, too long ones truncated, and both are counted. Read `ssdtune.data.batches` next.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdtune.config.schema import DataConfig
from ssdtune.data import rows as shapes
from ssdtune.data.rows import Row, read_rows
from ssdtune.data.tokenize import IGNORED, RowTokenizer, Tokens
from ssdtune.errors import ConfigError, FormatError

EMPTY = "empty"
NOTHING_LEARNED = "no learned token"
CUT_AWAY = "no learned token within max_length"

_LINES_KEPT = 5


@dataclass
class Lines:
    """How many rows something happened to, and the first few line numbers."""

    num_rows: int = 0
    first_lines: list[int] = field(default_factory=list)

    def add(self, line: int) -> None:
        """Count one row."""
        self.num_rows += 1
        if len(self.first_lines) < _LINES_KEPT:
            self.first_lines.append(line)

    def __str__(self) -> str:
        more = ", ..." if self.num_rows > len(self.first_lines) else ""
        lines = "line" if self.num_rows == 1 else "lines"
        return f"{self.num_rows} ({lines} {', '.join(map(str, self.first_lines))}{more})"


@dataclass
class Report:
    """What became of the rows of a file.

    Attributes:
        num_tokens: Tokens of the used rows, after truncation.
        num_learned_tokens: Those that a model learns to predict; a row's first token never is.
        longest_tokens: Length of the longest row before truncation.
        notes: What the user should know, each said once.
    """

    path: str
    shape: str = ""
    rows_read: int = 0
    rows_used: int = 0
    num_tokens: int = 0
    num_learned_tokens: int = 0
    longest_tokens: int = 0
    truncated: Lines = field(default_factory=Lines)
    skipped: dict[str, Lines] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {
            **{
                name: value
                for name, value in vars(self).items()
                if name not in ("truncated", "skipped")
            },
            "truncated": vars(self.truncated),
            "skipped": {reason: vars(lines) for reason, lines in self.skipped.items()},
        }

    def summary(self) -> list[str]:
        """Return the report as plain lines for people."""
        lines = [
            f"{self.path}: {self.rows_used} of {self.rows_read} rows used ({self.shape}), {self.num_tokens} tokens, "
            f"{self.num_learned_tokens} learned, longest row {self.longest_tokens} tokens"
        ]
        if self.truncated.num_rows:
            lines.append(f"truncated to max_length: {self.truncated}")
        lines += [f"skipped, {reason}: {rows}" for reason, rows in self.skipped.items()]
        return lines + [f"note: {note}" for note in self.notes]


@dataclass(frozen=True)
class TokenizedRows:
    """The used rows of a file.

    Attributes:
        ids: All rows' token ids one after the other, int32 [N].
        labels: Their labels, int32 [N]; -100 where a token is not learned. Not shifted.
        offsets: Row r is `ids[offsets[r]:offsets[r + 1]]`, int64 [rows + 1].
        lines: Line number of each row, int64 [rows].
        report: What was read, used, truncated and skipped.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: NDArray[np.int64]
    lines: NDArray[np.int64]
    report: Report

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, int64 [rows]."""
        return np.diff(self.offsets)

    def row(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return ids and labels of a row, int32 [S] each; views, not copies."""
        where = slice(self.offsets[number], self.offsets[number + 1])
        return self.ids[where], self.labels[where]

    def fingerprint(self) -> str:
        """Return a SHA-256 of tokens, labels and row borders: equal only if training sees the same rows."""
        digest = hashlib.sha256()
        for values in (self.offsets, self.ids, self.labels):
            digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).data)
        return digest.hexdigest()


def load_rows(
    path: str | Path, tokenizer: Any, config: DataConfig, *, vocab_size: int | None = None
) -> TokenizedRows:
    """Read and tokenize a jsonl file.

    Args:
        tokenizer: From `load_tokenizer`; None if all rows are `input_ids`.
        vocab_size: Rows of the model's embedding; ids beyond are an error. None leaves that unchecked.

    Raises:
        ConfigError: The file is missing, does not suit the settings, or has no usable row.
        FormatError: A line is wrong; or, with `config.strict`, a row had to be skipped or truncated.
    """
    path = Path(path).expanduser()
    encoder = RowTokenizer(
        tokenizer,
        completion_only_loss=config.completion_only_loss,
        assistant_only_loss=config.assistant_only_loss,
    )
    reader = _Reader(path, encoder, config, vocab_size)
    ids, labels, lengths, lines = array("i"), array("i"), array("q", [0]), array("q")
    for row, tokens in reader:
        ids.extend(tokens.ids)
        labels.extend(tokens.labels)
        lengths.append(len(tokens.ids))
        lines.append(row.line)
    rows = TokenizedRows(
        np.frombuffer(ids, np.int32) if ids else np.empty(0, np.int32),
        np.frombuffer(labels, np.int32) if labels else np.empty(0, np.int32),
        np.cumsum(np.frombuffer(lengths, np.int64)),
        np.frombuffer(lines, np.int64) if lines else np.empty(0, np.int64),
        reader.finish(),
    )
    if not len(rows):
        reasons = "; ".join(f"{reason}: {lines}" for reason, lines in rows.report.skipped.items())
        raise ConfigError(
            f"none of the {rows.report.rows_read} rows of {path} can be trained on ({reasons}). "
            "Look at them with `ssdtune data`, or raise max_length."
        )
    return rows


class _Reader:
    """Yields usable rows with their tokens, and keeps the report."""

    def __init__(
        self, path: Path, encoder: RowTokenizer, config: DataConfig, vocab_size: int | None
    ) -> None:
        self._path, self._encoder, self._config, self._vocab_size = (
            path,
            encoder,
            config,
            vocab_size,
        )
        self._report = Report(str(path))
        self._unsplit, self._preshifted, self._ignored = Lines(), Lines(), dict[str, None]()

    def __iter__(self) -> Iterator[tuple[Row, Tokens]]:
        report = self._report
        for row in read_rows(self._path, text_field=self._config.dataset_text_field):
            report.shape = row.shape
            report.rows_read += 1
            self._ignored.update(dict.fromkeys(row.ignored))
            tokens = self._encoder.tokenize(self._path, row)
            self._check_ids(row, tokens)
            report.longest_tokens = max(report.longest_tokens, len(tokens.ids))
            if not tokens.prompt_splits:
                self._unsplit.add(row.line)
            if len(tokens.ids) > 2 and tokens.labels[:-1] == tokens.ids[1:] != tokens.ids[:-1]:
                self._preshifted.add(row.line)
            cut = self._fit(row, tokens)
            if cut is not None:
                report.rows_used += 1
                report.num_tokens += len(cut.ids)
                report.num_learned_tokens += _num_learned(cut.labels)
                yield row, cut

    def finish(self) -> Report:
        """Return the report, with its notes."""
        notes = self._report.notes
        if self._report.shape == shapes.ALPACA:
            form = (
                "chat messages" if self._encoder.has_chat_template else "### Instruction: prompts"
            )
            notes.append(
                f"Alpaca rows are read as {form}: instruction and input ask, output is learned."
            )
        if self._report.shape == shapes.SHAREGPT:
            notes.append(
                "ShareGPT rows are read as messages: human is the user, gpt the assistant."
            )
        if self._unsplit.num_rows:
            notes.append(
                "the prompt's tokens are not the start of the row's tokens, so the mask may be off by a token "
                f"at its end: {self._unsplit}. End prompts, or start completions, with a space or line break."
            )
        if self._preshifted.num_rows:
            notes.append(
                f"labels look shifted by one already: {self._preshifted}. Give them unshifted, as transformers "
                "wants them; the loss shifts them."
            )
        if self._ignored:
            notes.append(f"keys that are not used: {', '.join(self._ignored)}.")
        return self._report

    def _fit(self, row: Row, tokens: Tokens) -> Tokens | None:
        """Truncate the row, or count it as skipped and return None."""
        limit = self._config.max_length
        too_long = len(tokens.ids) > limit
        reason = ""
        if not tokens.ids:
            reason = EMPTY
        elif not _num_learned(tokens.labels):
            reason = NOTHING_LEARNED
        elif too_long and not _num_learned(tokens.labels[:limit]):
            reason = CUT_AWAY
        if self._config.strict and (reason or too_long):
            what = (
                f"is skipped: {reason}"
                if reason
                else f"has {len(tokens.ids)} tokens and is truncated to max_length, {limit}"
            )
            raise FormatError(
                f"{self._path}:{row.line}: the row {what}. Fix the row, or its settings, or unset strict."
            )
        if reason:
            self._report.skipped.setdefault(reason, Lines()).add(row.line)
            return None
        if too_long:
            self._report.truncated.add(row.line)
            return Tokens(tokens.ids[:limit], tokens.labels[:limit])
        return tokens

    def _check_ids(self, row: Row, tokens: Tokens) -> None:
        size = self._vocab_size
        if size is None or not tokens.ids:
            return
        # Labels of tokenized rows are ids too, and need not be those of the input.
        largest = max(max(tokens.ids), max(tokens.labels))
        if largest >= size:
            name = self._encoder.token_text(largest)
            raise FormatError(
                f"{self._path}:{row.line}: token {name} has id {largest}, but the model's embedding has {size} rows. "
                "It is never resized; use the tokenizer that belongs to the model, or remove the token."
            )


def _num_learned(labels: list[int]) -> int:
    return len(labels) - 1 - labels[1:].count(IGNORED) if labels else 0
