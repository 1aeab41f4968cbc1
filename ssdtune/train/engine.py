"""The engine: carries out the operations of a step's schedule on the model, begins steps and settles what follows from them.

What lies where is the swap manager's business, what waits for what the schedule's. What is computed on the device is
`ssdtune.train.block_passes` and `ssdtune.train.end_passes`, what they share `ssdtune.train.run_state`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ssdtune.data.batches import Batch
from ssdtune.device.base import Device, Event, explained
from ssdtune.errors import SsdtuneError
from ssdtune.hardware.memory import KeptMemory
from ssdtune.model.blocks import BlockModel
from ssdtune.optim.adamw import sum_of_squares
from ssdtune.optim.loss_scale import LossScale
from ssdtune.optim.schedule import clip_coefficient
from ssdtune.plan.generate import (
    OUTER,
    StepShape,
    generate_evaluation,
    generate_flush,
    generate_training_step,
)
from ssdtune.plan.schedule import Kind, Lane, Operation, Schedule
from ssdtune.swap.manager import SwapManager
from ssdtune.swap.update import OutOfCoreAdam
from ssdtune.train.block_passes import BlockPasses
from ssdtune.train.device_times import real_spans
from ssdtune.train.end_passes import EndPasses
from ssdtune.train.lanes import Lanes, Span
from ssdtune.train.leaves import Leaves
from ssdtune.train.nonfinite import FiniteWatch, NotFinite
from ssdtune.train.run_state import RunState, Update, model_inputs
from ssdtune.train.speculation import Speculation
from ssdtune.train.token_rows import TokenRows


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
        self._events: dict[int, tuple[Event, Event]] = {}
        """Before and after operations of the compute lane, by their index."""
        self._state: RunState
        self._pending: Update | None = None
        leaves = Leaves(blocks.layout, swap, in_fp16=self.loss_scale is not None)
        self._block_passes = BlockPasses(blocks, swap, leaves, shape)
        self._end_passes = EndPasses(blocks, leaves, shape)

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
        return StepResult(
            state.loss, state.norm, clip_scale, num_items, spans, bool(shape.speculative), skipped,
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
        return state.loss, num_items

    def _begin(
        self,
        batches: Sequence[Batch],
        step: int,
        num_items: float,
        *,
        training: bool,
        learning_rate: float,
    ) -> RunState:
        self.blocks.train(training)
        self._watch.begin(batches)
        where = self.device.torch_device
        parts = self.blocks.layout.trained_parts
        present = {part.name: [False] * len(part.tensors) for part in parts}
        self._state = RunState(
            training=training,
            step=step,
            seed=self._seed,
            device=self.device,
            update=Update(learning_rate, present),
            batches=[model_inputs(batch, where) for batch in batches],
            labels=[torch.from_numpy(batch.labels).to(where) for batch in batches],
            num_items=num_items,
            loss_scale=self.loss_scale.scale if self.loss_scale else 1.0,
        )
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
        state = self._state
        stage, slot, m = operation.stage, operation.slot, operation.micro_batch
        begin = self.device.record() if operation.lane == Lane.COMPUTE else None
        match operation.kind:
            case Kind.LOAD:
                self.swap.load(stage, slot, with_trained=operation.with_weights)
            case Kind.UPLOAD:
                self.swap.upload(stage, slot)
                state.slot_of[stage] = slot
            case Kind.GATHER_ROWS:
                self._end_passes.gather_rows(state, stage, m)
            case Kind.ENTRY_FORWARD:
                self._end_passes.enter(state, m)
            case Kind.FORWARD:
                self._block_passes.forward(state, operation)
            case Kind.SAVE_INPUT:
                self.swap.inputs.save(stage, m, slot)
            case Kind.LOAD_INPUT:
                self.swap.inputs.load(stage, m, slot)
            case Kind.SCORE:
                self._end_passes.score(state, stage, m)
            case Kind.LOSS if len(self.shape.head_stages) > 1:
                self._end_passes.chunk_loss(state, stage, m, slot)
            case Kind.LOSS:
                self._end_passes.loss(state, stage, m, slot)
            case Kind.BACKWARD:
                self._block_passes.backward(state, operation)
            case Kind.ENTRY_BACKWARD:
                self._end_passes.enter_backward(state, m, slot)
            case Kind.ROWS_BACKWARD:
                self._end_passes.rows_backward(state, stage, m, slot)
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
            case Kind.UPDATE_ROWS:
                self._update_rows(operation)
            case Kind.SAVE_STATES:
                self.adam.save(
                    stage, operation.piece, slot, weight_slot=operation.weight_slot,
                    speculative=operation.speculative,
                )  # fmt: skip
        if operation.lane == Lane.COMPUTE and stage:
            self._look(operation)
            state.computed[stage] = state.computed[OUTER] = event = self.device.record()
            if begin:
                self._events[operation.index] = (begin, event)
            for used in (stage, OUTER):
                if used in state.slot_of:
                    self.swap.mark_used(state.slot_of[used], event)
            if operation.input_slot:
                self.swap.inputs.mark_used(operation.input_slot, event)
            if self._kept_memory:
                self._kept_memory.check()

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

    def _clip(self) -> None:
        state = self._state
        state.norm = math.sqrt(math.fsum(state.squares.values())) / state.loss_scale
        state.update.scale = clip_coefficient(state.norm, self._max_grad_norm) / state.loss_scale

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

    def _update_rows(self, operation: Operation) -> None:
        """Give the entry the rows that it needs as the pending update will leave them."""
        state, update, stage = self._state, self._pending, operation.stage
        assert update is not None
        found = self.adam.updated_rows(
            stage, self._end_passes.rows_needed(state, stage), operation.slot, update.present,
            gradient_slot=operation.gradient_slot, lr=update.learning_rate, scale=update.scale,
        )  # fmt: skip
        for numbers, rows in found:
            self._end_passes.take_rows(state, stage, numbers, rows)

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
