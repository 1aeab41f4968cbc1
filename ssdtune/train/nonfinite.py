"""What is not a finite number: where it first appeared in a step, and whether the run goes on.

While a step runs, the engine shows each block's output, the loss, and each gradient on its way down to a `FiniteWatch`.
Of every sequence the sum is kept, which is finite only if all of its values are; it stays on the device, and nobody waits
for it. It is read only if the loss or the gradient of a weight is not finite: then the order in which things were computed
says where it began. A sum costs less than anything else that an infinite value or NaN cannot hide from. It overflows for
finite values too, but not before they are some 1e32 in the mean, where a norm has long lost them.

What follows is the user's choice (`training.non_finite`). `stop` ends the run before a checkpoint could hold anything of
the step. `skip` leaves the step out, as loss scaling does in fp16: weights, moments and their counts of steps stay as they
were; so updates have to wait until all gradients were looked at (`ssdtune.train.prepare`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ssdtune.data.batches import Batch
from ssdtune.errors import SsdtuneError
from ssdtune.model.build import base_name
from ssdtune.model.layout import ModelLayout, Stage
from ssdtune.plan.generate import EMBED, HEAD, OUTER
from ssdtune.plan.schedule import Kind, Operation
from ssdtune.report.metrics import read_metrics
from ssdtune.swap.manager import SwapManager

MOST_IN_A_ROW = 10
"""Skipped steps one after the other that end the run: no later one would be different."""
LOOKED_AT = 1 << 20
"""Weights that are looked at at once."""
_NAMED = 3
"""Weights that a message names."""


class NotFinite(Exception):
    """Ends a step in which something is not finite; the engine raises what it means."""


@dataclass(frozen=True)
class _Look:
    """What an operation made, of one micro-batch.

    Attributes:
        values: Scalar of the loss; else [B], not finite where a sequence has such a value.
    """

    operation: Operation
    values: torch.Tensor

    @property
    def is_gradient(self) -> bool:
        kind = self.operation.kind
        return kind == Kind.BACKWARD or (kind == Kind.LOSS and self.values.dim() > 0)


@dataclass(frozen=True)
class _Place:
    """Where the first value that is not finite appeared.

    Attributes:
        suspects: Stages whose weights may be the cause; "embed" and "head" stand for all their chunks.
    """

    what: str
    value: str
    micro_batch: int | None = None
    sequences: tuple[int, ...] = ()
    suspects: tuple[str, ...] = ()


class FiniteWatch:
    """Remembers what a step or an evaluation computed, as far as it takes to say where it went wrong.

    Args:
        skips: A step with a gradient that is not finite is left out; else it ends the run.
        in_a_row: Steps that were left out just before (resume).
        name_rows: Says which rows those of these numbers are.
    """

    def __init__(
        self,
        *,
        skips: bool = False,
        in_a_row: int = 0,
        name_rows: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.skips = skips
        self._in_a_row = in_a_row
        self._name_rows = name_rows or (lambda rows: rows_text(rows, "row"))
        self._batches: Sequence[Batch] = ()
        self._looks: list[_Look] = []
        self._noticed: tuple[str, Sequence[tuple[str, float]]] | None = None

    @property
    def noticed(self) -> bool:
        """Say whether the loss or a gradient of the step is not finite."""
        return self._noticed is not None

    def begin(self, batches: Sequence[Batch]) -> None:
        """Forget the last step; the next one has these micro-batches."""
        self._batches = batches
        self._looks.clear()
        self._noticed = None

    def look(self, operation: Operation, made: torch.Tensor) -> None:
        """Look at what an operation made: the loss, or a tensor [B, S, D]."""
        with torch.no_grad():
            self._looks.append(_Look(operation, _sums(made.detach())))

    def notice(self, stage: str, gradients: Sequence[tuple[str, float]]) -> None:
        """Take note that the loss, or some gradients of a stage, are not finite.

        Args:
            gradients: Name of each such tensor, and the sum of its squares.

        Raises:
            NotFinite: Unless the step is left out.
        """
        self._noticed = self._noticed or (stage, gradients)
        if not self.skips:
            raise NotFinite

    def count(self, swap: SwapManager) -> None:
        """Take account of a step that is over.

        Raises:
            SsdtuneError: Too many were left out one after the other.
        """
        self._in_a_row = self._in_a_row + 1 if self.noticed else 0
        if self._in_a_row >= MOST_IN_A_ROW:
            raise SsdtuneError(
                f"{self._in_a_row} steps one after the other were skipped because of values that are not finite: in the "
                f"last one {self.where(swap)}. Training has diverged: go on from an earlier checkpoint, or start again, with "
                "a lower learning_rate."
            )

    def where(self, swap: SwapManager) -> str:
        """Say where the first value appeared that is not finite; "" if there is none. Between schedules only.

        The weights in question are looked at too.
        """
        place = self._first(swap.layout)
        if place is None:
            return ""
        text = f"{place.what} is {place.value}"
        count = len(self._batches)
        if place.micro_batch is None:
            return text if count > 1 else f"{text} ({self._rows(0, ())})"
        of = f" in micro-batch {place.micro_batch + 1} of {count}" if count > 1 else ""
        text += f"{of} ({self._rows(place.micro_batch, place.sequences)})"
        if names := _bad_weights(swap, place.suspects):
            text += f". The weights are not finite themselves: {names}"
        return text

    def reason_to_stop(self, step: int, swap: SwapManager) -> str:
        """Return the message of the error that ends a run.

        Args:
            step: Counted from 0.
        """
        place = self.where(swap)
        remedy = (
            "Train an intact copy of the model"
            if "not finite themselves" in place
            else "Look at these rows, lower the learning_rate, or leave such steps out with --non-finite skip"
        )
        return (
            f"step {step + 1}: {place}. All that was computed before is finite. The run ends here, and no checkpoint holds "
            f"anything of this step. {remedy}; --resume-from-checkpoint last goes on from the last checkpoint."
        )

    def _first(self, layout: ModelLayout) -> _Place | None:
        looks, noticed = self._looks, self._noticed
        if noticed and noticed[0].partition(".")[0] not in (OUTER, EMBED):
            # What lies below this stage came after its gradients.
            stage = noticed[0] if noticed[0].startswith("block.") else noticed[0].partition(".")[0]
            ends = [
                n
                for n, look in enumerate(looks)
                if stage in (look.operation.stage, look.operation.stage.partition(".")[0])
            ]
            looks = looks[: ends[-1] + 1] if ends else looks
        for look in looks:
            values = look.values.reshape(-1).tolist()
            bad = [n for n, value in enumerate(values) if not math.isfinite(value)]
            if bad:
                scalar, value = look.values.dim() == 0, f"{values[bad[0]]:g}"
                return _Place(
                    _name(look, layout), value if scalar else f"not finite (its sum is {value})",
                    look.operation.micro_batch, () if scalar else tuple(bad),
                    _suspects(look.operation),
                )  # fmt: skip
        if noticed is None or not noticed[1]:
            return None
        (name, squares), *others = noticed[1]
        more = f" (and of {len(others)} more tensors of {noticed[0]})" if others else ""
        what = f"the gradient of {base_name(name)}{more}"
        return _Place(what, f"not finite (the sum of its squares is {squares:g})")

    def _rows(self, micro_batch: int, sequences: Sequence[int]) -> str:
        """Name the rows of some sequences of a micro-batch; of all of them if none is given."""
        batch = self._batches[micro_batch]
        counts = [1] * len(batch.input_ids)
        if batch.segment_ids is not None:
            counts = (batch.segment_ids.max(axis=1) + 1).tolist()
        rows: list[int] = []
        for sequence in sequences or range(len(counts)):
            start = sum(counts[:sequence])
            rows += batch.rows[start : start + counts[sequence]]
        return self._name_rows(rows)


def rows_text(rows: Sequence[int], word: str) -> str:
    """Return "row 4", "rows 4, 7": the first few of them."""
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return f"{word} {shown}" if len(rows) == 1 else f"{word}s {shown}"


def skipped_in_a_row(metrics: Path, done: int) -> int:
    """Return how many of the steps up to `done` were skipped at the end, by the run's metrics."""
    count = 0
    for line in read_metrics(metrics, "step"):
        if line["step"] <= done:
            count = count + 1 if line.get("skipped") else 0
    return count


def _name(look: _Look, layout: ModelLayout) -> str:
    stage = look.operation.stage
    match look.operation.kind:
        case Kind.FORWARD:
            return f"the output of {_block(stage, layout)}"
        case Kind.BACKWARD:
            return f"the gradient of the input of {_block(stage, layout)}"
        case Kind.SCORE | Kind.LOSS:
            return "the gradient of the last block's output" if look.is_gradient else "the loss"
    return "the embedding's output"


def _block(stage: str, layout: ModelLayout) -> str:
    """Return a block's name: "block 17 (model.layers.17)"."""
    number = stage.partition(".")[2]
    tensor = base_name(layout.stages[stage].parts[0].tensors[0].name)
    return f"block {number} ({tensor.partition(f'.{number}.')[0]}.{number})"


def _sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of each sequence of [B, S, D], [B]; scalars as they are."""
    if values.dim() == 0:
        return values
    wide = torch.float32 if values.dtype == torch.float16 else None  # 65504 is soon exceeded
    return values.sum(tuple(range(1, values.dim())), dtype=wide)


def _suspects(operation: Operation) -> tuple[str, ...]:
    """Return the stages whose weights an operation works with."""
    if operation.kind in (Kind.FORWARD, Kind.BACKWARD):
        return (operation.stage,)
    end = operation.stage.partition(".")[0]  # all chunks of it
    return (OUTER, EMBED if operation.kind == Kind.ENTRY_FORWARD else end)


def _bad_weights(swap: SwapManager, stages: Sequence[str]) -> str:
    """Return the names of the first weights of some stages that are not finite. They are read into their slot again."""
    names: list[str] = []
    for name, stage in swap.layout.stages.items():
        kind = name.partition(".")[0]
        if name in stages or kind in stages:
            slot = {OUTER: OUTER, EMBED: "ends", HEAD: "ends"}.get(kind, "block.0")
            with suppress(SsdtuneError):  # what is wrong with the step is known without it
                swap.load(name, slot)
                names += _bad_names(swap, stage, slot)
    names = list(dict.fromkeys(names))  # chunks of a matrix have the same
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _bad_names(swap: SwapManager, stage: Stage, slot: str) -> list[str]:
    names = []
    for part in stage.parts:
        flat = swap.loaded(part, slot)
        for spec in part.tensors:
            pieces = part.view(flat, spec).reshape(-1).split(LOOKED_AT)
            if not all(bool(torch.isfinite(piece).all()) for piece in pieces):
                names.append(base_name(spec.name))
    return names
