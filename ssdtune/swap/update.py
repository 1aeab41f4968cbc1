"""Out-of-core AdamW: a trained part's states pass through memory in pieces that are read, computed and written.

The schedule says when each piece is read, computed and written, so that these overlap with each other, across
parts, and with everything else. The weights of a piece are updated where they lie, in a weight slot; its other states,
and a gradient that waited on SSD, in a chunk slot. The old version of a part is read, its pending version written and
made live with its last piece, so that a checkpoint's version stays as it is. Tensors without a gradient are carried
over unchanged, as torch.optim.AdamW leaves parameters whose gradient is None, and their count of steps does not
advance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ssdtune.errors import SsdtuneError
from ssdtune.io.buffers import BufferPool
from ssdtune.io.tickets import Tickets
from ssdtune.model.layout import ModelLayout, Part
from ssdtune.optim.adamw import adamw_
from ssdtune.plan.residency import MemoryPlan, chunk_numel, chunk_slot_bytes
from ssdtune.swap.manager import SwapManager, as_bytes, state_dtypes


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
    layout: ModelLayout, plan: MemoryPlan, check_bytes: int | None = None
) -> dict[str, list[PartPiece]]:
    """Cut the trained parts of each stage into pieces; a part that stays in memory is one.

    Args:
        check_bytes: The store's pieces that have a checksum; None for those of a new store.
    """
    pieces: dict[str, list[PartPiece]] = {}
    for part in layout.trained_parts:
        streamed = part.name not in plan.resident
        size = chunk_numel(plan.chunk_bytes, check_bytes) if streamed else part.numel
        pieces.setdefault(part.stage, []).extend(
            PartPiece(part, start, min(start + size, part.numel), streamed)
            for start in range(0, part.numel, size)
        )
    return pieces


class OutOfCoreAdam:
    """AdamW over parts that the swap manager holds in memory or on SSD.

    Attributes:
        pieces: For each stage what is updated at once.
        steps: For each part the number of updates of each of its tensors.
    """

    def __init__(self, swap: SwapManager, settings: AdamSettings, *, pool: BufferPool) -> None:
        self.pieces = pieces_of(swap.layout, swap.plan, swap.store.check_bytes)
        self.steps = {part.name: [0] * len(part.tensors) for part in swap.layout.trained_parts}
        self._swap = swap
        self._settings = settings
        size = max(
            (
                chunk_slot_bytes(
                    piece.stop - piece.start,
                    split=piece.part.dtype != torch.float32,
                    with_gradient=stage in swap.plan.gradients_on_ssd,
                )
                for stage, pieces in self.pieces.items()
                for piece in pieces
                if piece.streamed
            ),
            default=0,
        )
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
        with Tickets() as tickets:
            for name, view in states.items():
                if name.startswith("exp_avg") and piece.part.name in self._swap.fresh:
                    view.zero_()
                    continue
                offset = piece.start * view.element_size()
                store = self._swap.store
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
    ) -> None:
        """Update a piece in its slots, or in memory.

        Args:
            has_gradient: For each part and each of its tensors.
            gradient_slot: Where the complete gradient of the stage lies; "" if in the chunk slot.
            lr: Learning rate of this step.
            scale: Clipping coefficient.

        Raises:
            SsdtuneError: A weight is no longer finite.
        """
        piece = self.pieces[stage][number]
        part = piece.part
        present, steps = has_gradient[part.name], self.steps[part.name]
        if piece.start == 0:
            for index, found in enumerate(present):
                steps[index] += found
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

    def save(self, stage: str, number: int, slot: str, *, weight_slot: str) -> None:
        """Write an updated piece; the last one makes the part's new version live. Blocks.

        Raises:
            StorageError: Writing failed; the part's old version is whole, unless it was in place.
        """
        piece = self.pieces[stage][number]
        store = self._swap.store
        states = self._states(piece, slot, weight_slot)
        del states["gradient"]
        with Tickets() as tickets:
            for name, view in states.items():
                offset = piece.start * view.element_size()
                tickets.add(store.write(piece.part.name, name, as_bytes(view), offset=offset))
        if piece.is_last:
            store.commit(piece.part.name)
            self._swap.fresh.discard(piece.part.name)

    def _states(self, piece: PartPiece, slot: str, weight_slot: str) -> dict[str, torch.Tensor]:
        """Return the piece's states by name: the weights in their slot, the others in the chunk slot."""
        part, memory, offset = piece.part, self._slots[slot], 0
        weights = self._swap.host_weights(part, weight_slot)
        found = {"weights": weights[piece.start : piece.stop]}
        for name, dtype in {**state_dtypes(part), "gradient": torch.float32}.items():
            if name != "weights":
                size = (piece.stop - piece.start) * dtype.itemsize
                # The last one, the gradient, has no room where gradients wait in memory.
                found[name] = memory[offset : offset + size].view(dtype)
                offset += size
        return found

    def _compute(
        self, segments: list[_Segment], states: dict[str, torch.Tensor], piece: PartPiece,
        lr: float, scale: float,
    ) -> None:  # fmt: skip
        settings = self._settings
        for segment, low, high in _within(segments, piece.start, piece.stop):
            cut = slice(low - piece.start, high - piece.start)
            half = states.get("low")
            try:
                adamw_(
                    states["weights"][cut], None if half is None else half[cut],
                    states["exp_avg"][cut], states["exp_avg_sq"][cut], states["gradient"][cut],
                    step=segment.step, lr=lr, beta1=settings.beta1, beta2=settings.beta2,
                    eps=settings.eps, weight_decay=segment.weight_decay, grad_scale=scale,
                    threads=settings.threads,
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
