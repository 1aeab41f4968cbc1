"""Printing of results on stdout: text for people, or exactly one JSON document."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from ssdtune.errors import StorageError

SCHEMA_VERSION = 1


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON document with its schema_version; numbers that are not finite become null."""
    document = {"schema_version": SCHEMA_VERSION, **_plain(result)}
    show(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def show(text: str) -> None:
    """Print a result.

    Raises:
        StorageError: Nothing can be written there, as on a full drive. A reader that has gone is `main`'s affair.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(
            "write", "standard output", errno=error.errno or 0, hint="Send it elsewhere."
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return os.fspath(value) if isinstance(value, os.PathLike) else value
