# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What the pages' tests share."""

import io
import sys
from pathlib import Path

from datasets import Dataset
from PIL import Image, ImageChops
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples")]
import text_blocks  # noqa: E402

WAIT_SECONDS = 60
MARGIN = 24  # of a picture, below what the page shows
COLORS = 64  # of a picture, which is a small file so


def save_language_models(folder: Path) -> None:
    """Two untrained ones, "softmax" and "linear", with a tokenizer."""
    text = Path(__file__).read_text(encoding="utf-8")
    tokenizer = text_blocks.train_tokenizer(Dataset.from_dict({"text": [text]}), 400)
    for name, preset in {"softmax": "softmax", "linear": "gated_deltanet"}.items():
        config = LinearAttentionConfig.from_preset(
            preset, vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=2,
        )  # fmt: skip
        LinearAttentionForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


class Page:
    """A page with two cards, of the kinds "softmax" and "linear", in a browser."""

    def __init__(self, browser: webdriver.Chrome, address: str, screenshots: Path):
        self.browser = browser
        self.screenshots = screenshots
        browser.get(address)

    def find(self, selector: str):
        """The first visible element, as soon as there is one."""

        def visible(browser):
            found = browser.find_elements(By.CSS_SELECTOR, selector)
            return next((element for element in found if element.is_displayed()), None)

        return WebDriverWait(self.browser, WAIT_SECONDS).until(visible, selector)

    def until(self, what) -> None:
        WebDriverWait(self.browser, WAIT_SECONDS, 0.05).until(lambda browser: what())

    def text_of(self, selector: str) -> str:
        return self.browser.find_element(By.CSS_SELECTOR, selector).get_attribute("textContent")

    def phase(self, kind: str) -> str:
        return self.browser.find_element(By.CSS_SELECTOR, f".card.{kind}").get_attribute(
            "data-phase"
        )

    def save(self, name: str) -> None:
        self.screenshots.mkdir(parents=True, exist_ok=True)
        picture = Image.open(io.BytesIO(self.browser.get_screenshot_as_png())).convert("RGB")
        empty = Image.new("RGB", picture.size, picture.getpixel((0, 0)))
        _, _, _, bottom = ImageChops.difference(picture, empty).getbbox()
        picture = picture.crop((0, 0, picture.width, min(bottom + MARGIN, picture.height)))
        picture.quantize(COLORS, dither=Image.Dither.NONE).save(
            self.screenshots / f"{name}.png", optimize=True
        )
