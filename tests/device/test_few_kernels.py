"""Where a CPU works piece by piece, to stay in its caches, a card gets few large kernels: seen on tensors without memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssdtune.model.loss import _sum_losses
from ssdtune.train.leaves import ADDED_AT_ONCE, _add

META = torch.device("meta")


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_a_gradient_is_added_at_once() -> None:
    size = 3 * ADDED_AT_ONCE
    with Kernels() as on_card:
        _add(torch.empty(size, device=META), torch.empty(size, dtype=torch.bfloat16, device=META))
    assert on_card.count["add_"] == 1
    with Kernels() as on_cpu:
        _add(torch.zeros(size), torch.zeros(size, dtype=torch.bfloat16))
    assert on_cpu.count["add_"] == 3


def test_losses_are_taken_by_large_slices() -> None:
    vocabulary, tokens = 32_000, 400
    logits = torch.empty(tokens, vocabulary, device=META)
    target = torch.empty(tokens, dtype=torch.long, device=META)
    with Kernels() as on_card:
        _sum_losses(logits, target, 1.0, torch.empty_like(logits))
    assert on_card.count["_log_softmax"] == 2
