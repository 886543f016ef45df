# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What a Space sets by its variables, and others by flags."""

import argparse
import os
from pathlib import Path

MODELS = Path(__file__).parent / "models"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A page that shows a softmax and a linear model side by side. Each flag is "
        "also a variable of the environment: --max_context is SPACE_MAX_CONTEXT.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def option(name: str, default: str | int, text: str) -> None:
        value = os.environ.get(f"SPACE_{name.upper()}", default)
        parser.add_argument(f"--{name}", default=value, type=type(default), help=text)

    option("softmax", str(MODELS / "softmax"), "a language model, a folder or a name on the Hub")
    option("linear", str(MODELS / "linear"), "the language model beside it")
    option("digits", str(MODELS / "digits"), "a model of examples/train_digits.py")
    option("trained_tokens", 256, "in the texts that the language models were trained on")
    option("max_context", 100_000, "the end of the slider of the context's tokens")
    option("max_seconds", 1200, "after which a race is stopped")
    option("threads", 0, "of the models; 0: PyTorch's choice")
    option("port", 7860, "where the page is served")
    flags = parser.parse_args(arguments)
    for name in ("trained_tokens", "max_context", "max_seconds", "port"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name} must be 1 at least, got {getattr(flags, name)}")
    return flags
