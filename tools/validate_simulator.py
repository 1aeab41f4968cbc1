#!/usr/bin/env python3
"""Compare the simulator with published measurements, and our schedules with those published.

python tools/validate_simulator.py            # summary and every row
python tools/validate_simulator.py --ours     # our steps on the same machines (a minute)
python tools/validate_simulator.py --fit      # fit the free constants again (a minute)
python tools/validate_simulator.py --write    # write docs/simulator_rows.md, simulator_ours.md, simulator.svg
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ssdtune.plan.compare import Comparison, compare
from ssdtune.plan.validate import (
    RATEL_4090,
    Constants,
    Prediction,
    Row,
    anchor_rows,
    one_line_formula_s,
    picks,
    predict,
    predict_all,
    published_rows,
    summary,
)

DOCS = Path(__file__).parents[1] / "docs"
GROUPS = {
    "fit": "Fitted (13B over batch sizes, 13B over drives at batch 32)",
    "held-out": "Held out",
    "zero": "ZeRO-Infinity and ZeRO-Offload, held out",
}
COLOURS = {"fit": "#888888", "held-out": "#1f77b4", "zero": "#d9822b"}
PEAK_FLOP_PER_S = 160.3e12


def rows_text(predictions: Sequence[Prediction]) -> str:
    """Return summary and rows as Markdown."""
    lines = [
        "# Predicted and published step times, row by row", "",
        "Written by `python tools/validate_simulator.py --write`; [simulator.md](simulator.md) explains it.", "",
        "| rows | number | mean error | worst | within 15 % |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for use, title in GROUPS.items():
        group = [p for p in predictions if p.row.use == use]
        mean, worst = summary(group)
        near = sum(abs(p.error) <= 0.15 for p in group)
        lines.append(f"| {title} | {len(group)} | {mean:.1%} | {worst:.1%} | {near} |")
    anchors = [predict(row) for row in anchor_rows()]
    mean, worst = summary(anchors)
    lines.append(
        f"| The eleven rows of the one-line formula | {len(anchors)} | {mean:.1%} | {worst:.1%} | "
        f"{sum(abs(p.error) <= 0.15 for p in anchors)} |"
    )
    formula = [abs(one_line_formula_s(p.row) / p.published_s - 1) for p in anchors]
    lines.append(
        f"| the formula itself on them | {len(anchors)} | {sum(formula) / len(formula):.1%} | "
        f"{max(formula):.1%} | {sum(error <= 0.15 for error in formula)} |"
    )
    for use, title in GROUPS.items():
        lines += ["", f"## {title}", "", "| row | batch | published s | predicted s | error |",
                  "|---|---|---|---|---|"]  # fmt: skip
        for p in predictions:
            if p.row.use == use:
                lines.append(
                    f"| {p.row.label} | {p.batch} | {p.published_s:.1f} | {p.predicted_s:.1f} | "
                    f"{p.error:+.1%} |"
                )
    return "\n".join(lines) + "\n"


def ours_text(comparisons: Sequence[Comparison]) -> str:
    """Return the comparison as Markdown."""
    lines = [
        "# Our schedules on the machine of the Ratel paper", "",
        "Simulated seconds of a step; written by `python tools/validate_simulator.py --write`. "
        "[simulator.md](simulator.md) says what the columns mean and what is assumed.", "",
        "| row | batch | Ratel published | Ratel simulated | ours, recomputing | bound by | ours, swapping "
        "| ours, and caching | clipped, recomputing | clipped, swapping and caching | speculating, recomputing "
        "| speculating, swapping and caching |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for c in comparisons:
        times = (
            c.swapped_s, c.cached_s, c.clipped_s, c.clipped_cached_s, c.speculative_s, c.speculative_cached_s,
        )  # fmt: skip
        against = " | ".join(f"{time:.1f} ({c.ratel_s / time:.2f}×)" for time in times)
        lines.append(
            f"| {c.row.label.replace(', ratel', '')} | {c.batch} | {c.ratel_published_s:.1f} | {c.ratel_s:.1f} | "
            f"{c.streamed_s:.1f} ({c.ratel_s / c.streamed_s:.2f}×) | {c.bounds[0]} | {against} |"
        )
    return "\n".join(lines) + "\n"


def compared_rows() -> list[Row]:
    """Return Ratel's rows over batch sizes, models and drives."""
    return [
        row
        for row in published_rows()
        if row.system == "ratel"
        and (row.figure in ("5a", "7b", "9a", "10a") or (row.figure == "10b" and row.batch == 32))
    ]


def plot(predictions: Sequence[Prediction]) -> str:
    """Return an SVG: error of each row over its published time."""
    width, height, left, bottom = 760, 420, 60, 50
    low, high, limit = math.log10(10), math.log10(1500), 0.4

    def place(seconds: float, error: float) -> tuple[float, float]:
        x = left + (math.log10(seconds) - low) / (high - low) * (width - left - 20)
        return x, (height - bottom) * (1 - (error + limit) / (2 * limit)) + 10

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 20}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height + 20}" fill="white"/>',
    ]
    for percent in range(-40, 41, 10):
        x, y = place(10, percent / 100)
        stroke = "#333" if percent == 0 else "#ddd"
        parts.append(f'<line x1="{x}" y1="{y:.1f}" x2="{width - 20}" y2="{y:.1f}" stroke="{stroke}"/>')  # fmt: skip
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{percent:+d} %</text>')  # fmt: skip
    for seconds in (10, 20, 50, 100, 200, 500, 1000):
        x, y = place(seconds, -limit)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{seconds} s</text>')
    parts.append(f'<text x="{width / 2}" y="{height + 10}" text-anchor="middle">published step time; error of the prediction upwards</text>')  # fmt: skip
    for p in predictions:
        x, y = place(p.published_s, max(-limit, min(limit, p.error)))
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[p.row.use]}" fill-opacity="0.75">'
            f"<title>{p.row.label}: {p.error:+.1%}</title></circle>"
        )
    for i, (use, title) in enumerate(GROUPS.items()):
        y = 24 + 18 * i
        parts.append(f'<circle cx="{width - 400}" cy="{y}" r="4" fill="{COLOURS[use]}"/>')
        parts.append(f'<text x="{width - 390}" y="{y + 4}">{title}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def fit() -> None:
    """Print the request cost and the share of the peak that fit the fitted rows best, by overlap of the drives.

    Coordinate descent on the root mean square of relative errors; looks at no other row.
    """

    def loss(overlap: float, values: Sequence[float]) -> float:
        hardware = replace(
            RATEL_4090,
            ssd_overlap=overlap,
            request_s=values[0] * 1e-3,
            flop_per_s=values[1] * PEAK_FLOP_PER_S,
        )
        errors = [p.error**2 for p in predict_all(Constants(hardware), use=("fit",))]
        return math.sqrt(sum(errors) / len(errors))

    print("overlap  request  share of peak  root mean square error")
    for overlap in (1.0, 1.5, 2.0, 2.5, 3.0, 8.0):
        values, steps = [2.0, 0.8], [1.0, 0.05]
        best = loss(overlap, values)
        while steps[0] > 0.05:
            moved = False
            for i, step in enumerate(steps):
                for change in (step, -step):
                    trial = [*values[:i], values[i] + change, *values[i + 1 :]]
                    if trial[0] >= 0 and (found := loss(overlap, trial)) < best:
                        best, values, moved = found, trial, True
            if not moved:
                steps = [step / 2 for step in steps]
        print(f"{overlap:7.1f}  {values[0]:4.2f} ms  {values[1]:13.3f}  {best:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--fit", action="store_true", help="fit the free constants again")
    parser.add_argument("--ours", action="store_true", help="simulate our steps")
    parser.add_argument("--write", action="store_true", help="write tables and plot to docs/")
    arguments = parser.parse_args()
    if arguments.fit:
        fit()
        return
    predictions = predict_all()
    print(rows_text(predictions))
    for batch, volume, measured in picks():
        print(f"Fig. 9b, batch {batch}: {volume / 1e9:.0f} GB chosen, measured {measured - 1:.1%} above the best")  # fmt: skip
    comparisons: list[Comparison] = []
    if arguments.ours or arguments.write:
        comparisons = [compare(row) for row in compared_rows()]
        print(ours_text(comparisons))
    if arguments.write:
        (DOCS / "simulator_rows.md").write_text(rows_text(predictions), encoding="utf-8")
        (DOCS / "simulator_ours.md").write_text(ours_text(comparisons), encoding="utf-8")
        (DOCS / "simulator.svg").write_text(plot(predictions), encoding="utf-8")


if __name__ == "__main__":
    main()
