"""metrics.jsonl: always valid lines, and a resumed run goes on as if it had never stopped."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ssdtune.errors import StorageError
from ssdtune.report.metrics import MetricsWriter, read_metrics


def strict_lines(path: Path) -> list[dict]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_values_of_all_kinds(tmp_path: Path) -> None:
    path = tmp_path / "métriques.jsonl"
    with MetricsWriter(path) as writer:
        writer.write("start", 0, {"model": 'a "b"\nc', "path": tmp_path})
        writer.write(
            "step",
            1,
            {
                "loss": math.nan,
                "grad_norm": math.inf,
                "low": -math.inf,
                "learning_rate": np.float32(0.5),
                "rows": (3, 1),
                "bytes_read": {"weights": np.int64(7)},
                "none": None,
                "clipped": True,
            },
        )
        assert len(path.read_text().splitlines()) == 2  # readable while the run goes on
    start, step = strict_lines(path)
    assert start == {"event": "start", "step": 0, "model": 'a "b"\nc', "path": str(tmp_path)}
    assert step["loss"] == "nan" and math.isnan(float(step["loss"]))
    assert (step["grad_norm"], step["low"]) == ("inf", "-inf")
    assert (step["learning_rate"], step["rows"], step["bytes_read"]) == (
        0.5,
        [3, 1],
        {"weights": 7},
    )
    assert step["none"] is None and step["clipped"] is True
    assert [line["event"] for line in read_metrics(path)] == ["start", "step"]
    assert len(read_metrics(path, "step")) == 1


def write_run(path: Path, steps: range, resume_step: int | None = None) -> None:
    with MetricsWriter(path, resume_step=resume_step) as writer:
        for step in steps:
            writer.write("step", step, {"loss": 1 / step})
            if step % 2 == 0:
                writer.write("evaluation", step, {"loss": 2 / step})


@pytest.mark.parametrize("resume_step", range(7))
@pytest.mark.parametrize("cut", [0, 1, 20])
def test_resumed_file_equals_an_uninterrupted_one(
    tmp_path: Path, resume_step: int, cut: int
) -> None:
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write_run(whole, range(1, 8))
    write_run(resumed, range(1, 7))
    with MetricsWriter(resumed) as writer:
        writer.write("step", 7, {"loss": 1 / 7})
    os.truncate(resumed, resumed.stat().st_size - cut)  # a crash in the middle of a write
    write_run(resumed, range(resume_step + 1, 8), resume_step)
    assert resumed.read_bytes() == whole.read_bytes()


def test_lines_of_others_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('damaged\n{"event": "mine"}\n{"event": "step", "step": 3}\n')
    MetricsWriter(path, resume_step=2).close()
    assert path.read_text() == 'damaged\n{"event": "mine"}\n'


def test_without_resume_only_a_cut_line_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 3}\n{"event": "st')
    MetricsWriter(path).close()
    assert path.read_text() == '{"event": "step", "step": 3}\n'


def test_unwritable_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"open of .*metrics.jsonl failed, .*\[ENOENT\]"):
        MetricsWriter(tmp_path / "missing" / "metrics.jsonl")


def test_full_drive_is_one_clear_error(tmp_path: Path) -> None:
    # A limit on file size acts like a full drive: the first bytes still fit, the rest does not.
    script = """
import resource, signal, sys
from pathlib import Path
from ssdtune.errors import StorageError
from ssdtune.report.metrics import MetricsWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.RLIM_INFINITY))
writer = MetricsWriter(Path(sys.argv[1]))
try:
    writer.write("step", 1, {"text": "x" * 50})
except StorageError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "metrics.jsonl")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "40 of 91 bytes done" in result.stdout
    assert "[EFBIG]" in result.stdout
