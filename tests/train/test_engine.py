"""The engine keeps nothing from one step to the next: no graphs, no hidden states, no gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdtune.train.engine import Engine
from tests.equality.harness import stream
from tests.toy import make_checkpoint, make_rows


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "ssd"},
        {"recompute": "cheap"},
        {"host_cache": "1GiB", "max_grad_norm": 0},
        {"method": "lora", "target_modules": r".*h\.1\..*c_attn"},
    ],
    ids=["full", "products", "in-memory", "lora-in-one-block"],
)
def test_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    make_checkpoint(tmp_path / "model", "gpt2")
    make_rows(tmp_path / "rows.jsonl", 16, lengths=(8, 8))
    make_rows(tmp_path / "eval.jsonl", 3, lengths=(8, 8))
    alive: dict[str, list[tuple[int, int]]] = {"train_step": [], "evaluate": []}
    earlier = (
        _living_tensors()
    )  # what tests before have left; held, so that no address is used again
    known = {id(tensor) for tensor in earlier}

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(Engine, name)

        def run(engine: Engine, *args: Any, **more: Any) -> Any:
            result = original(engine, *args, **more)
            state = engine._state
            kept = (state.entries, state.hidden, state.inputs, state.products, state.gradients)
            assert kept == ({}, {}, {}, {}, {})
            assert not any(tensor.requires_grad for tensor in state.losses)
            alive[name].append(_count([t for t in _living_tensors() if id(t) not in known]))
            return result

        return run

    for name in alive:
        monkeypatch.setattr(Engine, name, watched(name))
    given = {"max_steps": 3, "eval_steps": 1, "eval_file": str(tmp_path / "eval.jsonl")}
    stream(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "out", given | settings)
    for name, figures in alive.items():
        assert len(figures) == 3
        assert len(set(figures[1:])) == 1, f"{name}: tensors and bytes alive grow: {figures}"


def _living_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]


def _count(tensors: list[torch.Tensor]) -> tuple[int, int]:
    """Return how many there are, and their bytes; none may belong to a graph."""
    assert not [tensor for tensor in tensors if tensor.grad_fn is not None]
    return len(tensors), sum(
        tensor.nbytes for tensor in tensors if tensor.device.type == "cpu" and tensor._base is None
    )
