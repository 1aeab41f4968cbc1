"""Run a program and watch it from outside: the kernel's count of its bytes at the end of each step, its peak memory.

Bytes are `read_bytes` and `write_bytes` of /proc/PID/io: what really went to the block layer, page cache hits excluded.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.005
"""A step's end is noticed this late; what the next step moves meanwhile is counted with the wrong one."""
TAIL = 2000


class Failed(Exception):
    """A program left with an exit code that was not expected."""


@dataclass
class Watched:
    """What was seen of a program.

    Attributes:
        io: (bytes read, bytes written) since its start, each time its metrics told of a step.
        peak_bytes: Most resident memory.
    """

    output: str = ""
    io: list[tuple[int, int]] = field(default_factory=list)
    peak_bytes: int = 0


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a program: this checkout, no network, no card, and the profile kept in the folder."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    own = {"XDG_CACHE_HOME": str(folder / "cache")}
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, **offline, **own, "PYTHONPATH": path}


def run(
    command: Sequence[str],
    folder: Path,
    *,
    metrics: Path | None = None,
    codes: Sequence[int] = (0,),
) -> Watched:
    """Run a program to its end.

    Args:
        folder: Where its output is kept meanwhile, and ssdtune's profile of the machine in `cache`.
        metrics: The metrics.jsonl that it will write.
        codes: Exit codes that are an answer.

    Raises:
        Failed: Another exit code, with the end of what it said.
    """
    seen = Watched()
    log, result = folder / "log.txt", folder / "output.txt"
    with log.open("wb") as errors, result.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment(folder))
        try:
            while True:
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
                if ended:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    break
                if metrics:
                    _note_steps(process.pid, metrics, seen)
                time.sleep(POLL_S if metrics else 20 * POLL_S)
        finally:
            if process.returncode is None:
                process.terminate()
                process.wait()
    seen.peak_bytes = usage.ru_maxrss * 1024
    seen.output = result.read_text(encoding="utf-8", errors="replace")
    if process.returncode not in codes:
        said = log.read_text(errors="replace")[-TAIL:].strip() or seen.output[-TAIL:].strip()
        raise Failed(f"exit code {process.returncode} of {' '.join(command)}\n{said}")
    return seen


def run_json(command: Sequence[str], folder: Path, *, codes: Sequence[int] = (0,)) -> Any:
    """Run a program that prints one JSON document, and return it."""
    return json.loads(run(command, folder, codes=codes).output)


def _note_steps(pid: int, metrics: Path, seen: Watched) -> None:
    try:
        steps = metrics.read_bytes().count(b'"event": "step"')
        if steps > len(seen.io):
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            counts = {name: int(value) for name, value in (line.split(": ") for line in lines)}
            missing = steps - len(seen.io)
            seen.io += [(counts["read_bytes"], counts["write_bytes"])] * missing
    except OSError:
        pass  # not written yet, or the program has just ended
