# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The figures and pictures in docs/ and the README are those of the newest results."""

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import DynamicCache

from hf_linear_attention import LinearAttentionCache

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "benchmarks"))

import report  # noqa: E402
from models import SMALLEST, cache_bytes, make_model, random_tokens  # noqa: E402


@pytest.fixture(scope="module")
def newest():
    return report.newest_results()


def test_the_page_is_what_the_report_writes_of_the_newest_results(newest):
    text = report.PAGE.read_text(encoding="utf-8")
    assert report.page(text, newest) == text
    assert list(newest) == [*report.TITLES, report.CONVERSION]
    for bench in report.TITLES:
        assert newest[bench]
        for result in newest[bench]:
            assert report.section(*result) in text


def test_the_page_on_converting_has_the_newest_results(newest):
    text = report.CONVERTING.read_text(encoding="utf-8")
    assert report.sections(newest[report.CONVERSION]) in text


def test_the_readmes_table_of_presets_is_that_of_the_newest_comparison(newest):
    _, document = newest["compare"][0]
    assert report.choices(document) in (ROOT / "README.md").read_text(encoding="utf-8")
    assert document["is_full"]


@pytest.mark.parametrize(
    "draw, picture, page",
    [
        (report.draw_bars, report.BARS, "README.md"),
        (report.draw_picture, report.PICTURE, "docs/how_it_works.md"),
    ],
)
def test_a_pages_picture_is_of_the_newest_times(draw, picture, page, newest, tmp_path):
    path, document = newest["decode"][0]
    draw(tmp_path / picture.name, path, document)
    for drawn in (tmp_path / picture.name, picture):
        with Image.open(drawn) as image:
            assert image.info["Source"] == path.name
            assert image.width > 600
    address = picture.relative_to((ROOT / page).parent)
    assert f"]({address})" in (ROOT / page).read_text(encoding="utf-8")


def test_the_picture_of_gains_is_that_of_the_newest_result(newest):
    path, _ = newest["upstream"][0]
    assert report.GAINS.read_bytes() == path.with_suffix(".png").read_bytes()
    assert "](use_kernels.png)" in (DOCS / "transformers_models.md").read_text(encoding="utf-8")


def test_old_figures_are_replaced(newest, tmp_path, monkeypatch):
    tables = {"README": report.choices(newest["compare"][0][1])}
    tables["PAGE"] = report.sections(newest["decode"])
    tables["CONVERTING"] = report.sections(newest[report.CONVERSION])
    written = {}
    for name, table in tables.items():
        page = getattr(report, name)
        written[name] = page.read_text(encoding="utf-8")
        old = tmp_path / page.name
        old.write_text(written[name].replace(table, "an old table"), encoding="utf-8")
        assert old.read_text(encoding="utf-8") != written[name]
        monkeypatch.setattr(report, name, old)
    for picture in ("BARS", "PICTURE", "GAINS"):
        monkeypatch.setattr(report, picture, tmp_path / getattr(report, picture).name)
    report.main()
    for name, text in written.items():
        assert getattr(report, name).read_text(encoding="utf-8") == text
    assert all(path.exists() for path in (report.BARS, report.PICTURE, report.GAINS))


def test_a_page_has_the_newest_full_result_of_each_processor(tmp_path, monkeypatch):
    def write(name, cpu, date, bench="decode", is_full=True, is_complete=True):
        document = {"bench": bench, "date": date, "machine": {"cpu": cpu}}
        document |= {"is_full": is_full, "is_complete": is_complete}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))

    monkeypatch.setattr(report, "RESULTS", tmp_path)
    write("old", "one", "2026-01-01")
    write("new", "one", "2026-01-02")
    write("broken off", "one", "2026-01-03", is_complete=False)
    write("short", "a third", "2026-01-04", is_full=False)
    write("other", "another", "2026-01-03")
    write("short op", "one", "2026-01-01", bench="ops", is_full=False)
    found = report.newest_results()
    names = {bench: [path.stem for path, _ in results] for bench, results in found.items()}
    assert names == {"ops": ["short op"], "decode": ["other", "new"]}


def test_a_missing_result_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match="no results of compare, ops, products, decode, training"):
        report.main()


@pytest.mark.parametrize("context", [7, 24])
def test_the_pictures_memory_is_that_of_the_caches(context):
    tokens = random_tokens(SMALLEST, 1, context)
    ours, llama = (make_model(name, size=SMALLEST) for name in ("ours", "Llama"))
    with torch.no_grad():
        cache = ours(tokens, use_cache=True).past_key_values
        softmax = llama(tokens, past_key_values=DynamicCache(config=llama.config)).past_key_values
    assert isinstance(cache, LinearAttentionCache)
    assert cache.nbytes == cache_bytes("ours", context, SMALLEST)
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in softmax.layers)
    assert stored == cache_bytes("Llama", context, SMALLEST)
