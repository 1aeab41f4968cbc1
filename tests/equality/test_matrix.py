"""The equality matrix: streamed training gives what in-memory training gives, for every architecture.

Twelve steps in two epochs, windows of two micro-batches of which each epoch's last has one of one row,
warm-up, weight decay, and a gradient limit that strikes in about half of the steps. fp32 must agree within
2e-5 (losses, weights) and 1e-5 relative (gradient norms): the noise of two honest float32 runs is below
2e-6 and 5e-7 here, measured by cutting the same windows into other micro-batches.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.covering import covering
from tests.equality.harness import (
    NUM_ROWS,
    TRAINING,
    Streamed,
    assert_matches,
    hash_folder,
    stream,
)
from tests.equality.reference import ReferenceResult, train_in_memory
from tests.toy import ARCHITECTURES, make_checkpoint, make_rows

LIMITS = {
    "llama": (2.5, 1.6), "qwen2": (2.9, 2.5), "qwen3": (3.1, 1.8), "mistral": (2.9, 2.3),
    "gemma2": (4.4, 3.1), "gemma3_text": (5.0, 3.6), "gpt2": (2.5, 1.7), "opt": (0.89, 0.55),
    "gpt_neox": (2.6, 1.4), "mixtral": (2.8, 2.2), "qwen3_moe": (3.1, 2.2), "gpt_oss": (2.3, 1.4),
    "phi3": (3.0, 2.3), "olmo2": (4.7, 3.6), "bloom": (1.8, 0.39), "falcon": (2.8, 1.9),
}  # fmt: skip
"""Median gradient norm of the full and the LoRA run: clipping strikes in some steps and not in others."""


@pytest.mark.parametrize(
    "arch, method, side", covering(ARCHITECTURES, ["full", "lora"], ["right", "left"], every=2)
)
def test_every_architecture(tmp_path: Path, arch: str, method: str, side: str) -> None:
    model_dir = make_checkpoint(tmp_path / "model", arch, sharded=side == "left")
    settings = {
        "method": method,
        "padding_side": side,
        "max_grad_norm": LIMITS[arch][method == "lora"],
    }
    reference, streamed = _run_both(tmp_path, model_dir, settings)
    assert 0 < len(reference.clipped) < len(reference.losses)
    assert_matches(streamed, reference, exempt=_without_true_gradient(arch, reference))
    assert streamed.moved("read") > 0
    if method == "lora":
        for name, tensor in streamed.state().items():
            assert not torch.equal(tensor, reference.initial[name]), f"{name} did not learn"


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "gpt2", "qwen2", "opt", "mixtral"])
def test_tied_and_untied(tmp_path: Path, arch: str) -> None:
    """The matrix has each architecture's default; this is the other one."""
    tied = arch in ("llama", "qwen2", "mixtral")
    model_dir = make_checkpoint(tmp_path / "model", arch, tied=tied)
    reference, streamed = _run_both(tmp_path, model_dir, {"num_train_epochs": 1})
    assert_matches(streamed, reference, exempt=_without_true_gradient(arch, reference))


@pytest.mark.parametrize("batch, accumulation", [(3, 4), (12, 1), (1, 12)])
def test_the_split_of_a_window_does_not_matter(
    tmp_path: Path, batch: int, accumulation: int
) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "llama")
    split = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    rows = make_rows(tmp_path / "rows.jsonl", 26)  # two full windows and a partial one
    reference = train_in_memory(
        model_dir,
        rows,
        TRAINING | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
    )
    streamed = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", split)
    assert len(streamed.steps) == 6
    assert_matches(streamed, reference)


def test_fewer_rows_than_a_window_are_one_step_each_epoch(tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "llama")
    settings = {"gradient_accumulation_steps": 8, "num_train_epochs": 3}
    reference, streamed = _run_both(tmp_path, model_dir, settings, num_rows=7)
    assert len(streamed.steps) == 3
    assert_matches(streamed, reference)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "constant_with_warmup"])
def test_schedules(tmp_path: Path, schedule: str) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "llama")
    settings = {"lr_scheduler_type": schedule, "warmup_steps": 0.4, "max_steps": 8}
    reference, streamed = _run_both(tmp_path, model_dir, settings)
    assert_matches(streamed, reference)


def test_shuffled_rows(tmp_path: Path) -> None:
    """Each epoch sees every row once, in another order, and is what in-memory training of it gives."""
    model_dir = make_checkpoint(tmp_path / "model", "llama")
    rows = make_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    streamed = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", {"shuffle": True})
    order = [number for line in streamed.steps for number in line["rows"]]
    epochs = [order[:NUM_ROWS], order[NUM_ROWS:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_ROWS))] * 2
    assert epochs[0] != epochs[1]
    windows = [[rows[number] for number in line["rows"]] for line in streamed.steps]
    assert_matches(streamed, train_in_memory(model_dir, windows, TRAINING, is_windows=True))


def test_evaluation(tmp_path: Path) -> None:
    """Held-out loss, weighted by tokens, in batches that divide the rows unevenly."""
    model_dir = make_checkpoint(tmp_path / "model", "gemma2")
    held_out = make_rows(tmp_path / "eval.jsonl", 7, lengths=(3, 25), seed=1)
    reference, streamed = _run_both(
        tmp_path,
        model_dir,
        {"eval_steps": 4, "per_device_eval_batch_size": 3, "padding_side": "left"},
        eval_rows=held_out,
        streamed_only={"eval_file": str(tmp_path / "eval.jsonl")},
    )
    assert len(reference.eval_losses) == 3
    assert_matches(streamed, reference)


def test_without_clipping(tmp_path: Path) -> None:
    """With no limit the update may overlap the backward pass; the norm is reported all the same."""
    model_dir = make_checkpoint(tmp_path / "model", "qwen3")
    reference, streamed = _run_both(tmp_path, model_dir, {"max_grad_norm": 0})
    assert_matches(streamed, reference)


def test_dropout_of_the_model(tmp_path: Path) -> None:
    """Recomputed blocks draw the masks of their first forward pass."""
    dropout = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    model_dir = make_checkpoint(tmp_path / "model", "gpt2", **dropout)
    reference, streamed = _run_both(tmp_path, model_dir, {})
    without = make_checkpoint(tmp_path / "plain", "gpt2")
    rows = make_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    assert abs(train_in_memory(without, rows, TRAINING).losses[0] - reference.losses[0]) > 1e-3
    assert_matches(streamed, reference, exempt=_without_true_gradient("gpt2", reference))


@pytest.mark.parametrize(
    "arch, settings",
    [
        ("llama", {"lora_dropout": 0.2}),
        ("gpt2", {"lora_dropout": 0.1, "use_rslora": True, "lora_alpha": 5}),
        ("qwen3", {"target_modules": ["q_proj", "down_proj"]}),
        ("qwen3", {"target_modules": r".*layers\.[12]\..*(v_proj|up_proj)"}),
        ("llama", {"modules_to_save": ["lm_head"]}),
        ("llama", {"modules_to_save": ["embed_tokens", "norm"], "target_modules": ["v_proj"]}),
        ("llama", {"bias": "lora_only"}),
        ("gpt2", {"bias": "all"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_lora_options(tmp_path: Path, arch: str, settings: dict[str, object]) -> None:
    model_dir = make_checkpoint(tmp_path / "model", arch)
    reference, streamed = _run_both(tmp_path, model_dir, {"method": "lora", **settings})
    assert_matches(streamed, reference, exempt=_without_true_gradient(arch, reference))


def test_lora_goes_on_from_an_adapter(tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "qwen2")
    first = {"method": "lora", "num_train_epochs": 1, "lora_r": 5, "use_rslora": True}
    _, before = _run_both(tmp_path / "first", model_dir, first)
    start = hash_folder(before.output_dir)
    # the adapter's own settings win over r and alpha given here by default
    settings = {"method": "lora", "adapter": str(before.output_dir)}
    rows = make_rows(tmp_path / "rows.jsonl", NUM_ROWS, seed=5)
    reference = train_in_memory(model_dir, rows, TRAINING | settings)
    streamed = stream(
        model_dir, tmp_path / "rows.jsonl", tmp_path / "out", settings | {"lora_r": None}
    )
    assert_matches(streamed, reference)
    assert hash_folder(before.output_dir) == start


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_lora_on_one_end_of_a_tied_model_leaves_the_other_as_it_was(
    tmp_path: Path, name: str
) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "llama", tied=True)
    settings = {"method": "lora", "modules_to_save": [name], "target_modules": ["v_proj"]}
    reference, streamed = _run_both(tmp_path, model_dir, settings)
    assert_matches(streamed, reference)


def test_lora_leaves_the_base_alone(tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "llama", sharded=True)
    make_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    before = hash_folder(model_dir)
    streamed = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / "out", {"method": "lora"})
    after = hash_folder(model_dir)
    assert {name: after[name] for name in before if "safetensors" in name} == {
        name: digest for name, digest in before.items() if "safetensors" in name
    }
    assert set(after) == set(before)
    adapter_bytes = 4 * sum(tensor.numel() for tensor in streamed.state().values())
    # master or weights, two moments and perhaps gradients: nothing the size of the base
    # states fill blocks of the drive, tensors multiples of 256 elements
    padding = (4096 * 6 + 4 * 256 * len(streamed.state())) * 5
    for line in streamed.steps:
        trained = {kind: n for kind, n in line["bytes_written"].items() if kind != "activations"}
        assert sum(trained.values()) <= 5 * adapter_bytes + padding


def test_packing_equals_separate_documents(tmp_path: Path) -> None:
    """One window holds all rows, so that only how they share sequences differs."""
    for arch in ("llama", "gemma2", "gpt2", "qwen3_moe"):
        model_dir = make_checkpoint(tmp_path / arch, arch)
        whole = {"gradient_accumulation_steps": 100, "num_train_epochs": 4, "warmup_steps": 0}
        rows = make_rows(tmp_path / "rows.jsonl", 9)
        reference = train_in_memory(model_dir, rows, TRAINING | whole)
        packed = whole | {"packing": True, "max_length": 32, "per_device_train_batch_size": 2}
        streamed = stream(model_dir, tmp_path / "rows.jsonl", tmp_path / f"out-{arch}", packed)
        assert_matches(streamed, reference, exempt=_without_true_gradient(arch, reference))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_parameters_without_a_gradient(tmp_path: Path, method: str) -> None:
    """AdamW skips a parameter whose gradient is None: no decay, no moments, no part in the norm."""
    from tests.equality.unused import registered_unused_llama

    with registered_unused_llama(tmp_path / "model") as model_dir:
        settings = {"weight_decay": 0.5, "method": method}
        if method == "lora":
            settings["modules_to_save"] = ["never_called"]
            settings["target_modules"] = ["q_proj"]
        reference, streamed = _run_both(tmp_path, model_dir, settings)
        assert_matches(streamed, reference)
        unused = [name for name in reference.state if "never" in name]
        assert len(unused) >= 1
        state = streamed.state()
        for name in unused:
            assert torch.equal(state[name], reference.initial[name]), name


def _run_both(
    tmp_path: Path,
    model_dir: Path,
    settings: dict[str, object],
    *,
    num_rows: int = NUM_ROWS,
    eval_rows: list[dict[str, list[int]]] | None = None,
    streamed_only: dict[str, object] | None = None,
) -> tuple[ReferenceResult, Streamed]:
    tmp_path.mkdir(exist_ok=True)
    rows_path = tmp_path / "rows.jsonl"
    rows = make_rows(rows_path, num_rows)
    reference = train_in_memory(model_dir, rows, TRAINING | settings, eval_rows=eval_rows or ())
    streamed = stream(model_dir, rows_path, tmp_path / "out", settings | (streamed_only or {}))
    return reference, streamed


def _without_true_gradient(arch: str, reference: ReferenceResult) -> dict[str, Tensor]:
    """Return the elements whose true gradient is 0, for each tensor that has some.

    A bias of the keys adds the same to all of a query's scores, and softmax ignores that, unless positions
    rotate the keys. What is left of such a gradient is rounding noise, which Adam scales up to steps of the
    learning rate: two in-memory runs differ by 2e-4 there. Only elements with that proof are listed.
    """
    marks: dict[str, Tensor] = {}
    for key, tensor in reference.state.items():
        name = key.replace(".base_layer", "")
        mark = torch.zeros(tensor.shape, dtype=torch.bool)
        if arch == "gpt2" and name.endswith("c_attn.bias"):
            hidden = tensor.numel() // 3
            mark[hidden : 2 * hidden] = True
        elif arch == "opt" and name.endswith("k_proj.bias"):
            mark[:] = True
        elif arch in ("bloom", "gpt_neox") and name.endswith("query_key_value.bias"):
            heads = {"bloom": 4, "gpt_neox": 3}[arch]
            first = {"bloom": 0, "gpt_neox": 4}[arch]  # gpt_neox rotates a quarter of each head
            mark.view(heads, 3, -1)[:, 1, first:] = True
        else:
            continue
        marks[key] = mark
    return marks
