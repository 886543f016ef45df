# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The command `python -m hf_linear_attention check MODEL`: whether a model, with its own weights
and the installed releases, answers the same in every way of asking.

A cache that a release hands on under another name, or padding that leaks into a state, raises
nothing: the answers are wrong. So each way that has to change nothing is run beside the plain one.

Shapes: B rows, T tokens, V size of the vocabulary, n generated tokens.
"""

import argparse
import inspect
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ..model.modeling import LinearAttentionPreTrainedModel
from ..upstream.use_kernels import is_own, use_kernels
from .speedup import (
    DTYPES,
    TOLERANCE,
    cache_argument,
    cache_in,
    cache_to_begin_with,
    say,
    say_if_no_folder,
)

# Of a prompt: beyond a chunk of 64 tokens, in which kernels read.
TOKENS = 72
# Pieces shorter and longer than a convolution, that end within a chunk and at its end.
PIECES = (1, 1, 1, 37, 24, 8)
ONE_BY_ONE = 11  # of the last tokens, over the end of a chunk
PACKED = (7, 1, 41, 23)
NEW_TOKENS = 5
SHORT_ROW = 9  # tokens of the row that has the padding
# What a forward raises that does not get on with a release.
ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Result(NamedTuple):
    """How far a way of asking was from the plain one."""

    title: str
    difference: float  # relative, see `difference`; infinite where an error was raised
    tolerance: float
    error: str  # empty where none was raised
    remedy: str

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance  # NaN does not

    def __str__(self) -> str:
        said = f"{self.difference:.0e} of {self.tolerance:.0e}"
        line = f"{'ok' if self.holds else 'FAILED':<8}{self.title:<44}{self.error or said}"
        return line if self.holds else f"{line}\n{'':8}{self.remedy}"


class Report(NamedTuple):
    """What `check_model` found: `str(report)` has a line for each way."""

    results: tuple[Result, ...]

    @property
    def holds(self) -> bool:
        return all(result.holds for result in self.results)

    def __str__(self) -> str:
        return "\n".join(map(str, self.results))


def check_model(model: PreTrainedModel) -> Report:
    """Whether a causal language model answers the same with a cache and without, alone and beside
    longer prompts, and, where it takes them, in packed sequences.

    It runs some prompts of 72 tokens or fewer through the model as it is, of any class and on any
    device: about as much work as to generate a hundred tokens.

        report = check_model(model)
        print(report)
        assert report.holds

    Args:
        model: with its trained weights, one that `generate()` works with.

    Returns:
        A line for each way, with the largest difference and how large it may be. Both are relative
        to the size of the logits; what is allowed depends on the dtype alone.

    Raises:
        ValueError: model is none that generates from a prompt alone.
    """
    return Report(tuple(results_of(model)))


def results_of(model: PreTrainedModel) -> Iterator[Result]:
    """As `check_model`, each as soon as it is there."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise ValueError(
            f"model must be a causal language model of Transformers, got {type(model).__name__}"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"model must generate from a prompt alone, got {type(model).__name__}")
    was_training = model.training
    model.eval()
    try:
        for check in CHECKS:
            if check.is_offered(model):
                yield run(check, model)
    finally:
        model.train(was_training)


# ---- the ways ----


class Check(NamedTuple):
    """A way that has to change nothing."""

    title: str
    measure: Callable[[PreTrainedModel], float]
    remedy: str
    is_offered: Callable[[PreTrainedModel], bool] = lambda model: True


def run(check: Check, model: PreTrainedModel) -> Result:
    try:
        with torch.no_grad():
            far, error = check.measure(model), ""
    except ERRORS as raised:
        first_line = (str(raised).splitlines() or [""])[0]
        far, error = float("inf"), f"{type(raised).__name__}: {first_line}"
    return Result(check.title, far, TOLERANCE.get(model.dtype, 1e-3), error, check.remedy)


def in_pieces(model: PreTrainedModel) -> float:
    return _pieces_and_whole(model, prompt(model), PIECES)


def one_by_one(model: PreTrainedModel) -> float:
    """After a prompt, as generate() goes on."""
    ids = prompt(model)
    return _pieces_and_whole(model, ids, (max(1, ids.shape[1] - ONE_BY_ONE), *[1] * ONE_BY_ONE))


def with_a_cache(model: PreTrainedModel) -> float:
    """generate(), which looks after the cache by itself, and its tokens."""
    ids = prompt(model)
    return parted(generated(model, ids, use_cache=True), generated(model, ids, use_cache=False))


def left_padded(model: PreTrainedModel) -> float:
    """A short prompt beside a long one, in generate()."""
    long = prompt(model)
    T = long.shape[1]
    short = long[:, -min(SHORT_ROW, T - 1) :]
    padded = torch.nn.functional.pad(short, (T - short.shape[1], 0))
    mask = torch.ones_like(padded)
    mask[:, : -short.shape[1]] = 0
    rows, masks = torch.cat([padded, long]), torch.cat([mask, torch.ones_like(mask)])
    together = generated(model, rows, mask=masks, use_cache=True)
    return max(
        (
            parted(together.row(i), generated(model, alone, use_cache=True))
            for i, alone in enumerate((short, long))
        ),
        key=_nan_last,
    )


def packed(model: PreTrainedModel) -> float:
    """Sequences in one row, as collators tell it."""
    parts = split(prompt(model), PACKED)
    lengths = torch.tensor([0] + [part.shape[1] for part in parts])
    bounds = lengths.cumsum(0).to(torch.int32).to(model.device)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    together = model(
        input_ids=torch.cat(parts, dim=1),
        position_ids=positions.to(model.device),
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=int(lengths.max()),
        max_length_k=int(lengths.max()),
        use_cache=False,
    ).logits
    separate = [model(input_ids=part, use_cache=False).logits for part in parts]
    return difference(together, torch.cat(separate, dim=1))


def takes_packed(model: PreTrainedModel) -> bool:
    """Whether it is one of ours, or its layers are, after `use_kernels`."""
    return is_own(model) or not {"tell_layers", "tell_base"}.isdisjoint(
        getattr(hook, "__name__", "")
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )


USE_NO_CACHE = "wrong tokens: until that is mended, generate with use_cache=False"
CHECKS = (
    Check(
        "a prompt in pieces = whole",
        in_pieces,
        "wrong after a cache was continued: give generate() no cache, and no prefill_chunk_size",
    ),
    Check("token by token = whole", one_by_one, USE_NO_CACHE),
    Check("generate() with a cache = without", with_a_cache, USE_NO_CACHE),
    Check(
        "left-padded = alone",
        left_padded,
        "wrong tokens in batches: give prompts one by one, or those of one length together",
    ),
    Check(
        "packed = separate",
        packed,
        "wrong losses of packed sequences: give them as rows, with an attention_mask",
        takes_packed,
    ),
)


# ---- what they are made of ----


def prompt(model: PreTrainedModel) -> Tensor:
    """The same ids (1, T) each time, no longer than the model's positions allow."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or TOKENS + NEW_TOKENS
    T = min(TOKENS, limit - NEW_TOKENS)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (1, T), generator=generator).to(model.device)


def split(ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Parts of ids (1, T) so long, as far as there are ids."""
    T = ids.shape[1]
    return ids.tensor_split([bound for bound in accumulate(lengths) if bound < T], dim=1)


def _pieces_and_whole(model: PreTrainedModel, ids: Tensor, lengths: Sequence[int]) -> float:
    argument = cache_argument(model)
    tells_positions = "position_ids" in inspect.signature(model.forward).parameters
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    options = cache_to_begin_with(model, ids)
    logits = []
    for piece, place in zip(split(ids, lengths), split(positions, lengths), strict=True):
        if tells_positions:  # as generate() does: some models count from 0 again without them
            options["position_ids"] = place
        output = model(input_ids=piece, use_cache=True, **options)
        if (cache := cache_in(output)) is not None:
            options = {argument: cache}
        logits.append(output.logits)
    return difference(torch.cat(logits, dim=1), model(input_ids=ids, use_cache=False).logits)


class Generated(NamedTuple):
    tokens: Tensor  # (B, n)
    logits: Tensor  # (B, n, V), by which they were chosen

    def row(self, i: int) -> "Generated":
        return Generated(self.tokens[i : i + 1], self.logits[i : i + 1])


def generated(
    model: PreTrainedModel, ids: Tensor, *, use_cache: bool, mask: Tensor | None = None
) -> Generated:
    """What generate() makes of ids (B, T), greedily, without an end."""
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        generation_config=GenerationConfig(
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            use_cache=use_cache,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        ),
    )
    return Generated(output.sequences[:, ids.shape[1] :], torch.stack(output.logits, dim=1))


def parted(actual: Generated, expected: Generated) -> float:
    """The difference of logits (1, n, V) up to the first tokens that differ: these may be two that
    are as likely as each other, and what follows them differs for good reason.
    """
    same = (actual.tokens == expected.tokens)[0].long()
    n = min(int(same.cumprod(0).sum()) + 1, NEW_TOKENS)
    return difference(actual.logits[:, :n], expected.logits[:, :n])


def difference(actual: Tensor, expected: Tensor) -> float:
    """Of logits (..., T, V): of the token that differs most, in the Euclidean norm, relative to
    the root of the mean square over tokens. What all words of a token have in common changes no
    probability and is left out.
    """
    a, e = (x.double() - x.double().mean(-1, keepdim=True) for x in (actual, expected))
    size = e.norm(dim=-1).square().mean().sqrt()
    return ((a - e).norm(dim=-1).max() / size).item()


def _nan_last(x: float) -> float:
    return float("inf") if x != x else x


# ---- the command ----

BEFORE, AFTER = "as it is", "after use_kernels(model)"
KERNELS = {"both": (BEFORE, AFTER), "without": (BEFORE,), "with": (AFTER,)}


def main(arguments: list[str]) -> None:
    """Prints a line for each way. Ends the program with status 1 where one fails."""
    flags = parse(arguments)
    say(f"loading {flags.model}")
    model = load(flags)
    print(
        f"{type(model).__name__} of {type(model).__module__}, {model.dtype}\n"
        f"transformers {transformers.__version__}, torch {torch.__version__}"
    )
    wanted = (BEFORE,) if is_own(model) else KERNELS[flags.kernels]
    holds = {}
    if BEFORE in wanted:
        holds[BEFORE] = print_results(BEFORE, model)
    if AFTER in wanted:
        with warnings.catch_warnings():  # below it is said
            warnings.filterwarnings("ignore", "use_kernels changes nothing")
            report = use_kernels(model)
        with report:
            if report.changed:
                holds[AFTER] = print_results(AFTER, model)
            else:
                print(f"\n{AFTER} nothing changes:\n{textwrap.indent(str(report), '  ')}")
    if not holds:
        sys.exit("nothing was checked: leave out --kernels with")
    if not all(holds.values()):
        print(*advice(model, holds), sep="\n")
        sys.exit(1)


def advice(model: PreTrainedModel, holds: Mapping[str, bool]) -> Iterator[str]:
    """For a model of which something failed: beside what each line says."""
    if holds.get(AFTER):
        yield f"\n{AFTER} all of it holds."
    if is_own(model) and not isinstance(model, LinearAttentionPreTrainedModel):
        yield (
            "\nThis is the code beside the model's weights. After `import hf_linear_attention` "
            "the package's own is used in its place, and here without --trust-remote-code."
        )
    if model.dtype not in (torch.float32, torch.float64):
        yield (
            f"\nRounding in {model.dtype} may come near to what is allowed, in models of many "
            "layers: --dtype float32 tells it from a fault."
        )


def load(flags: argparse.Namespace) -> PreTrainedModel:
    """Of a folder or a name on the Hub. Ends the program where there is no such model."""
    dtype = DTYPES[flags.dtype]
    say_if_no_folder(flags.model)
    try:
        model_class = class_in_folder(flags.model) if flags.trust_remote_code else None
        return (model_class or AutoModelForCausalLM).from_pretrained(
            flags.model, dtype=dtype, trust_remote_code=flags.trust_remote_code
        )
    except (OSError, ValueError) as error:
        sys.exit(f"{flags.model} can't be loaded: {error}")


def class_in_folder(name: str) -> Any:
    """The class of the code that lies beside a model's weights, also of a model of this package's,
    for which the Auto classes would take the package's own; None where there is none.
    """
    config, _ = PreTrainedConfig.get_config_dict(name)
    reference = config.get("auto_map", {}).get("AutoModelForCausalLM")
    return None if reference is None else get_class_from_dynamic_module(reference, name)


def print_results(title: str, model: PreTrainedModel) -> bool:
    """Whether all hold."""
    print(f"\n{title}", flush=True)
    holds = True
    for result in results_of(model):
        print(textwrap.indent(str(result), "  "), flush=True)
        holds = holds and result.holds
    return holds


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hf_linear_attention check",
        description="Whether a model answers the same with and without a cache, and with padding.",
    )
    parser.add_argument("model", help="a folder, or a name on the Hub")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: the checkpoint's")
    parser.add_argument(
        "--kernels", choices=KERNELS, default="both", help="of use_kernels; default: both"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code beside the model's weights, and not the package's",
    )
    return parser.parse_args(arguments)
