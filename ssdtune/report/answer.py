"""The answer to "how fast, and what would make it faster", in a few lines for people.

Plain numbers in: they come from `ssdtune.train.forecast` and `ssdtune.train.choose`. What is printed around them is
`ssdtune.train.planning`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from ssdtune.units import format_count, format_time

RESOURCES = {
    "ssd": "the drives",
    "h2d": "the link to the card",
    "d2h": "the link from the card",
    "compute": "the card",
    "cores": "the processor, which computes here",
    "adam": "AdamW on the processor",
    "dram": "the host memory's bandwidth",
}
"""What people call the simulator's resources."""
NOTABLE = 0.02
"""Smaller gains in tokens per second are called none."""
BUSY = 0.85
"""What works for less of a step does not hold it up alone."""


def step_line(sequences: int, micro_batches: int, tokens: float) -> str:
    """Say what a step learns.

    Args:
        sequences: Of a micro-batch.
        tokens: Of the whole step.
    """
    rows = sequences * micro_batches
    return (
        f"step      {format_count(tokens)} tokens in {rows} row{'s' * (rows != 1)}: "
        f"per_device_train_batch_size {sequences}, gradient_accumulation_steps {micro_batches}"
    )


def time_lines(
    step_s: float, tokens: float, lane_s: Mapping[str, float], resource_s: Mapping[str, float]
) -> list[str]:
    """Say how long a step takes, what each lane does in that time, and what holds it up.

    Args:
        step_s: Seconds of a step.
        tokens: Of a step.
        lane_s, resource_s: Seconds for which each lane works and each part of the machine is busy.
    """
    lanes = sorted(lane_s.items(), key=lambda item: -item[1])
    shown = [
        f"{name} {format_time(seconds)} ({seconds / step_s:.0%})"
        for name, seconds in lanes
        if seconds >= 0.005 * step_s
    ]
    lines = [
        f"time      {format_time(step_s)} per step, {tokens / step_s:.3g} tokens/s (simulated; other programs make it longer)",
        f"lanes     {', '.join(shown)}; they work at the same time",
    ]
    name = max(resource_s, key=lambda name: resource_s[name], default="")
    if not name:
        return lines
    share, what = min(resource_s[name] / step_s, 1.0), RESOURCES.get(name, name)
    if share >= BUSY:
        lines.append(f"limit     {what}: busy {share:.0%} of a step")
    else:
        lines.append(
            f"limit     nothing alone: the busiest, {what}, works {share:.0%} of a step; some of the rest is waiting for each other"
        )
    return lines


def gain_line(speedups: Mapping[str, float]) -> str:
    """Say what changes of the machine or the settings would bring.

    Args:
        speedups: Tokens per second with the change, in units of those without it.
    """
    gains = {
        name: speedup
        for name, speedup in sorted(speedups.items(), key=lambda item: -item[1])
        if speedup >= 1 + NOTABLE
    }
    nothing = [name for name in speedups if name not in gains]
    parts = []
    if gains:
        found = ", ".join(
            f"{name} {speedup - 1:+.0%}" if speedup < 2 else f"{name} {speedup:.3g} times as many"
            for name, speedup in gains.items()
        )
        parts.append(f"tokens/s with {found}")
    if nothing:
        parts.append(f"{'no more' if gains else 'no more tokens/s'} with {', '.join(nothing)}")
    return f"faster    {'; '.join(parts)}"
