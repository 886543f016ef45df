# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What the site is made of: every page once, and all that it links to (make site builds it)."""

import sys
from pathlib import Path

import yaml

import hf_linear_attention

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
import site_source  # noqa: E402


def pages_of(navigation) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation if isinstance(navigation, list) else navigation.values()
    return [page for part in parts for page in pages_of(part)]


def test_every_page_is_in_the_navigation():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    listed = pages_of(settings["nav"])
    assert sorted(listed) == sorted(map(str, [*site_source.pages(), site_source.API]))


def test_pages_lie_as_here_beside_what_they_link_to(tmp_path, monkeypatch):
    monkeypatch.setattr(site_source, "SOURCE", tmp_path)
    site_source.main()
    for page in site_source.pages():
        assert (tmp_path / page).read_bytes() == (ROOT / page).read_bytes()
        assert all((tmp_path / linked).exists() for linked in site_source.linked_from(page))


def test_all_that_is_public_has_its_place():
    names = [name for names in site_source.public_names().values() for name in names]
    assert sorted(names) == sorted(hf_linear_attention.__all__)
    assert all(f"::: hf_linear_attention.{name}\n" in site_source.api_page() for name in names)
