"""Out-of-core AdamW: a trained part's states pass through memory in pieces that are read, computed and written.

The schedule says when each piece is read, computed and written, so that these overlap with each other, across
parts, and with everything else. The weights of a piece are updated where they lie, in a weight slot; its other states,
and a gradient that waited on SSD, in a chunk slot. The old version of a part is read, its pending version written and
made live with its last piece, so that a checkpoint's version stays as it is. Tensors without a gradient are carried
over unchanged, as torch.optim.AdamW leaves parameters whose gradient is None, and their count of steps does not
advance.

A speculative update is made before it is known whether it is the right one: it is written beside the live version, and
becomes live, or is forgotten, once the whole step's are there (`keep_speculated`, `drop_speculated`).

What a pending update will make of some rows of a matrix can be known before it is made (`updated_rows`): AdamW works on
each element by itself, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from ssdtune.errors import SsdtuneError
from ssdtune.io.backend import ALIGNMENT
from ssdtune.io.buffers import BufferPool
from ssdtune.io.tickets import Tickets
from ssdtune.model.layout import ModelLayout, Part
from ssdtune.optim.adamw import adamw_
from ssdtune.optim.codes import num_scales
from ssdtune.plan.residency import MemoryPlan
from ssdtune.plan.states import CODE_BLOCK, chunk_numel, chunk_slot_bytes
from ssdtune.swap.manager import SwapManager, as_bytes
from ssdtune.swap.rows import RowBatch, RowSizes, row_batches
from ssdtune.swap.states import GRADIENT, Precision, State

_PER_ELEMENT = ("weights", "low", "exp_avg", "exp_avg_sq", "gradient")
_PER_BLOCK = ("exp_avg_scale", "exp_avg_sq_scale")


@dataclass(frozen=True)
class AdamSettings:
    """AdamW's constants, as torch.optim.AdamW names them."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    threads: int | None = None


@dataclass(frozen=True)
class PartPiece:
    """Elements [start, stop) of a trained part, updated at once."""

    part: Part
    start: int
    stop: int
    streamed: bool

    @property
    def is_last(self) -> bool:
        """Say whether the part ends here."""
        return self.stop == self.part.numel


@dataclass(frozen=True)
class _Segment:
    """Elements that are updated alike: within one tensor."""

    start: int
    stop: int
    step: int
    weight_decay: float
    name: str


def pieces_of(
    layout: ModelLayout,
    plan: MemoryPlan,
    precision: Precision | None = None,
    check_bytes: int | None = None,
) -> dict[str, list[PartPiece]]:
    """Cut the trained parts of each stage into pieces; a part that stays in memory is one.

    Args:
        check_bytes: The store's pieces that have a checksum; None for those of a new store.
    """
    pieces: dict[str, list[PartPiece]] = {}
    for part in layout.trained_parts:
        cut = pieces_of_part(part, plan, precision, check_bytes)
        pieces.setdefault(part.stage, []).extend(cut)
    return pieces


def pieces_of_part(
    part: Part, plan: MemoryPlan, precision: Precision | None, check_bytes: int | None = None
) -> list[PartPiece]:
    """Cut one trained part."""
    streamed, size = part.name not in plan.resident, part.numel
    if streamed:
        coded = precision is not None and precision.coded_moments
        size = chunk_numel(plan.chunk_bytes, check_bytes, coded=coded)
    return [
        PartPiece(part, start, min(start + size, part.numel), streamed)
        for start in range(0, part.numel, size)
    ]


class OutOfCoreAdam:
    """AdamW over parts that the swap manager holds in memory or on SSD.

    Args:
        seed: Of the random bits with which weights without masters are rounded.

    Attributes:
        pieces: For each stage what is updated at once.
        steps: For each part the number of updates of each of its tensors.
    """

    def __init__(
        self, swap: SwapManager, settings: AdamSettings, *, pool: BufferPool, seed: int = 0
    ) -> None:
        self.pieces = pieces_of(swap.layout, swap.plan, swap.precision, swap.store.check_bytes)
        self.steps = {part.name: [0] * len(part.tensors) for part in swap.layout.trained_parts}
        self._swap = swap
        self._settings = settings
        self._speculated: dict[str, list[bool]] = {}
        """By part: which of its tensors were updated."""
        self._seeds = {
            part.name: rounding_seed(seed, number)
            for number, part in enumerate(swap.layout.trained_parts)
        }
        size = max(
            (
                chunk_slot_bytes(
                    swap.precision.states(piece.part).values(),
                    piece.stop - piece.start,
                    with_gradient=stage in swap.plan.gradients_on_ssd,
                )
                for stage, pieces in self.pieces.items()
                for piece in pieces
                if piece.streamed
            ),
            default=0,
        )
        if size:
            late = (
                part for part in swap.layout.trained_parts if part.stage in swap.plan.rows_first
            )
            size = max(size, *(self._row_sizes(part).least_bytes for part in late), 0)
        self._slots = {
            f"chunk.{i}": torch.frombuffer(
                pool.take(size, "optimizer chunks").view, dtype=torch.uint8
            )
            for i in range(swap.plan.chunk_slots if size else 0)
        }

    def load(
        self, stage: str, number: int, slot: str, *, weight_slot: str, with_weights: bool, with_gradient: bool
    ) -> None:  # fmt: skip
        """Read a piece's states into a chunk slot. Blocks.

        Args:
            weight_slot: Slot of its weights, which are read too `with_weights`.
            with_gradient: Its gradient waited on SSD and is read too.

        Raises:
            StorageError: Reading failed.
        """
        piece = self.pieces[stage][number]
        states = self._states(piece, slot, weight_slot)
        if not with_weights:
            del states["weights"]
        if not with_gradient:
            del states["gradient"]
        store, kinds = self._swap.store, self._kinds(piece.part)
        with Tickets() as tickets:
            for name, view in states.items():
                if name.startswith("exp_avg") and piece.part.name in self._swap.fresh:
                    view.zero_()
                    continue
                offset = kinds[name].offset(piece.start)
                tickets.add(store.read(piece.part.name, name, as_bytes(view), offset=offset))

    def update(
        self,
        stage: str,
        number: int,
        slot: str,
        has_gradient: Mapping[str, Sequence[bool]],
        *,
        weight_slot: str,
        gradient_slot: str,
        lr: float,
        scale: float,
        speculative: bool = False,
    ) -> None:
        """Update a piece in its slots, or in memory.

        Args:
            has_gradient: For each part and each of its tensors.
            gradient_slot: Where the complete gradient of the stage lies; "" if in the chunk slot.
            lr: Learning rate of this step.
            scale: Clipping coefficient.
            speculative: The update may have to be forgotten; only for pieces that are streamed.

        Raises:
            SsdtuneError: A weight is no longer finite.
        """
        piece = self.pieces[stage][number]
        part = piece.part
        present, steps = has_gradient[part.name], self.steps[part.name]
        if piece.start == 0:
            for index, found in enumerate(present):
                steps[index] += found
            if speculative:
                self._speculated[part.name] = list(present)
        if piece.streamed:
            states = self._states(piece, slot, weight_slot)
        else:
            states = dict(self._swap.resident(part).states)
        if gradient_slot:
            whole, _ = self._swap.gradient(part, gradient_slot)
            states["gradient"] = whole[piece.start : piece.stop]
        segments = [
            _Segment(
                spec.offset, spec.offset + spec.numel, steps[index],
                self._settings.weight_decay if spec.decay else 0.0, spec.name,
            )
            for index, spec in enumerate(part.tensors)
            if present[index]
        ]  # fmt: skip
        self._compute(segments, states, piece, lr, scale)
        if not piece.streamed:
            self._swap.fresh.discard(part.name)

    def updated_rows(
        self,
        stage: str,
        rows: NDArray[Any],
        slot: str,
        has_gradient: Mapping[str, Sequence[bool]],
        *,
        gradient_slot: str,
        lr: float,
        scale: float,
    ) -> Iterator[tuple[NDArray[Any], torch.Tensor]]:
        """Yield rows of a stage that is one matrix as its pending update will leave them; nothing is written. Blocks.

        Args:
            rows: Their numbers in the stage, ascending [U].
            slot: A chunk slot, for what is read and computed.
            has_gradient, gradient_slot, lr, scale: As for `update`, which must not have begun.

        Yields:
            Numbers of some rows [N], and their weights [N, D] in the slot, valid until the next.

        Raises:
            StorageError: Reading failed.
            SsdtuneError: A weight is no longer finite.
        """
        (part,) = self._swap.layout.stages[stage].parts
        (spec,) = part.tensors
        sizes, memory = self._row_sizes(part), self._slots[slot]
        half = len(memory) // 2 // ALIGNMENT * ALIGNMENT
        decay = self._settings.weight_decay if spec.decay else 0.0
        segment = _Segment(0, spec.numel, self.steps[part.name][0] + 1, decay, spec.name)
        for batch in row_batches(
            rows, sizes.widest_bytes, most_rows=half // sizes.row_bytes, most_bytes=half
        ):
            states = self._read_rows(
                part, sizes, batch, memory[:half], memory[half:], gradient_slot
            )
            if has_gradient[part.name][0]:
                self._compute_rows(segment, states, batch, part, lr, scale)
            yield batch.numbers, states["weights"]

    def _read_rows(
        self, part: Part, sizes: RowSizes, batch: RowBatch, memory: torch.Tensor, scratch: torch.Tensor,
        gradient_slot: str,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Return the states of some rows by name, [N, numbers of a row] each."""
        states, offset, count = dict[str, torch.Tensor](), 0, len(batch.numbers)
        kinds = self._kinds(part).items()
        # The widest numbers first, so that each is aligned to its size.
        for name, state in sorted(kinds, key=lambda kind: -kind[1].itemsize):
            end = offset + count * state.size(sizes.width)
            states[name] = into = memory[offset:end].view(state.dtype).view(count, -1)
            offset = end
            if name == "gradient" and gradient_slot:
                whole, _ = self._swap.gradient(part, gradient_slot)
                wanted = torch.from_numpy(batch.numbers)
                torch.index_select(part.view(whole, part.tensors[0]), 0, wanted, out=into)
            elif name.startswith("exp_avg") and part.name in self._swap.fresh:
                into.zero_()
            else:
                batch.read(self._swap.store, part.name, state, scratch, into)
        return states

    def _compute_rows(
        self, segment: _Segment, states: dict[str, torch.Tensor], batch: RowBatch, part: Part,
        lr: float, scale: float,
    ) -> None:  # fmt: skip
        width = self._row_sizes(part).width
        # Where an element lies matters only for the random bits with which it is rounded.
        rounded = self._swap.precision.is_rounded(part)
        for run in batch.runs() if rounded else [slice(0, len(batch.numbers))]:
            first = int(batch.numbers[run.start]) * width if rounded else 0
            piece = PartPiece(part, first, first + (run.stop - run.start) * width, streamed=True)
            given = {name: state[run].view(-1) for name, state in states.items()}
            self._compute([segment], given, piece, lr, scale)

    def _row_sizes(self, part: Part) -> RowSizes:
        (spec,) = part.tensors
        return RowSizes.of(spec.numel // spec.shape[0], self._kinds(part).values())

    def save(
        self, stage: str, number: int, slot: str, *, weight_slot: str, speculative: bool = False
    ) -> None:
        """Write an updated piece; unless it is speculative, the last one makes the part's new version live. Blocks.

        Raises:
            StorageError: Writing failed; the part's old version is whole, unless it was in place.
        """
        piece = self.pieces[stage][number]
        store, kinds = self._swap.store, self._kinds(piece.part)
        states = self._states(piece, slot, weight_slot)
        del states["gradient"]
        with Tickets() as tickets:
            for name, view in states.items():
                offset = kinds[name].offset(piece.start)
                data = as_bytes(view)
                tickets.add(
                    store.write(piece.part.name, name, data, offset=offset, beside=speculative)
                )
        if piece.is_last and not speculative:
            self._make_live(piece.part.name)

    def can_speculate(self) -> bool:
        """Say whether there is room for updates that may have to be forgotten."""
        return self._swap.store.has_room_beside()

    def keep_speculated(self) -> None:
        """Make the speculative updates count: they were the right ones."""
        for part in self._speculated:
            self._make_live(part)
        self._speculated.clear()

    def drop_speculated(self) -> None:
        """Forget the speculative updates: weights, states and counts of steps are those before."""
        for part, present in self._speculated.items():
            self._swap.store.discard(part)
            for index, found in enumerate(present):
                self.steps[part][index] -= found
        self._speculated.clear()

    def _make_live(self, part: str) -> None:
        self._swap.store.commit(part)
        self._swap.fresh.discard(part)

    def _states(self, piece: PartPiece, slot: str, weight_slot: str) -> dict[str, torch.Tensor]:
        """Return the piece's states by name: the weights in their slot, the others in the chunk slot."""
        part, memory, offset = piece.part, self._slots[slot], 0
        weights = self._swap.host_weights(part, weight_slot)
        found = {"weights": weights[piece.start : piece.stop]}
        for state in self._others(part):
            size = state.nbytes(piece.stop - piece.start)
            # The last one, the gradient, has no room where gradients wait in memory.
            found[state.name] = memory[offset : offset + size].view(state.dtype)
            offset += size
        return found

    def _others(self, part: Part) -> list[State]:
        """Return what lies in a chunk slot of a part, the gradient last."""
        states = self._swap.precision.states(part)
        return [*(state for name, state in states.items() if name != "weights"), GRADIENT]

    def _kinds(self, part: Part) -> dict[str, State]:
        return {**self._swap.precision.states(part), "gradient": GRADIENT}

    def _compute(
        self, segments: list[_Segment], states: dict[str, torch.Tensor], piece: PartPiece,
        lr: float, scale: float,
    ) -> None:  # fmt: skip
        settings = self._settings
        for segment, low, high in _within(segments, piece.start, piece.stop):
            cut = slice(low - piece.start, high - piece.start)
            first = cut.start // CODE_BLOCK
            scales = slice(first, first + num_scales(high - low))
            part, precision = piece.part, self._swap.precision
            names = {**dict.fromkeys(_PER_ELEMENT, cut), **dict.fromkeys(_PER_BLOCK, scales)}
            given = {name: states[name][where] for name, where in names.items() if name in states}
            try:
                adamw_(
                    given.pop("weights"), given.pop("low", None), given.pop("exp_avg"),
                    given.pop("exp_avg_sq"), given.pop("gradient"), **given,
                    step=segment.step, lr=lr, beta1=settings.beta1, beta2=settings.beta2,
                    eps=settings.eps, weight_decay=segment.weight_decay, grad_scale=scale,
                    rounding_seed=self._seeds[part.name] if precision.is_rounded(part) else None,
                    first=low, threads=settings.threads,
                )  # fmt: skip
            except ValueError as error:
                raise SsdtuneError(
                    f"{segment.name}: {error}. Go on from the last checkpoint with a lower learning_rate."
                ) from error


def _within(segments: list[_Segment], start: int, stop: int) -> Iterator[tuple[_Segment, int, int]]:
    for segment in segments:
        low, high = max(segment.start, start), min(segment.stop, stop)
        if low < high:
            yield segment, low, high


def rounding_seed(seed: int, part: int) -> int:
    """Return what seeds the random bits of a part, different from those of the others."""
    return (seed * 1_000_003 + part) % (1 << 63)
