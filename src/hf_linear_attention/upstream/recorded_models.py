# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Traces of Transformers' whole models: all operations of a generated token, from its embedding to
the last norm, are traced once and replayed without the modules around them.

Transformers' Python may depend on a number that no tensor tells, as that of the tokens so far. So a
trace counts only after it has given, at the next token, what modules give, to the bit.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from ..cache.growing import GrowingLayer
from ..cache.protocol import StepCache
from ..decode.conditions import may_be_recorded
from ..decode.layers import RecordedTokens
from ..decode.models import outputs_of
from ..ops.checks import check_tokens
from ..releases import CACHE_NAMES
from .families import family_of
from .recorded_layers import given_beside, states_in

RESULT = "last_hidden_state"


class RecordedForward(functools.partial):
    """A model's `forward` as an attribute of its own, for Transformers knows by a model's class
    what else it can return.
    """

    def __new__(cls, model: nn.Module):
        # By a weak reference, or the two would stay until garbage is collected.
        forward = super().__new__(cls, _forward, ref(model))
        vars(forward)["__signature__"] = inspect.signature(type(model).forward.__get__(model))
        return forward

    def __reduce__(self):
        return RecordedForward, (self.args[0](),)  # of copies and pickles, the copy's


def hasten(model: nn.Module) -> bool:
    """Lets a model replay its tokens, unless its forward was replaced; whether it does."""
    if vars(model).get("forward") is None:
        vars(model)["forward"] = RecordedForward(model)
    return is_hastened(model)


def is_hastened(model: nn.Module) -> bool:
    return isinstance(vars(model).get("forward"), RecordedForward)


def restore(model: nn.Module) -> None:
    """Undoes `hasten`."""
    if is_hastened(model):
        del vars(model)["forward"]
    _traces.pop(model, None)


class Trace(NamedTuple):
    """A model's."""

    tokens: RecordedTokens
    template: dict[str, Any]  # what it returns, without tensors and caches


# Not in the models, which these would keep in memory.
_traces: WeakKeyDictionary[nn.Module, Trace] = WeakKeyDictionary()


class Step(NamedTuple):
    """One token in each row, all of them real, after others that a cache holds."""

    caches: list[StepCache]
    cache_name: str
    given: dict[str, Any]  # arguments, the cache among them
    inputs: list[Tensor]
    constants: tuple  # all other arguments


def _forward(
    reference: Callable[[], Any], input_ids: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    model = reference()
    by_class = functools.partial(type(model).forward, model)
    step = None if args else step_of(model, {"input_ids": input_ids, **kwargs})
    if step is None:
        return by_class(input_ids, *args, **kwargs)
    trace = _traces.get(model)
    if trace is None:
        trace = _traces[model] = Trace(RecordedTokens(are_called=True, is_proved=False), {})
    outputs: Any = None

    def by_modules() -> Tensor | None:
        nonlocal outputs
        outputs = by_class(**step.given)
        return _result_of(outputs, step, trace.template)

    dtype = next(model.parameters()).dtype  # which .to() changes in place
    constants = (dtype, *step.constants)
    try:
        result = trace.tokens.run([model], step.caches, step.inputs, by_modules, constants)
    except RuntimeError:
        if input_ids is not None:
            check_tokens(input_ids, model.get_input_embeddings())
        raise
    if outputs is not None:
        return outputs
    fields = {RESULT: result, step.cache_name: step.given[step.cache_name]}
    return outputs_of(trace.template["class"], fields)


def step_of(model: Any, given: Mapping[str, Any]) -> Step | None:
    """None where a forward may do more than give hidden states and go on from a cache."""
    cache_name = next((name for name in CACHE_NAMES if given.get(name) is not None), None)
    ids = given["input_ids"]
    first = given.get("inputs_embeds") if ids is None else ids
    if cache_name is None or type(first) is not Tensor:
        return None
    cache, mask = given[cache_name], given.get("attention_mask")
    if not isinstance(cache, Cache) or not may_be_recorded(first, None, True, cache):
        return None
    caches = _step_caches(cache)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if caches is None or len(caches) != layers:
        return None  # others may run than those of the cache
    if mask is not None and not sees_all(mask, caches):
        return None
    # All are real, which masks say by a number of tokens that is another each time.
    given = dict(given) | ({} if mask is None else {"attention_mask": None})
    cls: type = type(model)
    if given.get("position_ids") is None and "position_ids" in _parameters_of(cls):
        if not family_of(cls).counts_positions:
            return None
        past = cache.get_seq_length()
        given["position_ids"] = first.new_full((1, 1), past, dtype=torch.long)
    beside = given_beside(cache, (), given)
    if beside is None:
        return None
    return Step(caches, cache_name, given, beside.tensors, beside.constants)


def sees_all(mask: Any, caches: Sequence[StepCache]) -> bool:
    """Whether a mask says of all tokens so far, and of the new one, that they are real. Tokens that
    it does not speak of are padding to Transformers.
    """
    seen = max((x.get_seq_length() for x in caches if isinstance(x, GrowingLayer)), default=0)
    is_plain = type(mask) is Tensor and mask.dim() == 2 and mask.shape[1] > seen
    return is_plain and bool(mask.all())


def _step_caches(cache: Cache) -> list[StepCache] | None:
    caches: list[StepCache] = []
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, GrowingLayer):
            states: Any = layer if layer.may_be_recorded else None
        else:
            states = states_in(cache, i)
        if states is None:
            return None
        caches.append(states)
    return caches or None


def _result_of(outputs: Any, step: Step, template: dict[str, Any]) -> Tensor | None:
    """Hidden states, where a model returned these and the cache, and nothing else."""
    if not isinstance(outputs, ModelOutput) or {*outputs} != {RESULT, step.cache_name}:
        return None
    if outputs[step.cache_name] is not step.given[step.cache_name]:
        return None
    template["class"] = type(outputs)
    return outputs[RESULT]


@functools.cache
def _parameters_of(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters)  # type: ignore[attr-defined]
