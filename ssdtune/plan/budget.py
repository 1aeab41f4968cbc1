"""How many bytes a run needs on the drives, moves in a step, and holds in memory. Plain numbers only.

Pure arithmetic on shapes: no files, no torch, no measured rates. What is counted is what a unit's states are
made of (see `docs/cost_model.md` for the formulas as tables). Which states stay in memory is decided in
`ssdtune.plan.residency` and handed in as `resident`; `ssdtune.plan.estimate` turns the figures into words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

EXTENT_ALIGNMENT = 4096
"""Every state of every unit lies on the drive in a multiple of this many bytes."""

STATE_KINDS = {
    "frozen": "weights",
    "weights": "weights",
    "low": "master",
    "exp_avg": "moments",
    "exp_avg_sq": "moments",
    "gradient": "gradients",
    "inputs": "activations",
}
"""What the metrics call the traffic of each state."""

Resident = Collection[tuple[str, str]]
"""Pairs (unit, state) that stay in memory and cause no traffic."""


@dataclass(frozen=True)
class UnitShape:
    """One unit (a block, the embedding, the head, the small weights outside).

    Attributes:
        name: Name of the unit.
        trained_elements: Elements of its flat trained array, gaps between tensors included.
        frozen_bytes: Bytes of its frozen weights as they are read from the original files.
        largest_tensor_elements: Elements of its largest tensor, trained or frozen.
        loads: Times that a step needs its weights: 2 for a block (forward, backward) and for a tied
            embedding (input, head), 1 for the others.
    """

    name: str
    trained_elements: int = 0
    frozen_bytes: int = 0
    largest_tensor_elements: int = 0
    loads: int = 2


@dataclass(frozen=True)
class ModelShape:
    """What a model's size depends on. Units whose name begins with "block." are the blocks."""

    units: tuple[UnitShape, ...]
    hidden_size: int
    num_blocks: int
    vocab_size: int

    @property
    def trained_elements(self) -> int:
        """Elements that the optimizer updates."""
        return sum(unit.trained_elements for unit in self.units)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of all frozen weights."""
        return sum(unit.frozen_bytes for unit in self.units)


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What a run's needs depend on besides the model.

    Attributes:
        method: "full" or "lora"; for words only, the units say what is trained.
        dtype: Compute precision: "bf16" or "fp32".
        micro_batch: Sequences in a micro-batch.
        sequence_length: Tokens of the longest sequence.
        num_micro_batches: Micro-batches of a step.
        update: "after" (once all gradients are known) or "overlap" (inside backward).
        gradients: Where complete gradients wait: "host" or "ssd". With "overlap" they don't wait.
        activations: Where block inputs wait for backward: "host" or "ssd".
        update_reads_weights: The update reads the weights again, instead of taking those that backward
            has just used.
        checkpoints_kept: Checkpoints on the drive at any time; 0 if none are written.
        export_bytes: Size of the files that the run leaves for others.
        num_steps: Optimizer steps of the run; `steps_per_epoch` of one pass over the rows.
        num_checkpoints: Checkpoints written during the run.
        block_slots, gradient_slots, input_slots: Buffers for blocks' weights, for gradients and for block
            inputs on their way to the drive.
        chunk_bytes: Bytes of one state that the optimizer holds at a time; `chunks` of them in flight.
        loss_tokens: Tokens whose logits exist at one time.
        block_activation_bytes: Most that one block's forward and backward on one micro-batch allocate.
    """

    method: str = "full"
    dtype: str = "bf16"
    micro_batch: int = 1
    sequence_length: int = 1024
    num_micro_batches: int = 1
    update: str = "after"
    gradients: str = "host"
    activations: str = "host"
    update_reads_weights: bool = True
    checkpoints_kept: int = 1
    export_bytes: int = 0
    num_steps: int = 1
    steps_per_epoch: float = 1.0
    num_checkpoints: int = 0
    block_slots: int = 2
    gradient_slots: int = 2
    input_slots: int = 2
    chunk_bytes: int = 16 << 20
    chunks: int = 3
    loss_tokens: int = 1024
    block_activation_bytes: int = 0

    def __post_init__(self) -> None:
        for name, choices in (
            ("update", ("after", "overlap")),
            ("gradients", ("host", "ssd")),
            ("activations", ("host", "ssd")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {choices}")

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in the compute precision."""
        return compute_bytes(self.dtype)

    @property
    def gradients_on_ssd(self) -> bool:
        """Gradients travel to the drive and back."""
        return self.update == "after" and self.gradients == "ssd"


@dataclass(frozen=True)
class DiskNeed:
    """Bytes on drives by purpose. All but `export` lie in the swap directories."""

    states: int
    checkpoints: int
    gradients: int
    activations: int
    export: int

    @property
    def swap_bytes(self) -> int:
        """Bytes in the swap directories."""
        return self.states + self.checkpoints + self.gradients + self.activations

    @property
    def total(self) -> int:
        """Bytes on all drives."""
        return self.swap_bytes + self.export


@dataclass(frozen=True)
class Traffic:
    """Bytes between drives and memory, by kind (see `STATE_KINDS`)."""

    read: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)

    @property
    def read_bytes(self) -> int:
        """Bytes read, all kinds."""
        return sum(self.read.values())

    @property
    def written_bytes(self) -> int:
        """Bytes written, all kinds."""
        return sum(self.written.values())


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of memory by purpose, without what stays there by choice (the resident states)."""

    weights: int
    gradients: int
    block_inputs: int
    hidden_states: int
    block_activations: int
    loss: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of all purposes; they can all be needed at the same time."""
        return sum(vars(self).values())


def compute_bytes(dtype: str) -> int:
    """Return the bytes of one element in a compute precision.

    Raises:
        ValueError: The precision is unknown.
    """
    sizes = {"bf16": 2, "fp32": 4}
    if dtype not in sizes:
        raise ValueError(f'unknown dtype "{dtype}"; there are {", ".join(sizes)}')
    return sizes[dtype]


def state_element_bytes(dtype: str) -> dict[str, int]:
    """Return the bytes per trained element of each state that is kept with versions: 12 in sum.

    In bf16 the master weight is split in two halves of 2 bytes; in fp32 the weights are the master.
    """
    weights = {"weights": 2, "low": 2} if compute_bytes(dtype) == 2 else {"weights": 4}
    return {**weights, "exp_avg": 4, "exp_avg_sq": 4}


def extent_bytes(num_bytes: int) -> int:
    """Return the room on the drive for a state of this size."""
    return -(-num_bytes // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT


def unit_state_bytes(unit: UnitShape, dtype: str) -> dict[str, int]:
    """Return the room on the drive of each versioned state of a unit; none for a frozen unit."""
    if not unit.trained_elements:
        return {}
    return {
        state: extent_bytes(unit.trained_elements * size)
        for state, size in state_element_bytes(dtype).items()
    }


def input_bytes(model: ModelShape, run: RunShape) -> int:
    """Return the bytes of one block's input for one micro-batch: tokens × hidden size × element."""
    return run.micro_batch * run.sequence_length * model.hidden_size * run.compute_bytes


def disk_need(model: ModelShape, run: RunShape) -> DiskNeed:
    """Return the room that a run needs on drives, from its first step to its end.

    A checkpoint freezes the places of the live states, and later steps write to others, so every
    checkpoint kept costs the states once more. Gradients and block inputs have no versions.
    """
    states = sum(sum(unit_state_bytes(unit, run.dtype).values()) for unit in model.units)
    gradients = sum(extent_bytes(4 * unit.trained_elements) for unit in model.units)
    inputs = extent_bytes(input_bytes(model, run)) * model.num_blocks * run.num_micro_batches
    return DiskNeed(
        states=states,
        checkpoints=states * run.checkpoints_kept,
        gradients=gradients if run.gradients_on_ssd else 0,
        activations=inputs if run.activations == "ssd" else 0,
        export=run.export_bytes,
    )


def step_traffic(model: ModelShape, run: RunShape, resident: Resident = ()) -> Traffic:
    """Return what one optimizer step reads and writes.

    Writes are exact. Reads are the most there can be: a unit whose weights still lie in a slot when they
    are needed again is not read again.

    Args:
        resident: Pairs (unit, state), with the states of `STATE_KINDS`, that stay in memory.
    """
    kept = _checked(resident)
    read = dict.fromkeys(STATE_KINDS.values(), 0)
    written = dict(read)

    def count(unit: str, state: str, num_bytes: int, reads: int, writes: int) -> None:
        if (unit, state) not in kept:
            read[STATE_KINDS[state]] += num_bytes * reads
            written[STATE_KINDS[state]] += num_bytes * writes

    for unit in model.units:
        count(unit.name, "frozen", unit.frozen_bytes, unit.loads, 0)
        for state, num_bytes in unit_state_bytes(unit, run.dtype).items():
            reads = unit.loads + run.update_reads_weights if state == "weights" else 1
            count(unit.name, state, num_bytes, reads, 1)
        if run.gradients_on_ssd:
            count(unit.name, "gradient", extent_bytes(4 * unit.trained_elements), 1, 1)
        if run.activations == "ssd" and unit.name.startswith("block."):
            size = extent_bytes(input_bytes(model, run)) * run.num_micro_batches
            count(unit.name, "inputs", size, 1, 1)
    return Traffic(read, written)


def run_written_bytes(model: ModelShape, run: RunShape, resident: Resident = ()) -> int:
    """Return what the whole run writes: its steps, resident states once per checkpoint, the export."""
    kept = _checked(resident)
    resident_bytes = sum(
        num_bytes
        for unit in model.units
        for state, num_bytes in unit_state_bytes(unit, run.dtype).items()
        if (unit.name, state) in kept
    )
    steps = step_traffic(model, run, resident).written_bytes * run.num_steps
    return steps + resident_bytes * run.num_checkpoints + run.export_bytes


def memory_need(model: ModelShape, run: RunShape) -> MemoryNeed:
    """Return the memory that a step needs whatever is cached.

    On a GPU the weights, block activations and loss are needed there, and the weights once more in host
    memory on their way; on a CPU there is one copy.
    """
    blocks = [unit for unit in model.units if unit.name.startswith("block.")]
    outer = [unit for unit in model.units if unit.name == "outer"]
    ends = [unit for unit in model.units if unit not in blocks and unit not in outer]

    def slots(sizes: Mapping[str, int], num_block_slots: int) -> int:
        largest = [max((sizes[u.name] for u in units), default=0) for units in (blocks, ends)]
        return largest[0] * num_block_slots + largest[1] + sum(sizes[unit.name] for unit in outer)

    weights = {u.name: u.trained_elements * run.compute_bytes + u.frozen_bytes for u in model.units}
    gradients = {unit.name: 4 * unit.trained_elements for unit in model.units}
    wait_in_memory = run.update == "after" and not run.gradients_on_ssd
    one_input = input_bytes(model, run)
    all_inputs = one_input * model.num_blocks * run.num_micro_batches
    tokens = run.micro_batch * run.sequence_length
    states = sum(state_element_bytes(run.dtype).values()) + 4  # and the gradient
    return MemoryNeed(
        weights=slots(weights, run.block_slots),
        gradients=sum(gradients.values())
        if wait_in_memory
        else slots(gradients, run.gradient_slots),
        block_inputs=one_input * run.input_slots if run.activations == "ssd" else all_inputs,
        # One for each micro-batch in forward, its gradient in backward.
        hidden_states=one_input * run.num_micro_batches,
        block_activations=run.block_activation_bytes,
        # fp32 logits, their softmax and their gradient.
        loss=3 * 4 * min(run.loss_tokens, tokens) * model.vocab_size,
        # chunk_bytes is the size of the largest state's piece, 4 bytes an element.
        optimizer=run.chunks * run.chunk_bytes * states // 4 if model.trained_elements else 0,
    )


def _checked(resident: Resident) -> frozenset[tuple[str, str]]:
    kept = frozenset(resident)
    if unknown := {state for _, state in kept} - STATE_KINDS.keys():
        raise ValueError(f"unknown states {sorted(unknown)}; there are {', '.join(STATE_KINDS)}")
    return kept
