"""Killed without warning at any instant, a run taken up again ends with the bits of one never stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.equality.child import bytes_written, kill_after_writing, start
from tests.equality.harness import STREAMING, TRAINING, assert_same_bits, read_run, stream
from tests.toy import make_checkpoint, make_rows


@pytest.mark.parametrize(
    "settings",
    [
        {"max_grad_norm": 2.5, "shuffle": True},
        {"method": "lora", "lora_dropout": 0.1},
        {"max_grad_norm": 2.5, "clipping": "speculative"},
    ],
    ids=["full", "lora", "speculative"],
)
def test_kill_at_random_instants(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Killed again and again, each time after some more bytes; at the end nothing differs."""
    model_dir = make_checkpoint(tmp_path / "model", "llama")
    make_rows(tmp_path / "rows.jsonl", 13)
    settings = settings | {"max_steps": 8, "save_steps": 1, "save_total_limit": 1}
    before = bytes_written()
    wanted = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "whole", settings)
    whole = bytes_written() - before

    output_dir = tmp_path / "killed"
    given = TRAINING | STREAMING | settings
    given |= {
        "model_name_or_path": str(model_dir),
        "train_file": str(tmp_path / "rows.jsonl"),
        "output_dir": str(output_dir),
    }
    chance = random.Random(8)
    kills = 0
    for _ in range(5):
        resume = "last" if list(output_dir.glob("checkpoint-*")) else None
        if resume is None and output_dir.exists():
            # nothing was saved yet: the user starts again in a new folder
            output_dir.rename(tmp_path / f"given up {kills}")
        process = start(given | {"resume_from_checkpoint": resume})
        if not kill_after_writing(process, int(whole * chance.uniform(0.05, 0.25))):
            break
        kills += 1
    assert kills >= 3
    if process.exitcode != 0:
        process = start(given | {"resume_from_checkpoint": "last"})
    process.join()
    assert process.exitcode == 0
    assert_same_bits(read_run(output_dir), wanted)
    # one checkpoint is kept; nothing of the killed processes stays behind
    assert len(list(output_dir.glob("checkpoint-*"))) == 1
    assert {path.name for path in output_dir.iterdir()} == {
        path.name for path in wanted.output_dir.iterdir()
    }
