"""How fast a decoder block of a model's shape is computed: forward and backward, by tokens and dtype.

The block is built from the configuration alone, with random weights, taken out of its model and run as the engine
runs it. Of a model with several kinds of blocks the most frequent one is measured. Each figure is the best of a few
repetitions; what would take too long or too much memory is left out and noted.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdtune.errors import ConfigError, UnsupportedModelError, first_line
from ssdtune.hardware.figures import BlockPoint, BlockProfile
from ssdtune.hardware.stream import Clock
from ssdtune.model.checkpoint import refuse_quantized
from ssdtune.model.experts import active_parameters
from ssdtune.units import format_memory

if TYPE_CHECKING:
    import torch

    from ssdtune.device.base import Device
    from ssdtune.model.blocks import BlockModel, Call

SEQUENCE = 512
"""Tokens of one sequence; a micro-batch of fewer is one sequence."""
BUILT_IN: Mapping[str, Mapping[str, int]] = {
    "small": {
        "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 12,
    },
    "medium": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Llama blocks as models of about 0.1 and 1 billion parameters have them."""


def digest_of(model: str | None, shapes: Sequence[str] = tuple(BUILT_IN)) -> list[str]:
    """Return what identifies the shapes that `measure_blocks` measures; cheap.

    Raises:
        ConfigError: There is no readable config.json.
    """
    if model is None:
        return list(shapes)
    path = config_path(model)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not readable as JSON: {error}. Name a model folder or its config.json."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is no JSON object. Name a model folder or its config.json.")
    refuse_quantized(path, values)
    return [hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]]


def config_path(model: str) -> Path:
    """Return the config.json of a model folder, or the file itself.

    Raises:
        ConfigError: There is none.
    """
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{path} does not exist. Name a model folder or its config.json.")
    return path


def check_model(model: str, device: Device) -> None:
    """Make sure that a model can be built and taken apart, before anything is measured.

    Raises:
        ConfigError: The configuration can't be read.
        UnsupportedModelError: The model can't be taken apart into blocks.
    """
    _build(_load_config(model), device)


def measure_blocks(
    model: str | None,
    *,
    shapes: Sequence[str] = tuple(BUILT_IN),
    tokens: Sequence[int],
    seconds: float,
    device: Device,
    clock: Clock = time.perf_counter,
    say: Any = None,
) -> tuple[BlockProfile, ...]:
    """Measure the blocks of a model, or of the shapes that are built in.

    Args:
        model: Model folder or config.json.
        shapes: Names in `BUILT_IN`, without a model.
        tokens: Sizes of micro-batches, in tokens.
        seconds: Time for everything, besides building.
        say: Told what is being done.

    Raises:
        ConfigError: The configuration can't be read.
        UnsupportedModelError: The model can't be taken apart into blocks.
    """
    digests = digest_of(model, shapes)
    configs = _built_in(shapes) if model is None else [_load_config(model)]
    profiles = []
    for config, digest in zip(configs, digests, strict=True):
        text = config.get_text_config()
        shape = f"{config.model_type}, hidden {text.hidden_size}"
        if say:
            say(f"block ({shape})")
        profiles.append(
            _measure_shape(config, shape, digest, tokens, seconds / len(configs), device, clock)
        )
    return tuple(profiles)


def _built_in(shapes: Sequence[str]) -> list[Any]:
    from transformers import LlamaConfig

    return [
        LlamaConfig(
            num_hidden_layers=1, vocab_size=256, max_position_embeddings=8192, **BUILT_IN[name]
        )
        for name in shapes
    ]


def _load_config(model: str) -> Any:
    from transformers import AutoConfig

    from ssdtune.model.build import refuse_unsuitable

    path = config_path(model)
    try:
        config = AutoConfig.from_pretrained(path)
        config.get_text_config().hidden_size  # noqa: B018 (models without one aren't decoders)
    except Exception as error:  # each kind of configuration has its own way to refuse values
        raise ConfigError(
            f"{path}: transformers cannot read this configuration: {first_line(error)}"
        ) from error
    refuse_unsuitable(path, config)
    return config


def _measure_shape(
    config: Any,
    shape: str,
    digest: str,
    tokens: Sequence[int],
    seconds: float,
    device: Device,
    clock: Clock,
) -> BlockProfile:
    import torch

    from ssdtune.device.dtypes import COMPUTE_DTYPES

    only_fp16 = device.supports(torch.float16) and not device.supports(torch.bfloat16)
    names = ("fp32", "fp16" if only_fp16 else "bf16")
    points: list[BlockPoint] = []
    notes: list[str] = []
    blocks, number = _build(config, device)
    parameters, active = _sizes(blocks, number, config)
    for name in names:
        dtype = COMPUTE_DTYPES[name]
        needed = parameters * dtype.itemsize * 2
        if needed > device.memory().free_bytes // 2:
            notes.append(
                f"{name}: not measured, weights and gradients take {format_memory(needed)}"
            )
            continue
        runner = _Runner(blocks, number, dtype, device, clock)
        found, note = _measure_dtype(
            runner, name, tokens, seconds / len(names), partial(_forward_flop, active, config)
        )
        points += found
        notes += [note] if note else []
    return BlockProfile(
        shape=shape,
        digest=digest,
        device=device.name,
        parameters=parameters,
        active_parameters=active,
        hidden_size=config.get_text_config().hidden_size,
        points=tuple(points),
        notes=tuple(notes),
    )


def _measure_dtype(
    runner: _Runner,
    name: str,
    tokens: Sequence[int],
    seconds: float,
    forward_flop: Callable[[int, int], float],
) -> tuple[list[BlockPoint], str]:
    """Return the figures in one dtype, by size of micro-batch, and what was left out; "" if nothing was.

    Args:
        forward_flop: Of so many tokens in sequences of a length.
    """
    points: list[BlockPoint] = []
    start = runner.clock()
    for count in tokens:
        sequence = min(count, SEQUENCE)
        left = seconds - (runner.clock() - start)
        if points:
            last = points[-1]
            expected = (last.forward_s + last.backward_s) * count / last.tokens
            if 2.5 * expected > left:  # a first run that isn't counted, one that is
                return (
                    points,
                    f"{name}: micro-batches from {count} tokens on would take too long to measure",
                )
        try:
            forward, backward = runner.run(count // sequence, sequence, left / 3)
        except (RuntimeError, MemoryError) as error:  # memory, or no kernel for this dtype
            return points, f"{name}, {count} tokens: {first_line(error)}"
        points.append(
            BlockPoint(
                dtype=name,
                sequences=count // sequence,
                sequence=sequence,
                forward_s=forward,
                backward_s=backward,
                forward_flop=forward_flop(count, sequence),
            )
        )
    return points, ""


def _build(config: Any, device: Device) -> tuple[BlockModel, int]:
    """Return the model without weights, taken apart, and the number of its most frequent kind of block."""
    import torch

    from ssdtune.model.blocks import BlockModel
    from ssdtune.model.build import BuiltModel, empty_model
    from ssdtune.model.keys import KeyMap

    try:
        model = empty_model(config, torch.float32)
    except Exception as error:  # whatever the code of the model thinks of such a configuration
        raise UnsupportedModelError(
            f"{config.model_type}: transformers cannot build this as a causal language model: {first_line(error)}"
        ) from error
    names = frozenset(name for name, _ in model.named_parameters())
    built = BuiltModel(model, None, KeyMap.of_config(model), names, frozenset())
    blocks = BlockModel(built, device.torch_device)
    blocks.train(True)
    kinds = [sum(p.numel() for p in block.parameters()) for block in blocks.blocks]
    common = Counter(kinds).most_common(1)[0][0]
    return blocks, len(kinds) - 1 - kinds[::-1].index(common)


def _sizes(blocks: BlockModel, number: int, config: Any) -> tuple[int, int]:
    """Return the parameters of a block, and those that one token uses."""
    shapes = {name: p.shape for name, p in blocks.blocks[number].named_parameters()}
    total = sum(shape.numel() for shape in shapes.values())
    return total, active_parameters(config.get_text_config(), shapes)


def _forward_flop(active: int, config: Any, tokens: int, sequence: int) -> float:
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0) or 0
    head_size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    return 2.0 * active * tokens + 4.0 * sequence * heads * head_size * tokens


class _Runner:
    """Runs one block on random inputs in one dtype."""

    def __init__(
        self, blocks: BlockModel, number: int, dtype: torch.dtype, device: Device, clock: Clock
    ) -> None:
        import torch

        self._blocks, self._number, self._device, self.clock = blocks, number, device, clock
        self._on = {"dtype": dtype, "device": device.torch_device}
        self._weights: dict[str, torch.Tensor] = {}
        for part in blocks.layout.stages[f"block.{number}"].parts:
            for spec in part.tensors:
                weight = torch.ones(spec.shape, **self._on)  # norms and biases
                if len(spec.shape) > 1:
                    torch.nn.init.normal_(weight, std=0.02)
                self._weights[spec.name] = weight.requires_grad_(True)

    def run(self, sequences: int, sequence: int, seconds: float) -> tuple[float, float]:
        """Return seconds of the forward pass without gradients, and of the backward pass alone."""
        import torch

        call, hidden = self._enter(sequences, sequence)
        hidden.requires_grad_(True)
        leaves = [hidden, *self._weights.values()]
        forwards: list[float] = []
        backwards: list[float] = []
        start = self.clock()
        while len(forwards) < 2 or self.clock() - start < seconds:
            with torch.no_grad():
                forwards.append(self._timed(lambda: self._forward(call, hidden))[0])
            output = self._forward(call, hidden)
            ones = torch.ones_like(output)

            def backward(output: torch.Tensor = output, ones: torch.Tensor = ones) -> Any:
                return torch.autograd.grad(output, leaves, ones, allow_unused=True)

            backwards.append(self._timed(backward)[0])
        return min(forwards[1:]), min(backwards[1:])  # the first ones choose and load kernels

    def _forward(self, call: Call, hidden: torch.Tensor) -> torch.Tensor:
        return self._blocks.run_block(self._number, self._weights, call, hidden)

    def _enter(self, sequences: int, sequence: int) -> tuple[Call, torch.Tensor]:
        """Return what the model calls its block with, and a random input for it."""
        import torch

        outer = self._blocks.stand_ins(dtype=self._on["dtype"])
        ids = torch.zeros(sequences, sequence, dtype=torch.long, device=self._device.torch_device)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            entry = self._blocks.enter(outer, batch, trained=False)
        return entry.calls[self._number], torch.randn(entry.hidden.shape, **self._on)

    def _timed(self, work: Any) -> tuple[float, Any]:
        self._device.record().wait()
        start = self.clock()
        result = work()
        self._device.record().wait()
        return max(self.clock() - start, 1e-9), result
