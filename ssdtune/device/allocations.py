"""Which device memory was handed out for what, until it is freed, and within which budget."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque

import torch


class Allocations:
    """Counts the memory of tensors by purpose as long as they, or views of them, are alive. Thread-safe."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        # Memory may be freed within any line of a thread, also while it holds the lock; appending needs none.
        self._freed: deque[tuple[str, int]] = deque()

    def add(self, tensor: torch.Tensor, purpose: str) -> None:
        """Count a tensor that has just been allocated."""
        with self._lock:
            self._bytes[purpose] += tensor.nbytes
        freed = (purpose, tensor.nbytes)
        weakref.finalize(tensor.untyped_storage(), self._freed.append, freed).atexit = False

    def by_purpose(self) -> dict[str, int]:
        """Return the bytes in use for each purpose, the largest first."""
        with self._lock:
            while self._freed:
                purpose, num_bytes = self._freed.popleft()
                self._bytes[purpose] -= num_bytes
            return {purpose: n for purpose, n in self._bytes.most_common() if n > 0}
