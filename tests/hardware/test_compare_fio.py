"""The comparison with fio really runs, where fio is installed, and says what is missing where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools/compare_fio.py"


def compare(folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), str(folder), "--settings", "1MiB:4", "--rounds", "1", "--seconds", "0.05",
         "--size", "64MiB"],
        capture_output=True, text=True, env={**os.environ, "PATH": path},
    )  # fmt: skip


def test_without_fio(tmp_path: Path) -> None:
    result = compare(tmp_path, str(tmp_path))
    assert result.returncode == 2
    assert "fio is not installed. Install it" in result.stderr


def test_with_fio(tmp_path: Path) -> None:
    if not shutil.which("fio"):
        pytest.skip("fio is not installed")
    result = compare(tmp_path, os.environ["PATH"])
    if "io_uring is not available" in result.stderr:
        pytest.skip("no io_uring here")
    assert result.returncode in (0, 3), result.stderr
    assert all(f" {kind} " in result.stdout for kind in ("read", "write", "mixed"))
    assert list(tmp_path.iterdir()) == []
