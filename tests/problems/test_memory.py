"""Memory and descriptors stay constant over a long run, and budgets are settled before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ssdtune import finetune, plan
from ssdtune.errors import CapacityError
from ssdtune.hardware.memory import process_memory
from ssdtune.model import loss as loss_module
from ssdtune.train.trainer import Trainer
from tests.equality.harness import TRAINING, assert_matches, assert_same_bits, stream
from tests.equality.reference import train_in_memory
from tests.problems.process import run, settings_for
from tests.toy import make_checkpoint, make_rows

TINY = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1}  # fmt: skip


def _watch_a_long_run(folder: Path, settings: dict[str, object]) -> None:
    """Fine-tune, and write resident bytes and open descriptors at each step to a file."""
    figures: list[str] = []
    step = Trainer._step

    def watched(self: Trainer, number: int) -> None:
        step(self, number)
        descriptors = len([*Path("/proc/self/fd").iterdir()])
        figures.append(f"{process_memory().rss_bytes} {descriptors}")

    Trainer._step = watched  # type: ignore[method-assign]
    finetune(**settings)
    (folder / "figures").write_text("\n".join(figures))


def test_memory_and_descriptors_do_not_creep(tmp_path: Path) -> None:
    """What leaks once a step shows in 200 steps, after 450 to warm up (caches and allocators fill until then).

    Measured: 100 bytes a step, the figures that a run keeps of each step.
    """
    make_checkpoint(tmp_path / "model", "llama", **TINY)
    make_rows(tmp_path / "rows.jsonl", 4, lengths=(6, 6))
    given = settings_for(
        tmp_path, max_steps=650, gradient_accumulation_steps=1, activations="ssd", save_steps=0
    )
    code, text = run(_watch_a_long_run, tmp_path, given)
    assert code == 0, text
    lines = [line.split() for line in (tmp_path / "figures").read_text().splitlines()]
    memory = torch.tensor([int(line[0]) for line in lines[450:]], dtype=torch.float64)
    steps = torch.arange(len(memory), dtype=torch.float64)
    centred = steps - steps.mean()
    slope = float((centred * (memory - memory.mean())).sum() / centred.square().sum())
    assert slope < 512, f"{slope:.0f} bytes a step"
    assert len({line[1] for line in lines[1:]}) == 1


def test_too_little_memory_is_said_before_any_work(tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "llama")
    make_rows(tmp_path / "rows.jsonl", 4)
    with pytest.raises(CapacityError) as caught:
        stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", {"host_memory": "40MiB"})
    text = str(caught.value)
    assert "40.0 MiB" in text and "\n" not in text
    assert not (tmp_path / "out").exists()


def test_large_vocabularies_go_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits cut into chunks of tokens, rows of different lengths, give what whole logits give."""
    model_dir = make_checkpoint(tmp_path / "model", "llama", vocab_size=5003, **TINY)
    rows = make_rows(tmp_path / "rows.jsonl", 9, vocab=5003, lengths=(4, 30))
    sizes: list[int] = []
    chunks = loss_module.pieces_of

    def counted(*arguments: object) -> object:
        for chunk in chunks(*arguments):  # type: ignore[arg-type]
            sizes.append(chunk[1].numel())
            yield chunk

    monkeypatch.setattr(loss_module, "pieces_of", counted)
    settings = {"num_train_epochs": 1, "per_device_train_batch_size": 3}
    reference = train_in_memory(model_dir, rows, TRAINING | settings)
    whole = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "whole", settings)
    assert_matches(whole, reference)
    assert len(sizes) == 3
    sizes.clear()
    for tokens in (7, 40):  # less than a row, more than one
        monkeypatch.setattr(loss_module, "LOGIT_BYTES", 4 * 5003 * tokens)
        cut = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / f"cut{tokens}", settings)
        assert_matches(cut, reference)
        assert len(sizes) > 3 and max(sizes) <= tokens
        sizes.clear()


def test_tensors_larger_than_every_buffer_are_split(tmp_path: Path) -> None:
    """The embedding has 21 kB here; requests and chunks are smaller, and the store of odd size."""
    model_dir = make_checkpoint(tmp_path / "model", "gpt2")
    make_rows(tmp_path / "rows.jsonl", 5)
    settings = {"max_steps": 2, "dtype": "bf16"}
    wanted = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "plain", settings)
    small = settings | {"request_bytes": 4096, "chunk_bytes": 4096, "queue_depth": 1}
    assert_same_bits(stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", small), wanted)


def test_the_plan_counts_the_longest_row(tmp_path: Path) -> None:
    """One long row among short ones decides: memory that lasts for the first steps only is no plan."""
    make_checkpoint(tmp_path / "model", "llama", vocab_size=5003)
    planned = []
    for longest in (6, 60):
        make_rows(tmp_path / "rows.jsonl", 20, vocab=5003, lengths=(6, 6))
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write(json.dumps({"input_ids": [5] * longest}) + "\n")
        memory = plan(**settings_for(tmp_path)).to_dict()["memory"]
        planned.append(memory["breakdown"]["compute"])
    logits = 2 * (60 - 6) * 5003 * 4  # of a micro-batch of two rows
    assert planned[1] - planned[0] >= logits
