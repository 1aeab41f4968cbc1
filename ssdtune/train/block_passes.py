"""Blocks forward and backward, one micro-batch at a time; what a block keeps in between is the plan's choice (`Keeps`).

What comes before the first block and behind the last one is `ssdtune.train.end_passes`.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves

from ssdtune.model.blocks import BlockModel
from ssdtune.model.products import recorded, replayed
from ssdtune.plan.generate import OUTER, StepShape
from ssdtune.plan.schedule import Keeps, Operation
from ssdtune.swap.activations import Kept, saved_elsewhere
from ssdtune.swap.manager import SwapManager
from ssdtune.train.leaves import Leaves
from ssdtune.train.run_state import RunState


class BlockPasses:
    """Runs FORWARD and BACKWARD of blocks.

    Args:
        shape: Says which blocks gradients must reach.
    """

    def __init__(
        self, blocks: BlockModel, swap: SwapManager, leaves: Leaves, shape: StepShape
    ) -> None:
        self._blocks = blocks
        self._swap = swap
        self._leaves = leaves
        self._first_backward = shape.first_backward
        self._entry_trained = bool({OUTER, *shape.embed_stages} & shape.trained)

    def forward(self, state: RunState, operation: Operation) -> None:
        """Run a block, and keep what its backward pass will need."""
        stage, m, number = operation.stage, operation.micro_batch, _number(operation.stage)
        hidden = state.hidden[m]
        if operation.keeps == Keeps.ALL:
            self._forward_with_graph(state, stage, m, operation.input_slot)
            return
        if operation.keeps == Keeps.PRODUCTS:
            self._forward_with_products(state, stage, m, operation.input_slot)
            return
        if operation.input_slot:
            self._swap.inputs.stage(stage, m, operation.input_slot, hidden)
        elif state.training and number >= self._first_backward:
            state.inputs[stage, m] = hidden
        with torch.no_grad():
            state.seed_stage(m, 1 + number)
            call = state.entries[m].calls[number]
            leaves = self._leaves.of(state, stage, training=False)
            state.hidden[m] = self._blocks.run_block(number, leaves, call, hidden)

    def backward(self, state: RunState, operation: Operation) -> None:
        """Run a block again as far as it isn't kept, and backward."""
        stage, m = operation.stage, operation.micro_batch
        state.gradient_slots[stage] = operation.slot
        if operation.keeps == Keeps.ALL:
            if operation.input_slot:
                state.activations[stage, m] = self._swap.inputs.take(operation.input_slot)
            hidden, output = state.graphs.pop((stage, m))
        elif operation.keeps == Keeps.PRODUCTS:
            kept = state.products.pop((stage, m))
            if operation.input_slot:
                kept.return_from(self._swap.inputs.take(operation.input_slot))
            with replayed(kept.products, kept.hidden.shape[-1]):
                hidden, output = self._run_block(state, stage, m, kept.hidden)
            del kept  # what backward does not need goes now
        else:
            if operation.input_slot:
                hidden = self._swap.inputs.take(operation.input_slot)
            else:
                hidden = state.inputs.pop((stage, m))
            hidden, output = self._run_block(state, stage, m, hidden)
        torch.autograd.backward(output, state.gradients.pop(m))
        state.activations.pop((stage, m), None)
        if hidden.requires_grad:
            assert hidden.grad is not None
            state.gradients[m] = hidden.grad

    def _forward_with_graph(self, state: RunState, stage: str, m: int, input_slot: str) -> None:
        """Run a block such that backward needn't run it again; what it saves stays where it is or leaves."""
        leaving = self._swap.inputs.leaving(stage, m, input_slot) if input_slot else None
        call = state.entries[m].calls[_number(stage)]
        given = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
        with saved_elsewhere(
            self._swap.memory(state.slot_of[stage]),
            lambda: self._swap.memory(state.slot_of[stage]),
            leaving=leaving,
            activations_later=lambda: state.activations[stage, m],
            shared={tensor.untyped_storage()._cdata for tensor in given},
        ):
            hidden, output = self._run_block(state, stage, m, state.hidden[m])
        if leaving:
            self._swap.inputs.stage_activations(stage, m, input_slot, leaving)
        state.graphs[stage, m] = (hidden, output)
        state.hidden[m] = output.detach()

    def _forward_with_products(self, state: RunState, stage: str, m: int, input_slot: str) -> None:
        """Run a block such that backward needn't compute its products again; they stay where they are or leave."""
        given = state.hidden[m]
        with recorded(given.shape[-1]) as products:
            # As in backward, where gradients are wanted: kernels may be others without.
            _, output = self._run_block(state, stage, m, given)
        state.products[stage, m] = kept = Kept(given, products)
        if input_slot:
            leaving = self._swap.inputs.leaving(stage, m, input_slot)
            kept.leave(leaving)
            self._swap.inputs.stage_activations(stage, m, input_slot, leaving)
        state.hidden[m] = output.detach()

    def _run_block(
        self, state: RunState, stage: str, m: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a block with gradients, and return its input as a leaf (if gradients go on below) and its output."""
        number = _number(stage)
        goes_on = number > self._first_backward or self._entry_trained
        hidden = hidden.detach().requires_grad_(goes_on)
        with torch.enable_grad():
            state.seed_stage(m, 1 + number)
            call, leaves = (
                state.entries[m].calls[number],
                self._leaves.of(state, stage, training=True),
            )
            return hidden, self._blocks.run_block(number, leaves, call, hidden)


def _number(stage: str) -> int:
    return int(stage.partition(".")[2])
