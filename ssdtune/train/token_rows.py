"""The rows of a divided embedding that one micro-batch needs, and their gradients; chunks come and go one by one.

Letters: U distinct tokens of the micro-batch, R rows of a chunk, D hidden size.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class TokenRows:
    """Takes the rows of a micro-batch's tokens from each chunk, and adds their gradients to each chunk's.

    Args:
        ids: Tokens of the micro-batch, of any shape.
        where: The device that computes.

    Attributes:
        tokens: The distinct ones [U], in order.
        gradient: Of their rows [U, D]; None until backward has got there.
    """

    def __init__(self, ids: NDArray[Any], where: torch.device) -> None:
        self._tokens = np.unique(ids)
        self.tokens = torch.from_numpy(self._tokens).to(where)
        self.gradient: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._lock = threading.Lock()

    def needed(self, rows: range) -> NDArray[Any]:
        """Return the tokens that are among some rows of the vocabulary, in order."""
        return self._tokens[self._within(rows)]

    def gather(self, chunk: torch.Tensor, rows: range, dtype: torch.dtype) -> None:
        """Copy what is needed of a chunk [R, D].

        Args:
            rows: Of the vocabulary, which the chunk holds.
            dtype: Of the copies.
        """
        here = self._within(rows)
        places = self._places(chunk.shape[1], dtype)
        places[here] = chunk.index_select(0, self.tokens[here] - rows.start).to(dtype)

    def put(self, tokens: NDArray[Any], rows: torch.Tensor, dtype: torch.dtype) -> None:
        """Copy what is needed of some tokens' rows [N, D], in host memory.

        Args:
            tokens: In order [N]; the micro-batch has no others between the first and the last.
            dtype: Of the copies.
        """
        here = self._within(range(int(tokens[0]), int(tokens[-1]) + 1))
        wanted = torch.from_numpy(np.searchsorted(tokens, self._tokens[here]))
        places = self._places(rows.shape[1], dtype)
        places[here] = rows.index_select(0, wanted).to(places.device, dtype)

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens [U] and, once all chunks have been there, their rows [U, D]."""
        assert self._rows is not None
        rows, self._rows = self._rows, None
        return self.tokens, rows

    def add_gradient(self, total: torch.Tensor, rows: range) -> None:
        """Add the gradients of a chunk's rows to its sum [R, D]."""
        assert self.gradient is not None
        here = self._within(rows)
        total.index_add_(0, self.tokens[here] - rows.start, self.gradient[here].to(total.dtype))

    def _places(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return where copies go [U, D]."""
        with self._lock:  # chunks may come from several lanes
            if self._rows is None:
                shape = (len(self._tokens), width)
                self._rows = torch.empty(shape, dtype=dtype, device=self.tokens.device)
            return self._rows

    def _within(self, rows: range) -> slice:
        first, last = np.searchsorted(self._tokens, (rows.start, rows.stop))
        return slice(int(first), int(last))
