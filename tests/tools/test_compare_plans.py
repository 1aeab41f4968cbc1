"""The comparison of plans: its arithmetic, and a whole one of a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from compare_plans import FIXED, Compared, plan_text, render

from ssdtune.plan.residency import MemoryPlan

TOOLS = Path(__file__).parents[2] / "tools"


def test_pairs_are_compared_one_by_one() -> None:
    slow_minute = Compared("0.13B", "all kept", [1.0, 3.0, 1.0], [2.0, 4.0, 1.0], "all in memory")
    refused = Compared("0.13B", "all on SSD", plan="all in memory", failed="too little memory")
    lines = render([slow_minute, refused]).splitlines()
    assert lines[2] == "| 0.13B | all kept | 1.00 | 2.00 | 0.75 | 0.50 to 1.00 |"
    assert lines[3] == "| 0.13B | all on SSD | | | – | too little memory |"
    assert lines[5:] == ["Chosen for 0.13B: all in memory."]


def test_plans_in_words() -> None:
    blocks = frozenset({"block.0", "block.1", "block.2"})
    plan = MemoryPlan(frozenset({"head"}), kept=blocks, partly=blocks - {"block.2"}, input_slots=2)
    text = "1 parts in memory, 1 blocks keep all, 2 keep products, block inputs on SSD"
    assert plan_text(plan.to_dict()) == text


@pytest.mark.slow
def test_a_tiny_model(tmp_path: Path) -> None:
    """Both runs step in turns, what doesn't fit is said, and nothing is left."""
    fixed = ["nothing in memory", "all kept"]
    assert set(fixed) < set(FIXED)
    result = subprocess.run(
        [
            sys.executable, TOOLS / "compare_plans.py", "--work-dir", tmp_path, "--models", "tiny", "--rounds", "2",
            "--fixed", *fixed, "--memories", "1.5GiB",
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = result.stdout.splitlines()
    assert [line.split(" | ")[1] for line in lines[2:4]] == fixed
    assert (
        "–" not in result.stdout and "Chosen for tiny full 1x256 overlap 1.5GiB: " in result.stdout
    )
    assert list(tmp_path.iterdir()) == []
