# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_linear_attention quantize MODEL OUT --bits 4`: a folder of the model with weights
of 8 or 4 bits, which `from_pretrained` loads as they are, and what that costs in bits per byte.
"""

import argparse
import inspect
import math
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    TorchAoConfig,
)

from ..conversion.command import save_tokenizer
from ..conversion.model_files import gguf_of, read
from ..conversion.writing import check_empty, whole_folder
from ..model.configuration import LinearAttentionConfig
from ..upstream.use_kernels import use_kernels
from .int4_weights import pack_int4_weights
from .speedup import say, say_if_no_folder

DTYPES = ("bfloat16", "float16", "float32")
GROUP_SIZES = (64, 32, 128)  # of inputs, by preference: 4.5 bits a weight with the first
BLOCK_TOKENS = 1024  # of a text, read without those before
MOST_BYTES = 2**16  # of a text
MANY = 2**16  # numbers of a matrix that is worth a line
HEADS = ("CausalLM", "LMHead", "ConditionalGeneration")  # in names of models that write text


class Left(NamedTuple):
    """A layer whose weights stay as they are."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def quantize(
    name: str, out: Path, bits: int, dtype: torch.dtype, group_size: int, left: list[Left]
) -> PreTrainedModel:
    """Loads a model with weights of so many bits in its linear layers, but those that are left, and
    saves it. group_size: of inputs that share a scale, for 4 bits; with 8, all of an output do.
    """
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

    if bits == 8:
        weights = Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        int4: Any = torch.int4  # type: ignore[attr-defined]
        weights = IntxWeightOnlyConfig(int4, PerGroup(group_size), scale_dtype=torch.bfloat16)
    config = TorchAoConfig(weights, modules_to_not_convert=[one.name for one in left])
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, quantization_config=config)
    if bits == 4:
        pack_int4_weights(model)
    model.save_pretrained(out)
    return model.eval()


def layers_left(model: PreTrainedModel, bits: int, group_size: int) -> list[Left]:
    """Linear layers that can't have such weights, or must not."""
    head, left = tied_head(model), []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if module is head:
            left.append(Left(name, "its weight is that of the embeddings (see --untie)"))
        elif bits == 4 and module.in_features % group_size != 0:
            why = f"its {module.in_features} inputs are no multiple of {group_size}"
            left.append(Left(name, why))
    return left


def others_left(model: PreTrainedModel) -> list[Left]:
    """Matrices that are no linear layer's, as experts', all of one kind together."""
    known = {id(x.weight) for x in model.modules() if isinstance(x, (nn.Linear, nn.Embedding))}
    sizes: Counter[str] = Counter()
    for name, weight in model.named_parameters():
        if id(weight) not in known and weight.numel() >= MANY and weight.dim() > 1:
            sizes[re.sub(r"\d+", "*", name)] += weight.nbytes
    return [
        Left(name, f"its {size / 1e6:.1f} MB are no linear layer's") for name, size in sizes.items()
    ]


def tied_head(model: PreTrainedModel) -> nn.Module | None:
    """Its head, if that multiplies by the weight of the embeddings."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and getattr(head, "weight", None) is embeddings.weight
    return head if is_tied else None


def untie(model: PreTrainedModel) -> None:
    """Gives its head a weight of its own, so that it can be quantised: of embeddings a token reads
    a row, of the head all of it.
    """
    head: Any = tied_head(model)
    if head is not None:
        head.weight = nn.Parameter(head.weight.detach().clone())
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def group_size_for(model: PreTrainedModel) -> int:
    """That by which most weights can be quantised."""

    def count(size: int) -> int:
        layers = (module for module in model.modules() if isinstance(module, nn.Linear))
        return sum(x.weight.numel() for x in layers if x.in_features % size == 0)

    return max(GROUP_SIZES, key=count)


# ---- what it costs ----


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, tokenizer: Any, text: str) -> float:
    """Of a text in blocks, of each all tokens but the first."""
    ids = tokens_of(tokenizer, text)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    size = min(BLOCK_TOKENS, longest or BLOCK_TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may have nothing to change
        report = use_kernels(model)
    with report:
        loss = math.fsum(_losses(model, ids.split(size, dim=1)))
    return loss / math.log(2) / len(text.encode())


def tokens_of(tokenizer: Any, text: str) -> Tensor:
    """(1, T)"""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return torch.tensor([ids], dtype=torch.long)


def _losses(model: PreTrainedModel, blocks: Sequence[Tensor]) -> Iterator[float]:
    """Of each block (1, T) the sum over its tokens."""
    for block in blocks:
        if block.shape[1] > 1:
            logits = model(block, use_cache=False).logits[0, :-1].float()
            yield F.cross_entropy(logits, block[0, 1:], reduction="sum").item()


def default_text() -> str:
    """English and Python that everybody has: the source of a module of Python's."""
    return inspect.getsource(argparse)


def weight_bytes(model: PreTrainedModel) -> int:
    """Of all parameters; of torchao's, of the tensors that they are made of."""
    return sum(_bytes_of(weight) for weight in model.parameters())


def _bytes_of(weight: Tensor) -> int:
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    names, _ = weight.__tensor_flatten__()
    return sum(getattr(weight, name).nbytes for name in names)


# ---- the command ----


def main(arguments: list[str]) -> None:
    """Quantises, saves and says what that cost. Ends the program where it can't be."""
    flags = parse(arguments)
    out = Path(flags.out)
    try:
        check_empty(out)
    except FileExistsError as error:
        sys.exit(str(error))
    if find_spec("torchao") is None:
        sys.exit("quantize needs torchao: pip install torchao")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(whole_folder(out))
        except OSError as error:
            sys.exit(f"{out} can't be written: {error}")
        quantize_folder(flags, made)
    print(f"saved in {out}")


def quantize_folder(flags: argparse.Namespace, out: Path) -> None:
    """Writes the folder, and says what became of the model."""
    text = default_text() if flags.text is None else flags.text.read_text(errors="replace")
    text = text.encode()[:MOST_BYTES].decode(errors="ignore")
    dtype = getattr(torch, flags.dtype)
    say_if_no_folder(flags.model)
    try:
        check_head(read(AutoConfig, flags.model))
        say(f"loading {flags.model}")
        model = read(AutoModelForCausalLM, flags.model, dtype=dtype).eval()
        if getattr(model, "is_quantized", False):
            sys.exit(f"{flags.model} is quantised already")
        group_size = flags.group_size or group_size_for(model)
        tokenizer = tokenizer_of(flags.model)
        before, size = loss_of(model, tokenizer, text), weight_bytes(model)
        with tempfile.TemporaryDirectory() as folder:
            name, unties = flags.model, flags.untie and tied_head(model) is not None
            if unties:
                untie(model)
            if unties or gguf_of(name) is not None:
                model.save_pretrained(folder)
                name = folder
            left = layers_left(model, flags.bits, group_size)
            check_any(model, left)
            del model
            say(f"quantising to {flags.bits} bits")
            model = quantize(name, out, flags.bits, dtype, group_size, left)
    except (OSError, ValueError) as error:
        sys.exit(f"{flags.model} can't be quantised: {error}")
    after = loss_of(model, tokenizer, text)
    for one in [*left, *others_left(model)]:
        print(f"{one.name} stays {flags.dtype}: {one.why}")
    print(f"weights: {size / 1e6:.1f} MB in {flags.dtype}, {weight_bytes(model) / 1e6:.1f} MB now")
    if before is not None and after is not None:
        print(f"bits per byte: {before:.4f}, {after:.4f} now ({after / before - 1:+.2%})")
    print(f"tokenizer: {save_tokenizer(flags.model, out)}")
    if flags.bits == 4 and not isinstance(model.config, LinearAttentionConfig):
        print("on a CPU, call use_kernels(model): torchao multiplies such weights on GPUs only")


def check_head(config: PreTrainedConfig) -> None:
    """Raises a ValueError where another head would be lost."""
    names = config.architectures or []
    if names and not any(kind in name for name in names for kind in HEADS):
        raise ValueError(f"it must be a causal language model, got {', '.join(names)}")


def check_any(model: PreTrainedModel, left: Sequence[Left]) -> None:
    """Raises a ValueError where all linear layers are left."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if len(layers) == len(left):
        raise ValueError(f"none of its linear layers can have such weights, as {left[0]}")


def tokenizer_of(name: str) -> Any | None:
    try:
        return read(AutoTokenizer, name)
    except (OSError, ValueError):
        return None  # which is said when it can't be saved


def loss_of(model: PreTrainedModel, tokenizer: Any | None, text: str) -> float | None:
    """Bits per byte; None without a tokenizer, or where it makes no tokens of the text."""
    if tokenizer is None or tokens_of(tokenizer, text).shape[1] < 2:
        return None
    say("reading a text")
    return bits_per_byte(model, tokenizer, text)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hf_linear_attention quantize",
        description="A model with weights of 8 or 4 bits, and what that costs.",
    )
    parser.add_argument("model", help="a folder, a name on the Hub, or a GGUF file")
    parser.add_argument("out", help="a folder that is not there yet")
    parser.add_argument("--bits", type=int, choices=(8, 4), required=True, help="of a weight")
    parser.add_argument(
        "--group-size",
        type=positive_even,
        help="of inputs that share a scale, for 4 bits; default: 64, or what fits more layers",
    )
    parser.add_argument(
        "--untie",
        action="store_true",
        help="a head that shares the embeddings' weight gets one of its own, of so many bits: "
        "tokens take less time, and the folder is larger",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of all else; default: bfloat16"
    )
    parser.add_argument(
        "--text",
        type=existing_file,
        help=f"to measure the loss on, {MOST_BYTES} bytes at most; default: a source of Python's",
    )
    flags = parser.parse_args(arguments)
    if flags.group_size is not None and flags.bits == 8:
        parser.error("--group-size is for 4 bits: with 8, an output has one scale")
    return flags


def positive_even(text: str) -> int:
    if not text.isdecimal() or int(text) == 0 or int(text) % 2 != 0:
        raise argparse.ArgumentTypeError(f"must be a positive even number, got {text!r}")
    return int(text)


def existing_file(text: str) -> Path:
    if not Path(text).is_file() or Path(text).stat().st_size == 0:
        raise argparse.ArgumentTypeError(f"must be a file of text, got {text!r}")
    return Path(text)
