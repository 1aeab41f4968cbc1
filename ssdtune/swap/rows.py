"""Some rows of a matrix out of its stored states, many of them at once; for `ssdtune.swap.update`.

Rows that lie near to each other are read together with what lies between. What is read is not checked against
checksums, which are of larger pieces: whoever reads all of the state later in the step does that.

Letters: U rows that are wanted, N rows that are read at once, D elements of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ssdtune.io.backend import ALIGNMENT
from ssdtune.io.buffers import aligned_size
from ssdtune.io.tickets import Tickets
from ssdtune.store.store import Store
from ssdtune.swap.states import State
from ssdtune.units import KIB

GAP_BYTES = 64 * KIB
"""Of the widest state, what may lie between rows that are read together: to begin a read takes longer than to read so much."""


@dataclass(frozen=True)
class RowBatch:
    """Rows that are read at once.

    Attributes:
        numbers: Ascending [N].
        spans: What is read, with the rows between them.
    """

    numbers: NDArray[Any]
    spans: list[range]

    def runs(self) -> list[slice]:
        """Return which of the rows follow one another without a gap."""
        ends = [0, *(np.flatnonzero(np.diff(self.numbers) != 1) + 1).tolist(), len(self.numbers)]
        return [slice(first, stop) for first, stop in pairwise(ends)]

    def read(
        self, store: Store, unit: str, state: State, scratch: torch.Tensor, into: torch.Tensor
    ) -> None:
        """Read the rows from one state. Blocks.

        Args:
            scratch: Where reads go, bytes.
            into: The numbers of the state [N, numbers of a row].

        Raises:
            StorageError: Reading failed.
        """
        row_bytes, begin, starts = into[0].nbytes, 0, list[int]()
        with Tickets() as tickets:
            for span in self.spans:
                start = span.start * row_bytes
                offset = start // ALIGNMENT * ALIGNMENT
                end = begin + aligned_size(span.stop * row_bytes - offset)
                view = memoryview(scratch[begin:end].numpy())
                tickets.add(store.read(unit, state.name, view, offset=offset))
                starts.append(begin + start - offset)
                begin = end
        bounds = np.searchsorted(self.numbers, [span.start for span in self.spans]).tolist()
        bounds.append(len(self.numbers))
        for span, start, first, stop in zip(self.spans, starts, bounds, bounds[1:]):
            there = scratch[start : start + len(span) * row_bytes].view(state.dtype)
            wanted = torch.from_numpy(self.numbers[first:stop] - span.start)
            torch.index_select(there.view(len(span), -1), 0, wanted, out=into[first:stop])


@dataclass(frozen=True)
class RowSizes:
    """What a row of a matrix takes.

    Attributes:
        width: Its elements, D.
        row_bytes: Of all its states together; `widest_bytes` of the widest of them.
    """

    width: int
    row_bytes: int
    widest_bytes: int

    @classmethod
    def of(cls, width: int, states: Iterable[State]) -> RowSizes:
        """Return the sizes of a row of so many elements that has these states."""
        sizes = [state.size(width) for state in states]
        return cls(width, sum(sizes), max(sizes))

    @property
    def least_bytes(self) -> int:
        """Memory in which one row can be read and computed."""
        return 2 * aligned_size(max(self.row_bytes, _alone_bytes(self.widest_bytes)))


def row_batches(
    numbers: NDArray[Any], row_bytes: int, *, most_rows: int, most_bytes: int
) -> Iterator[RowBatch]:
    """Divide rows into batches.

    Args:
        numbers: Of the rows, ascending and distinct [U].
        row_bytes: Of a row of the widest state.
        most_rows: Of a batch.
        most_bytes: That reading a batch takes of the widest state; enough for one row.
    """
    first, spans, taken = 0, list[range](), 0
    for index, number in enumerate(numbers.tolist()):
        near = bool(spans) and (number - spans[-1].stop) * row_bytes <= GAP_BYTES
        more = (number + 1 - spans[-1].stop) * row_bytes if near else _alone_bytes(row_bytes)
        if index - first == most_rows or (spans and taken + more > most_bytes):
            yield RowBatch(numbers[first:index], spans)
            first, spans, taken = index, [], 0
            near, more = False, _alone_bytes(row_bytes)
        if near:
            spans[-1] = range(spans[-1].start, number + 1)
        else:
            spans.append(range(number, number + 1))
        taken += more
    if spans:
        yield RowBatch(numbers[first:], spans)


def _alone_bytes(row_bytes: int) -> int:
    """Return the most that reading a single row takes, its ends rounded for direct I/O."""
    return row_bytes + 2 * ALIGNMENT
