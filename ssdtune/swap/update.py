"""Out-of-core AdamW: one pass over a part's states in chunks, reading, computing and writing at once.

While chunk i is computed, chunk i + 1 is being read and chunk i - 1 written. The old version of a part is
read, its pending version written and made live at the end, so that a checkpoint's version stays as it is.
Tensors without a gradient are carried over unchanged, as torch.optim.AdamW leaves parameters whose gradient
is None, and their count of steps does not advance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ssdtune.errors import SsdtuneError
from ssdtune.io.backend import Ticket
from ssdtune.io.buffers import BufferPool
from ssdtune.io.tickets import Tickets
from ssdtune.model.layout import Part
from ssdtune.optim.adamw import adamw_
from ssdtune.plan.residency import CHUNK_ELEMENT_BYTES, CHUNK_SETS
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
class _Segment:
    """Elements that are updated alike: within one tensor."""

    start: int
    stop: int
    step: int
    weight_decay: float
    name: str


class OutOfCoreAdam:
    """AdamW over parts that the swap manager holds in memory or on SSD.

    Args:
        parts: The trained parts.
        chunk_bytes: Bytes of an fp32 state in one chunk.

    Attributes:
        steps: For each part the number of updates of each of its tensors.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        swap: SwapManager,
        settings: AdamSettings,
        *,
        chunk_bytes: int,
        pool: BufferPool,
    ) -> None:
        self._swap = swap
        self._settings = settings
        self.steps = {part.name: [0] * len(part.tensors) for part in parts}
        # Whole pieces with a checksum, whose size a resumed run takes over: of 2-byte states, and so of all.
        piece = swap.store.check_bytes // 2
        self._chunk = max(-(-chunk_bytes // 4 // piece), 1) * piece
        streamed = [part.numel for part in parts if not swap.is_resident(part)]
        numel = min(self._chunk, max(streamed, default=0))
        self._sets = [
            torch.frombuffer(
                pool.take(CHUNK_ELEMENT_BYTES * numel, "optimizer chunks").view, dtype=torch.uint8
            )
            for _ in range(CHUNK_SETS if numel else 0)
        ]

    def update(
        self,
        part: Part,
        has_gradient: Sequence[bool],
        gradient: torch.Tensor | None,
        *,
        lr: float,
        scale: float,
    ) -> None:
        """Update one part. Blocks.

        Args:
            has_gradient: For each tensor of the part.
            gradient: Complete gradient, fp32 [N]; None if it lies in the store.
            lr: Learning rate of this step.
            scale: Clipping coefficient.

        Raises:
            SsdtuneError: A weight is no longer finite.
            StorageError: Reading or writing failed; the part's old version is whole, unless it was in place.
        """
        steps = self.steps[part.name]
        for index, present in enumerate(has_gradient):
            steps[index] += present
        segments = [
            _Segment(
                spec.offset, spec.offset + spec.numel, steps[index],
                self._settings.weight_decay if spec.decay else 0.0, spec.name,
            )
            for index, spec in enumerate(part.tensors)
            if has_gradient[index]
        ]  # fmt: skip
        if self._swap.is_resident(part):
            assert gradient is not None
            states = self._swap.resident(part).states
            self._compute(segments, states, gradient, 0, part.numel, lr, scale)
        else:
            self._stream(part, segments, gradient, lr, scale)
        self._swap.fresh.discard(part.name)

    def _stream(
        self,
        part: Part,
        segments: list[_Segment],
        gradient: torch.Tensor | None,
        lr: float,
        scale: float,
    ) -> None:
        store, dtypes = self._swap.store, state_dtypes(part)
        fresh = part.name in self._swap.fresh
        chunks = [(s, min(s + self._chunk, part.numel)) for s in range(0, part.numel, self._chunk)]
        writes: list[list[Ticket]] = [[] for _ in self._sets]

        def views(index: int) -> dict[str, torch.Tensor]:
            start, stop = chunks[index]
            memory, offset, found = self._sets[index % len(self._sets)], 0, {}
            for name, dtype in {**dtypes, "gradient": torch.float32}.items():
                size = (stop - start) * dtype.itemsize
                found[name] = memory[offset : offset + size].view(dtype)
                offset += size
            return found

        def read(index: int) -> list[Ticket]:
            for ticket in writes[index % len(self._sets)]:
                ticket.wait()
            start, _ = chunks[index]
            tickets = []
            for name, view in views(index).items():
                if name == "gradient" and gradient is not None:
                    continue
                if fresh and name.startswith("exp_avg"):
                    view.zero_()
                    continue
                offset = start * view.element_size()
                ticket = store.read(part.name, name, as_bytes(view), offset=offset)
                tickets.append(started.add(ticket))
            return tickets

        with Tickets() as started:
            pending = read(0)
            for index, (start, stop) in enumerate(chunks):
                ahead = read(index + 1) if index + 1 < len(chunks) else []
                for ticket in pending:
                    ticket.wait()
                pending = ahead
                states = views(index)
                piece = states.pop("gradient")
                if gradient is not None:
                    piece = gradient[start:stop]
                self._compute(segments, states, piece, start, stop, lr, scale)
                writes[index % len(self._sets)] = written = []
                for name, view in states.items():
                    offset = start * view.element_size()
                    ticket = store.write(part.name, name, as_bytes(view), offset=offset)
                    written.append(started.add(ticket))
        store.commit(part.name)

    def _compute(
        self, segments: list[_Segment], states: dict[str, torch.Tensor], gradient: torch.Tensor,
        start: int, stop: int, lr: float, scale: float,
    ) -> None:  # fmt: skip
        """Update the elements [start, stop) of a part; all tensors begin at `start`."""
        settings = self._settings
        for segment, low, high in _within(segments, start, stop):
            cut = slice(low - start, high - start)
            half = states.get("low")
            try:
                adamw_(
                    states["weights"][cut], None if half is None else half[cut],
                    states["exp_avg"][cut], states["exp_avg_sq"][cut], gradient[cut],
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
