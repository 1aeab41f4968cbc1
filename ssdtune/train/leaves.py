"""The parameters of a stage as compute sees them: views of its weight slot, and in training where their gradients go.

Each parameter's gradient is added in fp32 to the sum of its part as soon as autograd has it, and then let go.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ssdtune.model.layout import ModelLayout, Part
from ssdtune.swap.manager import SwapManager
from ssdtune.train.run_state import RunState

ADDED_AT_ONCE = 1 << 20
"""Elements of a gradient that are converted to fp32 and added at once."""


class Leaves:
    """Gives the parameters of uploaded stages, and the sums of their gradients.

    Args:
        in_fp16: It computes in fp16, while what is stored of trained weights is bf16 (`ssdtune.model.layout`).
    """

    def __init__(self, layout: ModelLayout, swap: SwapManager, *, in_fp16: bool) -> None:
        self._layout = layout
        self._swap = swap
        self._in_fp16 = in_fp16

    def of(self, state: RunState, stage: str, *, training: bool) -> dict[str, torch.Tensor]:
        """Return a stage's parameters by name; in training as leaves whose gradients go to the stage's slot."""
        weights = {
            name: weight.to(self.dtype(weight))
            for name, weight in self.stored(state, stage).items()
        }
        if not training:
            return weights
        for part in self._layout.stages[stage].parts:
            if part.trained:
                for index, spec in enumerate(part.tensors):
                    leaf = weights[spec.name].detach().requires_grad_()
                    leaf.register_post_accumulate_grad_hook(self._hook(state, part, index))
                    weights[spec.name] = leaf
        return weights

    def stored(self, state: RunState, stage: str) -> dict[str, torch.Tensor]:
        """Return a stage's parameters by name, as they are stored."""
        return self._swap.weights(stage, state.slot_of[stage])

    def dtype(self, weight: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a stored weight computes."""
        return torch.float16 if self._in_fp16 and weight.dtype == torch.bfloat16 else weight.dtype

    def started_sum(self, state: RunState, part: Part, index: int) -> torch.Tensor:
        """Return the sum of the gradients of a part's tensor: zeros if nothing was added yet."""
        total, present = self._sum(state, part, index), state.update.present[part.name]
        if not present[index]:
            total.zero_()
            present[index] = True
        return total

    def _hook(self, state: RunState, part: Part, index: int) -> Callable[[torch.Tensor], None]:
        def collect(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            total, present = self._sum(state, part, index), state.update.present[part.name]
            if present[index]:
                _add(total, leaf.grad)
            else:
                total.copy_(leaf.grad)
                present[index] = True
            leaf.grad = None

        return collect

    def _sum(self, state: RunState, part: Part, index: int) -> torch.Tensor:
        _, flat = self._swap.gradient(part, state.gradient_slots[part.stage])
        return part.view(flat, part.tensors[index])


def _add(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to an fp32 sum.

    Piece by piece on a CPU, which converts what it adds, all of it if it is one piece. A card adds in one kernel.
    """
    if gradient.device.type == "cpu" and gradient.is_contiguous():
        pairs = zip(
            total.view(-1).split(ADDED_AT_ONCE), gradient.view(-1).split(ADDED_AT_ONCE), strict=True
        )
        for part, added in pairs:
            part.add_(added)
    else:
        total.add_(gradient)
