"""A hardware profile as tables for people."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from ssdtune.units import format_disk, format_memory, format_rate

if TYPE_CHECKING:
    from ssdtune.hardware.profile import HardwareProfile


def render(profile: HardwareProfile, *, width: int = 100) -> str:
    """Return the profile as text without colours.

    Args:
        width: Columns.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)

    def show(headers: list[str], rows: list[list[str]]) -> None:
        table = Table(*headers, box=None, pad_edge=False, show_edge=False)
        for column in table.columns[1:]:
            column.overflow = "fold"
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()

    machine = profile.machine
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {format_memory(int(machine['memory_bytes']))}; "
        f"ssdtune {machine['ssdtune']}, torch {machine['torch']}; measured {profile.measured_at}\n",
        markup=False,
    )
    show(
        ["drive of", "file system", "free", "read", "write", "both", "direct I/O"],
        [
            [
                d.path,
                f"{d.file_system} on {d.device}",
                format_disk(d.free_bytes),
                *(
                    format_rate(rate) if rate else "-"
                    for rate in (d.read_bytes_per_s, d.write_bytes_per_s, d.mixed_bytes_per_s)
                ),
                "yes" if d.direct else "not measured" if d.problem else "no: page cache",
            ]
            for d in profile.directories
        ],
    )
    for directory in profile.directories:
        if directory.problem:
            console.print(f"{directory.path}: {directory.problem}\n", markup=False)
    rows = [["memory copy", format_rate(profile.memory_bytes_per_s)]]
    for threads, rate in profile.adam_parameters_per_s.items():
        rows.append([f"AdamW, threads: {threads}", f"{rate / 1e9:.3g}e9 parameters/s"])
    for device, rates in profile.matmul_flop_per_s.items():
        for dtype, rate in rates.items():
            rows.append([f"matrix products, {device}, {dtype}", f"{rate / 1e12:.3g} TFLOP/s"])
    show(["", ""], rows)
    settings = (
        f"queue depth {profile.queue_depth}, requests of {format_memory(profile.request_bytes)}"
    )
    console.print(f"I/O backend {profile.backend} ({settings})", markup=False)
    for name, reason in profile.backends.items():
        console.print(f"  {name}: {reason or 'works'}", markup=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
