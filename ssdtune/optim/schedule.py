"""Learning-rate schedules by transformers' names, as a function of the step alone."""

from __future__ import annotations

import math


def warmup_count(warmup_steps: float, total_steps: int) -> int:
    """Return the steps of warm-up; a value below 1 is a share of the run, rounded up as transformers does."""
    if 0 < warmup_steps < 1:
        return math.ceil(warmup_steps * total_steps)
    return int(warmup_steps)


def learning_rate(kind: str, step: int, total_steps: int, peak: float, warmup: int) -> float:
    """Return the learning rate of a step.

    Args:
        kind: "linear", "cosine", "constant" or "constant_with_warmup".
        step: Optimizer step, counted from 0.
        warmup: Steps of warm-up.

    Source: transformers.optimization, get_linear_schedule_with_warmup and its siblings.
    """
    if kind == "constant":
        return peak
    if step < warmup:
        return peak * (step / max(1, warmup))
    if kind == "constant_with_warmup":
        return peak
    if kind == "linear":
        return peak * max(0.0, (total_steps - step) / max(1, total_steps - warmup))
    if kind == "cosine":
        progress = (step - warmup) / max(1, total_steps - warmup)
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * 2.0 * 0.5 * progress)))
    raise ValueError(f'unknown schedule "{kind}"')


def clip_coefficient(norm: float, limit: float) -> float:
    """Return the factor that torch.nn.utils.clip_grad_norm_ applies; 1 without a limit."""
    if limit <= 0:
        return 1.0
    return min(1.0, limit / (norm + 1e-6))
