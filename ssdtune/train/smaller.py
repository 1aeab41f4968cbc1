"""What a user can change so that a run fits into the memory: the settings to try, with the values that work.

Called where `ssdtune.train.prepare` finds that nothing fits; the search itself is `ssdtune.plan.nearest`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from ssdtune.config.schema import Config
from ssdtune.plan.device_memory import DeviceLimits, device_bytes
from ssdtune.plan.nearest import Nearest, nearest_fit
from ssdtune.plan.residency import (
    LEAST_CHUNK_BYTES,
    ComputeSize,
    MemoryLimits,
    MemoryPlan,
    PartSize,
    Proportions,
    plan_memory,
)

_SMALLEST = Proportions(block_slots=1, chunk_slots=2, chunk_bytes=LEAST_CHUNK_BYTES)
_ENDLESS_BYTES = 1 << 62


def nearest_settings(
    config: Config,
    parts: Sequence[PartSize],
    limits: MemoryLimits,
    max_length: int,
    compute_size: Callable[[Config, int], ComputeSize],
) -> Nearest | None:
    """Find the settings that fit where the given ones do not.

    Args:
        limits: With the budget that is too small.
        max_length: Longest sequence of the run, in tokens.
        compute_size: Returns what computing needs with given settings and longest sequence.

    Returns:
        None if the given settings fit.
    """
    device = DeviceLimits(_ENDLESS_BYTES) if limits.device else None
    # Streaming everything needs least.
    endless = replace(limits, budget_bytes=_ENDLESS_BYTES, cache_bytes=0, device=device)

    @cache  # counting takes a while, and both budgets ask for the same
    def smallest(batch_size: int, length: int) -> tuple[ComputeSize, MemoryPlan]:
        training = replace(config.training, per_device_train_batch_size=batch_size)
        compute = compute_size(replace(config, training=training), length)
        plan = plan_memory(parts, compute, endless, _SMALLEST)
        return compute, replace(plan, device_gradient_slots=1) if device else plan

    def on_host(batch_size: int, length: int) -> int:
        return smallest(batch_size, length)[1].least_bytes

    def on_device(batch_size: int, length: int) -> int:
        return sum(device_bytes(parts, *smallest(batch_size, length)).values())

    batch_size = config.training.per_device_train_batch_size
    found = nearest_fit(on_host, batch_size, max_length, limits.budget_bytes)
    if not limits.device:
        return found
    budget = limits.device.budget_bytes
    on_card = nearest_fit(on_device, batch_size, max_length, budget, setting="gpu_memory")
    return found.with_another(on_card) if found and on_card else found or on_card
