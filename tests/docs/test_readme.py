# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The README's Python, run in order, as a reader would."""

import re
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM
from new_python import run_python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def demo_output(tmp_path, small_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder with what `make demo` leaves in outputs/demo, but smaller and untrained."""
    config = LinearAttentionConfig(
        vocab_size=len(small_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=small_tokenizer.pad_token_id,
    )
    LinearAttentionForCausalLM(config).save_pretrained(tmp_path / "outputs/demo")
    small_tokenizer.save_pretrained(tmp_path / "outputs/demo")
    return tmp_path


@pytest.fixture
def small_tokenizer() -> PreTrainedTokenizerFast:
    sys.path.insert(0, str(ROOT / "examples"))
    from datasets import Dataset

    from text_blocks import train_tokenizer

    return train_tokenizer(Dataset.from_dict({"text": [README]}), 300)


def test_every_python_snippet_runs(demo_output):
    snippets = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len(snippets) >= 3
    # In a process of its own: what the snippets import and register must not help other tests.
    result = run_python("-c", "\n".join(snippets), cwd=demo_output)
    assert result.returncode == 0, result.stderr
    sizes = re.findall(r"^\d+ tokens: (\d+) bytes", result.stdout, re.MULTILINE)
    assert len(sizes) == 2
    assert sizes[0] == sizes[1]


def test_it_is_short():
    assert len(README.splitlines()) <= 150
