"""What a step costs in bytes and FLOP: per model, per block, and per operation of a schedule.

Shape numbers in, plain numbers out; no rates, no torch. `work_of` prices the schedules that
`ssdtune.plan.generate` writes and the engine runs; `ssdtune.plan.peers` prices those of other systems with the
same figures. Seconds are `ssdtune.plan.hardware`'s.

Letters: T tokens of a step, S sequence length, D hidden size, L blocks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ssdtune.plan.generate import (
    EMBED,
    HEAD,
    OUTER,
    Piece,
    StageShape,
    StepShape,
    block_stage,
    gradient_slot,
)
from ssdtune.plan.hardware import Work
from ssdtune.plan.schedule import Keeps, Kind, Lane, Operation, Schedule
from ssdtune.plan.times import ComputeTimes
from ssdtune.units import KIB

REST_SHARE = 0.3
"""Time of what is neither matrix product nor attention in units of a block's forward pass: measured 0.25 to 0.5 on a CPU in
bf16 (docs/benchmarks.md). Rehearsals measure it for the run."""
ADAM_DRAM_BYTES = 28
"""Host memory traffic of AdamW per element: master and moments in and out (24), gradient in (4)."""
DIFFERENT_TOKENS, DIFFERENT_EXPONENT = 10, 0.6
"""So many times the tokens of a step to the power of that are different: Heaps' law, for text."""
SCATTERED_BYTES = 64 * KIB
"""What a small read takes on top of its bytes, in bytes of large ones: to begin it costs more than the drive does."""
MATRICES_PER_BLOCK = 4
"""Transfers that a state of a block takes where matrices travel one by one: qkv, projection, two of the MLP."""

AMOUNTS = (
    "read_bytes",
    "write_bytes",
    "source_bytes",
    "activation_bytes",
    "requests",
    "h2d_bytes",
    "d2h_bytes",
    "flop",
    "compute_s",
    "dram_bytes",
    "copied_bytes",
    "aside_bytes",
    "adam_elements",
)
"""Fields of `Work` that are proportional to the work."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Numbers that describe a decoder.

    Attributes:
        block_parameters: Of one block, all experts included.
        active_block_parameters: Of one block, those that a token passes; None for all.
        embedding_parameters: Of the input embedding with positions.
        head_parameters: Of the output matrix, tied or not.
        tied: Embedding and head are one.
    """

    num_blocks: int
    hidden: int
    block_parameters: int
    active_block_parameters: int | None = None
    embedding_parameters: int = 0
    head_parameters: int = 0
    tied: bool = True

    @classmethod
    def gpt(
        cls, num_blocks: int, hidden: int, *, vocabulary: int = 50257, positions: int = 1024
    ) -> ModelShape:
        """Return a GPT-2 style model: 12 D² + 13 D parameters a block, tied embedding."""
        return cls(
            num_blocks=num_blocks,
            hidden=hidden,
            block_parameters=12 * hidden**2 + 13 * hidden,
            embedding_parameters=(vocabulary + positions) * hidden,
            head_parameters=vocabulary * hidden,
        )

    @property
    def active(self) -> int:
        """Parameters of a block that a token passes."""
        return self.active_block_parameters or self.block_parameters

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        ends = self.embedding_parameters + (0 if self.tied else self.head_parameters)
        return self.num_blocks * self.block_parameters + ends

    def stage_parameters(self, stage: str) -> int:
        """Return the parameters of a stage (`block.N`, `embed`, `head`; small weights count with blocks)."""
        if stage == EMBED:
            return self.embedding_parameters
        if stage == HEAD:
            return self.head_parameters
        return 0 if stage == OUTER else self.block_parameters


@dataclass(frozen=True, kw_only=True)
class TrainingShape:
    """How a model is trained.

    Attributes:
        tokens: Of a step, all micro-batches together.
        sequence: Tokens of a sequence.
        micro_batches: Parts into which the step's tokens are divided.
        weight_bytes: Of a weight in compute precision, and of an element of a hidden state.
        gradient_bytes: Of a gradient element that leaves the device.
        split_master: The master weight is the compute weight and its lower half.
        adapter_parameters: Trained parameters of a block with LoRA; 0 for full fine-tuning.
        swap_bytes: Activations of a step that leave the device, at least block inputs, whatever the schedule moves; None
            for what it moves.
        swap_to_ssd_bytes: The part of them that goes on to the drives.
        skips_last_matrix: Recomputation ends before the block's last matrix product, whose result nobody needs.
        backward_slowness: Time of a FLOP of backward in units of one of forward.
        activation_bytes: What blocks keep in a step if they aren't run again, where that was counted.
        product_bytes: The same if they keep only their input and the results of matrix products and attention.
    """

    tokens: int
    sequence: int
    micro_batches: int = 1
    weight_bytes: int = 2
    gradient_bytes: int = 4
    split_master: bool = True
    adapter_parameters: int = 0
    swap_bytes: float | None = None
    swap_to_ssd_bytes: float = 0.0
    skips_last_matrix: bool = False
    backward_slowness: float = 1.0
    activation_bytes: float | None = None
    product_bytes: float | None = None


@dataclass(frozen=True)
class Ledger:
    """A model in training: what its pieces cost.

    Attributes:
        times: Seconds of computing, where they were measured; else it is counted in FLOP.
    """

    model: ModelShape
    training: TrainingShape
    times: ComputeTimes | None = None

    @property
    def input_bytes(self) -> float:
        """Inputs of all blocks for all tokens: the least that must be kept."""
        t = self.training
        return t.weight_bytes * t.tokens * self.model.hidden * self.model.num_blocks

    @property
    def all_activation_bytes(self) -> float:
        """All that a block needs for its backward pass without recomputation: 16 hidden states.

        Two norms, qkv (3), attention, projection, the MLP's inner layer before and after its activation
        (4 each), and the block's result.
        """
        counted = self.training.activation_bytes
        return 16 * self.input_bytes if counted is None else counted

    @property
    def all_product_bytes(self) -> float:
        """What of that are inputs, matrix products and attention: 11 hidden states."""
        counted = self.training.product_bytes
        return 11 * self.input_bytes if counted is None else counted

    @property
    def swap_bytes(self) -> float:
        """Activations that leave the device in a step, at least the blocks' inputs, at most all."""
        wanted = self.training.swap_bytes
        return min(max(wanted or 0.0, self.input_bytes), self.all_activation_bytes)

    @property
    def block_forward_flop(self) -> float:
        """Of one block for all tokens: two per active parameter, and attention over the whole square."""
        t = self.training
        return t.tokens * (2.0 * self.model.active + 4.0 * t.sequence * self.model.hidden)

    @property
    def forward_flop(self) -> float:
        """Of the whole model, F."""
        head = 2.0 * self.model.head_parameters * self.training.tokens
        return self.model.num_blocks * self.block_forward_flop + head

    @property
    def recompute_share(self) -> float:
        """Share r of a block's forward FLOP done again in backward.

        The block's input is kept in any case. What else is kept is taken in decreasing FLOP per byte:
        results of attention (2·S per byte in bf16) or of matrices (D), whichever is worth more. What is
        neither (norms, GELU) is cheap to make again and comes last.
        """
        model, t = self.model, self.training
        matrices = 2.0 * model.active
        attention = 4.0 * t.sequence * model.hidden
        whole = matrices + attention
        last = matrices / 3  # the MLP's second matrix: 4 of a block's 12 D² parameters
        unit = t.weight_bytes * model.hidden
        again = whole - (last if t.skips_last_matrix else 0.0)
        kept = (self.swap_bytes - self.input_bytes) / (t.tokens * model.num_blocks)
        # qkv 3, projection 1, first matrix of the MLP 4 hidden states; attention 1
        items = [(matrices * 2 / 3, 8 * unit), (attention, unit)]
        if not t.skips_last_matrix:
            items.append((last, unit))
        for flop, size in sorted(items, key=lambda item: item[0] / item[1], reverse=True):
            share = min(1.0, kept / size)
            again -= share * flop
            kept -= share * size
        return max(0.0, again / whole)

    @property
    def backward_share(self) -> float:
        """Backward FLOP of a block in units of its forward: 2, with frozen weights 1 (and the adapter)."""
        if not self.training.adapter_parameters:
            return 2.0
        return 1.0 + 2.0 * self.training.adapter_parameters / self.model.active

    def trained(self, stage: str) -> int:
        """Return the trained parameters of a stage."""
        adapter = self.training.adapter_parameters
        if adapter:
            return adapter if stage.startswith("block.") else 0
        return self.model.stage_parameters(stage)

    def forward(self) -> Work:
        """Return one block's forward pass for all tokens, swapped activations on their way out."""
        blocks = self.model.num_blocks
        return Work(
            flop=self.block_forward_flop,
            d2h_bytes=self.swap_bytes / blocks,
            write_bytes=self.training.swap_to_ssd_bytes / blocks,
        )

    def kept_bytes(self, keeps: Keeps, share: float) -> int:
        """Return what waits for the backward pass of one block and a share of the tokens."""
        match keeps:
            case Keeps.ALL:
                whole = self.all_activation_bytes
            case Keeps.PRODUCTS:
                whole = self.all_product_bytes
            case _:
                whole = self.input_bytes
        return int(whole / self.model.num_blocks * share)

    def backward(self, keeps: Keeps = Keeps.INPUT) -> Work:
        """Return one block's backward pass for all tokens, swapped activations included.

        FLOP are those of forward that take as long.

        Args:
            keeps: What of a block is not computed again.
        """
        blocks = self.model.num_blocks
        share = self.backward_share * self.training.backward_slowness
        share += {Keeps.INPUT: self.recompute_share, Keeps.PRODUCTS: REST_SHARE, Keeps.ALL: 0.0}[
            keeps
        ]
        return Work(
            flop=share * self.block_forward_flop,
            h2d_bytes=self.swap_bytes / blocks,
            read_bytes=self.training.swap_to_ssd_bytes / blocks,
        )

    def loss(self) -> Work:
        """Return head and loss for all tokens, forward and backward."""
        share = 1.0 if self.training.adapter_parameters else 2.0
        return self._head(forward=1, backward=share)

    def _head(self, *, forward: int, backward: float) -> Work:
        """Return products with the head for all tokens: forward ones, and backward ones, which take longer."""
        share = forward + backward * self.training.backward_slowness
        return Work(flop=share * 2.0 * self.model.head_parameters * self.training.tokens)

    def chunk(self, kind: Kind, chunks: int) -> Work:
        """Return what a chunk of a divided head takes for all tokens in one of its passes."""
        # The losses are forward only; a tied matrix's own gradient comes in the last pass.
        own = 0 if self.training.adapter_parameters or self.model.tied else 1
        backward = {Kind.SCORE: 0, Kind.LOSS: 1 + own, Kind.ROWS_BACKWARD: 1}[kind]
        return scaled(self._head(forward=1, backward=backward), 1 / chunks)

    def update(self, elements: float, *, read: float, write: float, requests: float) -> Work:
        """Return AdamW over so many elements that reads and writes so many bytes of each."""
        return Work(
            read_bytes=read * elements,
            write_bytes=write * elements,
            requests=requests,
            adam_elements=elements,
            dram_bytes=ADAM_DRAM_BYTES * elements,
        )

    def updated_rows(self, stage: StageShape, chunks: int, *, with_gradient: bool) -> Work:
        """Return the update of the rows that a step needs of a chunk of the embedding.

        Args:
            with_gradient: It is read too.
        """
        tokens = self.training.tokens
        rows = min(tokens, DIFFERENT_TOKENS * tokens**DIFFERENT_EXPONENT) / chunks
        elements = min(rows * self.model.hidden, stage.trained_numel)
        states = sum(piece.weight_bytes + piece.state_bytes for piece in stage.pieces)
        size = elements * (states / stage.trained_numel + 4 * with_gradient)
        reads = 3 + self.training.split_master + with_gradient
        whole = states + 4 * with_gradient * stage.trained_numel
        return Work(
            read_bytes=min(size + rows * reads * SCATTERED_BYTES, whole),
            adam_elements=elements,
            dram_bytes=ADAM_DRAM_BYTES * elements,
        )

    def stages(self, resident: Collection[str] = (), pieces: int = 1) -> dict[str, StageShape]:
        """Return the stages' sizes for the generator of schedules.

        Args:
            resident: Stages whose weights and states stay in host memory.
            pieces: Pieces in which a stage's states are updated.
        """
        t = self.training
        found = {}
        for name in (
            OUTER, EMBED, *(block_stage(n) for n in range(self.model.num_blocks)),
            *([] if self.model.tied else [HEAD]),
        ):  # fmt: skip
            weights, streamed = self.model.stage_parameters(name), name not in resident
            trained = self.trained(name)
            load = t.weight_bytes * weights if streamed else 0
            states = 10 if t.split_master else 8
            piece = Piece(
                trained // pieces,
                t.weight_bytes * trained // pieces,
                states * trained // pieces,
                streamed,
            )
            # An adapter comes beside the weights and is no part of `stage_parameters`.
            frozen = load if t.adapter_parameters else 0
            found[name] = StageShape(
                load, frozen, t.weight_bytes * weights, (piece,) * pieces if trained else ()
            )
        return found


def scaled(work: Work, share: float) -> Work:
    """Return a share of the work; memory is not scaled."""
    return replace(work, **{name: getattr(work, name) * share for name in AMOUNTS})


def work_of(
    schedule: Schedule, shape: StepShape, ledger: Ledger, *, requests_per_state: float = 0
) -> list[Work]:
    """Return the work of each operation of a schedule that `ssdtune.plan.generate` wrote.

    Args:
        shape: What the schedule was written for.
        requests_per_state: Transfers that one state of a stage takes.
    """
    # Blocks, pieces and micro-batches are alike: few operations differ.
    known: dict[tuple[object, ...], Work] = {}
    alike: dict[str, int] = {}
    numbers: dict[tuple[StageShape, bool, bool], int] = {}
    for stage in {operation.stage for operation in schedule.operations}:
        sizes = (shape.stage(stage), gradient_slot(shape, stage) != "", stage in shape.in_host)
        alike[stage] = numbers.setdefault(sizes, len(numbers))
    found = []
    for op in schedule.operations:
        key = (
            op.kind, alike[op.stage], op.num_bytes, op.num_elements, op.micro_batch > 0, op.keeps,
            op.with_weights, op.input_slot == "", op.gradient_slot == "",
        )  # fmt: skip
        if key not in known:
            known[key] = _timed(_work(op, shape, ledger, requests_per_state), op, shape, ledger)
        found.append(known[key])
    return found


def _timed(work: Work, operation: Operation, shape: StepShape, ledger: Ledger) -> Work:
    """Return the work of computing as measured seconds instead of FLOP and bytes, where there are any."""
    seconds = ledger.times.of(operation) if ledger.times else None
    if seconds is None:
        return work
    # What leaves for SSD is copied besides.
    leaves = 0
    if operation.keeps != Keeps.INPUT and operation.input_slot:
        leaves = 2 * shape.waiting_bytes(operation.keeps)
    return replace(work, flop=0, compute_s=seconds, copied_bytes=leaves)


def _work(operation: Operation, shape: StepShape, ledger: Ledger, requests: float) -> Work:
    training, stage = ledger.training, shape.stage(operation.stage)
    micro, moved = 1 / training.micro_batches, operation.num_bytes
    gradient = training.gradient_bytes * stage.trained_numel
    waits = gradient_slot(shape, operation.stage) != ""
    states = requests / max(1, len(stage.pieces))
    match operation.kind:
        case Kind.LOAD:
            # Frozen weights come from the model's own files, where nothing is aligned: read aside, then copied, unless they go
            # straight to a card.
            source = min(moved, stage.frozen_bytes)
            straight = min(source, stage.straight_bytes)
            return Work(
                read_bytes=moved,
                source_bytes=source,
                requests=requests if moved else 0,
                h2d_bytes=straight,
                aside_bytes=source - straight,
            )
        case Kind.UPLOAD:
            return Work(h2d_bytes=stage.upload_bytes)
        case Kind.FORWARD:
            return replace(
                scaled(ledger.forward(), micro),
                d2h_bytes=_crossing_bytes(operation, shape, ledger),
                acquires_bytes=_held_bytes(operation, shape, ledger),
            )
        case Kind.BACKWARD:
            return replace(
                scaled(ledger.backward(operation.keeps), micro),
                h2d_bytes=_crossing_bytes(operation, shape, ledger),
                releases_bytes=_held_bytes(operation, shape, ledger),
                copied_bytes=_added_bytes(operation, stage, training),
            )
        case Kind.SAVE_INPUT if operation.lane == Lane.D2H:
            return Work(d2h_bytes=moved)
        case Kind.LOAD_INPUT if operation.lane == Lane.H2D:
            return Work(h2d_bytes=moved)
        case Kind.SAVE_INPUT:
            return Work(write_bytes=moved, activation_bytes=moved, requests=1)
        case Kind.LOAD_INPUT:
            return Work(read_bytes=moved, activation_bytes=moved, requests=1)
        case Kind.ROWS_BACKWARD if not shape.tied:
            zeros = 0 if operation.micro_batch else 4 * stage.trained_numel
            return Work(copied_bytes=zeros)  # the sum begins with zeros
        case Kind.SCORE | Kind.LOSS | Kind.ROWS_BACKWARD if len(shape.head_stages) > 1:
            added = _added_bytes(operation, stage, training) if operation.slot else 0
            work = ledger.chunk(operation.kind, len(shape.head_stages))
            return replace(scaled(work, micro), copied_bytes=added)
        case Kind.LOSS:
            added = _added_bytes(operation, stage, training)
            return replace(scaled(ledger.loss(), micro), copied_bytes=added)
        case Kind.ENTRY_BACKWARD if not ledger.model.tied and not operation.micro_batch:
            return Work(copied_bytes=4 * stage.trained_numel)  # the sum begins with zeros
        case Kind.COLLECT_GRADIENT:
            return Work(
                d2h_bytes=gradient,
                copied_bytes=gradient,  # their squares are summed up
                acquires_bytes=(("host", gradient),) if waits else (),
            )
        case Kind.SAVE_GRADIENT:
            return Work(write_bytes=moved, requests=requests)
        case Kind.LOAD_STATES:
            count = (
                2 + training.split_master + operation.with_weights + (not operation.gradient_slot)
            )
            return Work(read_bytes=moved, requests=count * states)
        case Kind.UPDATE:
            elements = operation.num_elements
            return Work(
                adam_elements=elements,
                dram_bytes=ADAM_DRAM_BYTES * elements,
                releases_bytes=(("host", gradient // len(stage.pieces)),) if waits else (),
            )
        case Kind.UPDATE_ROWS:
            chunks, reads = len(shape.embed_stages), not operation.gradient_slot
            return ledger.updated_rows(stage, chunks, with_gradient=reads)
        case Kind.SAVE_STATES:
            return Work(write_bytes=moved, requests=(3 + training.split_master) * states)
        case _:
            return Work()


def _crossing_bytes(operation: Operation, shape: StepShape, ledger: Ledger) -> float:
    """Return what of a block crosses the link within computing, there or back."""
    training = ledger.training
    if training.swap_bytes is not None:
        return ledger.swap_bytes / ledger.model.num_blocks / training.micro_batches
    # What waits in host memory crosses in operations of its own.
    if not operation.input_slot or operation.stage in shape.in_host:
        return 0.0
    return ledger.kept_bytes(operation.keeps, 1 / training.micro_batches)


def _held_bytes(
    operation: Operation, shape: StepShape, ledger: Ledger
) -> tuple[tuple[str, int], ...]:
    """Return the memory that what a block needs for its backward pass takes until then; on SSD none."""
    if operation.input_slot and operation.stage not in shape.in_host:
        return ()
    return (("host", ledger.kept_bytes(operation.keeps, 1 / ledger.training.micro_batches)),)


def _added_bytes(operation: Operation, stage: StageShape, training: TrainingShape) -> float:
    """Return what adding a micro-batch's gradient to the sum reads and writes; the first one is copied."""
    per_element = training.weight_bytes + (8 if operation.micro_batch else 4)
    return per_element * stage.trained_numel
