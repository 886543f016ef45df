# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_linear_attention import MODEL OUT`: a checkpoint of flash-linear-attention as a
folder of ours.
"""

import argparse
import sys
from pathlib import Path

from ..conversion.command import DTYPES, save_tokenizer
from ..conversion.writing import check_empty, whole_folder
from .load import load_checkpoint
from .rwkv_tokenizer import find_vocabulary, rwkv_tokenizer


def main(arguments: list[str]) -> None:
    """Loads, saves and says what became of every weight. Ends the program where it can't be."""
    flags = parse(arguments)
    out = Path(flags.out)
    try:
        check_empty(out)  # before anything large is read
        model, report = load_checkpoint(flags.model, flags.dtype)
        model.card_metadata["base_model"] = flags.model
        with whole_folder(out) as folder:
            model.save_pretrained(folder)
            tokenizer = save_any_tokenizer(flags.model, folder)
    except (OSError, ValueError) as error:
        sys.exit(f"{flags.model} can't be imported: {error}")
    print(f"{report}\ntokenizer: {tokenizer}\nsaved in {out}")


def save_any_tokenizer(model: str, folder: Path) -> str:
    """As `save_tokenizer`; of RWKV's vocabulary, which Transformers has no class for, too."""
    vocabulary = find_vocabulary(model)
    if vocabulary is None:
        return save_tokenizer(model, folder)
    tokenizer = rwkv_tokenizer(vocabulary)
    tokenizer.save_pretrained(folder)
    template = "with" if tokenizer.chat_template else "without"
    return f"RWKV's, of {vocabulary.name}, {template} a chat template"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hf_linear_attention import",
        description="A checkpoint of flash-linear-attention as a model of this package.",
    )
    parser.add_argument("model", help="a folder, a name on the Hub, or RWKV-7's .pth")
    parser.add_argument("out", help="a folder that is not there yet")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: the checkpoint's")
    return parser.parse_args(arguments)
