"""Runs ssdtune in a process of its own that a test may kill; also the module that such processes preload.

The processes come from a fork server that imported everything once and holds no threads, so each costs little
more than a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from typing import Any

import peft  # noqa: F401  imported once for all children
import torch  # noqa: F401
import transformers  # noqa: F401

from ssdtune import finetune


def run_quietly(settings: Mapping[str, Any]) -> None:
    """Fine-tune without a word; the child's exit code says how it went."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    finetune(**settings)


def start(settings: Mapping[str, Any]) -> BaseProcess:
    """Start a run in another process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=run_quietly, args=(dict(settings),), daemon=True)
    process.start()
    return process


def kill_after_writing(process: BaseProcess, num_bytes: int) -> bool:
    """Kill a process without warning once it has written so many bytes; false if it ended before."""
    assert process.pid is not None
    while process.exitcode is None:
        if bytes_written(process.pid) >= num_bytes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            return process.exitcode == -signal.SIGKILL
        Event().wait(0.0005)  # look often; nothing depends on how often
    return False


def bytes_written(pid: int | str = "self") -> int:
    """Return what the kernel counted as given to write calls of a process, direct and kernel aio included."""
    return _io(pid).get("write_bytes", 0)


def device_bytes() -> dict[str, int]:
    """Return the bytes that this process made the kernel read from and write to drives."""
    counts = _io("self")
    return {"read": counts["read_bytes"], "written": counts["write_bytes"]}


def _io(pid: int | str) -> dict[str, int]:
    try:
        text = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}  # it has just ended
    return {name: int(value) for name, value in (line.split(": ") for line in text.splitlines())}
