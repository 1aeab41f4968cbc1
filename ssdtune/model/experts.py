"""Mixtures of experts: how many there are, and what of a block a token passes.

Read from a configuration, where every family of models calls it otherwise. Models without experts pass all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def num_experts(text: Any) -> int:
    """Return the experts of a block among which a router chooses; 0 without a mixture."""
    return _first(text, COUNTS) if _first(text, CHOSEN) else 0


def num_chosen(text: Any) -> int:
    """Return how many of them a token passes; 1 without a mixture."""
    count = num_experts(text)
    return min(_first(text, CHOSEN), count) if count else 1


def active_parameters(text: Any, shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the parameters of a block that a token passes: of its experts only the chosen ones.

    Args:
        text: The text model's configuration.
        shapes: Of all parameters of the block, by name.
    """
    count, total = num_experts(text), sum(prod(shape) for shape in shapes.values())
    if not count:
        return total
    routed = sum(prod(shape) for name, shape in shapes.items() if _is_routed(name, shape, count))
    return total - routed + routed * num_chosen(text) // count


def feed_forward_size(text: Any) -> int:
    """Return the inner values of a token in a block's feed-forward part, in all experts that it passes."""
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    inner = _first(text, names) or 4 * text.hidden_size
    if not num_experts(text):
        return inner
    own = _first(text, ("moe_intermediate_size",)) or inner
    shared = _first(text, ("shared_expert_intermediate_size",))
    shared = shared or own * _first(text, ("n_shared_experts",))
    # Some models have blocks without experts too, which may be wider.
    dense = inner if own != inner else 0
    return max(own * num_chosen(text) + shared, dense)


def _is_routed(name: str, shape: Sequence[int], count: int) -> bool:
    """Say whether a parameter is that of experts; some models have those of all in one, under any name."""
    return ".experts." in f".{name}" or (len(shape) == 3 and shape[0] == count)


def _first(text: Any, names: Sequence[str]) -> int:
    values = (getattr(text, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
