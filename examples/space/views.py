# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What the page shows, as HTML, of what the models have done."""

import base64
import html
import io
import statistics
from collections.abc import Callable, Sequence

import torch
from PIL import Image

from charts import Line, byte_text, chart
from painting import Painting
from race import MEDIAN_OF, Point, Standing

KINDS = ("softmax", "linear")  # classes of style.css, in the order of the models
CONTEXT = "tokens of context"


def card(standing: Standing, kind: str) -> str:
    """One model: how far it is, what it measured, what it wrote."""
    share = (standing.read + standing.written) / max(standing.to_read + standing.to_write, 1)
    speed = standing.tokens_per_second
    facts = {
        "tokens/s, one by one": "–" if speed is None else f"{speed:,.0f}",
        "cache": byte_text(standing.cache_bytes),
        "own clock": f"{standing.seconds:.2f} s",
    }
    told = "".join(f"<div><b>{value}</b><span>{key}</span></div>" for key, value in facts.items())
    return (
        f'<div class="card {kind}" data-phase="{standing.phase}">'
        f"<header><h3>{html.escape(standing.name)}</h3><em>{progress(standing)}</em></header>"
        f'<div class="bar"><i style="width:{100 * share:.1f}%"></i></div>'
        f'<div class="facts">{told}</div>'
        f'<div class="text"><div>{html.escape(standing.text)}</div></div></div>'
    )


def progress(standing: Standing) -> str:
    if standing.phase == "reading":
        return f"reading: {standing.read:,} of {standing.to_read:,} tokens"
    if standing.phase == "writing":
        return f"writing: {standing.written:,} of {standing.to_write:,} tokens"
    if standing.phase == "ready":
        return standing.phase
    return (
        f"{standing.phase}: {standing.read:,} tokens read in {standing.read_seconds:.2f} s, "
        f"{standing.written:,} written"
    )


def speed_chart(standings: Sequence[Standing]) -> str:
    return _chart("Speed, one token after another", standings, _speeds, "{:,.0f}/s".format)


def cache_chart(standings: Sequence[Standing]) -> str:
    return _chart("Memory of the context", standings, _sizes, byte_text)


def _chart(
    title: str,
    standings: Sequence[Standing],
    points_of: Callable[[Sequence[Point]], list[tuple[float, float]]],
    y_text: Callable[[float], str],
) -> str:
    lines = [
        Line(standing.name, kind, points_of(standing.points))
        for standing, kind in zip(standings, KINDS, strict=True)
    ]
    end = max(standing.to_read + standing.to_write for standing in standings)
    return f'<div class="panel">{chart(title, CONTEXT, lines, end, y_text)}</div>'


def _sizes(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(point.context, point.cache_bytes) for point in points]


def _speeds(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Medians, for other programs slow a model down at times."""
    measured = [point for point in points if point.tokens_per_second is not None]
    around = MEDIAN_OF // 2
    return [
        (
            point.context,
            statistics.median(
                p.tokens_per_second for p in measured[max(i - around, 0) : i + around + 1]
            ),
        )
        for i, point in enumerate(measured)
    ]


def gallery(painting: Painting) -> str:
    """The images, side by side, what is not painted yet transparent."""
    images = "".join(
        f'<figure><img alt="{digit}" src="{_png(pixels, painting.side)}"><figcaption>{digit}'
        "</figcaption></figure>"
        for digit, pixels in zip(painting.digits, painting.pixels, strict=True)
    )
    each = painting.cache_bytes // len(painting.digits)
    rate = painting.painted * len(painting.digits) / painting.seconds
    count = painting.pixels.shape[1]
    return (
        f'<div class="gallery" data-pixels="{count}">{images}</div>'
        f'<p class="told">{count} of {painting.side**2} pixels of each. The model computed for '
        f"{painting.seconds:.2f} s, {rate:,.0f} pixels a second of all images, and remembers an "
        f"image in {byte_text(each)}, at its first pixel as at its last.</p>"
    )


def _png(pixels: torch.Tensor, side: int) -> str:
    """An address that is the image itself."""
    shades = torch.zeros(side * side, 2, dtype=torch.uint8)  # black to white, and how opaque
    shades[: len(pixels), 0] = (pixels * 255).round().byte()
    shades[: len(pixels), 1] = 255
    file = io.BytesIO()
    Image.fromarray(shades.view(side, side, 2).numpy(), "LA").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def message(text: str) -> str:
    return f'<p class="message">{html.escape(text)}</p>'
