# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What tests of several files ask for."""

import pytest

from upstream_models import tiny_upstream


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved Qwen3.5."""
    path = tmp_path_factory.mktemp("model")
    tiny_upstream("qwen3_5_text").save_pretrained(path)
    return path
