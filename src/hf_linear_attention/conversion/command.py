# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_linear_attention convert MODEL OUT`: a folder with the converted model."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file

from .convert import KEPT, config_for, convert, forms
from .model_files import gguf_of, read
from .writing import check_empty

DTYPES = ("auto", "float32", "bfloat16", "float16")
# A model with none of these files has no tokenizer, but AutoTokenizer returns one without words for
# some model types, as mamba2.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model"),
)


def main(arguments: list[str]) -> None:
    """Converts, saves and says what became of the weights. Ends the program where that can't be."""
    flags = parse(arguments)
    out = Path(flags.out)
    try:
        check_empty(out)
    except FileExistsError as error:
        sys.exit(str(error))
    options = {"mixer": flags.mixer, "softmax_layers": flags.softmax_layers, **flags.overrides}
    try:
        # before anything large is read
        config_for(read(AutoConfig, flags.model), **options)
        model = read(AutoModelForCausalLM, flags.model, dtype=flags.dtype)
        converted, report = convert(model, **options)
    except (OSError, TypeError, ValueError) as error:
        sys.exit(f"{flags.model} can't be converted: {error}")
    converted.card_metadata["base_model"] = flags.model
    converted.save_pretrained(out)
    print(f"{report}\ntokenizer: {save_tokenizer(flags.model, out)}\nsaved in {out}")


def save_tokenizer(name: str, out: Path) -> str:
    """Saves the tokenizer of a model, with its chat template, and says which it is."""
    try:
        if gguf_of(name) is None and not has_tokenizer(name):
            return f"none, for there is no {' or '.join(TOKENIZER_FILES)}"
        tokenizer = read(AutoTokenizer, name)
    except (OSError, ValueError) as error:
        return f"none, for none can be loaded: {error}"
    tokenizer.save_pretrained(out)
    template = "with" if tokenizer.chat_template else "without"
    return f"{type(tokenizer).__name__}, {template} a chat template"


def has_tokenizer(name: str) -> bool:
    """Whether a folder, or a model on the Hub, has a file of a tokenizer."""
    options = {"_raise_exceptions_for_missing_entries": False}
    return any(cached_file(name, file, **options) is not None for file in TOKENIZER_FILES)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hf_linear_attention convert",
        description="A softmax model of Transformers as a linear-attention model.",
    )
    parser.add_argument("model", help="a folder, a name on the Hub, or a GGUF file")
    parser.add_argument("out", help="a folder that is not there yet")
    parser.add_argument(
        "--mixer", choices=forms(), default="window", help="of linear layers; default: window"
    )
    parser.add_argument(
        "--softmax-layers",
        type=read_layers,
        default="none",
        help=f"{KEPT}, as 3,7,11; default: none",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: the checkpoint's")
    parser.add_argument(
        "--overrides", type=read_fields, default={}, help="more fields of the config, as JSON"
    )
    return parser.parse_args(arguments)


def read_layers(text: str) -> str | int | list[int]:
    """What `convert` takes for softmax_layers."""
    if text in ("none", "all"):
        return text
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = []
    if not numbers:
        raise argparse.ArgumentTypeError(f"must be {KEPT}, got {text!r}")
    return numbers if "," in text else numbers[0]


def read_fields(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object of fields, got {text!r}")
    return fields
