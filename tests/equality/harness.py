"""Runs ssdtune as the tests of this folder need it and compares the result with the yardstick.

Every run streams everything (`host_cache` 0), reads its rows in file order and computes in one thread, so
that it can be compared with `tests.equality.reference`. Cases change what they are about.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ssdtune import finetune
from tests.equality.reference import ReferenceResult
from tests.toy import make_tokenizer

NUM_ROWS = 21
"""With micro-batches of 2 rows and windows of 2: six steps an epoch; the last is one micro-batch of one row."""

TRAINING: dict[str, Any] = {
    "dtype": "fp32",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "lora_r": 3,
}
"""Twelve steps with all that can go wrong in a window. Given to both sides."""

STREAMING: dict[str, Any] = {
    "shuffle": False,
    "host_cache": 0,
    "compute_threads": 1,
    "adam_threads": 2,
    "device": "cpu",
    "verify": False,  # the comparison here is stricter
    "save_steps": 0,
}
"""Given to ssdtune only."""

ATOL = 2e-5
NORM_RTOL = 1e-5


@dataclass(frozen=True)
class Streamed:
    """What a run of ssdtune left in its output folder."""

    output_dir: Path
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]

    def series(self, key: str) -> list[Any]:
        """Return one value of every step."""
        return [line[key] for line in self.steps]

    def state(self) -> dict[str, Tensor]:
        """Return the result as transformers or peft read it: float32 tensors by name."""
        adapter = self.output_dir / "adapter_model.safetensors"
        if adapter.exists():
            return {name: tensor.float() for name, tensor in load_file(adapter).items()}
        model = AutoModelForCausalLM.from_pretrained(self.output_dir, dtype=torch.float32)
        return {name: tensor.detach() for name, tensor in model.named_parameters()}

    def bits(self) -> dict[str, str]:
        """Return a hash of every tensor as stored."""
        hashes = {}
        for path in sorted(self.output_dir.glob("*.safetensors")):
            for name, tensor in load_file(path).items():
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                key = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
                hashes[key] = hashlib.sha256(data.tobytes()).hexdigest()
        return hashes

    def moved(self, direction: str, kind: str | None = None, since: int = 0) -> int:
        """Add up the bytes of the steps from `since` on: direction "read" or "written", one kind or all."""
        return sum(
            count
            for line in self.steps[since:]
            for name, count in line[f"bytes_{direction}"].items()
            if kind in (None, name)
        )


def stream(model_dir: Path, rows: Path, output_dir: Path, settings: Mapping[str, Any]) -> Streamed:
    """Fine-tune with ssdtune; `settings` may hold the reference's `padding_side` too."""
    given = TRAINING | STREAMING | dict(settings)
    if given.get("method") != "lora":
        del given[
            "lora_r"
        ]  # given to both sides by default; a full run would say that it has no effect
    make_tokenizer(model_dir, padding_side=given.pop("padding_side", "right"))
    paths = {"model_name_or_path": model_dir, "train_file": rows, "output_dir": output_dir}
    given |= {key: str(value) for key, value in paths.items()}
    finetune(**given)
    return read_run(output_dir)


def read_run(output_dir: Path) -> Streamed:
    """Read the metrics of a run."""
    text = (output_dir / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return Streamed(output_dir, steps, [line for line in lines if line["event"] == "evaluation"])


def assert_matches(
    streamed: Streamed,
    reference: ReferenceResult,
    *,
    atol: float = ATOL,
    norm_rtol: float = NORM_RTOL,
    exempt: Mapping[str, Tensor] | None = None,
) -> None:
    """Assert that a run gave what in-memory training gives: losses, norms, rates, counts, every tensor.

    Args:
        exempt: For some tensors, which elements are not compared (boolean, of the tensor's shape).
    """
    assert streamed.series("learned_tokens") == reference.learned_tokens
    torch.testing.assert_close(
        torch.tensor(streamed.series("learning_rate"), dtype=torch.float64),
        torch.tensor(reference.lrs, dtype=torch.float64),
        rtol=1e-6,
        atol=0,
        msg=lambda m: f"learning rates: {m}",
    )
    assert_close("losses", streamed.series("loss"), reference.losses, atol=atol)
    norms = streamed.series("grad_norm")
    assert_close("gradient norms", norms, reference.grad_norms, rtol=norm_rtol)
    assert_close(
        "evaluation",
        [line["eval_loss"] for line in streamed.evals],
        [loss for _, loss in reference.eval_losses],
        atol=atol,
    )
    state = streamed.state()
    assert sorted(state) == sorted(reference.state)
    for name, wanted in reference.state.items():
        assert state[name].shape == wanted.shape, name
        difference = (state[name] - wanted).abs()
        if exempt and name in exempt:
            difference[exempt[name]] = 0
        worst = difference.max().item()
        assert worst <= atol, f"{name} is {worst:.3g} away from the in-memory result"


def assert_close(
    what: str, got: list[float], wanted: list[float], *, atol: float = 0.0, rtol: float = 0.0
) -> None:
    """Assert that two series are equally long and close, and show both if not."""
    assert len(got) == len(wanted), f"{what}: {len(got)} values, {len(wanted)} wanted"
    for index, (one, other) in enumerate(zip(got, wanted)):
        # not "abs(...) > limit": NaN must fail
        assert abs(one - other) <= atol + rtol * abs(other), (
            f"{what}: entry {index} is {one!r}, wanted {other!r}\n got {got}\n wanted {wanted}"
        )


def assert_same_bits(one: Streamed, other: Streamed) -> None:
    """Assert that two runs gave the same numbers to the last bit."""
    for key in ("loss", "grad_norm", "learning_rate", "learned_tokens"):
        assert one.series(key) == other.series(key), key
    assert [line["eval_loss"] for line in one.evals] == [line["eval_loss"] for line in other.evals]
    assert one.bits() == other.bits()


def hash_folder(folder: Path) -> dict[str, str]:
    """Return a hash of every file in a folder, to see that nothing in it was changed."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
