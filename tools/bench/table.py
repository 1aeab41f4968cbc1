"""The records of cells as tables in Markdown; `docs/benchmarks.md` explains the columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

GIB = 1 << 30

Record = dict[str, Any]


def render(records: Sequence[Record]) -> str:
    """Return the tables, and below them what was skipped or failed and why."""
    good = [record for record in records if "step_s" in record]
    bad = [record for record in records if "step_s" not in record]
    texts = [
        f"**{title}**\n\n{_table(good, columns)}"
        for title, columns in (
            ("Time", TIME),
            ("Bytes and memory", BYTES),
            ("The machine", MACHINE),
        )
        if good
    ]
    texts += [f"{r['name']}: {r.get('skipped') or r.get('failed')}" for r in bad]
    texts += [
        f"{r['name']}: not run in memory: {r['in_memory']['skipped']}"
        for r in good
        if "skipped" in r["in_memory"]
    ]
    return "\n\n".join(texts)


def describe(machine: dict[str, Any], *, dtype: str, steps: int) -> str:
    """Return a line on the machine, as its profile has it, and the settings of all cells."""
    if not machine:
        return ""
    direct = "direct" if machine["direct"] else "buffered"
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / GIB:.1f} GiB; "
        f"{machine['file_system']} on {machine['device']}, rates with {machine['backend']}, {direct}, "
        f"{machine['queue_depth']} requests of {machine['request_bytes'] >> 10} KiB; "
        f"ssdtune {machine['ssdtune']}, torch {machine['torch']}; {dtype}, {steps} steps.\n"
    )


def _table(records: Sequence[Record], columns: dict[str, Callable[[Record], str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    for record in records:
        lines.append(f"| {' | '.join(cell(record) for cell in columns.values())} |")
    return "\n".join(lines)


def _figure(name: str, scale: float = 1.0, digits: int = 2) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        value = record[name]
        return "–" if value is None else f"{value / scale:.{digits}f}"

    return cell


def _percent(name: str) -> Callable[[Record], str]:
    return lambda record: "–" if record[name] is None else f"{record[name]:+.1%}"


def _rate(name: str, scale: float) -> Callable[[Record], str]:
    return lambda record: " / ".join(f"{rates[name] / scale:.2f}" for rates in record["rates"])


def _to_fio(record: Record) -> str:
    found = [
        " ".join(f"{ratio:.2f}" for ratio in rates["own_to_fio"].values())
        for rates in record["rates"]
    ]
    return " / ".join(found) if all(found) else "–"


def _seconds(terms: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in terms.items() if value >= 0.005)


def _both(way: str) -> Callable[[Record], str]:
    return lambda record: " / ".join(
        f"{record[f'{who}_{way}_bytes_per_parameter']:.2f}" for who in ("kernel", "own")
    )


def _cell(record: Record) -> str:
    return str(record["name"])


TIME = {
    "cell": _cell,
    "step s": _figure("step_s", digits=3),
    "forecast s": _figure("forecast_s", digits=3),
    "forecast error": _percent("forecast_error"),
    "bound s": lambda record: f"{record['bound']['mode_s']:.3f}",
    "step ÷ bound": _figure("to_bound"),
    "ultimate s": lambda record: f"{record['bound']['ultimate_s']:.3f}",
    "step ÷ ultimate": _figure("to_ultimate"),
    "in memory s": _figure("in_memory_s", digits=3),
    "step ÷ in memory": _figure("to_in_memory"),
}
BYTES = {
    "cell": _cell,
    "read B/parameter (kernel / own)": _both("read"),
    "written B/parameter (kernel / own)": _both("written"),
    "planned peak GiB": _figure("planned_memory_bytes", GIB, 3),
    "measured peak GiB": _figure("peak_memory_bytes", GIB, 3),
    "error of plan": _percent("memory_error"),
}
MACHINE = {
    "cell": _cell,
    "read GB/s": _rate("read_bytes_per_s", 1e9),
    "write GB/s": _rate("write_bytes_per_s", 1e9),
    "mixed GB/s": _rate("mixed_bytes_per_s", 1e9),
    "ours ÷ fio (read write mixed)": _to_fio,
    "AdamW 10⁹/s": _rate("adam_parameters_per_s", 1e9),
    "rehearsed s": lambda record: " / ".join(_seconds(times) for times in record["times"]),
    "lanes busy s": lambda record: _seconds(record["lane_s"]),
    "bound: forward s": lambda record: _seconds(record["bound"]["terms_s"]["forward"]),
    "bound: backward s": lambda record: _seconds(record["bound"]["terms_s"]["backward"]),
}
