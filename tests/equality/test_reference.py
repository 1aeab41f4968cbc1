"""The yardstick itself, measured against transformers' own Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests.equality.harness import ATOL, NUM_ROWS, TRAINING, assert_close
from tests.equality.reference import _collate, round_half_up, train_in_memory
from tests.toy import ARCHITECTURES, make_checkpoint, make_rows


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_the_reference_is_what_the_trainer_does(tmp_path: Path, arch: str) -> None:
    model_dir = make_checkpoint(tmp_path / "model", arch)
    rows = make_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    settings = TRAINING | {"max_grad_norm": 2.5, "lr_scheduler_type": "cosine"}
    reference = train_in_memory(model_dir, rows, settings, eval_rows=rows[:5])
    same_names = set(TRAINING) - {"dtype", "lora_r"}
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        args=TrainingArguments(
            output_dir=str(tmp_path / "out"),
            **{name: settings[name] for name in same_names},
            max_grad_norm=2.5,
            lr_scheduler_type="cosine",
            train_sampling_strategy="sequential",
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=rows,
        data_collator=lambda batch: _collate(batch, "right"),
    )
    trainer.train()
    history = [line for line in trainer.state.log_history if "loss" in line]
    assert_close("losses", reference.losses, [line["loss"] for line in history], atol=1e-4)
    norms = [line["grad_norm"] for line in history]
    assert_close("gradient norms", reference.grad_norms, norms, rtol=1e-5)
    rates = [line["learning_rate"] for line in history]
    assert_close("learning rates", reference.lrs, rates, atol=1e-9)
    trained = dict(trainer.model.named_parameters())
    assert sorted(trained) == sorted(reference.state)
    for name, tensor in trained.items():
        if not name.endswith("c_attn.bias"):  # its key third has no true gradient, see test_matrix
            torch.testing.assert_close(reference.state[name], tensor.data, atol=5e-6, rtol=0)


@pytest.mark.parametrize("arch", ["mistral", "gemma2", "gemma3_text", "gpt_oss", "phi3"])
def test_windows_of_the_toys_matter(tmp_path: Path, arch: str) -> None:
    """A run that loses the sliding window is far outside of the tolerance."""
    rows = make_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    losses = [
        train_in_memory(
            make_checkpoint(tmp_path / f"{window}", arch, sliding_window=window),
            rows,
            TRAINING | {"max_steps": 1},
        ).losses[0]
        for window in (ARCHITECTURES[arch]["sliding_window"], 60)
    ]
    assert abs(losses[0] - losses[1]) > 10 * ATOL


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_padding_of_the_toys_matters(tmp_path: Path, arch: str) -> None:
    """So is one that loses the padding mask, if padding is on the left."""
    model_dir = make_checkpoint(tmp_path / "model", arch)
    rows = make_rows(tmp_path / "rows.jsonl", 4)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    batch = _collate(rows, "left")
    with torch.no_grad():
        masked = model(**batch).loss
        unmasked = model(**batch | {"attention_mask": torch.ones_like(batch["input_ids"])}).loss
    assert abs(masked - unmasked) > 10 * ATOL


def test_half_is_rounded_up() -> None:
    bits = torch.tensor([0x3F80_7FFF, 0x3F80_8000, 0x3F81_8000, 0x3F80_8001], dtype=torch.int32)
    high = round_half_up(bits.view(torch.float32)).view(torch.int16).tolist()
    assert high == [0x3F80, 0x3F81, 0x3F82, 0x3F81]
