"""The bytes really move: the kernel's own accounting against what metrics say, with every cache off.

A tiny model fits in memory, so without this the equality tests would prove little. Two runs that
differ only in their number of steps are compared: start, checks and export cancel out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.equality.child import device_bytes
from tests.equality.harness import Streamed, stream
from tests.toy import make_checkpoint, make_rows

SIZES = {"hidden_size": 120, "intermediate_size": 332, "num_hidden_layers": 4}
"""Blocks of some 700 kB, so that rounding to blocks of the drive stays below a few per cent."""


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "fp32"},
        {"dtype": "bf16"},
        {"dtype": "fp32", "activations": "host"},
        {"dtype": "fp32", "max_grad_norm": 0},
    ],
    ids=lambda settings: "-".join(f"{value}" for value in settings.values()),
)
def test_the_kernel_counts_what_metrics_say(tmp_path: Path, settings: dict[str, Any]) -> None:
    _needs_a_drive(tmp_path)
    model_dir = make_checkpoint(tmp_path / "model", "llama", **SIZES)
    rows = tmp_path / "rows.jsonl"
    make_rows(rows, 21)
    runs: list[Streamed] = []
    counted: list[dict[str, int]] = []
    for steps in (2, 8):
        before = device_bytes()
        given = settings | {"max_steps": steps}
        runs.append(stream(model_dir, rows, tmp_path / f"out-{steps}", given))
        after = device_bytes()
        counted.append({way: after[way] - before[way] for way in before})
    for way in ("read", "written"):
        kernel = counted[1][way] - counted[0][way]
        metrics = runs[1].moved(way) - runs[0].moved(way)
        assert metrics > 0
        # other files written meanwhile (metrics, journal) are small
        assert abs(kernel - metrics) <= 0.05 * metrics + 300_000, (way, kernel, metrics)

    _assert_every_kind_moved(runs[1], model_dir, settings)


def test_lora_reads_the_base_and_writes_only_adapters(tmp_path: Path) -> None:
    """The base comes from the original files twice a step, for forward and backward.

    With `prefetch_depth` 0 there are two weight slots for blocks: only the last two blocks are not read twice.
    """
    _needs_a_drive(tmp_path)
    model_dir = make_checkpoint(tmp_path / "model", "llama", **SIZES)
    make_rows(tmp_path / "rows.jsonl", 21)
    settings = {"method": "lora", "max_steps": 4, "prefetch_depth": 0}
    run = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", settings)
    blocks = _block_elements(model_dir)
    visits = 2 * SIZES["num_hidden_layers"] - 2
    once = 4 * blocks / SIZES["num_hidden_layers"]
    assert run.moved("read", "weights", since=1) >= 3 * visits * once * 0.999
    adapter = sum(tensor.numel() for tensor in run.state().values())
    # the first values and four updates, rounded up to blocks of the drive; the base is 25 times larger
    assert run.moved("written", "weights") <= 5 * 1.5 * 4 * adapter


def _assert_every_kind_moved(run: Streamed, model_dir: Path, settings: dict[str, Any]) -> None:
    """Compare the steps after the first (which reads weights from the checkpoint) with the arithmetic."""
    elements = _block_elements(model_dir)
    bf16 = settings["dtype"] == "bf16"
    size = 2 if bf16 else 4
    # bytes per element of a block: weights for forward and backward (unless in one of three slots), both
    # moments, and back; the update finds the weights in a slot, or the forward pass those of the update
    layers = SIZES["num_hidden_layers"]
    least = {
        "read": {"weights": size * (2 - 3 / layers), "master": 2 if bf16 else 0, "moments": 8},
        "written": {"weights": size, "master": 2 if bf16 else 0, "moments": 8},
    }
    steps = len(run.steps) - 1
    for way, kinds in least.items():
        for kind, num_bytes in kinds.items():
            moved = run.moved(way, kind, since=1) / steps / elements
            # above the least: embedding, head, and the rounding of extents
            assert num_bytes * 0.999 <= moved <= num_bytes * 1.6 + 0.1, (way, kind, moved)
    spilled = run.moved("written", "activations", since=1)
    # without host memory to spare, block inputs go to SSD unless told otherwise
    assert (spilled > 0) == (settings.get("activations") != "host")
    assert (run.moved("read", "activations", since=1) > 0) == (spilled > 0)


def _block_elements(model_dir: Path) -> int:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    return sum(parameter.numel() for parameter in model.model.layers.parameters())


def _needs_a_drive(folder: Path) -> None:
    """Skip on file systems in memory, whose bytes no block device sees."""
    before = device_bytes()["written"]
    path = folder / "probe"
    with path.open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    if device_bytes()["written"] - before < 1 << 20:
        pytest.skip(f"{folder} is not on a drive that /proc/self/io accounts for (tmpfs?)")
