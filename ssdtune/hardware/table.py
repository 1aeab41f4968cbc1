"""A hardware profile as tables for people, and in words what limits training on the machine."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from ssdtune.hardware.busy import busy_warning
from ssdtune.hardware.limits import sentences
from ssdtune.units import format_disk, format_memory, format_rate, format_time

if TYPE_CHECKING:
    from rich.console import Console

    from ssdtune.hardware.figures import DirectoryProfile
    from ssdtune.hardware.profile import HardwareProfile

KIND_TITLES = (("read", "read"), ("write", "written"), ("mixed", "both"))


def render(profile: HardwareProfile, *, width: int = 100) -> str:
    """Return the profile as text without colours.

    Args:
        width: Columns.
    """
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    machine = {
        "cpu": "unknown processor",
        "cores": "?",
        "ssdtune": "?",
        "torch": "?",
        **profile.machine,
    }
    cards = f", {machine['cards']}" if machine.get("cards") else ""
    _line(
        console,
        f"{machine['cpu']}, {machine['cores']} cores, {format_memory(int(machine.get('memory_bytes', 0)))}{cards}; "
        f"ssdtune {machine['ssdtune']}, torch {machine['torch']}; measured {profile.measured_at} in "
        f"{format_time(profile.seconds)} ({profile.effort})",
    )
    if warning := busy_warning(profile.others):
        _line(console, f"Warning: {warning}")
    _drives(console, profile)
    for directory in profile.directories:
        _settings(console, directory)
    _compute(console, profile)
    _blocks(console, profile)
    lines = sentences(profile)
    if lines:
        console.print("What limits full fine-tuning here:")
        for line in lines:
            _line(console, f"  {line}", end="")
        console.print()
    console.print("I/O backends:")
    for name, reason in profile.backends.items():
        _line(console, f"  {name}: {reason or 'works'}", end="")
    for directory in profile.directories:
        for warning in directory.warnings:
            _line(console, f"\nWarning: {warning}", end="")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _drives(console: Console, profile: HardwareProfile) -> None:
    rows = []
    for d in profile.directories:
        rates = (d.read_bytes_per_s, d.write_bytes_per_s, d.mixed_bytes_per_s)
        rows.append([
            d.path,
            f"{d.file_system} on {d.device}",
            format_disk(d.free_bytes),
            *(format_rate(rate) if rate else "-" for rate in rates),
            "not measured" if d.problem else "yes" if d.direct else "no: page cache",
        ])  # fmt: skip
    together = profile.together
    if together and together.num_file_systems > 1:
        rows.append([
            "all together", "", "", format_rate(together.read_bytes_per_s),
            format_rate(together.write_bytes_per_s), format_rate(together.mixed_bytes_per_s), "",
        ])  # fmt: skip
    headers = ["rates that hold", "file system", "free", "read", "written", "both", "direct I/O"]
    _table(console, headers, rows)


def _settings(console: Console, d: DirectoryProfile) -> None:
    """Print what else is known of a directory: settings, caches, drives."""
    if d.problem:
        _line(console, f"{d.path}: {d.problem}")
        return
    _line(
        console,
        f"{d.path}: best with {d.backend}, requests of {format_memory(d.request_bytes)}, {d.queue_depth} in flight; "
        f"measured on {format_disk(d.file_bytes)}, {format_disk(d.written_bytes)} written; reflinks: "
        f"{ {True: 'yes', False: 'no', None: 'unknown'}[d.reflink] }",
        end="",
    )
    for kind in d.caches:
        burst = d.read_burst_bytes_per_s if kind == "read" else d.write_burst_bytes_per_s
        held = d.read_bytes_per_s if kind == "read" else d.write_bytes_per_s
        _line(
            console,
            f"  A cache of drive or host: a short {kind} reaches {format_rate(burst)}, {format_rate(held)} holds.",
            end="",
        )
    if d.ways:
        ways = [
            f"{'to the card by ' * way.to_card}{way.backend} {way.read_bytes_per_s / 1e9:.2f} / {way.mixed_bytes_per_s / 1e9:.2f}"
            for way in d.ways
        ]
        _line(console, f"  In turns, read / both, GB/s: {', '.join(ways)}", end="")
    for drive in d.drives:
        facts = [
            drive.model or "model unknown",
            format_disk(drive.size_bytes),
            "" if drive.rotational is None else "rotational" if drive.rotational else "solid state",
            f"scheduler {drive.scheduler}" if drive.scheduler else "",
            f"{drive.num_requests} queued requests of at most {format_memory(drive.max_request_bytes)}",
            "" if drive.temperature_c is None else f"{drive.temperature_c:.0f} °C",
            "" if drive.wear_share is None else f"{drive.wear_share:.0%} of its endurance used",
            ""
            if drive.written_bytes is None
            else f"{format_disk(drive.written_bytes)} written in its life",
            drive.wear_note,
        ]
        _line(console, f"  {drive.name}: {', '.join(fact for fact in facts if fact)}", end="")
    console.print()
    _grid(console, d)


def _grid(console: Console, d: DirectoryProfile) -> None:
    """Print the settings that were tried, read/written/both in GB/s, request sizes downwards."""
    points = [point for point in d.points if point.backend == d.backend]
    depths = sorted({point.queue_depth for point in points})
    rows = []
    for request_bytes in sorted({point.request_bytes for point in points}):
        row = [format_memory(request_bytes)]
        for depth in depths:
            found = [
                p for p in points if (p.request_bytes, p.queue_depth) == (request_bytes, depth)
            ]
            row.append(_three(found[0]) if found else "-")
        rows.append(row)
    _table(console, [f"{d.backend}, GB/s", *(f"{depth} in flight" for depth in depths)], rows)
    others = [
        [p.backend, f"{format_memory(p.request_bytes)}, {p.queue_depth} in flight", _three(p)]
        for p in d.points
        if p.backend != d.backend
    ]
    if others:
        _table(console, ["other backends", "requests", "read / written / both, GB/s"], others)


def _three(point: object) -> str:
    return " / ".join(
        f"{getattr(point, f'{kind}_bytes_per_s') / 1e9:.2f}" for kind, _ in KIND_TITLES
    )


def _compute(console: Console, profile: HardwareProfile) -> None:
    rows = [
        [
            f"memory, threads: {point.threads}",
            f"copy {format_rate(point.copy_bytes_per_s)}, a = b + s·c {format_rate(point.triad_bytes_per_s)}",
        ]
        for point in profile.memory
    ]
    for adam in profile.adam:
        rows.append(
            [f"AdamW {adam.form}, threads: {adam.threads}", _parameters(adam.parameters_per_s)]
        )
    both = profile.contention
    if both:
        rows += [
            [
                "AdamW while drives work",
                f"{_parameters(both.adam_with_io_parameters_per_s)} "
                f"({both.adam_with_io_parameters_per_s / both.adam_parameters_per_s:.0%} of that alone)",
            ],
            [
                "drives while AdamW works",
                f"{format_rate(both.io_with_adam_bytes_per_s)} both "
                f"({both.io_with_adam_bytes_per_s / both.io_bytes_per_s:.0%} of that alone)",
            ],
        ]
    for copy in profile.copies:
        pinned = "pinned" if copy.pinned else "pageable"
        rows.append([f"{copy.device}, {copy.direction}, {pinned}", format_rate(copy.bytes_per_s)])
    _table(console, ["", ""], rows)


def _parameters(rate: float) -> str:
    return f"{rate / 1e9:.3g}e9 parameters/s"


def _blocks(console: Console, profile: HardwareProfile) -> None:
    rows = []
    for block in profile.blocks:
        for point in block.points:
            rows.append([
                f"{block.shape}, {block.device}", point.dtype, f"{point.sequences} x {point.sequence}",
                f"{format_time(point.forward_s)} ({point.forward_flop_per_s / 1e12:.3g})",
                f"{format_time(point.backward_s)} ({point.backward_flop_per_s / 1e12:.3g})",
            ])  # fmt: skip
    headers = ["one block", "dtype", "tokens", "forward (TFLOP/s)", "backward alone"]
    if rows:
        _table(console, headers, rows)
    for block in profile.blocks:
        for note in block.notes:
            _line(console, f"{block.shape}: {note}", end="")
    if any(block.notes for block in profile.blocks):
        console.print()


def _table(console: Console, headers: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table

    table = Table(*headers, box=None, pad_edge=False, show_edge=False, show_header=any(headers))
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)
    console.print()


def _line(console: Console, text: str, end: str = "\n") -> None:
    console.print(text + end, markup=False, soft_wrap=False)
