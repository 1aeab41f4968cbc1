"""`ssdtune data`: shows how the rows of a file become tokens and labels, before any training.

Learned tokens stand out from masked ones: in colour on a terminal, in brackets elsewhere. It reads the tokenizer
and the files, never the weights. Parsing of arguments is `ssdtune.cli.main`'s.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ssdtune.cli.output import print_json
from ssdtune.config.schema import Config
from ssdtune.data.dataset import TokenizedRows, load_rows
from ssdtune.data.tokenize import IGNORED, load_tokenizer
from ssdtune.errors import ConfigError
from ssdtune.model.checkpoint import read_json, vocab_size


def run(config: Config, *, json_output: bool, limit: int) -> int:
    """Print the report of the train file, and of the eval file if there is one, and the first rows.

    Args:
        config: Uses `model.model_name_or_path` and `data`.
        json_output: Print one JSON document instead of text.
        limit: Rows shown of each file; all rows are read in any case.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: No file is named, or settings and rows do not go together.
        FormatError: A line is wrong.
    """
    files = {"train_file": config.data.train_file, "eval_file": config.data.eval_file}
    if not files["train_file"]:
        raise ConfigError(
            "no data to show: train_file is not set. Name a jsonl file with --train-file."
        )
    model = config.model.model_name_or_path
    tokenizer = None
    if model:
        tokenizer = load_tokenizer(
            model, trust_remote_code=config.model.trust_remote_code, missing_ok=True
        )
    size = _vocab_size(model)
    loaded = {
        name: load_rows(path, tokenizer, config.data, vocab_size=size)
        for name, path in files.items()
        if path
    }
    if json_output:
        print_json(_document(loaded, tokenizer, limit))
    else:
        for rows in loaded.values():
            _show(rows, tokenizer, limit)
    return 0


def _vocab_size(model: str) -> int | None:
    """Read the embedding's rows from the checkpoint's config.json, if there is one."""
    path = Path(model).expanduser()
    if not model or not (path / "config.json").is_file():
        return None
    return vocab_size(read_json(path / "config.json")[0])


def _pieces(ids: list[int], tokenizer: Any) -> list[str]:
    """Return the text of each token by itself."""
    if tokenizer is None:
        return [str(token) for token in ids]
    return [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in ids]


def _document(loaded: dict[str, TokenizedRows], tokenizer: Any, limit: int) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, rows in loaded.items():
        shown = []
        for number in range(min(limit, len(rows))):
            ids, labels = (values.tolist() for values in rows.row(number))
            shown.append(
                {
                    "line": int(rows.lines[number]),
                    "tokens": _pieces(ids, tokenizer),
                    "ids": ids,
                    "labels": labels,
                }
            )
        document[name] = {
            "report": rows.report.to_dict(),
            "fingerprint": rows.fingerprint(),
            "rows": shown,
        }
    return document


def _show(rows: TokenizedRows, tokenizer: Any, limit: int) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
    colour = console.is_terminal and console.color_system is not None and not console.no_color
    for line in rows.report.summary():
        console.print(line)
    if limit and len(rows):
        key = "learned tokens are green" if colour else "learned tokens are in [brackets]"
        console.print(f"\n{key}, others are masked; a row's first token is never predicted\n")
    for number in range(min(limit, len(rows))):
        ids, labels = (values.tolist() for values in rows.row(number))
        learned = [place > 0 and label != IGNORED for place, label in enumerate(labels)]
        console.print(f"line {rows.lines[number]}: {len(ids)} tokens, {sum(learned)} learned")
        text = Text()
        for piece, learns in zip(_pieces(ids, tokenizer), learned, strict=True):
            # Line breaks are shown as signs, so that a row stays one paragraph.
            piece = piece.replace("\n", "⏎").replace("\r", "␍").replace("\t", "⇥")
            if colour:
                text.append(piece, style="green" if learns else "dim")
            else:
                text.append(f"[{piece}]" if learns else piece)
        console.print(text)
        console.print()
