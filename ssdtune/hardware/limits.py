"""What limits training on a machine: time per parameter of drives, AdamW and link against compute per token.

A rule of thumb for people, from the rates alone; it knows no model and no schedule. Full fine-tuning with all states
on the drives and recomputed blocks, as in docs/cost_model.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssdtune.hardware.profile import HardwareProfile
from ssdtune.units import format_count, format_rate, format_time

BYTES_MOVED = {"bf16": (14, 12), "fp32": (16, 12)}
"""Read and written per parameter and step."""
MEMORY_BYTES = 64
"""Bytes that cross the memory per parameter and step: transfers, gradient sums, AdamW."""
EXAMPLE_PARAMETERS = 1.0e9
EXAMPLE_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds per parameter and step by resource, and per parameter and token for compute.

    Attributes:
        dtype: What is computed in.
        per_parameter: By resource ("drives", "AdamW", "memory", "link"); of what was measured.
        compute_per_token: Forward pass, the same again, and backward pass; None if not measured.
    """

    dtype: str
    per_parameter: dict[str, float]
    compute_per_token: float | None

    @property
    def binding(self) -> str:
        """The resource that takes longest for each parameter; empty if none was measured."""
        return max(self.per_parameter, key=lambda name: self.per_parameter[name], default="")

    @property
    def break_even_tokens(self) -> float | None:
        """Tokens per step from which compute takes longer than everything else."""
        if not self.binding or not self.compute_per_token:
            return None
        return self.per_parameter[self.binding] / self.compute_per_token


def limits(profile: HardwareProfile) -> Limits:
    """Return the limits of a machine."""
    rates = profile.rates()
    dtype = (
        "bf16"
        if "bf16" in profile.compute_dtypes and "bf16" in rates.forward_flop_per_s
        else "fp32"
    )
    moved = sum(BYTES_MOVED[dtype])
    width = 2 if dtype == "bf16" else 4
    costs = {
        "drives": (moved, rates.io_with_adam_bytes_per_s),
        "AdamW": (1, rates.adam_with_io_parameters_per_s),
        "memory": (MEMORY_BYTES, rates.memory_bytes_per_s),
        "link": (2 * width, rates.h2d_bytes_per_s),
    }
    per_parameter = {name: amount / rate for name, (amount, rate) in costs.items() if rate}
    forward, backward = rates.forward_flop_per_s.get(dtype), rates.backward_flop_per_s.get(dtype)
    compute = 2 * 2 / forward + 4 / backward if forward and backward else None
    return Limits(dtype=dtype, per_parameter=per_parameter, compute_per_token=compute)


def sentences(profile: HardwareProfile) -> list[str]:
    """Say what limits full fine-tuning on a machine, one sentence or two each."""
    found, rates = limits(profile), profile.rates()
    times = {name: f"{1e9 * seconds:.3g} ns" for name, seconds in found.per_parameter.items()}
    lines = []
    if "drives" in times:
        read, written = BYTES_MOVED[found.dtype]
        lines.append(
            f"Drives: at {read}+{written} bytes per parameter ({found.dtype}) and "
            f"{format_rate(rates.io_with_adam_bytes_per_s)} mixed while AdamW works, each step costs "
            f"{times['drives']} per parameter."
        )
    if "AdamW" in times:
        alone = f"{1e9 / rates.adam_parameters_per_s:.3g} ns"
        lines.append(f"AdamW: {times['AdamW']} per parameter while drives work, {alone} alone.")
    if "memory" in times:
        lines.append(f"Memory: about {MEMORY_BYTES} bytes per parameter, {times['memory']}.")
    if "link" in times:
        lines.append(
            f"Link to the card: weights cross it twice a step, {times['link']} per parameter."
        )
    tokens = found.break_even_tokens
    if not tokens or not found.compute_per_token:
        return lines
    lines.append(
        f"Compute: {1e12 * found.compute_per_token:.3g} ps per parameter and token, with recomputing."
    )
    lines.append(
        f"So up to about {format_count(tokens)} tokens per step the limit is {found.binding}, above it is compute: "
        f"with that many tokens, compute hides the {times[found.binding]}. More tokens per step (larger micro-batch "
        "or accumulation) cost nothing until then."
    )
    if not profile.copies:
        lines.append("Compute and AdamW share the cores of this processor, so their times add.")
    other = EXAMPLE_PARAMETERS * found.per_parameter[found.binding]
    compute = EXAMPLE_PARAMETERS * EXAMPLE_TOKENS * found.compute_per_token
    lines.append(
        f"Example, {format_count(EXAMPLE_PARAMETERS)} parameters and {EXAMPLE_TOKENS} tokens per step: "
        f"{found.binding} {format_time(other)}, compute {format_time(compute)}."
    )
    return lines
