# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The page of examples/space, used in a browser: `make test-space`.

It needs Chromium and its driver (on Debian the packages chromium and chromium-driver) or Chrome.
Models are untrained ones, unless SPACE_TEST_MODELS is a folder of others: "softmax", "linear" and
"digits" in it. Pictures of the page are left in outputs/space/screenshots.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pages
import pytest
from pages import ROOT, save_language_models
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

SPACE = ROOT / "examples/space"
SCREENSHOTS = ROOT / "outputs/space/screenshots"
sys.path[:0] = [str(ROOT / "examples"), str(SPACE)]
import train_digits  # noqa: E402


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    if given := os.environ.get("SPACE_TEST_MODELS"):
        return Path(given)
    folder = tmp_path_factory.mktemp("models")
    save_language_models(folder)
    train_digits.make_model().save_pretrained(folder / "digits")
    return folder


@pytest.fixture(scope="module")
def serve(models):
    """Starts the page with some flags, and returns its address."""
    servers = []

    def start(*flags: str) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        named = [f"--{name}={models / name}" for name in ("softmax", "linear", "digits")]
        command = [sys.executable, SPACE / "app.py", *named, f"--port={port}", *flags]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        servers.append(server)
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert server.poll() is None, "the page did not start"
            try:
                urllib.request.urlopen(address)
            except OSError:
                time.sleep(0.1)
            else:
                return address
        raise TimeoutError(f"nothing answers at {address}")

    yield start
    for server in servers:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def address(serve) -> str:
    return serve()


class Page(pages.Page):
    def __init__(self, browser: webdriver.Chrome, address: str):
        super().__init__(browser, address, SCREENSHOTS)
        self.find("#race")

    def type(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text + Keys.TAB)

    def open_digits(self) -> None:
        tabs = self.browser.find_elements(By.CSS_SELECTOR, "button[role=tab]")
        next(tab for tab in tabs if tab.text == "Digits").click()


@pytest.fixture
def page(browser, address) -> Page:
    return Page(browser, address)


def length(page: Page, kind: str) -> int:
    """Of what a model has written, in letters."""
    return len(page.text_of(f".card.{kind} .text"))


def points(page: Page, chart: str) -> list[int]:
    """Of both lines of a chart that is drawn."""
    lines = page.browser.find_elements(By.CSS_SELECTOR, f"#{chart} svg polyline")
    return [len(line.get_attribute("points").split()) for line in lines]


def test_both_texts_grow_and_both_charts_are_drawn(page):
    page.type("#prompt textarea", "def read(self, size):")
    page.type("#context input[type=number]", "8000")
    page.type("#to-write input[type=number]", "500")
    page.find("#race").click()
    for kind in ("linear", "softmax"):
        page.until(lambda kind=kind: page.phase(kind) == "writing" and length(page, kind) > 0)
        before = length(page, kind)
        page.until(lambda kind=kind, before=before: length(page, kind) > before)
    page.until(lambda: page.phase("softmax") == "done" and page.phase("linear") == "done")
    for chart in ("speeds", "sizes"):
        found = points(page, chart)
        assert len(found) == 2 and min(found) > 5
    assert "8,0" in page.text_of(".card.softmax em")  # with the prompt, some more
    assert page.text_of(".card.linear b:first-child") != "–"
    page.save("race")


def test_the_slider_and_its_number_are_one(page):
    slider = page.find("#context input[type=range]")
    assert slider.get_attribute("max") == "100000"
    slider.send_keys(Keys.END)
    page.until(lambda: page.find("#context input[type=number]").get_attribute("value") == "100000")


def test_stop_stops_a_long_race_and_another_one_can_begin(page):
    page.type("#context input[type=number]", "100000")
    page.find("#race").click()
    page.until(lambda: page.phase("softmax") == "reading")
    page.until(lambda: "0 of" not in page.text_of(".card.softmax em"))
    page.find("#stop-race").click()
    page.until(lambda: {page.phase("softmax"), page.phase("linear")} <= {"stopped", "done"})
    assert page.phase("softmax") == "stopped"
    page.type("#context input[type=number]", "0")
    page.find("#race").click()
    page.until(lambda: page.phase("softmax") == "done" and page.phase("linear") == "done")


def test_an_empty_prompt_is_a_message_and_no_trace(page):
    page.type("#prompt textarea", " ")
    page.find("#race").click()
    message = page.find(".toast-body")
    assert "Type a prompt first." in message.text and "Traceback" not in message.text


def test_digits_are_painted_stopped_and_painted_anew(page):
    page.open_digits()
    page.find("#paint").click()

    def painted() -> int:
        found = page.browser.find_elements(By.CSS_SELECTOR, "#gallery .gallery")
        return int(found[0].get_attribute("data-pixels")) if found else 0

    page.until(lambda: 0 < painted() < 100)
    page.until(lambda: painted() > 110)
    page.find("#stop-paint").click()
    time.sleep(0.5)
    stopped = painted()
    assert stopped < train_digits.SIDE**2
    time.sleep(0.3)
    assert painted() == stopped
    assert len(page.browser.find_elements(By.CSS_SELECTOR, "#gallery img")) == 10
    page.save("digits")
    page.find("#repaint").click()
    page.until(lambda: painted() == train_digits.SIDE**2)


def test_a_page_without_models_says_so(browser, serve, tmp_path):
    page = Page(browser, serve(f"--linear={tmp_path / 'absent'}"))
    assert "absent" in page.find(".message").text
    page.find("#race").click()
    assert "There are not two language models" in page.find(".toast-body").text
