# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A page to look at linear attention: a race of two language models, and digits being painted.

    python examples/space/app.py --softmax FOLDER --linear FOLDER --digits FOLDER

Or `make space`, which trains the models first where they are missing; or as a Space (README.md).
"""

import argparse
import functools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two cores' threads wait for each other often
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr
import torch
from torch import Tensor

import painting
import race
import views
from engine import Engine
from settings import parse_arguments

HERE = Path(__file__).parent
PROMPTS = ["class Queue:\n    def __init__(self):\n", "import os\n\ndef main():\n", "# Copyright"]
ANY_DIGIT = "all ten"
NAMES = ("Softmax attention", "Linear attention")
# Of what the models are to do: one at a time, whoever asks, so that it is measured alone.
RUN: dict[str, Any] = {
    "concurrency_limit": 1,
    "concurrency_id": "models",
    "show_progress": "hidden",
}
FONTS, MONOSPACED = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]  # nothing fetched
INTRO = """
# Linear attention beside softmax attention

Softmax attention looks back at every earlier token: each new token costs more than the one before,
and all of them stay in memory. Linear attention keeps a summary of fixed size. Let two small models
race, and watch what a longer context does to each.
"""
HOW = """
**How it is measured.** Both models compute here, on {threads}, in turns: whose clock shows least
goes on, so that both have had the same time at any moment. *Tokens/s* is how fast tokens go through
one by one, as in writing. A context is read {chunk} tokens at a time, and some on the way one by
one, to draw the chart (medians of {median}). *Cache* counts the bytes of all tensors that a model
keeps of its context; both caches are those that `generate()` makes.

**What it is not.** The models were trained on texts of {trained} tokens. Beyond that, what they
write means nothing: a long context shows what it costs, not that it is understood. It is synthetic,
functions that do nothing of interest.
"""
DIGITS_INTRO = """
To this model an image is a text: first which digit it is, then {pixels} pixels, each in one of
{shades} shades, drawn one after another. It remembers what it has painted in a state of fixed size.
"""


class Page:
    """Handlers of events, for the sessions that look at the page."""

    def __init__(self, flags: argparse.Namespace):
        self.flags = flags
        self.engine = Engine()
        self.stops: dict[str, threading.Event] = {}  # of what runs, by session
        self.problems: list[str] = []
        self.racers = [
            self._load(race.load, name, where)
            for name, where in zip(NAMES, (flags.softmax, flags.linear), strict=True)
        ]
        self.painter = self._load(painting.load, flags.digits)

    def _load(self, load: Callable, *arguments: str) -> Any:
        """None where there is no such model, which the page says."""
        try:
            return load(*arguments)
        except (ValueError, RuntimeError) as error:
            self.problems.append(race.first_line(error))
            return None

    def race(self, prompt: str, context: int, to_write: int, request: gr.Request):
        if None in self.racers:
            raise ValueError("There are not two language models to race: see the top of the page.")

        def job(stop: threading.Event) -> Iterator[tuple[race.Standing, ...]]:
            seconds = self.flags.max_seconds
            return race.race(self.racers, prompt, int(context), int(to_write), stop, seconds)

        for standings in self._stream(job, request):
            cards = [
                views.card(standing, kind)
                for standing, kind in zip(standings, views.KINDS, strict=True)
            ]
            yield *cards, views.speed_chart(standings), views.cache_chart(standings)

    def paint(self, digit: str, speed: int, request: gr.Request):
        digits = range(painting.DIGITS) if digit == ANY_DIGIT else [int(digit)] * 5
        yield from self._paint(digits, None, speed, request)

    def repaint(self, before: painting.Painting | None, speed: int, request: gr.Request):
        """The lower halves of what was painted before."""
        half = 0 if before is None else before.side // 2 * before.side
        if before is None or before.pixels.shape[1] < half:
            raise ValueError("Paint something first, whose lower half can be painted anew.")
        yield from self._paint(before.digits, before.pixels[:, :half], speed, request)

    def _paint(
        self, digits: Sequence[int], given: Tensor | None, speed: int, request: gr.Request
    ) -> Iterator[tuple[str, painting.Painting]]:
        if self.painter is None:
            raise ValueError("There is no model that paints digits: see the top of the page.")

        def job(stop: threading.Event) -> Iterator[painting.Painting]:
            seed = random.getrandbits(32)
            return painting.paint(self.painter, digits, stop, given, speed, seed)

        for painted in self._stream(job, request):
            yield views.gallery(painted), painted

    def _stream(self, job: Callable, request: gr.Request) -> Iterator[Any]:
        session = request.session_hash or ""
        self.stops[session] = stop = threading.Event()
        try:
            yield from self.engine.stream(job, stop)
        finally:
            stop.set()
            self.stops.pop(session, None)

    def stop(self, request: gr.Request) -> None:
        """Of this session, also when it is gone."""
        if stop := self.stops.get(request.session_hash or ""):
            stop.set()


def told(handler: Callable) -> Callable:
    """A handler whose errors are messages on the page."""

    @functools.wraps(handler)
    def run(*arguments):
        try:
            yield from handler(*arguments)
        except (ValueError, RuntimeError, MemoryError) as error:
            raise gr.Error(race.first_line(error), print_exception=False) from error

    return run


def build(page: Page) -> gr.Blocks:
    flags = page.flags
    with gr.Blocks(title="Linear attention beside softmax attention") as blocks:
        gr.Markdown(INTRO, elem_id="intro")
        for problem in page.problems:
            gr.HTML(views.message(problem))
        with gr.Tab("Text"):
            _text_tab(page, flags)
        with gr.Tab("Digits"):
            _digits_tab(page)
        blocks.unload(page.stop)
    return blocks.queue(max_size=20)


def _text_tab(page: Page, flags: argparse.Namespace) -> None:
    with gr.Row():
        prompt = gr.Textbox(PROMPTS[0], label="Prompt", lines=4, scale=3, elem_id="prompt")
        with gr.Column(scale=2):
            context = gr.Slider(
                0,
                flags.max_context,
                0,
                step=100,
                label="Tokens of synthetic context",
                elem_id="context",
            )
            to_write = gr.Slider(
                50, 2000, 500, step=50, label="Tokens to write", elem_id="to-write"
            )
    gr.Examples([[text] for text in PROMPTS], prompt, label="Prompts")
    start, stop = _buttons("Start the race", "race")
    with gr.Row(equal_height=True, elem_classes="pair"):
        empty = [race.nothing(name) for name in NAMES]
        cards = [
            gr.HTML(views.card(standing, kind))
            for standing, kind in zip(empty, views.KINDS, strict=True)
        ]
    with gr.Row(elem_classes="pair"):
        speeds = gr.HTML(views.speed_chart(empty), elem_id="speeds")
        sizes = gr.HTML(views.cache_chart(empty), elem_id="sizes")
    threads = torch.get_num_threads()
    gr.Markdown(
        HOW.format(
            threads="one CPU core" if threads == 1 else f"{threads} CPU threads",
            chunk=race.CHUNK,
            median=race.MEDIAN_OF,
            trained=flags.trained_tokens,
        )
    )
    start.click(told(page.race), [prompt, context, to_write], [*cards, speeds, sizes], **RUN)
    stop.click(page.stop, queue=False)


def _digits_tab(page: Page) -> None:
    if page.painter is not None:
        pixels, shades = page.painter.side**2, page.painter.shades
        gr.Markdown(DIGITS_INTRO.format(pixels=pixels, shades=shades))
    with gr.Row():
        digits = [ANY_DIGIT, *map(str, range(painting.DIGITS))]
        digit = gr.Radio(digits, value=ANY_DIGIT, label="What to paint", elem_id="digit", scale=3)
        speed = gr.Slider(20, 1000, 100, step=20, label="Pixels a second, at most", scale=2)
    start, stop = _buttons("Paint", "paint")
    again = gr.Button("Paint the lower halves anew", elem_id="repaint")
    gallery = gr.HTML(elem_id="gallery")
    before = gr.State()
    start.click(told(page.paint), [digit, speed], [gallery, before], **RUN)
    again.click(told(page.repaint), [before, speed], [gallery, before], **RUN)
    stop.click(page.stop, queue=False)


def _buttons(text: str, name: str) -> tuple[gr.Button, gr.Button]:
    with gr.Row():
        start = gr.Button(text, variant="primary", elem_id=name, scale=3)
        stop = gr.Button("Stop", variant="stop", elem_id=f"stop-{name}", scale=1)
    return start, stop


def main() -> None:
    flags = parse_arguments()
    if flags.threads:
        torch.set_num_threads(flags.threads)
    page = Page(flags)
    for problem in page.problems:
        print(problem)
    build(page).launch(
        server_port=flags.port,
        theme=gr.themes.Soft(font=FONTS, font_mono=MONOSPACED),
        css_paths=HERE / "style.css",
        footer_links=[],
    )


if __name__ == "__main__":
    main()
