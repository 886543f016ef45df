# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The proof of a replacement whose source in Transformers is new: it must answer the same on a tiny
model with the settings of the real one, in which that class alone is replaced.

Shapes: B batch, T time, C hidden size.
"""

import contextlib
import copy
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import hf_linear_attention

from ...releases import CACHE_NAMES
from ..bounds import TOLD
from ..module_classes import change_class
from ..tiny_models import VOCAB_SIZE, fill_weights, settings_of, tiny_config
from .fingerprints import fingerprint, fingerprint_of
from .source_reads import why_unknown
from .verdicts import keep, key_of, recall

# Set to "0", unknown sources are not tried, and their classes stay as they are.
SWITCH = "HF_LINEAR_ATTENTION_PROVE"

# How far answers may be off for rounding alone, by the largest of Transformers'. Fixed: one that
# was taken from how far Transformers' own are off would let a wrong factor through where they are.
TOLERANCE = 2e-5
OF_MANY_TOKENS = 5e-5
OF_GRADIENTS = 2e-3
OF_OTHER_WEIGHTS = 1e-3
# In bfloat16 the errors of both are rounding's; by how much one may be the larger.
RATIO_OF_ERRORS = 4.0

# What can go wrong with a source that is another than those that are known.
FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


# Whether a trial is going on, whose models nobody else is to change.
is_proving: ContextVar[bool] = ContextVar("a replacement is tried", default=False)


class DifferenceError(Exception):
    """Answers are not the same."""


class Twins(NamedTuple):
    """Two models with the same weights."""

    theirs: PreTrainedModel
    ours: PreTrainedModel  # in which one class is replaced
    layers: list[Any]  # of that class, in ours
    num_states: int  # that these keep, all together


def why_not_proved(
    upstream: type[nn.Module],
    ours: type[nn.Module],
    functions: tuple[str, ...],
    model: PreTrainedModel | None,
    sizes: Mapping[str, Any],
) -> str | None:
    """Why a class of ours must not stand in for one of Transformers whose source is unknown, in a
    model; None where both were proved equal, now or earlier. What a caller has set stays.

    Args:
        functions: of the source, as of `Replacement`.
        model: the innermost around it.
        sizes: of a tiny one.
    """
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 keeps it from being tried on a tiny model"
    if model is None:
        return "give use_kernels the model around it, to have it tried on a tiny one"
    key = key_of(
        *(upstream.__module__, upstream.__qualname__, fingerprint(upstream, functions)),
        *(ours.__qualname__, fingerprint_of(ours), hf_linear_attention.__version__),
        *(torch.__version__, transformers.__version__),
        *(type(model).__qualname__, settings_of(model.config, sizes)),
    )
    is_known, why = recall(key)
    if is_known:
        return why
    why = why_other_arguments(upstream, ours) or why_unknown(ours, upstream, functions)
    is_certain = True
    if why is None:
        now = type(upstream.__name__, (ours, upstream), {"__module__": __name__})
        why, is_certain = why_not_equal(upstream, now, model, sizes)
    keep(key, why, in_file=is_certain)
    return why


def why_other_arguments(upstream: type[nn.Module], ours: type[nn.Module]) -> str | None:
    """What a forward of Transformers takes that ours does not, or in another place. The cache may
    have any of its names, and what tells of packed sequences is read by its name alone.
    """
    theirs, mine = (_named(cls.forward) for cls in (upstream, ours))
    for i, name in enumerate(theirs):
        mine_there = mine[i] if i < len(mine) else None
        if mine_there is None and name in TOLD:
            continue
        if mine_there != ("cache" if name in CACHE_NAMES else name):
            return f"it takes an argument {name!r} where ours takes {mine_there!r}"
    return None


def _named(forward: Callable[..., Any]) -> list[str]:
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(forward).parameters.values()
    return [one.name for one in parameters if one.kind not in several]


def why_not_equal(
    upstream: type[nn.Module],
    now: type[nn.Module],
    model: PreTrainedModel,
    sizes: Mapping[str, Any],
) -> tuple[str | None, bool]:
    """What differs where a class of Transformers becomes one of ours in a tiny model with the
    settings of `model`, None where nothing does; and whether it would at another time.
    """
    what = "the model"
    try:
        with undisturbed():
            twins = twins_of(upstream, now, model, sizes)
            for check in CHECKS:
                what = inspect.getdoc(check) or ""
                check(twins)
    except DifferenceError as difference:
        return f"on a tiny model, {what}: {difference}", True
    except FAULTS as error:
        return f"on a tiny model, {what}: {type(error).__name__}: {str(error)[:200]}", False
    return None, True


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Settings that PyTorch begins with, and random numbers, warnings and settings of the caller's
    as they were, at the end. What Transformers warns of once it shall warn of later.
    """
    dtype, logger = torch.get_default_dtype(), logging.getLogger("transformers")
    level, warn_once = logger.level, getattr(logging.Logger, "warning_once", None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.callback(torch.set_default_dtype, dtype)
        stack.callback(logger.setLevel, level)
        stack.callback(is_proving.reset, is_proving.set(True))
        if warn_once is not None:
            stack.callback(setattr, logging.Logger, "warning_once", warn_once)
            logging.Logger.warning_once = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        yield


def twins_of(
    upstream: type[nn.Module],
    now: type[nn.Module],
    model: PreTrainedModel,
    sizes: Mapping[str, Any],
) -> Twins:
    theirs = type(model)(tiny_config(model.config, sizes)).eval()
    fill_weights(theirs, torch.Generator().manual_seed(0))
    ours = copy.deepcopy(theirs)
    layers = [module for module in ours.modules() if type(module) is upstream]
    if not layers:
        raise ValueError(f"it has no {upstream.__name__}")
    for layer in layers:
        change_class(layer, now)
    # Inkling's say nothing of their recurrences, and have one convolution each.
    num_states = sum(len(getattr(layer, "recurrences", "1")) for layer in layers)
    return Twins(theirs, ours, layers, num_states)


# ---- what is compared ----


def ids_of(B: int, T: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE - 4, (B, T), generator=generator)


def parameters_of(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


def hidden(model: nn.Module, ids: Tensor, **more: Any) -> Tensor:
    """Outputs (B, T, C) of ids (B, T), without a cache."""
    return model(input_ids=ids, use_cache=False, **more).last_hidden_state


ON_MODULES = ("conv1d_state", "recurrent_states")  # RecurrentGemma's states


class Reader:
    """Reads pieces of a text with a cache."""

    def __init__(self, cache: Any = None, num_tokens: int = 0):
        self.cache, self.num_tokens = cache, num_tokens

    def read(self, model: nn.Module, pieces: Sequence[Tensor]) -> Tensor:
        """Pieces (B, T) -> outputs (B, T of all, C)"""
        self.model = model
        outputs, given = [], parameters_of(model)
        name = next(name for name in (*CACHE_NAMES, "state") if name in given)
        for piece in pieces:
            more: dict[str, Any] = {} if self.cache is None else {name: self.cache}
            if "position_ids" in given:  # without which Bamba would count from 0 again
                positions = torch.arange(piece.shape[1]) + self.num_tokens
                more["position_ids"] = positions.expand(piece.shape)
            output = model(input_ids=piece, use_cache=True, **more)
            self.cache = getattr(output, name, self.cache)
            self.num_tokens += piece.shape[1]
            outputs.append(output.last_hidden_state)
        return torch.cat(outputs, dim=1)

    @property
    def states(self) -> list[Tensor]:
        """Of recurrent layers. The first token of a convolution is never read."""
        states = []
        for layer in getattr(self.cache, "layers", ()):
            for kept, skipped in (("conv_states", 1), ("recurrent_states", 0)):
                given = (x for x in getattr(layer, kept, {}).values() if x is not None)
                states += [x[..., skipped:] for x in given]
        for module in self.model.modules():
            states += [x for name in ON_MODULES if (x := getattr(module, name, None)) is not None]
        if isinstance(self.cache, list):  # RWKV's
            return self.cache
        for kept in getattr(self.cache, "rnn_state", {}).values():  # xLSTM's
            states += kept
        linear = getattr(self.cache, "linear_cache", [])  # MiniMax's
        return states + [x for x in linear if isinstance(x, Tensor)]


def reader_for(twins: Twins) -> Reader:
    """Models whose states are on their modules return no cache, and take one for other layers."""
    is_cached = twins.layers[0].is_cached
    return Reader(None if is_cached else DynamicCache(config=twins.theirs.config))


def close(mine: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        raise DifferenceError(
            f"{what} are {mine.dtype} {tuple(mine.shape)}, and not {tuple(theirs.shape)}"
        )
    mine, theirs = mine.double(), theirs.double()
    off = (mine - theirs).abs().max().item() / max(theirs.abs().max().item(), 1e-30)
    if not off <= tolerance:
        raise DifferenceError(f"{what} are off by {off:.0e} of the largest")


# ---- how ----


def is_mended(twins: Twins, what: str) -> bool:
    """Whether Transformers' own is known to be wrong there, and ours is not."""
    return any(what in layer.mended for layer in twins.layers)


def num_rows(twins: Twins) -> int:
    """Of texts that are read in pieces."""
    return 1 if is_mended(twins, "rows") else 2


def check_whole_texts(twins: Twins) -> None:
    """Texts of 19 and 150 tokens"""
    for shape, tolerance in (((2, 19), TOLERANCE), ((1, 150), OF_MANY_TOKENS)):
        ids = ids_of(*shape, seed=1)
        close(hidden(twins.ours, ids), hidden(twins.theirs, ids), tolerance, "outputs")


def check_tokens(twins: Twins) -> None:
    """Tokens one by one, with a cache"""
    ids = ids_of(num_rows(twins), 14, seed=2)
    pieces = ids.split((11, 1, 1, 1), dim=1)
    mine, their = reader_for(twins), reader_for(twins)
    got, want = mine.read(twins.ours, pieces), their.read(twins.theirs, pieces)
    if is_mended(twins, "steps"):
        close(got, hidden(twins.theirs, ids), TOLERANCE, "outputs")
        return
    close(got, want, TOLERANCE, "outputs")
    if len(mine.states) != len(their.states) or len(their.states) < twins.num_states:
        raise DifferenceError(f"{len(mine.states)} states, and not {len(their.states)}")
    for state, expected in zip(mine.states, their.states, strict=True):
        close(state, expected, TOLERANCE, "states")


def check_handing_over(twins: Twins) -> None:
    """Going on from the other's cache"""
    if not twins.layers[0].is_cached:
        return
    ids = ids_of(num_rows(twins), 14, seed=3)
    first, *later = ids.split((11, 1, 1, 1), dim=1)
    want = hidden(twins.theirs, ids)[:, 11:]
    for one, other in ((twins.theirs, twins.ours), (twins.ours, twins.theirs)):
        if other is twins.theirs and is_mended(twins, "steps"):
            continue
        reader = Reader()
        reader.read(one, [first])
        close(reader.read(other, later), want, TOLERANCE, "outputs")


def check_pieces(twins: Twins) -> None:
    """Several tokens after a cache"""
    if is_mended(twins, "pieces"):
        return
    ids = ids_of(num_rows(twins), 17, seed=4)
    pieces = ids.split((6, 7, 1, 3), dim=1)
    got, want = Reader().read(twins.ours, pieces), Reader().read(twins.theirs, pieces)
    if is_mended(twins, "steps"):
        want = hidden(twins.theirs, ids)
    close(got, want, TOLERANCE, "outputs")


def check_padding(twins: Twins) -> None:
    """Padding on the left"""
    ids = ids_of(2, 11, seed=5)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    got, want = (hidden(model, ids, attention_mask=mask) for model in (twins.ours, twins.theirs))
    close(got[1], want[1], TOLERANCE, "outputs of a row without it")
    if not is_mended(twins, "padding"):
        close(got[0, 4:], want[0, 4:], TOLERANCE, "outputs")


def check_gradients(twins: Twins) -> None:
    """Training"""
    ids = ids_of(2, 19, seed=6)
    (got, mine), (want, their) = (outputs_and_gradients(x, ids) for x in (twins.ours, twins.theirs))
    close(got, want, TOLERANCE, "outputs")
    for name, expected in their.items():
        found = mine[name]
        if found is None or expected is None:
            if found is not expected:
                raise DifferenceError(f"gradients of {name} are {found}, and not {expected}")
        else:
            close(found, expected, OF_GRADIENTS, f"gradients of {name}")


def outputs_and_gradients(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    names, weights = zip(*model.named_parameters(), strict=True)
    model.train()
    with torch.enable_grad():
        outputs = hidden(model, ids)
        factors = torch.linspace(-1, 1, outputs.numel()).view_as(outputs)
        found = torch.autograd.grad((outputs * factors).sum(), weights, allow_unused=True)
    model.eval()
    return outputs.detach(), dict(zip(names, found, strict=True))


class Sweep(NamedTuple):
    """A change of all weights whose names hold one of some words."""

    words: tuple[str, ...]
    change: Callable[[Tensor], Tensor]
    what: str


PROJECTIONS = (
    "in_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "a_proj",
    "b_proj",
    "f_",
    "x_proj",
    "gate_preact",
)
STEPS = ("dt_bias", "dt_proj.bias", "dt_proj_bias")
DECAYS = ("A_log", "time_decay")
# Numbers of tokens, and what is changed together.
SWEEPS = (
    (19, [Sweep(PROJECTIONS, lambda x: 3 * x, "3 times the projections")]),
    (19, [Sweep(PROJECTIONS, lambda x: x / 1000, "projections divided by 1,000")]),
    (
        19,
        [
            Sweep(STEPS, lambda x: x + 6, "step sizes greater by 6"),
            Sweep(DECAYS, lambda x: x - 5, "slower decays"),
        ],
    ),
    # What is remembered over several of Transformers' chunks.
    (150, [Sweep((*STEPS, *DECAYS), lambda x: x - 3, "smaller step sizes and decays")]),
)


def check_other_weights(twins: Twins) -> None:
    """Larger and smaller weights"""
    for T, sweeps in SWEEPS:
        ids = ids_of(1, T, seed=7)
        with contextlib.ExitStack() as stack:
            if any([stack.enter_context(swept(twins, sweep)) for sweep in sweeps]):
                got, want = hidden(twins.ours, ids), hidden(twins.theirs, ids)
                what = " and ".join(sweep.what for sweep in sweeps)
                close(got, want, OF_OTHER_WEIGHTS, f"with {what}, outputs")


@contextlib.contextmanager
def swept(twins: Twins, sweep: Sweep) -> Iterator[bool]:
    """Whether there are such weights."""
    before = [
        (weight, weight.clone())
        for model in (twins.theirs, twins.ours)
        for name, weight in model.named_parameters()
        if any(word in name for word in sweep.words)
    ]
    for weight, value in before:
        weight.copy_(sweep.change(value))
    try:
        yield bool(before)
    finally:
        for weight, value in before:
            weight.copy_(value)


def check_limits(twins: Twins) -> None:
    """Limits that limit something"""
    limits = dict(twins.layers[0].limits)
    if not limits:
        return
    places = [name for name, module in twins.ours.named_modules() if module in twins.layers]
    layers = [model.get_submodule(name) for name in places for model in (twins.theirs, twins.ours)]
    ids = ids_of(1, 19, seed=9)
    with contextlib.ExitStack() as stack:
        for layer in layers:
            for name, value in limits.items():
                stack.callback(setattr, layer, name, getattr(layer, name))
                setattr(layer, name, value)
        close(hidden(twins.ours, ids), hidden(twins.theirs, ids), TOLERANCE, "outputs")


def check_bfloat16(twins: Twins) -> None:
    """bfloat16"""
    ids = ids_of(2, 19, seed=8)
    want = hidden(twins.theirs, ids).double()
    models = [in_bfloat16(model) for model in (twins.ours, twins.theirs)]
    if is_mended(twins, "half precision without a cache"):
        outputs = [Reader().read(model, [ids]) for model in models]
    else:
        outputs = [hidden(model, ids) for model in models]
    if outputs[0].dtype != outputs[1].dtype:
        raise DifferenceError(f"outputs are {outputs[0].dtype}, and not {outputs[1].dtype}")
    mine, their = ((y.double() - want).square().mean(-1).median().sqrt() for y in outputs)
    if not (mine <= RATIO_OF_ERRORS * their and their <= RATIO_OF_ERRORS * mine):
        raise DifferenceError(f"the error is {mine:.0e}, and not {their:.0e}")


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """A copy as from_pretrained makes it: some models keep parts in float32."""
    model = copy.deepcopy(model)
    kept = model._keep_in_fp32_modules_strict or ()
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, x in tensors:
            if x.is_floating_point() and not any(part in name for part in kept):
                x.data = x.data.to(torch.bfloat16)
    return model


CHECKS = (
    check_whole_texts,
    check_tokens,
    check_handing_over,
    check_pieces,
    check_padding,
    check_gradients,
    check_other_weights,
    check_limits,
    check_bfloat16,
)
