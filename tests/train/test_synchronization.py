"""Whole trainings on a device, drives and lanes that are as late as they may be, bit for bit as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adversarial import ORDERS, use
from tests.equality.harness import Streamed, assert_same_bits, stream
from tests.toy import make_checkpoint, make_rows

WINDOW: dict[str, Any] = {
    "dtype": "bf16",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 3,
    "max_steps": 2,
    "warmup_steps": 0,
    "max_grad_norm": 1.0,
    "chunk_bytes": 8192,
}
"""Three micro-batches use two input slots again and again; many chunks an optimizer step."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full, all on ssd": ("untied", {}),
    "full, all on ssd, overlapped": ("untied", {"max_grad_norm": 0.0}),
    "full, tied, some in memory": ("tied", {"host_cache": 40_000, "activations": "ssd"}),
    "full, all in memory": ("tied", {"host_cache": "1GiB", "prefetch_depth": 0}),
    "lora, all on ssd": ("untied", {"method": "lora", "lora_dropout": 0.1}),
    "lora, in memory, overlapped": (
        "untied",
        {"method": "lora", "host_cache": "1GiB", "max_grad_norm": 0.0},
    ),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "untied", "llama", tied=False, dtype="bfloat16")
    make_checkpoint(folder / "tied", "gemma3_text", tied=True)
    make_rows(folder / "rows.jsonl", 6)
    return folder


@pytest.fixture(scope="session")
def wanted(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Streamed]:
    """What each case gives on the CPU device with real lanes."""
    folder = tmp_path_factory.mktemp("wanted")
    return {name: _train(models, folder / str(i), name) for i, name in enumerate(CASES)}


def _train(models: Path, output_dir: Path, case: str) -> Streamed:
    model, settings = CASES[case]
    return stream(models / model, models / "rows.jsonl", output_dir, WINDOW | settings)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_late_is_soon_enough(
    models: Path,
    wanted: dict[str, Streamed],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    order: str,
) -> None:
    device = use(monkeypatch, ORDERS[order])
    got = _train(models, tmp_path / "out", case)
    assert_same_bits(got, wanted[case])
    assert device.violations == []
    assert device.num_copies > 10
