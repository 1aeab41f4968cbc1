"""The engine: carries out the operations of a step's schedule on the model.

One method per kind of operation. What lies where is the swap manager's business, what waits for what the
schedule's. Shape letters: B sequences, S positions, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.utils._pytree import tree_leaves

from ssdtune.data.batches import Batch
from ssdtune.device.base import Device, Event, explained
from ssdtune.errors import SsdtuneError
from ssdtune.hardware.memory import KeptMemory
from ssdtune.model.blocks import BlockModel, Entry
from ssdtune.model.chunked_loss import ChunkedLoss, LogitsOf
from ssdtune.model.layout import ModelLayout, Part, Stage
from ssdtune.model.loss import loss_by_chunks
from ssdtune.model.products import recorded, replayed
from ssdtune.optim.adamw import sum_of_squares
from ssdtune.optim.loss_scale import LossScale
from ssdtune.optim.schedule import clip_coefficient
from ssdtune.plan.generate import (
    EMBED,
    OUTER,
    Piece,
    StageShape,
    StepShape,
    generate_evaluation,
    generate_flush,
    generate_training_step,
)
from ssdtune.plan.residency import ComputeSize, MemoryPlan
from ssdtune.plan.schedule import Keeps, Kind, Lane, Operation, Schedule
from ssdtune.swap.activations import Kept, saved_elsewhere
from ssdtune.swap.manager import SwapManager
from ssdtune.swap.states import Precision
from ssdtune.swap.update import OutOfCoreAdam, PartPiece
from ssdtune.train.device_times import real_spans
from ssdtune.train.lanes import Lanes, Span
from ssdtune.train.nonfinite import FiniteWatch, NotFinite
from ssdtune.train.seeds import stage_seed
from ssdtune.train.speculation import Speculation
from ssdtune.train.token_rows import TokenRows

ADDED_AT_ONCE = 1 << 20
"""Elements of a gradient that are converted to fp32 and added at once."""


@dataclass
class StepResult:
    """What one optimizer step gave.

    Attributes:
        loss: Token-weighted mean over the whole step.
        grad_norm: Global norm before clipping.
        clip_scale: What the gradients were multiplied by.
        speculated: Updates were made as if it were 1, before it was known; if it is not, they are made again.
        skipped: The loss or a gradient was not finite, so nothing is updated.
        not_finite: Where that began, if the step was skipped.
    """

    loss: float
    grad_norm: float
    clip_scale: float
    learned_tokens: int
    spans: list[Span]
    speculated: bool = False
    skipped: bool = False
    not_finite: str = ""


@dataclass
class _Update:
    """What an update needs to know of its step.

    Attributes:
        present: For each part, which of its tensors have a gradient.
        scale: Clipping coefficient.
    """

    learning_rate: float
    present: dict[str, list[bool]]
    scale: float = 1.0


@dataclass
class _State:
    """What is alive during one run of a schedule."""

    training: bool
    step: int
    update: _Update
    batches: list[dict[str, torch.Tensor]]
    labels: list[torch.Tensor]
    num_items: float
    token_rows: dict[int, TokenRows] = field(default_factory=dict)
    """Of a divided embedding."""
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
    """Of a divided head."""
    losses: list[torch.Tensor] = field(default_factory=list)
    squares: dict[str, float] = field(default_factory=dict)
    norm: float = 0.0
    wrong: SsdtuneError | None = None
    """A speculative update failed: an error only if it was the right one."""

    def let_go(self) -> None:
        """Forget what a failed run left: its graphs lead back to the engine by hooks, a circle that Python cannot see."""
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


class Engine:
    """Runs steps and evaluations.

    Args:
        shape: The step's shape; its number of micro-batches is replaced by that of each step.
        seed: Seeds dropout (see `ssdtune.train.seeds`).
        max_grad_norm: Clipping limit, 0 for none.
        speculation: Decides in which steps stages that may be updated speculatively are.
        kept_memory: Where memory of freed tensors stays with the process: keeps it within the plan.
        watch: Decides what follows if something is not finite. In fp16 such a step is skipped whatever it says.

    Attributes:
        loss_scale: Where it computes in fp16; None elsewhere.
    """

    def __init__(
        self,
        blocks: BlockModel,
        swap: SwapManager,
        adam: OutOfCoreAdam,
        device: Device,
        lanes: Lanes,
        shape: StepShape,
        *,
        seed: int,
        max_grad_norm: float,
        speculation: Speculation | None = None,
        watch: FiniteWatch | None = None,
        kept_memory: KeptMemory | None = None,
    ) -> None:
        self.blocks = blocks
        self.swap = swap
        self.adam = adam
        self.device = device
        self.shape = shape
        self._lanes = lanes
        self._seed = seed
        self._max_grad_norm = max_grad_norm
        self._speculation = speculation or Speculation()
        self._watch = watch or FiniteWatch()
        self._kept_memory = kept_memory
        dtypes = {parameter.dtype for parameter in blocks.model.parameters()}
        self.loss_scale = LossScale() if torch.float16 in dtypes else None
        if self.loss_scale:
            self._watch.skips = True
        self._settled: frozenset[str] = frozenset()
        """Deferred stages that the last step updated all the same."""
        self._slot_of: dict[str, str] = {}
        self._events: dict[int, tuple[Event, Event]] = {}
        """Before and after operations of the compute lane, by their index."""
        self._state: _State
        self._pending: _Update | None = None
        layout = blocks.layout
        self._vocab_size = blocks.model.config.get_text_config().vocab_size
        self._embedding_parts = {
            stage: (part, index)
            for stage in layout.embed_stages
            for part in layout.stages[stage].parts
            for index, spec in enumerate(part.tensors)
            if spec.name == blocks.embedding_name
        }
        self._rows = {
            stage: spec.rows
            for stage in (*layout.embed_stages, *layout.head_stages)
            for part in layout.stages[stage].parts
            for spec in part.tensors
        }
        """Of the vocabulary, in each chunk of a divided embedding or head."""
        self._first_backward = shape.first_backward
        self._entry_trained = bool({OUTER, *shape.embed_stages} & shape.trained)

    @property
    def pending(self) -> bool:
        """Say whether the last step's updates are still to be made; see `flush`."""
        return self._pending is not None

    def train_step(self, batches: Sequence[Batch], step: int, learning_rate: float) -> StepResult:
        """Run one optimizer step.

        Where updates are deferred, the schedule begins with those of the previous step, and this step's wait
        for the next one, or for `flush`.

        Args:
            batches: Its micro-batches.
            step: Counted from 0.
            learning_rate: Of this step.

        Raises:
            SsdtuneError: The loss or a gradient is not finite, and such steps are not skipped; or too many were.
        """
        num_items = sum(batch.num_learned_tokens for batch in batches)
        shape = replace(
            self.shape,
            num_micro_batches=len(batches),
            speculative=self._speculated_stages(),
            pending=self.pending,
            settled=self._settled,
        )
        schedule = generate_training_step(shape)
        state = self._begin(batches, step, num_items, training=True, learning_rate=learning_rate)
        try:
            spans = self._run(schedule)
        except NotFinite:
            raise SsdtuneError(self._watch.reason_to_stop(step, self.swap)) from None
        skipped, clip_scale = self._watch.noticed, state.update.scale
        not_finite = self.not_finite() if skipped else ""
        assert not skipped or shape.trained <= shape.deferred, "it was updated before"
        self._settled = self._settle(shape.speculative, skipped=skipped)
        owed = not skipped and shape.deferred - self._settled
        self._pending = state.update if owed else None
        if self.loss_scale:
            clip_scale *= self.loss_scale.scale
            self.loss_scale.note(finite=not skipped, where=not_finite)
        else:
            self._watch.count(self.swap)
        loss = float(sum(loss.item() for loss in state.losses))
        return StepResult(
            loss, state.norm, clip_scale, num_items, spans, bool(shape.speculative), skipped,
            not_finite,
        )  # fmt: skip

    def not_finite(self) -> str:
        """Say where the step or evaluation before first came to a value that is not finite; "" if it didn't."""
        return self._watch.where(self.swap)

    def _speculated_stages(self) -> frozenset[str]:
        """Return the stages that a step updates before it is known whether gradients are clipped."""
        stages = self.shape.speculative
        allowed = stages and self._speculation.is_allowed and self.adam.can_speculate()
        return stages if allowed else frozenset()

    def _settle(self, speculated: frozenset[str], *, skipped: bool) -> frozenset[str]:
        """Keep or drop the step's speculative updates, and return the stages that are updated now."""
        state = self._state
        clipped = skipped or state.update.scale != 1.0
        self._speculation.note(clipped=clipped)
        if not speculated:
            return speculated
        if clipped:
            self.adam.drop_speculated()
            return frozenset()
        if state.wrong:
            raise state.wrong
        self.adam.keep_speculated()
        return speculated

    def flush(self) -> None:
        """Make the updates that are pending, so that weights and states are those after the last step."""
        if self.pending:
            self._run(generate_flush(replace(self.shape, settled=self._settled)))
            self._pending = None

    def evaluate(
        self, batches: Sequence[Batch], *, num_blocks: int | None = None
    ) -> tuple[float, int]:
        """Return the sum of the token losses of some micro-batches, and the number of learned tokens.

        Args:
            num_blocks: Run only the first blocks, for comparison with a model cut there.
        """
        num_items = sum(batch.num_learned_tokens for batch in batches)
        shape = replace(
            self.shape,
            num_micro_batches=len(batches),
            num_blocks=num_blocks or self.shape.num_blocks,
        )
        schedule = generate_evaluation(shape)
        state = self._begin(batches, 0, 1, training=False, learning_rate=0.0)
        self._run(schedule)
        return float(sum(loss.item() for loss in state.losses)), num_items

    def _begin(
        self,
        batches: Sequence[Batch],
        step: int,
        num_items: float,
        *,
        training: bool,
        learning_rate: float,
    ) -> _State:
        self.blocks.train(training)
        self._slot_of.clear()
        self._watch.begin(batches)
        where = self.device.torch_device
        parts = self.blocks.layout.trained_parts
        present = {part.name: [False] * len(part.tensors) for part in parts}
        self._state = _State(
            training, step, _Update(learning_rate, present),
            [model_inputs(batch, where) for batch in batches],
            [torch.from_numpy(batch.labels).to(where) for batch in batches],
            num_items,
        )  # fmt: skip
        if len(self.shape.embed_stages) > 1:
            self._state.token_rows = {
                m: TokenRows(batch.input_ids, where) for m, batch in enumerate(batches)
            }
        return self._state

    def _run(self, schedule: Schedule) -> list[Span]:
        try:
            with explained(self.device):
                self._events.clear()
                spans = self._lanes.run(schedule, self._execute)
                return real_spans(spans, self._events, self.device)
        except BaseException:
            self._state.let_go()
            raise

    def _execute(self, operation: Operation) -> None:
        stage, slot, m = operation.stage, operation.slot, operation.micro_batch
        begin = self.device.record() if operation.lane == Lane.COMPUTE else None
        match operation.kind:
            case Kind.LOAD:
                self.swap.load(stage, slot, with_trained=operation.with_weights)
            case Kind.UPLOAD:
                self.swap.upload(stage, slot)
                self._slot_of[stage] = slot
            case Kind.GATHER_ROWS:
                self._gather_rows(stage, m)
            case Kind.ENTRY_FORWARD:
                self._entry_forward(m)
            case Kind.FORWARD:
                self._forward(stage, m, operation)
            case Kind.SAVE_INPUT:
                self.swap.save_input(stage, m, slot)
            case Kind.LOAD_INPUT:
                self.swap.load_input(stage, m, slot)
            case Kind.SCORE:
                self._score(stage, m)
            case Kind.LOSS if len(self.shape.head_stages) > 1:
                self._chunk_loss(stage, m, slot)
            case Kind.LOSS:
                self._loss(stage, m, slot)
            case Kind.BACKWARD:
                self._backward(stage, m, operation)
            case Kind.ENTRY_BACKWARD:
                self._entry_backward(m, slot)
            case Kind.ROWS_BACKWARD:
                self._rows_backward(stage, m, slot)
            case Kind.COLLECT_GRADIENT:
                self._collect(stage, slot)
            case Kind.SAVE_GRADIENT:
                self.swap.save_gradient(stage, slot)
            case Kind.CLIP:
                self._clip()
            case Kind.LOAD_STATES:
                self.adam.load(
                    stage, operation.piece, slot, weight_slot=operation.weight_slot,
                    with_weights=operation.with_weights, with_gradient=not operation.gradient_slot,
                )  # fmt: skip
            case Kind.UPDATE:
                self._update(operation)
            case Kind.SAVE_STATES:
                self.adam.save(
                    stage, operation.piece, slot, weight_slot=operation.weight_slot,
                    speculative=operation.speculative,
                )  # fmt: skip
        if operation.lane == Lane.COMPUTE and stage:
            self._look(operation)
            self._state.computed[stage] = self._state.computed[OUTER] = event = self.device.record()
            if begin:
                self._events[operation.index] = (begin, event)
            for used in (stage, OUTER):
                if used in self._slot_of:
                    self.swap.mark_used(self._slot_of[used], event)
            if operation.input_slot:
                self.swap.mark_input_used(operation.input_slot, event)
            if self._kept_memory:
                self._kept_memory.check()

    # Compute lane

    def _look(self, operation: Operation) -> None:
        """Show the watch what an operation made."""
        state, m = self._state, operation.micro_batch
        match operation.kind:
            case Kind.ENTRY_FORWARD | Kind.FORWARD:
                self._watch.look(operation, state.hidden[m])
            case Kind.SCORE if operation.stage == self.shape.head_stages[0]:
                self._watch.look(operation, state.losses[-1])
            case Kind.LOSS | Kind.BACKWARD:
                if operation.kind == Kind.LOSS and len(self.shape.head_stages) == 1:
                    self._watch.look(operation, state.losses[-1])
                if m in state.gradients:
                    self._watch.look(operation, state.gradients[m])

    def _leaves(self, stage: str, training: bool) -> dict[str, torch.Tensor]:
        """Return a stage's parameters; in training as leaves whose gradients go to the stage's slot."""
        weights = self.swap.weights(stage, self._slot_of[stage])
        if self.loss_scale:  # of trained weights, what is stored is bf16 (`ssdtune.model.layout`)
            for name, weight in weights.items():
                weights[name] = weight.half() if weight.dtype == torch.bfloat16 else weight
        if not training:
            return weights
        for part in self.blocks.layout.stages[stage].parts:
            if part.trained:
                for index, spec in enumerate(part.tensors):
                    leaf = weights[spec.name].detach().requires_grad_()
                    leaf.register_post_accumulate_grad_hook(self._hook(part, index))
                    weights[spec.name] = leaf
        return weights

    def _hook(self, part: Part, index: int) -> Callable[[torch.Tensor], None]:
        def collect(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            target = self._gradient_of(part, index, self._state.gradient_slots[part.stage])
            if self._state.update.present[part.name][index]:
                _add(target, leaf.grad)
            else:
                target.copy_(leaf.grad)
                self._state.update.present[part.name][index] = True
            leaf.grad = None

        return collect

    def _gradient_of(self, part: Part, index: int, slot: str) -> torch.Tensor:
        return part.view(self.swap.gradient(part, slot)[1], part.tensors[index])

    def _seed_stage(self, m: int, stage: int) -> None:
        if self._state.training:
            self.device.seed(stage_seed(self._seed, self._state.step, m, stage))

    def _gather_rows(self, stage: str, m: int) -> None:
        part, index = self._embedding_parts[stage]
        weights = self.swap.weights(stage, self._slot_of[stage])[part.tensors[index].name]
        in_fp16 = self.loss_scale and weights.dtype == torch.bfloat16  # see `_leaves`
        dtype = torch.float16 if in_fp16 else weights.dtype
        self._state.token_rows[m].gather(weights, self._rows[stage], dtype)

    def _entry_forward(self, m: int) -> None:
        state = self._state
        rows = state.token_rows.get(m)
        with torch.set_grad_enabled(state.training):
            tensors = self._leaves(OUTER, state.training)
            if rows is None:
                tensors |= self._leaves(EMBED, state.training)
            trained = any(part.trained for part, _ in self._embedding_parts.values())
            entry = self.blocks.enter(
                tensors,
                state.batches[m],
                state.training and trained,
                at_start=lambda: self._seed_stage(m, 0),
                gathered=rows.take() if rows else None,
            )
        state.entries[m] = entry
        state.hidden[m] = entry.hidden.detach()

    def _forward(self, stage: str, m: int, operation: Operation) -> None:
        state, number = self._state, int(stage.partition(".")[2])
        hidden = state.hidden[m]
        if operation.keeps == Keeps.ALL:
            self._forward_with_graph(stage, number, m, operation.input_slot)
            return
        if operation.keeps == Keeps.PRODUCTS:
            self._forward_with_products(stage, number, m, operation.input_slot)
            return
        if operation.input_slot:
            self.swap.stage_input(operation.input_slot, hidden)
        elif state.training and number >= self._first_backward:
            state.inputs[stage, m] = hidden
        with torch.no_grad():
            self._seed_stage(m, 1 + number)
            call = state.entries[m].calls[number]
            state.hidden[m] = self.blocks.run_block(
                number, self._leaves(stage, False), call, hidden
            )

    def _forward_with_graph(self, stage: str, number: int, m: int, input_slot: str) -> None:
        """Run a block such that backward needn't run it again; what it saves stays in memory or goes to a slot."""
        state = self._state
        leaving = self.swap.leaving(input_slot) if input_slot else None
        call = state.entries[m].calls[number]
        given = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
        with saved_elsewhere(
            self.swap.memory(self._slot_of[stage]),
            lambda: self.swap.memory(self._slot_of[stage]),
            leaving=leaving,
            activations_later=lambda: state.activations[stage, m],
            shared={tensor.untyped_storage()._cdata for tensor in given},
        ):
            hidden, output = self._run_block(stage, number, m, state.hidden[m])
        if leaving:
            self.swap.stage_activations(input_slot, leaving)
        state.graphs[stage, m] = (hidden, output)
        state.hidden[m] = output.detach()

    def _forward_with_products(self, stage: str, number: int, m: int, input_slot: str) -> None:
        """Run a block such that backward needn't compute its products again; they stay in memory or go to a slot."""
        state, given = self._state, self._state.hidden[m]
        with recorded(given.shape[-1]) as products:
            # As in backward, where gradients are wanted: kernels may be others without.
            _, output = self._run_block(stage, number, m, given)
        state.products[stage, m] = kept = Kept(given, products)
        if input_slot:
            leaving = self.swap.leaving(input_slot)
            kept.leave(leaving)
            self.swap.stage_activations(input_slot, leaving)
        state.hidden[m] = output.detach()

    def _run_block(
        self, stage: str, number: int, m: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a block with gradients, and return its input as a leaf (if gradients go on below) and its output."""
        goes_on = number > self._first_backward or self._entry_trained
        hidden = hidden.detach().requires_grad_(goes_on)
        with torch.enable_grad():
            self._seed_stage(m, 1 + number)
            call = self._state.entries[m].calls[number]
            return hidden, self.blocks.run_block(number, self._leaves(stage, True), call, hidden)

    def _loss(self, stage: str, m: int, slot: str) -> None:
        state = self._state
        hidden = state.hidden.pop(m)
        gradient = torch.zeros_like(hidden) if state.training else None
        state.gradient_slots[stage] = slot
        loss = loss_by_chunks(
            self._logits_of(stage, m, state.training, state.training), hidden, state.labels[m],
            vocab_size=self._vocab_size, num_items=state.num_items, gradient=gradient,
            scale=self.loss_scale.scale if self.loss_scale else 1.0,
        )  # fmt: skip
        state.losses.append(loss)
        if gradient is not None:
            state.gradients[m] = gradient
        else:
            del state.entries[m]

    def _logits_of(self, stage: str, m: int, outer_trains: bool, head_trains: bool) -> LogitsOf:
        """Return what gives the logits of the head, or of a chunk of it."""
        tensors = self._leaves(OUTER, outer_trains) | self._leaves(stage, head_trains)
        seeds = iter([self.shape.num_blocks + 1])

        def seed_once() -> None:
            for stage_number in seeds:
                self._seed_stage(m, stage_number)

        return lambda piece: self.blocks.logits(tensors, piece, seed_once)

    def _score(self, stage: str, m: int) -> None:
        state, chunks = self._state, self.shape.head_stages
        if m not in state.chunked:
            most = max(len(self._rows[chunk]) for chunk in chunks)
            state.chunked[m] = ChunkedLoss(state.hidden.pop(m), state.labels[m], most)
        loss = state.chunked[m]
        loss.add(self._logits_of(stage, m, False, False), self._rows[stage])
        if stage == chunks[0]:  # the last one
            state.losses.append(loss.losses(state.num_items))
            if not state.training:
                del state.entries[m], state.chunked[m]

    def _chunk_loss(self, stage: str, m: int, slot: str) -> None:
        """Run the backward pass of a chunk of the head; if tied, its own gradient is made later (`_rows_backward`)."""
        state = self._state
        state.gradient_slots[stage] = slot
        loss = state.chunked[m]
        loss.backward(self._logits_of(stage, m, True, bool(slot)), self._rows[stage], self._weight)
        if stage == self.shape.head_stages[-1]:
            state.gradients[m] = loss.take_gradient()
            if not (self.shape.tied and stage in self.shape.trained):
                del state.chunked[m]

    @property
    def _weight(self) -> float:
        """By which the gradient of a token's loss is multiplied."""
        return (self.loss_scale.scale if self.loss_scale else 1.0) / self._state.num_items

    def _backward(self, stage: str, m: int, operation: Operation) -> None:
        state, number = self._state, int(stage.partition(".")[2])
        state.gradient_slots[stage] = operation.slot
        if operation.keeps == Keeps.ALL:
            if operation.input_slot:
                state.activations[stage, m] = self.swap.take_input(operation.input_slot)
            hidden, output = state.graphs.pop((stage, m))
        elif operation.keeps == Keeps.PRODUCTS:
            kept = state.products.pop((stage, m))
            if operation.input_slot:
                kept.return_from(self.swap.take_input(operation.input_slot))
            with replayed(kept.products, kept.hidden.shape[-1]):
                hidden, output = self._run_block(stage, number, m, kept.hidden)
            del kept  # what backward does not need goes now
        else:
            if operation.input_slot:
                hidden = self.swap.take_input(operation.input_slot)
            else:
                hidden = state.inputs.pop((stage, m))
            hidden, output = self._run_block(stage, number, m, hidden)
        torch.autograd.backward(output, state.gradients.pop(m))
        state.activations.pop((stage, m), None)
        if hidden.requires_grad:
            assert hidden.grad is not None
            state.gradients[m] = hidden.grad

    def _entry_backward(self, m: int, slot: str) -> None:
        state = self._state
        entry, gradient = state.entries.pop(m), state.gradients.pop(m, None)
        if not entry.hidden.requires_grad:
            return
        torch.autograd.backward(entry.hidden, gradient)
        if entry.rows.grad is None:
            return
        gradient = entry.rows.grad
        if self.blocks.padding_row is not None:
            gradient[entry.ids == self.blocks.padding_row] = 0
        if m in state.token_rows:
            state.token_rows[m].gradient = gradient
            return
        state.gradient_slots[EMBED] = slot
        self._started(EMBED, slot).index_add_(0, entry.ids, gradient.float())

    def _rows_backward(self, stage: str, m: int, slot: str) -> None:
        state, rows = self._state, self._rows[stage]
        state.gradient_slots[stage] = slot
        if self.shape.tied:
            logits_of = self._logits_of(stage, m, False, True)
            state.chunked[m].backward(logits_of, rows, self._weight, to_hidden=False)
        if state.token_rows[m].gradient is not None:
            state.token_rows[m].add_gradient(self._started(stage, slot), rows)
        if stage == self.shape.embed_stages[0]:  # the last one
            state.token_rows.pop(m)
            state.chunked.pop(m, None)

    def _started(self, stage: str, slot: str) -> torch.Tensor:
        """Return the sum of the gradients of the embedding, or of a chunk of its rows: zeros if nothing was added yet."""
        part, index = self._embedding_parts[stage]
        target = self._gradient_of(part, index, slot)
        if not self._state.update.present[part.name][index]:
            target.zero_()
            self._state.update.present[part.name][index] = True
        return target

    def _clip(self) -> None:
        state = self._state
        scale = self.loss_scale.scale if self.loss_scale else 1.0
        state.norm = math.sqrt(math.fsum(state.squares.values())) / scale
        state.update.scale = clip_coefficient(state.norm, self._max_grad_norm) / scale

    # Other lanes

    def _update(self, operation: Operation) -> None:
        stage, update = operation.stage, self._state.update
        if stage in self.shape.deferred and not operation.speculative:
            assert self._pending is not None
            update = self._pending
        try:
            self.adam.update(
                stage, operation.piece, operation.slot, update.present,
                weight_slot=operation.weight_slot, gradient_slot=operation.gradient_slot,
                lr=update.learning_rate, scale=1.0 if operation.speculative else update.scale,
                speculative=operation.speculative,
            )  # fmt: skip
        except SsdtuneError as error:
            if not operation.speculative:
                raise
            self._state.wrong = self._state.wrong or error

    def _collect(self, stage: str, slot: str) -> None:
        state = self._state
        total, wrong = 0.0, []
        for part in self.blocks.layout.stages[stage].parts:
            if part.trained:
                host, on_device = self.swap.gradient(part, slot)
                self.device.download(on_device, host, state.computed[stage]).wait()
                for index, spec in enumerate(part.tensors):
                    if state.update.present[part.name][index]:
                        squares = sum_of_squares(part.view(host, spec).view(-1))
                        total += squares
                        if not math.isfinite(squares):
                            wrong.append((spec.name, squares))
        first = not state.squares  # all losses are there before the first gradient
        if wrong or (first and not all(math.isfinite(loss) for loss in state.losses)):
            self._watch.notice(stage, wrong)
        state.squares[stage] = total


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


def model_inputs(batch: Batch, where: torch.device) -> dict[str, torch.Tensor]:
    """Return what a model's forward takes of a batch, [B, S] each."""
    inputs = {"input_ids": torch.from_numpy(batch.input_ids).to(where)}
    if batch.position_ids is not None:
        # Positions that start again tell transformers where a packed row begins; it masks accordingly.
        inputs["position_ids"] = torch.from_numpy(batch.position_ids).to(where)
    else:
        inputs["attention_mask"] = torch.from_numpy(batch.attention_mask).to(where)
    return inputs


def make_step_shape(
    layout: ModelLayout,
    plan: MemoryPlan,
    pieces: Mapping[str, Sequence[PartPiece]],
    compute: ComputeSize,
    precision: Precision,
) -> StepShape:
    """Return the shape of a step for the generator, from the model's layout and the memory plan.

    Args:
        pieces: What is updated at once, by stage (`ssdtune.swap.update.pieces_of`).
        compute: What block inputs and activations take.
        precision: Which states trained parts have.
    """
    return StepShape(
        num_blocks=layout.num_blocks,
        num_micro_batches=1,
        tied=layout.tied,
        embed_chunks=len(layout.embed_stages),
        head_chunks=len(layout.head_stages),
        stages={
            name: stage_shape(stage, plan, pieces.get(name, ()), precision)
            for name, stage in layout.stages.items()
        },
        block_slots=plan.block_slots,
        gradient_slots=plan.gradient_slots,
        device_gradient_slots=plan.device_gradient_slots,
        input_slots=plan.input_slots,
        swapped=plan.swapped,
        inputs_stay=plan.inputs_stay,
        chunk_slots=plan.chunk_slots,
        kept=plan.kept,
        partly=plan.partly,
        deferred=plan.deferred,
        speculative=plan.speculative,
        gradients_on_ssd=plan.gradients_on_ssd,
        input_bytes=compute.input_bytes,
        kept_bytes=compute.kept_bytes,
        products_bytes=compute.products_bytes,
    )


def stage_shape(
    stage: Stage, plan: MemoryPlan, pieces: Sequence[PartPiece], precision: Precision
) -> StageShape:
    """Return the sizes of a stage, from the pieces in which it is updated."""
    streamed = [part for part in stage.parts if part.name not in plan.resident]
    return StageShape(
        load_bytes=sum(part.weight_bytes for part in streamed),
        frozen_bytes=sum(part.weight_bytes for part in streamed if not part.trained),
        upload_bytes=sum(part.weight_bytes for part in stage.parts),
        pieces=tuple(
            Piece(
                numel=(numel := piece.stop - piece.start),
                weight_bytes=numel * piece.part.dtype.itemsize,
                state_bytes=sum(
                    state.nbytes(numel)
                    for name, state in precision.states(piece.part).items()
                    if name != "weights"
                ),
                streamed=piece.streamed,
            )
            for piece in pieces
        ),
    )
