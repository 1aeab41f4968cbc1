"""How fast memory is copied and AdamW updates parameters, by number of threads.

Every figure is the best of several repetitions: other programs only ever make it slower. Sizes exceed the
caches but not the memory that is free. torch is imported when a figure needs it. AdamW while the drives are busy:
`ssdtune.hardware.contention`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ssdtune.hardware.figures import AdamPoint, MemoryPoint
from ssdtune.hardware.memory import available_host_memory
from ssdtune.hardware.stream import Clock
from ssdtune.units import MIB

_ADAM_BYTES = 16
"""Bytes per parameter that the split form touches: two halves of the master, two moments, the gradient."""


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def thread_counts() -> list[int]:
    """Return powers of two up to the number of cores, and that number."""
    cores = num_cores()
    return sorted({1 << i for i in range(cores.bit_length())} | {cores})


def measure_memory(
    *, seconds: float, memory_bytes: int = 256 * MIB, clock: Clock = time.perf_counter
) -> tuple[MemoryPoint, ...]:
    """Measure copying memory and adding scaled arrays (`a = b + s * c`), by threads."""
    import torch

    size = working_set(memory_bytes) // 3 // 4
    a, b, c = (np.full(size, value, np.float32) for value in (0, 1, 2))
    tensors = [torch.from_numpy(array) for array in (a, b, c)]
    counts = thread_counts()
    share = seconds / len(counts) / 2
    before = torch.get_num_threads()
    points = []
    try:
        for threads in counts:
            pieces = [slice(i * size // threads, (i + 1) * size // threads) for i in range(threads)]
            torch.set_num_threads(threads)

            def triad() -> None:
                torch.add(tensors[1], tensors[2], alpha=3.0, out=tensors[0])

            with ThreadPoolExecutor(threads) as pool:

                def copy(pool: Any = pool, pieces: Any = pieces) -> None:
                    list(pool.map(lambda piece: np.copyto(a[piece], b[piece]), pieces))

                copied = 8 * size / best_time(copy, share, clock)
            added = 12 * size / best_time(triad, share, clock)
            points.append(
                MemoryPoint(threads=threads, copy_bytes_per_s=copied, triad_bytes_per_s=added)
            )
    finally:
        torch.set_num_threads(before)
    return tuple(points)


class AdamWork:
    """AdamW on split masters, on arrays of its own that are larger than the caches."""

    def __init__(self, memory_bytes: int = 256 * MIB) -> None:
        import torch

        from ssdtune.optim.adamw import split_master

        self.size = working_set(memory_bytes) // _ADAM_BYTES
        self._grad = torch.full((self.size,), 1e-3)
        self._high, self._low = split_master(torch.full((self.size,), 1e-2))
        self._exp_avg, self._exp_avg_sq = torch.zeros(self.size), torch.zeros(self.size)

    def update(self, threads: int, form: str | None = None, size: int | None = None) -> None:
        """Update all parameters, or the first `size`, once."""
        from ssdtune.optim.adamw import adamw_

        cut = slice(0, size or self.size)
        adamw_(
            self._high[cut], self._low[cut], self._exp_avg[cut], self._exp_avg_sq[cut], self._grad[cut],
            step=1, lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, threads=threads, form=form,
        )  # fmt: skip


def measure_adam(
    *, seconds: float, work: AdamWork | None = None, clock: Clock = time.perf_counter
) -> tuple[AdamPoint, ...]:
    """Measure the fastest form of AdamW by number of threads, and the others with all cores."""
    from ssdtune.optim.adamw import forms

    work = work or AdamWork()
    settings = [(forms()[0], threads) for threads in thread_counts()]
    settings += [(form, num_cores()) for form in forms()[1:]]
    points = []
    for form, threads in settings:
        size = (
            work.size // 8 if form == "numpy" else work.size
        )  # many times slower, and on one core
        threads = 1 if form == "numpy" else threads
        taken = best_time(
            lambda f=form, t=threads, n=size: work.update(t, f, n),  # type: ignore[misc]
            seconds / len(settings),
            clock,
        )
        points.append(AdamPoint(form=form, threads=threads, parameters_per_s=size / taken))
    return tuple(points)


def working_set(wanted: int) -> int:
    """Return so many bytes, or fewer where little memory is free."""
    return min(wanted, available_host_memory().bytes // 8) // MIB * MIB or MIB


def best_time(work: Callable[[], None], seconds: float, clock: Clock) -> float:
    """Return the shortest of as many repetitions as fit into the time, at least one, the first not counted."""
    start = clock()
    work()
    best = float("inf")
    while True:
        before = clock()
        work()
        after = clock()
        best = min(best, after - before)
        if after - start >= seconds:
            return max(best, 1e-9)
