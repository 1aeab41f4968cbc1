"""Draw what each lane did when, as an SVG picture: of a simulated step or of one that ran.

Plain text out, no library needed; any browser shows it, and hovering names an operation. `save` writes it as .svg, or
within a page as .html.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ssdtune.errors import ConfigError, StorageError
from ssdtune.plan.schedule import Lane, Operation
from ssdtune.units import format_time

COLOURS = {
    "load": "#4e79a7", "upload": "#86bcb6", "entry-forward": "#8cd17d", "forward": "#59a14f",
    "loss": "#b6992d", "backward": "#499894", "entry-backward": "#79706e", "save-input": "#d4a6c8",
    "load-input": "#b07aa1", "collect-gradient": "#fabfd2", "save-gradient": "#ff9d9a",
    "gather-rows": "#d4e157", "score": "#f1ce63", "rows-backward": "#a0a0a0", "clip": "#000000", "update": "#e15759", "load-states": "#f28e2b", "save-states": "#edc948",
}  # fmt: skip
"""One colour for each kind of operation."""

_LEFT, _WIDTH, _ROW, _TOP = 90, 1100, 34, 46
_LEAST = 0.4
"""Narrowest bar, in pixels; shorter operations would not be seen."""


@dataclass(frozen=True)
class Bar:
    """One operation on the picture; times in seconds from the step's begin."""

    lane: str
    kind: str
    label: str
    begin_s: float
    end_s: float

    @classmethod
    def of(cls, operation: Operation, begin_s: float, end_s: float) -> Bar:
        """Return the bar of a schedule's operation."""
        micro_batch = f", micro-batch {operation.micro_batch}" if operation.micro_batch >= 0 else ""
        piece = f", piece {operation.piece}" if operation.piece >= 0 else ""
        label = f"{operation.kind.value} {operation.stage}{micro_batch}{piece}"
        return cls(operation.lane.value, operation.kind.value, label, begin_s, end_s)


def picture_path(name: str) -> Path:
    """Return the path of a picture to be written.

    Raises:
        ConfigError: It is no kind of picture that can be drawn, or its folder does not exist.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() not in (".svg", ".html", ".htm"):
        raise ConfigError(
            f"--timeline {name}: the picture can be drawn as .svg or .html, not as "
            f"{path.suffix or 'a file without an ending'}; browsers show both. Name a file such as "
            f"{path.with_suffix('.svg').name}"
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"--timeline {name}: the folder {path.parent} does not exist. Create it first."
        )
    if path.is_dir():
        raise ConfigError(f"--timeline {name} is a folder. Name a file in it.")
    return path


def save(path: Path, picture: str, text: str) -> None:
    """Write a picture, by its ending as SVG or as a page.

    Args:
        picture: What `draw` returned.
        text: What the page says below it.

    Raises:
        StorageError: It cannot be written.
    """
    if path.suffix.lower() != ".svg":
        picture = (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>ssdtune plan</title></head>\n'
            f'<body style="font-family: sans-serif">\n{picture}'
            f'<pre style="white-space: pre-wrap">{escape(text)}</pre>\n</body></html>\n'
        )
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise StorageError("write", path, errno=error.errno or 0) from error


def draw(bars: Sequence[Bar], title: str) -> str:
    """Return an SVG document with one row per lane."""
    lanes = [lane.value for lane in Lane if any(bar.lane == lane.value for bar in bars)]
    end = max((bar.end_s for bar in bars), default=0.0) or 1.0
    height = _TOP + _ROW * len(lanes) + 60
    scale = _WIDTH / end
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 40}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
    ]
    for number, lane in enumerate(lanes):
        y = _TOP + _ROW * number
        parts.append(f'<text x="8" y="{y + 18}">{escape(lane)}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW - 8}" fill="#f2f2f2"/>'
        )
    for bar in bars:
        x = _LEFT + bar.begin_s * scale
        width = max((bar.end_s - bar.begin_s) * scale, _LEAST)
        y = _TOP + _ROW * lanes.index(bar.lane)
        times = f"{format_time(bar.begin_s)} to {format_time(bar.end_s)}"
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 8}" '
            f'fill="{COLOURS.get(bar.kind, "#bab0ac")}"><title>{escape(bar.label)}, {times}</title></rect>'
        )
    parts += _legend(list(dict.fromkeys(bar.kind for bar in bars)), _TOP + _ROW * len(lanes) + 12)
    parts += _axis(end, scale, _TOP + _ROW * len(lanes) - 4)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(kinds: list[str], y: int) -> list[str]:
    parts, x = [], _LEFT
    for kind in kinds:
        parts.append(
            f'<rect x="{x}" y="{y + 18}" width="12" height="12" fill="{COLOURS.get(kind, "#bab0ac")}"/>'
        )
        parts.append(f'<text x="{x + 16}" y="{y + 28}">{escape(kind)}</text>')
        x += 30 + 7 * len(kind)
    return parts


def _axis(end: float, scale: float, y: int) -> list[str]:
    return [
        f'<text x="{_LEFT + end * share * scale:.0f}" y="{y + 14}" text-anchor="middle" fill="#555">'
        f"{format_time(end * share)}</text>"
        for share in (0.25, 0.5, 0.75, 1.0)
    ]
