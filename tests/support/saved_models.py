# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""For tests of saved models: a tokenizer to save beside them, and new processes that load them."""

import json
import os
import subprocess
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import hf_linear_attention
from new_python import run_python
from tiny import VOCAB_SIZE

WITHOUT_PACKAGE = 'import sys; sys.modules["hf_linear_attention"] = None\n'  # its import fails


def word_tokenizer(**special_tokens: str) -> PreTrainedTokenizerFast:
    """Of the words w0 ... w40."""
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", **special_tokens)


PACKAGE = str(Path(hf_linear_attention.__file__).parents[1])


def new_process(modules: Path, **variables: str) -> dict:
    """How to start a process that nobody answers, which copies the code of models to `modules`."""
    return {
        "env": {
            **os.environ,
            "PYTHONPATH": PACKAGE,
            "HF_MODULES_CACHE": str(modules),
            "HF_HUB_OFFLINE": "1",
            **variables,
        },
        "cwd": modules,  # not the repository, which is importable
        "stdin": subprocess.DEVNULL,
        "text": True,
    }


def run(script: str, *arguments: str | Path, modules: Path, **variables: str):
    """The last line that a new Python prints, read as JSON. It runs in the folder `modules`."""
    result = run_python("-c", script, *arguments, cwd=modules, PYTHONPATH=PACKAGE, **variables)
    return last_line(result)


def last_line(result: subprocess.CompletedProcess):
    """The last line that a process printed, read as JSON."""
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
