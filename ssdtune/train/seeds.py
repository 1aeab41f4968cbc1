"""Random seeds as a function of where in the run they are used.

Each stage of each micro-batch draws from a generator seeded by (seed, step, micro-batch, stage) alone. So the
dropout masks are the same when a block is recomputed, whatever order the schedule runs blocks and
micro-batches in, and after a resume: there is no generator state to save.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def stage_seed(seed: int, step: int, micro_batch: int, stage: int) -> int:
    """Return the seed of one stage's forward pass, below 2^63.

    Args:
        seed: The run's seed.
        step: Optimizer step, counted from 0.
        micro_batch: Index within the step, counted from 0.
        stage: 0 for what lies before the blocks, 1 + b for block b, L + 1 for what lies behind them.

    Source: the splitmix64 finalizer (Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014).
    """
    value = 0
    for part in (seed, step, micro_batch, stage):
        value = (value + part + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value >> 1
