"""Embedding and head in chunks of rows: what in-memory training gives, and the same bits however bytes move.

The limit above which a matrix is divided is lowered to that of a block, so that 700 rows make several chunks. Logits of
chunks add up in another order than those of a whole row: losses and weights are compared within the same 2e-5 as all
others.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ssdtune import export
from ssdtune.config.load import load_config
from ssdtune.model import layout
from ssdtune.model.layout import ModelLayout
from ssdtune.plan.residency import Proportions
from ssdtune.swap.update import OutOfCoreAdam
from ssdtune.train import prepare
from tests.equality.harness import (
    STREAMING,
    TRAINING,
    Streamed,
    assert_matches,
    assert_same_bits,
    stream,
)
from tests.equality.reference import train_in_memory
from tests.equality.test_matrix import _without_true_gradient
from tests.toy import make_checkpoint, make_rows

VOCABULARY = 700
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "untied": ("llama", False, {"max_grad_norm": 2.5}),
    "tied": ("gemma2", True, {"max_grad_norm": 5.0}),
    "untied, not clipped": ("qwen2", False, {"max_grad_norm": 0}),
    "tied, not clipped": ("opt", True, {"max_grad_norm": 0}),
    "lora": ("mistral", False, {"method": "lora"}),
    "lora, tied": ("gemma3_text", True, {"method": "lora", "max_grad_norm": 0}),
}
"""gemma2 caps its logits, opt's embedding is narrower than its blocks."""


@pytest.fixture(autouse=True)
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MOST_WHOLE_ELEMENTS", 0)


def _made(folder: Path, arch: str, tied: bool, num_rows: int = 11, **config: Any) -> Path:
    make_checkpoint(folder / "model", arch, tied=tied, vocab_size=VOCABULARY, **config)
    make_rows(folder / "rows.jsonl", num_rows, VOCABULARY)
    return folder


def _layout(folder: Path, settings: dict[str, Any]) -> ModelLayout:
    given = TRAINING | STREAMING | {"model_name_or_path": str(folder / "model"), "max_length": 14}
    given |= settings
    if given.get("method") != "lora":
        del given["lora_r"]
    return prepare.prepare(load_config(None, given), with_rows=False).layout


@pytest.mark.parametrize("case", CASES)
def test_equals_training_in_memory(tmp_path: Path, case: str) -> None:
    """Windows of two micro-batches of two rows, the last of an epoch with one of one row."""
    arch, tied, settings = CASES[case]
    settings = settings | {"num_train_epochs": 1}
    folder = _made(tmp_path, arch, tied)
    found = _layout(folder, settings)
    assert found.tied == tied
    assert len(found.embed_stages) == len(found.head_stages) > 2
    rows = make_rows(folder / "rows.jsonl", 11, VOCABULARY)
    reference = train_in_memory(folder / "model", rows, TRAINING | settings)
    streamed = stream(folder / "model", folder / "rows.jsonl", folder / "out", settings)
    assert_matches(streamed, reference, exempt=_without_true_gradient(arch, reference))


MOVED: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "untied": ("llama", False, {}),
    "tied": ("gemma3_text", True, {}),
    "fp16": ("llama", True, {"dtype": "fp16", "max_grad_norm": 1.0}),
    "lora": ("llama", False, {"method": "lora", "lora_dropout": 0.1}),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "speculative": {"clipping": "speculative"},
    "some in memory": {"host_cache": 150_000, "backend": "python"},
    "all in memory": {"host_cache": "1GiB"},
    "small pieces": {"chunk_bytes": 8192, "prefetch_depth": 0, "activations": "ssd"},
}


@pytest.mark.parametrize("case", MOVED)
def test_how_bytes_move_changes_nothing(tmp_path: Path, case: str) -> None:
    arch, tied, settings = MOVED[case]
    folder = _made(tmp_path, arch, tied)
    settings = {"max_steps": 3, "dtype": "bf16", "max_grad_norm": 2.0} | settings

    def run(name: str, **more: Any) -> Streamed:
        return stream(folder / "model", folder / "rows.jsonl", folder / name, settings | more)

    wanted = run("all on ssd")
    assert any(scale != 1 for scale in wanted.series("clip_scale"))
    for name, variant in VARIANTS.items():
        if case == "fp16" and name != "some in memory":
            continue  # it is emulated, and slow
        assert_same_bits(run(name, **variant), wanted)


ROWS: dict[str, tuple[bool, dict[str, Any]]] = {
    "deferred": (False, {}),
    "tied": (True, {"max_grad_norm": 1e9}),
    "speculative": (False, {"clipping": "speculative"}),
    "tied, speculative": (True, {"clipping": "speculative", "max_grad_norm": 1e9}),
    "not clipped": (True, {"max_grad_norm": 0}),
    "rounded, moments of 8 bits": (False, {"optim": "adamw_8bit", "master_weights": False}),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_the_next_batch_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Where the embedding is updated after the entry of the next step: bits as if all of it were in memory.

    Before an evaluation all of it is updated: no step begins with rows after that.
    """
    tied, settings = ROWS[case]
    coded = "optim" in settings
    wide = (
        {"hidden_size": 256, "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
        if coded
        else {}
    )
    folder = _made(tmp_path, "llama", tied, **wide)
    make_rows(folder / "eval.jsonl", 2, VOCABULARY)
    settings = {
        "dtype": "bf16", "max_grad_norm": 2.0, "max_steps": 4, "eval_steps": 3, "chunk_bytes": 1 << 20,
        "eval_file": str(folder / "eval.jsonl"), "warmup_steps": 0,
    } | settings  # fmt: skip
    if (
        case == "not clipped"
    ):  # the planner defers some where drives have too much to do in backward
        monkeypatch.setattr(
            "ssdtune.train.prepare.usual_proportions", lambda config: Proportions(deferred_stages=9)
        )
    read: list[int] = []
    original = OutOfCoreAdam.updated_rows

    def updated_rows(adam: OutOfCoreAdam, stage: str, rows: Any, *args: Any, **more: Any) -> Any:
        read.append(len(rows))
        return original(adam, stage, rows, *args, **more)

    monkeypatch.setattr(OutOfCoreAdam, "updated_rows", updated_rows)
    found = stream(folder / "model", folder / "rows.jsonl", folder / "found", settings)
    chunks = len(_layout(folder, {}).embed_stages)
    assert len(read) == 2 * chunks  # not in the first step, nor in that after the evaluation
    assert 0 < sum(read) < VOCABULARY
    more = {"host_cache": "1GiB"}
    wanted = stream(folder / "model", folder / "rows.jsonl", folder / "wanted", settings | more)
    assert len(read) == 2 * chunks
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_resumed_and_exported(tmp_path: Path, tied: bool) -> None:
    """A run from a checkpoint gives the same bits, and the export of one is the whole matrix again."""
    folder = _made(tmp_path, "llama", tied, dtype="bfloat16")
    settings = {"dtype": "bf16", "max_steps": 2, "lr_scheduler_type": "constant"}
    short = stream(folder / "model", folder / "rows.jsonl", folder / "short", settings)
    settings |= {"max_steps": 4, "save_steps": 2, "save_total_limit": 2}
    saved = stream(folder / "model", folder / "rows.jsonl", folder / "saved", settings)
    wanted = saved.bits()
    export(folder / "saved/checkpoint-2", folder / "exported")
    assert Streamed(folder / "exported", [], []).bits() == short.bits()
    settings |= {"resume_from_checkpoint": str(folder / "saved/checkpoint-2")}
    resumed = stream(folder / "model", folder / "rows.jsonl", folder / "saved", settings)
    assert resumed.bits() == wanted


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_large_vocabulary_takes_slots_of_limited_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, method: str
) -> None:
    """256 thousand tokens at a width of 4096: planned from the configuration alone, with the limit as it is."""
    monkeypatch.undo()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4,
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "vocab_size": 256000, "tie_word_embeddings": tied,
    }))  # fmt: skip
    settings = {"dtype": "bf16", "host_memory": "24GiB", "max_length": 512, "method": method}

    def planned(most: int) -> dict[str, int]:
        monkeypatch.setattr(layout, "MOST_WHOLE_ELEMENTS", most)
        given = {
            "model_name_or_path": str(tmp_path / "model"),
            "device": "cpu",
            "host_cache": 0,
        } | settings
        run = prepare.prepare(load_config(None, given), with_rows=False)
        numel = {
            name: sum(math.prod(spec.shape) for part in stage.parts for spec in part.tensors)
            for name, stage in run.layout.stages.items()
        }
        ends = [size for name, size in numel.items() if name.startswith(("embed", "head"))]
        assert sum(ends) == (1 if tied else 2) * 256000 * 4096
        assert max(ends) <= most // 2 or most > 1 << 28
        return run.memory.breakdown | {"host": run.memory.host_bytes}

    before, after = planned(1 << 40), planned(1 << 28)
    saved = 256000 * 4096 - (1 << 28)
    for purpose, size in (("weight slots", 2), ("gradients", 4 if method == "full" else 0)):
        assert before[purpose] - after[purpose] >= size * saved - (1 << 20)
    assert before["host"] - after["host"] >= (8 if method == "full" else 2) * saved - (1 << 24)
