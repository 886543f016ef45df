# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The page of examples/browser, used in a browser: `make test-space`, which puts ONNX Runtime Web
into outputs/browser/lib. A picture of the page is left in outputs/browser/screenshots.
"""

import functools
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pages
import pytest
import torch
from pages import ROOT, save_language_models
from selenium.webdriver.common.by import By
from transformers import AutoTokenizer

from hf_linear_attention import LinearAttentionForCausalLM, export_onnx

PAGE = ROOT / "outputs/browser"
PIECES = [1, 30, 31, 40]  # where those that a graph reads end
TEXT = "def read(self):\n\treturn 'Grüße, 你好', 12345\n"
LOGITS = """
const [folder, pieces, text, done] = arguments;
(async () => {
  const { load } = await import("/model.js");
  const model = await load(folder);
  const logits = [];
  for (const piece of pieces) logits.push(Array.from(await model.read(piece)));
  done({ logits, bytes: model.stateBytes, ids: model.tokenizer.encode(text).ids });
})().catch((error) => done({ error: String(error) }));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page, as make browser builds it, with tiny models."""
    folder = tmp_path_factory.mktemp("page") / "browser"
    shutil.copytree(ROOT / "examples/browser", folder)
    (folder / "lib").symlink_to(PAGE / "lib")
    torch.manual_seed(0)
    save_language_models(folder / "torch")
    for name in ("softmax", "linear"):
        model = LinearAttentionForCausalLM.from_pretrained(folder / "torch" / name)
        export_onnx(model, folder / "models" / name)
        AutoTokenizer.from_pretrained(folder / "torch" / name).save_pretrained(
            folder / "models" / name
        )
    return folder


@pytest.fixture(scope="module")
def address(folder):
    serve = functools.partial(SimpleHTTPRequestHandler, directory=folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(browser, address):
    page = pages.Page(browser, address, PAGE / "screenshots")
    page.until(lambda: page.find("#race").is_enabled())
    return page


def set_context(page, tokens):
    page.browser.execute_script(
        "const slider = document.querySelector('#context');"
        "slider.value = arguments[0]; slider.dispatchEvent(new Event('input'))",
        tokens,
    )


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_logits_in_a_browser_are_the_models(kind, page, folder):
    """Read in pieces; and so are the numbers of tokens, and the size of the states."""
    model = LinearAttentionForCausalLM.from_pretrained(folder / "torch" / kind).eval()
    ids = torch.randint(0, model.config.vocab_size, (PIECES[-1],))
    pieces = [ids[a:b].tolist() for a, b in zip([0, *PIECES], PIECES, strict=False)]
    page.browser.set_script_timeout(pages.WAIT_SECONDS)
    got = page.browser.execute_async_script(LOGITS, f"models/{kind}", pieces, TEXT)
    assert "error" not in got, got["error"]
    with torch.no_grad():
        output = model(ids[None], use_cache=True)
    expected = output.logits[0, [end - 1 for end in PIECES]]
    torch.testing.assert_close(torch.tensor(got["logits"]), expected, atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "torch" / kind)
    assert got["ids"] == tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert got["bytes"] == output.past_key_values.nbytes


def test_both_write_and_read_on_and_both_charts_are_drawn(page):
    set_context(page, 3000)
    page.find("#race").click()
    page.until(lambda: page.text_of(".card.softmax .text") and page.text_of(".card.linear .text"))
    page.until(lambda: page.phase("softmax") == page.phase("linear") == "reading")
    before = page.text_of(".card.linear .bytes")
    page.until(lambda: page.phase("softmax") == page.phase("linear") == "done")
    assert page.text_of(".card.linear .bytes") == before
    assert "3,000 of 3,000" in page.text_of(".card.softmax .phase")
    assert page.text_of(".card.softmax .bytes") == "3.07 MB"  # 2 layers, 128 keys and values each
    for chart in ("speed", "memory"):
        for kind in ("softmax", "linear"):
            selector = f"#{chart} polyline.{kind}"
            line = page.browser.find_element(By.CSS_SELECTOR, selector)
            assert len(line.get_attribute("points").split()) > 5
    page.save("race")


def test_stop_stops_a_long_race_and_another_one_can_begin(page):
    page.find("#race").click()
    page.until(lambda: page.phase("linear") == "reading")
    page.find("#stop").click()
    page.until(lambda: page.find("#race").is_enabled())
    assert page.phase("linear") == "reading"
    set_context(page, 1000)
    page.find("#race").click()
    page.until(lambda: page.phase("softmax") == page.phase("linear") == "done")


def test_an_empty_prompt_is_a_message(page):
    page.find("#prompt").clear()
    page.find("#race").click()
    assert page.find("#message").text == "Type a prompt first."


def test_a_page_without_models_says_so(browser, folder, address):
    (folder / "models").rename(folder / "elsewhere")
    try:
        page = pages.Page(browser, address, PAGE / "screenshots")
        page.until(lambda: "is missing (404)" in page.find("#message").text)
        assert not page.find("#race").is_enabled()
    finally:
        (folder / "elsewhere").rename(folder / "models")
