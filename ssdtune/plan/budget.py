"""How many bytes a run needs on the drives, and how many it moves in a step. Plain numbers only.

Pure arithmetic on the sizes of parts: no files, no torch, no measured rates; `docs/cost_model.md` has the
formulas as tables. Memory, and what stays in it, is `ssdtune.plan.residency`'s; `ssdtune.plan.estimate` turns
the figures into words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ssdtune.plan.generate import EMBED, HEAD
from ssdtune.plan.residency import PartSize
from ssdtune.plan.states import GRADIENT, STATE_KINDS, extent_bytes


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What a run's needs depend on besides the parts.

    Attributes:
        stored_inputs: Blocks whose input goes to SSD and back.
        swapped_bytes: What goes to SSD of all blocks' activations for one micro-batch.
        num_micro_batches: Micro-batches of a step.
        input_bytes: One block's input for one micro-batch: sequences × length × hidden size × element.
        step_inputs_bytes: One block's inputs for all micro-batches of a mean step; None for the longest.
        deferred: Stages that are updated at the beginning of the next step; before a save they are updated first.
        gradients_on_ssd: Those of them whose gradient waits on SSD.
        speculative: Those of them that are updated at once all the same; only clipped steps defer them.
        clipped_share: Share of the steps that are taken to be clipped after speculating: the most there can be.
        checkpoints_kept: Checkpoints on the drives at any time; 0 if none are made.
        export_bytes: Size of the files that the run leaves for others.
        num_steps: Optimizer steps of the run; `steps_per_epoch` of one pass over the rows, None if unknown.
        num_checkpoints: Checkpoints made during the run.
    """

    stored_inputs: int = 0
    swapped_bytes: int = 0
    num_micro_batches: int = 1
    input_bytes: int = 0
    step_inputs_bytes: int | None = None
    deferred: frozenset[str] = frozenset()
    gradients_on_ssd: frozenset[str] = frozenset()
    speculative: frozenset[str] = frozenset()
    clipped_share: float = 0.0
    checkpoints_kept: int = 1
    export_bytes: int = 0
    num_steps: int = 1
    steps_per_epoch: float | None = 1.0
    num_checkpoints: int = 0

    @property
    def speculates(self) -> bool:
        """Say whether states are written beside the live ones."""
        return bool(self.speculative)


@dataclass(frozen=True)
class DiskNeed:
    """Bytes on drives by purpose. All but `export` lie in the swap directories."""

    states: int
    checkpoints: int
    speculation: int
    gradients: int
    activations: int
    export: int

    @property
    def swap_bytes(self) -> int:
        """Bytes in the swap directories."""
        states = self.states + self.checkpoints + self.speculation
        return states + self.gradients + self.activations

    @property
    def total(self) -> int:
        """Bytes on all drives."""
        return self.swap_bytes + self.export


@dataclass(frozen=True)
class Traffic:
    """Bytes between drives and memory, by kind (see `STATE_KINDS`)."""

    read: Mapping[str, int]
    written: Mapping[str, int]

    @property
    def read_bytes(self) -> int:
        """Bytes read, all kinds."""
        return sum(self.read.values())

    @property
    def written_bytes(self) -> int:
        """Bytes written, all kinds."""
        return sum(self.written.values())


def state_bytes(part: PartSize) -> dict[str, int]:
    """Return the room on the drive of each versioned state of a part; none for a frozen one.

    12 bytes per element: a split master is two halves of 2 bytes, a whole one 4, and each moment is 4. Without
    masters 10, with moments of 8 bits 6 less.
    """
    return {state.name: state.nbytes(part.numel) for state in part.states}


def disk_need(parts: Sequence[PartSize], run: RunShape) -> DiskNeed:
    """Return the room that a run needs on drives, from its first step to its end.

    A checkpoint freezes the places of the live states, and later steps write to others, so every
    checkpoint kept costs the states once more. Speculative updates leave the live states alone, which costs them
    once more too. Gradients and block inputs have no versions. Frozen weights
    are read from the original files and need no room.
    """
    states = sum(sum(state_bytes(part).values()) for part in parts)
    return DiskNeed(
        states=states,
        checkpoints=states * run.checkpoints_kept,
        speculation=states * run.speculates,
        gradients=_gradient_bytes(parts, run.gradients_on_ssd),
        activations=_inputs_bytes(run),
        export=run.export_bytes,
    )


def step_traffic(
    parts: Sequence[PartSize], run: RunShape, resident: Collection[str] = ()
) -> Traffic:
    """Return what one optimizer step reads and writes.

    Writes are exact where nothing is clipped after speculating (`rewritten_bytes`). Reads are the most there can be:
    weights that still lie in a slot when they are needed again are not read again. The update works on the weights where
    they lie for forward or backward.

    Args:
        resident: Names of parts whose weights and states stay in memory.
    """
    read = dict.fromkeys(STATE_KINDS.values(), 0)
    written = dict(read)
    tied = all(part.stage.partition(".")[0] != HEAD for part in parts)
    for part in parts:
        if part.name in resident:
            continue
        loads = _loads(part, tied)
        if not part.trained:
            read["weights"] += part.weight_bytes * loads
        for state, num_bytes in state_bytes(part).items():
            reads = loads if state == "weights" else 1
            read[STATE_KINDS[state]] += num_bytes * reads
            written[STATE_KINDS[state]] += num_bytes
    inputs = _inputs_bytes(run)
    if inputs and run.step_inputs_bytes is not None and not run.swapped_bytes:
        inputs = run.step_inputs_bytes * run.stored_inputs
    read["gradients"] += _gradient_bytes(parts, run.gradients_on_ssd - run.speculative)
    written["gradients"] += _gradient_bytes(parts, run.gradients_on_ssd)
    read["activations"] += inputs
    written["activations"] += inputs
    return Traffic(read, written)


def rewritten_bytes(
    parts: Sequence[PartSize], run: RunShape, resident: Collection[str] = ()
) -> int:
    """Return what a step writes once more if it is clipped after speculating: the states of all that was updated."""
    speculated = [p for p in parts if p.stage in run.speculative and p.name not in resident]
    return sum(sum(state_bytes(part).values()) for part in speculated)


def mean_written_bytes(
    parts: Sequence[PartSize], run: RunShape, resident: Collection[str] = ()
) -> int:
    """Return what a step writes in the mean, with as many clipped steps as there can be."""
    again = run.clipped_share * rewritten_bytes(parts, run, resident)
    return step_traffic(parts, run, resident).written_bytes + round(again)


def _loads(part: PartSize, tied: bool) -> int:
    """Return how often a step needs a part's weights."""
    name, divided, _ = part.stage.partition(".")
    if name == "block":
        return 2
    head = 2 if divided else 1  # for the losses, and for their gradients
    if name == HEAD:
        return head
    if name == EMBED and tied:  # a divided one once more, when its own gradient is complete
        return 1 + head + (bool(divided) and part.trained)
    return 1


def save_traffic(
    parts: Sequence[PartSize], run: RunShape, resident: Collection[str] = ()
) -> Traffic:
    """Return what a save reads and writes: the states in memory, and before that the updates that wait.

    The updates of streamed parts are those that the next step would begin with otherwise, so only the first is
    written on top of what the steps write.
    """
    read = dict.fromkeys(STATE_KINDS.values(), 0)
    written = dict(read)
    for part in parts:
        in_memory = part.name in resident
        if not in_memory and part.stage not in run.deferred - run.speculative:
            continue
        for state, num_bytes in state_bytes(part).items():
            written[STATE_KINDS[state]] += num_bytes
            if not in_memory:
                read[STATE_KINDS[state]] += num_bytes
    read["gradients"] += _gradient_bytes(parts, run.gradients_on_ssd - run.speculative)
    return Traffic(read, written)


def run_written_bytes(
    parts: Sequence[PartSize], run: RunShape, resident: Collection[str] = ()
) -> int:
    """Return what the whole run writes.

    That is the first weights of streamed parts, the steps, resident states once per checkpoint, the export.
    """
    kept, first = 0, 0
    for part in parts:
        states = state_bytes(part)
        if part.name in resident:
            kept += sum(states.values())
        else:
            first += states.get("weights", 0) + states.get("low", 0)
    steps = mean_written_bytes(parts, run, resident) * run.num_steps
    return first + steps + kept * run.num_checkpoints + run.export_bytes


def _gradient_bytes(parts: Sequence[PartSize], stages: Collection[str]) -> int:
    waiting = [part for part in parts if part.trained and part.stage in stages]
    return sum(GRADIENT.nbytes(part.numel) for part in waiting)


def _inputs_bytes(run: RunShape) -> int:
    inputs = run.stored_inputs * extent_bytes(run.input_bytes)
    return (run.swapped_bytes + inputs) * run.num_micro_batches
