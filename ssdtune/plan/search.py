"""Find the memory plan with the shortest step: try proportions one after the other on the simulator.

Coordinate descent: from the usual proportions, each choice in turn is varied while the others stay, the best is kept,
and rounds are repeated until one brings nothing; then once more from buffers as few as are useful, and from there with
activations of all blocks away. Plain numbers; what a step takes under a plan is asked from the caller. Nothing of it
changes the numbers of a training, only its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ssdtune.errors import CapacityError
from ssdtune.plan.generate import EMBED, OUTER
from ssdtune.plan.residency import (
    LEAST_CHUNK_BYTES,
    ComputeSize,
    MemoryLimits,
    MemoryPlan,
    PartSize,
    Proportions,
    plan_memory,
)
from ssdtune.units import MIB

LEAST_GAIN = 0.002
"""A choice that makes a step shorter by less isn't taken: the simulator isn't that exact."""
MOST_STEPS = 60
"""Simulated steps of one search."""


@dataclass(frozen=True)
class Found:
    """The best plan.

    Attributes:
        step_s: Its simulated step; `usual_s` that of the usual proportions.
        num_tried: Different plans that were simulated.
    """

    plan: MemoryPlan
    proportions: Proportions
    step_s: float
    usual_s: float
    num_tried: int


def choices(parts: Sequence[PartSize], limits: MemoryLimits) -> dict[str, list[Any]]:
    """Return the values to try of each field of `Proportions`."""
    blocks = len({part.stage for part in parts if part.stage.startswith("block.")})
    found: dict[str, list[Any]] = {}
    if limits.device and limits.activations == "auto":
        found["host_blocks"] = [None, *_shares(blocks, (0, 0.5))]
    found |= {
        "kept_blocks": [None, *_shares(blocks, (0, 0.25, 0.5, 0.75, 1))],
        "partly_blocks": _shares(blocks, (0, 0.25, 0.5, 0.75, 1)),
        "swapped_blocks": _shares(blocks, (0, 0.25, 0.5, 0.75, 1)),
        "swapped_whole": [False, True],
        "input_slots": [2, 3, 4],
        "block_slots": [2, 3, 4, 6],
        "chunk_slots": [3, 4, 6, 8, 12],
        "inputs_leave": [False, True],
    }
    if limits.chunk_bytes is None:
        found["chunk_bytes"] = [size * MIB for size in (4, 8, 16, 32)]
    if not limits.clipping:
        # What comes before the blocks has its gradient last: first of all that is deferred, all chunks of the embedding.
        before = {part.stage for part in parts if part.trained and _is_entry(part.stage)}
        found["deferred_stages"] = [
            0,
            *(len(before) + n for n in _shares(blocks, (0, 0.1, 0.25, 0.5))),
        ]
    return found


def search(
    parts: Sequence[PartSize],
    compute: ComputeSize,
    limits: MemoryLimits,
    step_s: Callable[[MemoryPlan], float],
    *,
    usual: Proportions | None = None,
    most_steps: int = MOST_STEPS,
) -> Found:
    """Return the best plan that was found; of equal ones the first, that is the most usual.

    Args:
        step_s: Simulates a step under a plan, in seconds.
        usual: Where the search begins.
        most_steps: Simulated steps, at most.

    Raises:
        CapacityError: Even with everything streamed it does not fit.
    """
    usual = usual or Proportions()
    plan = plan_memory(parts, compute, limits, usual)
    times = {plan: step_s(plan)}
    plans: dict[Proportions, MemoryPlan | None] = {usual: plan}
    best = Found(plan, usual, times[plan], times[plan], 1)

    def planned(proportions: Proportions) -> MemoryPlan | None:
        if proportions not in plans:
            try:
                plans[proportions] = plan_memory(parts, compute, limits, proportions)
            except CapacityError:
                plans[proportions] = None
        return plans[proportions]

    options = choices(parts, limits)
    # Where memory is short, what one choice frees may pay only if another takes it: other starts.
    slim = replace(
        usual, block_slots=2, chunk_slots=3, chunk_bytes=LEAST_CHUNK_BYTES, inputs_leave=True
    )
    swapping = replace(slim, swapped_blocks=max(options["swapped_blocks"]), swapped_whole=True)
    for start in (usual, slim, swapping):
        here, improved = (start, float("inf")), True
        while improved:
            improved = False
            for name, values in options.items():
                for value in values:
                    if len(times) >= most_steps:
                        return replace(best, num_tried=len(times))
                    proportions = replace(here[0], **{name: value})
                    found = planned(proportions)
                    if found is None:
                        continue
                    if found not in times:
                        times[found] = step_s(found)
                    seconds = times[found]
                    if seconds < here[1] * (1 - LEAST_GAIN):
                        here, improved = (proportions, seconds), True
                    if seconds < best.step_s * (1 - LEAST_GAIN):
                        best = replace(best, plan=found, proportions=proportions, step_s=seconds)
    return replace(best, num_tried=len(times))


def _is_entry(stage: str) -> bool:
    return stage.partition(".")[0] in (OUTER, EMBED)


def _shares(count: int, shares: Sequence[float]) -> list[int]:
    return sorted({round(count * share) for share in shares})
