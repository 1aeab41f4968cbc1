"""Hardware profiles with invented figures, so that a test says all of a machine that matters to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ssdtune.hardware.figures import (
    AdamPoint,
    BlockPoint,
    BlockProfile,
    MemoryPoint,
    TogetherProfile,
)
from ssdtune.hardware.profile import HardwareProfile


def profile(**figures: Any) -> HardwareProfile:
    """Return a profile of a machine of which nothing was measured but these figures."""
    blank: dict[str, Any] = {
        "machine_id": "0", "machine": {"cpu": "Zen", "cores": 16, "memory_bytes": 64 << 30, "cards": ""},
        "measured_at": "2026-12-01T00:00:00+00:00", "effort": "full", "seconds": 1.0, "backends": {},
        "directories": (), "together": None, "memory": (), "adam": (), "contention": None, "copies": (),
        "compute_dtypes": ("fp32", "bf16"), "blocks": (),
    }  # fmt: skip
    return HardwareProfile(**blank | figures)


def rates(
    *,
    read: float,
    write: float,
    mixed: float,
    memory: float,
    adam: float,
    num_file_systems: int = 1,
) -> dict[str, Any]:
    """Return the figures of drives, memory (bytes per second) and AdamW (parameters per second)."""
    return {
        "together": TogetherProfile(
            num_file_systems=num_file_systems, read_bytes_per_s=read, write_bytes_per_s=write,
            mixed_bytes_per_s=mixed,
        ),
        "memory": (MemoryPoint(threads=2, copy_bytes_per_s=memory, triad_bytes_per_s=memory),),
        "adam": (AdamPoint(form="avx2", threads=2, parameters_per_s=adam),),
    }  # fmt: skip


def block(
    points: Iterable[tuple[str, int, float]], parameters: int = 20000, hidden_size: int = 40
) -> BlockProfile:
    """Return a block with points of (dtype, tokens, FLOP per second), the same forward and backward."""
    return BlockProfile(
        shape="x", digest="x", device="cpu", parameters=parameters, active_parameters=parameters,
        hidden_size=hidden_size,
        points=tuple(
            BlockPoint(
                dtype=dtype, sequences=1, sequence=tokens, forward_s=1.0, backward_s=2.0, forward_flop=rate
            )
            for dtype, tokens, rate in points
        ),
    )  # fmt: skip
