"""The optimizer reaches every weight, however small its steps and however rarely it is used."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.equality.harness import TRAINING, assert_matches, stream
from tests.equality.reference import train_in_memory
from tests.toy import make_checkpoint, make_rows


def test_small_steps_add_up_in_a_bf16_checkpoint(tmp_path: Path) -> None:
    """50 steps of 1e-5: each is too small for bf16, together they move many weights.

    Without float32 masters every step would be rounded away: see the last assertion.
    """
    model_dir = make_checkpoint(tmp_path / "model", "llama", dtype="bfloat16")
    rows = make_rows(tmp_path / "rows.jsonl", 5)
    settings = {
        "dtype": "bf16", "learning_rate": 1e-5, "lr_scheduler_type": "constant", "warmup_steps": 0,
        "weight_decay": 0.0, "max_steps": 50, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    out = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", settings).output_dir
    reference = train_in_memory(model_dir, rows, TRAINING | settings)
    start = load_file(model_dir / "model.safetensors")
    got = load_file(out / "model.safetensors")
    wanted = {name: tensor.bfloat16() for name, tensor in reference.state.items()}
    assert _share_moved(wanted, start) > 0.3
    assert abs(_share_moved(got, start) / _share_moved(wanted, start) - 1) < 0.05
    assert _share_moved(_without_masters(model_dir, rows), start) < 0.1


def _share_moved(after: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> float:
    moved = sum(int((after[name] != before[name]).sum()) for name in before)
    return moved / sum(tensor.numel() for tensor in before.values())


def _without_masters(model_dir: Path, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    for step in range(50):
        row = rows[step % len(rows)]
        ids, labels = (torch.tensor([row[key]]) for key in ("input_ids", "labels"))
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def test_experts_without_a_token(tmp_path: Path) -> None:
    """Rows of three tokens leave most of 16 experts idle, some in every step: they decay and do not learn."""
    model_dir = make_checkpoint(tmp_path / "model", "qwen3_moe", num_experts=16)
    rows = make_rows(tmp_path / "rows.jsonl", 3, lengths=(3, 3), mask_some_labels=False)
    settings = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "warmup_steps": 0,
        "num_train_epochs": 1,
    }  # fmt: skip
    reference = train_in_memory(model_dir, rows, TRAINING | settings)
    assert_matches(
        stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", settings), reference
    )
