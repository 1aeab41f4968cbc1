"""Runs a function of a test in a process of its own: under limits, or where it may die.

The processes come from the fork server of `tests.equality.child`, so each costs little more than a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ssdtune.config.load import load_config, to_yaml
from tests.equality import child
from tests.equality.harness import STREAMING, TRAINING


class Outcome(NamedTuple):
    """How a process ended (negative: killed by that signal) and what it said."""

    code: int
    text: str


def run(function: Callable[..., int | None], *arguments: Any, timeout_s: float = 120) -> Outcome:
    """Call a function of a test module in another process; it returns the exit code (None is 0).

    Args:
        timeout_s: After so long the process hangs: it is killed, and the test fails.
    """
    with tempfile.TemporaryFile("w+") as said:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([child.__name__])
        path = f"/proc/{os.getpid()}/fd/{said.fileno()}"
        process = context.Process(target=_work, args=(path, function, arguments), daemon=True)
        process.start()
        process.join(timeout_s)
        hung = process.exitcode is None
        if hung:
            process.kill()
            process.join()
        said.seek(0)
        text = said.read()
    assert not hung, f"the process hangs: {text}"
    assert process.exitcode is not None
    return Outcome(process.exitcode, text)


def _work(path: str, function: Callable[..., int | None], arguments: tuple[Any, ...]) -> None:
    output = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.exit(function(*arguments) or 0)


def settings_for(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of a run on `model` and `rows.jsonl` of a folder, with the result in `out`."""
    settings = TRAINING | STREAMING | changes
    if settings.get("method") != "lora":
        del settings["lora_r"]  # would be pointed out as without effect
    paths = {"model_name_or_path": "model", "train_file": "rows.jsonl", "output_dir": "out"}
    return {key: str(folder / name) for key, name in paths.items()} | settings


def command(settings: Mapping[str, Any]) -> int:
    """Run `ssdtune finetune` as the command line does, in this process, and return the exit code."""
    from ssdtune.cli.main import main

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(to_yaml(load_config(None, settings)))
        file.flush()
        return main(["finetune", "--config", file.name])
