"""How fast a step could be at best on a machine that computes on its CPU: bytes over measured rates, and computing as timed.

A step has two phases: forward, and backward. In each, these can run side by side at best, so the longest counts:

* cores: computing, AdamW and the processor's part of I/O share them, so their times add up;
* drives: all bytes at the measured rate for their mix of reads and writes;
* dram: what I/O and AdamW move in memory.

AdamW runs beside backward, or is deferred and runs beside the next step's forward, or both if it was made too early. The ultimate bound knows no phases. Plain
numbers, nothing is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

MOMENT_BYTES = 8
WRITTEN_BYTES = 12
"""Per trained parameter: weights and, if it is split, the master's other half, together 4; moments 8."""
ADAM_DRAM_BYTES = 28
"""Per parameter: master and moments in and out, gradient in."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the machine reached beside the run.

    Attributes:
        read_bytes_per_s, write_bytes_per_s: Of the drives, one way; `mixed` is the sum of both ways at once.
        read_cpu_s_per_byte, write_cpu_s_per_byte: Seconds of one core that a byte costs.
        memory_bytes_per_s: Of host memory; each copied byte counts twice.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    read_cpu_s_per_byte: float
    write_cpu_s_per_byte: float
    memory_bytes_per_s: float
    adam_parameters_per_s: float
    cores: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one optimizer step has to do.

    Attributes:
        num_blocks, block_parameters, head_parameters: The model; its embedding is as large as its head.
        forward_s, backward_s: Computing alone, head and loss with the latter.
        trained_parameters: That AdamW updates.
        frozen: The model's own weights are not trained.
        weight_bytes: Of a weight that is streamed.
        split: The master is the weight and another 2 bytes.
        streamed_weights, streamed_states: Share that comes from the drives; the rest is cached.
        gradient_bytes: Gradients that go to the drives; `read_gradient_bytes` those that come back.
        activation_bytes: Block inputs that do.
        deferred_share: Share of the trained parameters whose update waits for the next forward.
        redone_share: That of them that were updated beside backward too, in vain.
    """

    num_blocks: int
    block_parameters: int
    head_parameters: int
    forward_s: float
    backward_s: float
    trained_parameters: float
    frozen: bool
    weight_bytes: int
    split: bool
    streamed_weights: float = 1.0
    streamed_states: float = 1.0
    gradient_bytes: float = 0.0
    read_gradient_bytes: float = 0.0
    activation_bytes: float = 0.0
    deferred_share: float = 0.0
    redone_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a step."""

    read_bytes: float = 0.0
    write_bytes: float = 0.0
    compute_s: float = 0.0
    adam_parameters: float = 0.0

    def __add__(self, other: Phase) -> Phase:
        return Phase(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, share: float) -> Phase:
        return Phase(**{name: share * value for name, value in vars(self).items()})

    def terms(self, rates: Rates) -> dict[str, float]:
        """Return the seconds that each part of the machine needs, and what makes up those of the cores."""
        adam = self.adam_parameters / rates.adam_parameters_per_s
        io_cpu = self.read_bytes * rates.read_cpu_s_per_byte
        io_cpu += self.write_bytes * rates.write_cpu_s_per_byte
        moved = self.read_bytes + self.write_bytes + ADAM_DRAM_BYTES * self.adam_parameters
        return {
            "cores": self.compute_s + adam + io_cpu / rates.cores,
            "drives": drive_seconds(self.read_bytes, self.write_bytes, rates),
            "dram": moved / rates.memory_bytes_per_s,
            "compute": self.compute_s,
            "adam": adam,
            "io_cpu": io_cpu / rates.cores,
        }


RESOURCES = ("cores", "drives", "dram")


def drive_seconds(read_bytes: float, write_bytes: float, rates: Rates) -> float:
    """Return the time of the drives: both ways at once as far as they balance, or in turns if that is faster."""
    both = min(read_bytes, write_bytes)
    in_turns = read_bytes / rates.read_bytes_per_s + write_bytes / rates.write_bytes_per_s
    at_once = 2 * both / rates.mixed_bytes_per_s
    at_once += (read_bytes - both) / rates.read_bytes_per_s
    at_once += (write_bytes - both) / rates.write_bytes_per_s
    return min(in_turns, at_once)


def computing_reads(step: Step) -> tuple[float, float]:
    """Return the bytes of weights that forward and backward read from the drives, caches not counted.

    Blocks are needed in both; the last one is still in memory when backward begins. The embedding is needed in forward,
    the head once where they meet.
    """
    blocks = step.num_blocks * step.block_parameters
    forward = blocks + step.head_parameters
    backward = blocks - step.block_parameters + step.head_parameters
    return step.weight_bytes * forward, step.weight_bytes * backward


def phases(step: Step) -> tuple[Phase, Phase]:
    """Return what forward and backward have to do."""
    forward_read, backward_read = (step.streamed_weights * read for read in computing_reads(step))
    states = MOMENT_BYTES + (2 if step.split else 0)
    update = Phase(
        read_bytes=step.streamed_states * states * step.trained_parameters,
        write_bytes=step.streamed_states * WRITTEN_BYTES * step.trained_parameters,
        adam_parameters=step.trained_parameters,
    )
    if not step.frozen:
        # A deferred update reads the head before forward does, which then finds it in memory until backward.
        head = step.streamed_weights * step.weight_bytes * step.head_parameters
        forward_read += step.deferred_share * head
        backward_read -= step.deferred_share * head
    forward = Phase(
        read_bytes=forward_read + step.read_gradient_bytes,
        write_bytes=step.activation_bytes,
        compute_s=step.forward_s,
    )
    backward = Phase(
        read_bytes=backward_read + step.activation_bytes,
        write_bytes=step.gradient_bytes,
        compute_s=step.backward_s,
    )
    at_once = 1 - step.deferred_share + step.redone_share
    return forward + update * step.deferred_share, backward + update * at_once


def bounds(step: Step, rates: Rates) -> dict[str, Any]:
    """Return the shortest step in seconds: with its own phases ("mode"), and of any schedule ("ultimate"), with their terms.

    The ultimate bound takes neither gradients nor activations to the drives, makes no update twice, and has every part of
    the machine busy throughout.
    """
    named = dict(zip(("forward", "backward"), phases(step), strict=True))
    terms = {name: phase.terms(rates) for name, phase in named.items()}
    nothing = {
        "gradient_bytes": 0,
        "read_gradient_bytes": 0,
        "activation_bytes": 0,
        "redone_share": 0,
    }
    free = phases(replace(step, **nothing))
    ultimate = (free[0] + free[1]).terms(rates)
    return {
        "mode_s": sum(longest(found) for found in terms.values()),
        "ultimate_s": longest(ultimate),
        "terms_s": {**terms, "ultimate": ultimate},
    }


def longest(terms: dict[str, float]) -> float:
    return max(terms[name] for name in RESOURCES)
