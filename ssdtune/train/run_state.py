"""What is alive while a schedule is run: batches, hidden states, graphs, sums, and what updates will need to know.

Passes (`ssdtune.train.block_passes`, `ssdtune.train.end_passes`) hand their results to each other here; nothing of it
outlives the run but what the engine takes over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ssdtune.data.batches import Batch
from ssdtune.device.base import Device, Event
from ssdtune.errors import SsdtuneError
from ssdtune.model.blocks import Entry
from ssdtune.model.chunked_loss import ChunkedLoss
from ssdtune.plan.generate import OUTER
from ssdtune.swap.activations import Kept
from ssdtune.train.seeds import stage_seed
from ssdtune.train.token_rows import TokenRows


@dataclass
class Update:
    """What an update needs to know of its step.

    Attributes:
        present: For each part, which of its tensors have a gradient.
        scale: Clipping coefficient.
    """

    learning_rate: float
    present: dict[str, list[bool]]
    scale: float = 1.0


@dataclass
class RunState:
    """What is alive during one run of a schedule.

    Attributes:
        seed: The run's; with `step` it seeds dropout.
        batches: What the model's forward takes of each micro-batch; `labels` [B, S].
        num_items: Learned tokens of the step.
        loss_scale: What losses are multiplied by before their backward pass.
        slot_of: Weight slots of the stages that are uploaded.
        token_rows: Of a divided embedding, by micro-batch.
        chunked: Losses of a divided head, by micro-batch.
        computed: The last compute of each stage.
        gradient_slots: Where the gradients of each stage go.
        squares: Of each stage's gradient, the sum; `norm` that of all.
        wrong: A speculative update failed: an error only if it was the right one.
    """

    training: bool
    step: int
    seed: int
    device: Device
    update: Update
    batches: list[dict[str, torch.Tensor]]
    labels: list[torch.Tensor]
    num_items: float
    loss_scale: float
    slot_of: dict[str, str] = field(default_factory=dict)
    token_rows: dict[int, TokenRows] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    graphs: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    products: dict[tuple[str, int], Kept] = field(default_factory=dict)
    activations: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    computed: dict[str, Event] = field(default_factory=dict)
    gradient_slots: dict[str, str] = field(default_factory=lambda: {OUTER: OUTER})
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    chunked: dict[int, ChunkedLoss] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    squares: dict[str, float] = field(default_factory=dict)
    norm: float = 0.0
    wrong: SsdtuneError | None = None

    @property
    def loss(self) -> float:
        """Sum of the losses of all micro-batches."""
        return float(sum(loss.item() for loss in self.losses))

    def seed_stage(self, m: int, number: int) -> None:
        """Seed dropout of a stage of micro-batch `m`; `number` as `stage_seed` counts them."""
        if self.training:
            self.device.seed(stage_seed(self.seed, self.step, m, number))

    def let_go(self) -> None:
        """Forget what a failed run left: its graphs lead back here by hooks, a circle that Python cannot see."""
        places = (
            self.entries,
            self.graphs,
            self.gradients,
            self.hidden,
            self.inputs,
            self.products,
        )
        for left in places:
            left.clear()


def model_inputs(batch: Batch, where: torch.device) -> dict[str, torch.Tensor]:
    """Return what a model's forward takes of a batch, [B, S] each."""
    inputs = {"input_ids": torch.from_numpy(batch.input_ids).to(where)}
    if batch.position_ids is not None:
        # Positions that start again tell transformers where a packed row begins; it masks accordingly.
        inputs["position_ids"] = torch.from_numpy(batch.position_ids).to(where)
    else:
        inputs["attention_mask"] = torch.from_numpy(batch.attention_mask).to(where)
    return inputs
