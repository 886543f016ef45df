# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Charts of lines as SVG, in the colours of style.css: drawn anew without a flicker."""

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 540, 310
LEFT, RIGHT, TOP, BOTTOM = 64, 28, 58, 48  # margins, for titles and labels
LEGEND = 160  # from one line's name to the next
TICKS = 5  # on an axis, about
UNITS = ("B", "kB", "MB", "GB")


class Line(NamedTuple):
    """kind: a class of style.css; points: (x, y), none of them below 0."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]


def chart(
    title: str,
    x_label: str,
    lines: Sequence[Line],
    x_end: float,
    y_text: Callable[[float], str],
) -> str:
    """From 0 to x_end at least, and from 0 to the highest point. y_text has the unit."""
    everything = [point for line in lines for point in line.points]
    x_ticks = ticks(max([x_end, *(x for x, _ in everything)]))
    y_ticks = ticks(max([y for _, y in everything], default=0))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(LEFT + x / x_ticks[-1] * (right - LEFT), 1),
            round(bottom - y / y_ticks[-1] * (bottom - TOP), 1),
        )

    parts = [f'<text class="title" x="{LEFT}" y="18">{html.escape(title)}</text>']
    for y in y_ticks:
        at = place(0, y)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="y" x="{LEFT - 8}" y="{at + 4}">{y_text(y)}</text>')
    for x in x_ticks:
        at = place(x, 0)[0]
        parts.append(f'<text class="x" x="{at}" y="{bottom + 18}">{x:,.0f}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text class="x" x="{middle}" y="{HEIGHT - 8}">{html.escape(x_label)}</text>')
    for index, line in enumerate(lines):
        at = LEFT + LEGEND * index
        parts.append(f'<line class="{line.kind}" x1="{at}" x2="{at + 18}" y1="36" y2="36"/>')
        parts.append(f'<text x="{at + 24}" y="40">{html.escape(line.name)}</text>')
        if line.points:
            path = " ".join("{},{}".format(*place(*point)) for point in line.points)
            x, y = place(*line.points[-1])
            parts.append(f'<polyline class="{line.kind}" points="{path}"/>')
            parts.append(f'<circle class="{line.kind}" cx="{x}" cy="{y}" r="3.5"/>')
    label = html.escape(title, quote=True)
    drawn = "".join(parts)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{drawn}</svg>"
    )


def ticks(end: float) -> list[float]:
    """Round numbers from 0 to one that is no less than `end`."""
    rough = max(end, 1) / TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(end / step - 1e-9) + 1)] if end > 0 else [0, step]


def byte_text(count: float) -> str:
    """With a unit of thousands, as "12.3 MB"."""
    power = min(int(math.log10(max(count, 1) / 0.9995)) // 3, len(UNITS) - 1)
    value = count / 1000**power
    return f"{value:.3g} {UNITS[power]}" if value < 1000 else f"{value:,.0f} {UNITS[power]}"
