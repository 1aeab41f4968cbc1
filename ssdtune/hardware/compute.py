"""How fast memory is copied, AdamW updates parameters, and matrices are multiplied on this machine.

Every figure is the best of several repetitions: other programs only ever make it slower. Sizes exceed the
caches but not the memory that is free. torch is imported when a figure needs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ssdtune.hardware.drives import Clock
from ssdtune.hardware.memory import available_host_memory
from ssdtune.units import MIB

_ADAM_BYTES = 16
"""Bytes per parameter that the split form touches: two halves of the master, two moments, the gradient."""


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bandwidth(*, seconds: float, clock: Clock = time.perf_counter) -> float:
    """Return the bytes per second of copying memory with all cores: each byte read and written counts two."""
    size = _working_set(256 * MIB) // 2
    source = np.ones(size, np.uint8)
    target = np.zeros(size, np.uint8)
    cores = num_cores()
    pieces = [slice(i * size // cores, (i + 1) * size // cores) for i in range(cores)]
    with ThreadPoolExecutor(cores) as pool:

        def copy() -> None:
            list(pool.map(lambda piece: np.copyto(target[piece], source[piece]), pieces))

        return 2 * size / _best_time(copy, seconds, clock)


def adam_rates(*, seconds: float, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Return parameters per second of AdamW on split masters, by number of threads."""
    import torch

    from ssdtune.optim.adamw import adamw_, split_master

    size = _working_set(128 * MIB) // _ADAM_BYTES
    grad = torch.full((size,), 1e-3)
    high, low = split_master(torch.full((size,), 1e-2))
    exp_avg, exp_avg_sq = torch.zeros(size), torch.zeros(size)
    counts = sorted({1 << i for i in range(num_cores().bit_length())} | {num_cores()})
    rates = {}
    for threads in [count for count in counts if count <= num_cores()]:

        def update(threads: int = threads) -> None:
            adamw_(
                high, low, exp_avg, exp_avg_sq, grad, step=1, lr=1e-5, beta1=0.9, beta2=0.999,
                eps=1e-8, weight_decay=0.0, threads=threads,
            )  # fmt: skip

        rates[str(threads)] = size / _best_time(update, seconds / len(counts), clock)
    return rates


def matmul_rates(
    *, seconds: float, clock: Clock = time.perf_counter
) -> dict[str, dict[str, float]]:
    """Return FLOP per second of a linear layer's three products, by device ("cpu", "cuda:0") and dtype.

    The products of the backward pass count too: where a processor lacks bf16 instructions they are many
    times slower than that of the forward pass.
    """
    import torch

    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    share = seconds / (len(devices) * len(dtypes))
    return {
        device: {name: _matmul_rate(device, dtype, share, clock) for name, dtype in dtypes.items()}
        for device in devices
    }


def _matmul_rate(device: str, dtype: object, seconds: float, clock: Clock) -> float:
    """Grow the matrices while there is time, so that a slow form does not take minutes."""
    import torch

    rate, last = 0.0, 0.0
    for n in (256, 512, 1024, 2048, 4096):
        flop = 3 * 2 * n**3
        if 8 * last > seconds:
            break
        weight, x = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(2))

        def products(weight: torch.Tensor = weight, x: torch.Tensor = x) -> None:
            x @ weight.T  # forward
            x @ weight  # gradient of the input
            x.T @ x  # gradient of the weight
            if device != "cpu":
                torch.cuda.synchronize(device)

        last = _best_time(products, seconds / 8, clock)
        rate = max(rate, flop / last)
    return rate


def _working_set(wanted: int) -> int:
    return min(wanted, available_host_memory().bytes // 8) // MIB * MIB or MIB


def _best_time(work: Callable[[], None], seconds: float, clock: Clock) -> float:
    """Return the shortest of as many repetitions as fit into the time, at least two, the first not counted."""
    work()
    best, start = float("inf"), clock()
    while True:
        before = clock()
        work()
        after = clock()
        best = min(best, after - before)
        if after - start >= seconds:
            return max(best, 1e-9)
