# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A browser without a window. It needs Chromium and its driver (on Debian the packages chromium
and chromium-driver) or Chrome.
"""

import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

BROWSERS = ("chromium", "google-chrome", "chrome")
WIDTH, HEIGHT = 1180, 1330  # of the window


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.fail(f"needs a browser on PATH, one of {', '.join(BROWSERS)}")
    options.binary_location = found
    # As root, and in containers, there is neither a sandbox nor much of /dev/shm.
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_window_size(WIDTH, HEIGHT + 140)
    yield driver
    driver.quit()
