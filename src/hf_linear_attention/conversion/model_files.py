# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What a model is read from: Transformers' files, or one of llama.cpp's (GGUF)."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.utils import CONFIG_NAME


def gguf_of(name: str) -> tuple[str, str] | None:
    """Folder and file name of the GGUF file that a name stands for: it is one, or the folder that
    holds one and no config. None: it stands for a folder of Transformers', or a name on the Hub.

    Raises:
        ValueError: such a folder holds several.
    """
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), path.name
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not found or (path / CONFIG_NAME).exists():
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{name} must hold one GGUF file, or be one of its files: {names}")
    return name, found[0].name


def read(auto: Any, name: str, **options: Any) -> Any:
    """`auto.from_pretrained(name, **options)`, of a GGUF file as well. Transformers then makes
    plain numbers of the weights, and calls the model quantised still: this takes that back. And it
    makes weights that a folder has not, as the head of a classifier's: this refuses that.

    Args:
        auto: AutoConfig, AutoTokenizer or AutoModelForCausalLM.
        name: a folder, a name on the Hub, a GGUF file, or a folder with one and no config.

    Raises:
        OSError, ValueError: as there; or the folder holds several such files, or gguf is missing,
            or some of the model's weights.
    """
    gguf = gguf_of(name)
    if gguf is not None:
        if find_spec("gguf") is None:
            raise ValueError(f"{name} is read by the package gguf: pip install gguf")
        name, options["gguf_file"] = gguf
    if auto is not AutoModelForCausalLM:
        return auto.from_pretrained(name, **options)
    found, loading = auto.from_pretrained(name, output_loading_info=True, **options)
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"{name} must hold the weights of a {type(found).__name__}, and has no {missing[0]}"
        )
    if gguf is not None:
        del found.config.quantization_config
        found.is_quantized, found.hf_quantizer = False, None
    return found
