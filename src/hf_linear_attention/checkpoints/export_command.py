# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_linear_attention export-fla MODEL OUT`: a model of ours as a folder that
flash-linear-attention loads.
"""

import argparse
import sys
from pathlib import Path

from transformers import AutoConfig

from ..conversion.command import DTYPES, save_tokenizer
from ..conversion.writing import check_empty, whole_folder
from ..model.configuration import LinearAttentionConfig
from ..model.modeling import LinearAttentionForCausalLM
from .export import export_checkpoint, find_form
from .files import read_config


def main(arguments: list[str]) -> None:
    """Loads, saves and says what became of every weight. Ends the program where it can't be."""
    flags = parse(arguments)
    out = Path(flags.out)
    try:
        check_empty(out)  # before anything large is read
        model_type = read_config(flags.model, {}).get("model_type")
        if model_type != LinearAttentionConfig.model_type:
            raise ValueError(f"it must be a model of this package, got a {model_type!r}")
        find_form(AutoConfig.from_pretrained(flags.model))
        model = LinearAttentionForCausalLM.from_pretrained(flags.model, dtype=flags.dtype)
        with whole_folder(out) as folder:
            report = export_checkpoint(model, folder)
            tokenizer = save_tokenizer(flags.model, folder)
    except (OSError, ValueError) as error:
        sys.exit(f"{flags.model} can't be exported: {error}")
    print(f"{report}\ntokenizer: {tokenizer}\nsaved in {out}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hf_linear_attention export-fla",
        description="A model of this package as a checkpoint of flash-linear-attention.",
    )
    parser.add_argument("model", help="a folder, or a name on the Hub")
    parser.add_argument("out", help="a folder that is not there yet")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: the model's")
    return parser.parse_args(arguments)
