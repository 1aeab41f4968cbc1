"""Sizes, rates and times as people write and read them.

Memory is shown in GiB, drives in GB and GB/s (as on data sheets), three significant digits.
"""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip


def parse_size(text: str | int) -> int:
    """Return the bytes that a size such as `3GiB`, `500 MB`, `64k` or `4096` names.

    Raises:
        ValueError: The text is not a size.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f'"{text}" is not a size; write for example 3GiB, 500MB or 4096')
    return int(float(match.group(1)) * factor)


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_count(number: float) -> str:
    """Format a number of parameters or tokens, such as `830`, `55.8k`, `2.76M` or `1.10B`."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= factor:
            return f"{_three_digits(number / factor)}{unit}"
    return f"{number:.0f}"


def format_memory(num_bytes: float) -> str:
    """Format bytes of memory with a binary unit, such as `2.87 GiB`."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= factor:
            return f"{_three_digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def format_disk(num_bytes: float) -> str:
    """Format bytes on a drive with a decimal unit, such as `13.2 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= factor:
            return f"{_three_digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def format_rate(bytes_per_s: float) -> str:
    """Format a bandwidth, such as `1.74 GB/s`."""
    return f"{format_disk(bytes_per_s)}/s"


def format_time(seconds: float) -> str:
    """Format a duration, such as `3.2 s`, `4 min 05 s` or `7 h 12 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours / 24:.1f} days"
