"""Rotary frequencies that depend on rows of earlier steps: what a run that is taken up again must know of them.

Models with `rope_type: dynamic` make their frequencies anew for a row that is longer than any before, and keep them. So
what they compute follows from the longest row so far, which checkpoints hold. Other models have nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn


def longest_rows(model: nn.Module) -> dict[str, int]:
    """Return for how many tokens the frequencies of each module, and kind of layer, were made."""
    return {
        f"{path} {layer_type}".rstrip(): int(
            getattr(
                module, f"{layer_type}_max_seq_len_cached".lstrip("_"), module.max_seq_len_cached
            )
        )
        for path, module, layer_type in _dynamic(model)
    }


def set_longest_rows(model: nn.Module, lengths: Mapping[str, int]) -> None:
    """Let a model make the frequencies that it had when `longest_rows` returned these lengths; without any, its first ones."""
    for path, module, layer_type in _dynamic(model):
        device = next(module.buffers()).device
        kind = {"layer_type": layer_type} if layer_type else {}
        # A short row takes back what longer ones, such as those that planning counts with, have left.
        for length in (1, lengths.get(f"{path} {layer_type}".rstrip(), 1)):
            last = torch.tensor([[length - 1]], device=device)
            module(torch.empty(0, device=device), last, **kind)


def _dynamic(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and kind of layer ("" if there is one only) of all frequencies that change."""
    for path, module in model.named_modules():
        types = getattr(module, "rope_type", None)
        for layer_type, rope_type in (types if isinstance(types, dict) else {"": types}).items():
            if isinstance(rope_type, str) and "dynamic" in rope_type:
                yield path, module, layer_type
