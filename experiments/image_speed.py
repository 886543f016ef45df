# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""How long an image takes that is drawn pixel by pixel.

    python experiments/image_speed.py            # 28 x 28 pixels, one image at once: minutes
    python experiments/image_speed.py --full     # and sixteen; and 32 x 32 of three colours
    python experiments/image_speed.py --gpu      # on a GPU, more at once

Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236, tables 1 and 2: images per second
of linear attention, of softmax attention with a cache and without one, and of Reformer. The gated
delta rule is beside them. Models are the paper's, of 8 layers for 28 x 28 and 16 for 32 x 32, with
random weights, on which time does not depend.

"No cache" reads all numbers again for each, as the paper's softmax and Reformer do: that is timed
at a few lengths, and the lengths between lie on straight lines.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

from contenders import Size
from experiment import harness, parser
from images import UNCACHED, make_image_model

OURS = "linear"
NO_CACHE = "softmax, no cache"
NAMES = (OURS, "gated delta rule", "softmax", NO_CACHE, *UNCACHED)


class Case(NamedTuple):
    """numbers: of an image; rows: images at once; points: lengths at which a model is timed that
    has no cache.
    """

    title: str
    size: Size
    numbers: int
    rows: int
    points: int = 8


DIGIT, PHOTO = ("28 x 28", Size(8, 8), 784), ("32 x 32 x 3", Size(16, 8), 3072)
SETTINGS = {
    "smallest": [Case("4 x 4", Size(1, 2, 8), 16, 1, 2)],
    "short": [Case(*DIGIT, 1)],
    "full": [Case(*DIGIT, 1), Case(*DIGIT, 16), Case(*PHOTO, 1, 4)],
    "gpu": [Case(*DIGIT, 1), Case(*DIGIT, 128), Case(*PHOTO, 1), Case(*PHOTO, 64)],
}


def seconds_of_an_image(name: str, case: Case, device: str) -> Callable[[], float]:
    """A function that draws, and says how long an image took."""
    torch.manual_seed(0)
    model = make_image_model("softmax" if name == NO_CACHE else name, case.size, case.numbers)
    model = model.to(device).eval()
    given = torch.zeros(case.rows, case.numbers, dtype=torch.long, device=device)

    def draw(first: int, last: int, use_cache: bool) -> float:
        """Of the numbers from one to another."""
        start = time.perf_counter()
        model.complete(given[:, :first], last, use_cache).sum().item()  # waits for a GPU
        return (time.perf_counter() - start) / case.rows

    def all_read_again() -> float:
        places = numpy.linspace(0, case.numbers - 1, case.points, dtype=int)
        seconds = [draw(place, place + 1, use_cache=False) for place in places]
        return float(numpy.interp(range(case.numbers), places, seconds).sum())

    if name in (NO_CACHE, *UNCACHED):
        return all_read_again
    return lambda: draw(0, case.numbers, use_cache=True)


class SpeedReport(harness.Report):
    """Its plot has images per second."""

    def _plot(self, path: Path) -> None:
        pyplot = harness.plotter()
        cases = list(dict.fromkeys((row.panel, row.case) for row in self.rows))
        figure, axes = pyplot.subplots(
            1, len(cases), figsize=(4.5 * len(cases), 3), squeeze=False, layout="constrained"
        )
        for axis, case in zip(axes[0], cases, strict=True):
            rows = [row for row in self.rows if (row.panel, row.case) == case]
            bars = axis.barh(
                [row.contender for row in rows],
                [1e3 / row.milliseconds for row in rows],
                color=["black" if row.contender == self.baseline else "C0" for row in rows],
            )
            axis.bar_label(bars, fmt="%.3g", padding=3)
            axis.set(xscale="log", xlabel="images per second", title=", ".join(case))
            axis.margins(x=0.2)
            axis.invert_yaxis()
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def main() -> None:
    flags = parser(__doc__).parse_args()
    report = SpeedReport("image-speed", "images at once", OURS, flags, flags.resume)
    device = "cuda" if flags.setting == "gpu" else "cpu"
    for case in SETTINGS[flags.setting]:
        panel, rows = case.title, f"{case.rows} at once"
        if report.has(panel, rows):
            continue
        samples = {name: seconds_of_an_image(name, case, device) for name in NAMES}
        report.add(panel, rows, case.rows, report.time(samples, budget=120), {})
    report.save()


if __name__ == "__main__":
    main()
