# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_linear_attention export MODEL OUT`: a folder with the model as an ONNX graph."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from ..conversion.command import save_tokenizer
from ..conversion.model_files import read
from ..conversion.writing import check_empty, whole_folder
from ..extras.speedup import say, say_if_no_folder
from .export import export_onnx
from .stock import check_type

NEEDED = ("onnx", "onnxscript", "onnxruntime")


def main(arguments: list[str]) -> None:
    """Loads, exports and says how near that is. Ends the program where it can't be."""
    flags = parse(arguments)
    out = Path(flags.out)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"export needs {', '.join(missing)}: pip install 'hf-linear-attention[onnx]'")
    say_if_no_folder(flags.model)
    try:
        check_empty(out)  # before anything large is read
        config = read(AutoConfig, flags.model)
        check_type(config.get_text_config().model_type)
        say(f"loading {flags.model}")
        model = read(AutoModelForCausalLM, flags.model, dtype=flags.dtype)
        with whole_folder(out) as folder:
            compared = export_onnx(
                model, folder, bits=flags.bits, standard=flags.standard, progress=say
            )
            tokenizer = save_tokenizer(flags.model, folder)
    except (OSError, ValueError) as error:
        sys.exit(f"{flags.model} can't be exported: {error}")
    print(f"{compared}\ntokenizer: {tokenizer}\nsaved in {out}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hf_linear_attention export",
        description="A model of this package, or a recurrent one of Transformers, as an ONNX graph "
        "with states in and out.",
    )
    parser.add_argument("model", help="a folder, or a name on the Hub")
    parser.add_argument("out", help="a folder that is not there yet")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="of what is computed; sums are float32 in either; default: float32",
    )
    parser.add_argument("--bits", type=int, choices=(8, 4), help="of weights and embeddings")
    parser.add_argument(
        "--standard",
        action="store_true",
        help="operators of ONNX 27 alone, which ONNX Runtime computes more slowly than its own",
    )
    return parser.parse_args(arguments)
