# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`use_kernels`: Transformers' own models, recurrent ones above all, on our kernels, by one call.

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3.5-0.8B")
print(use_kernels(model))
"""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Iterator
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..cache.growing import let_cache_grow
from ..fast import linear, quantized
from ..fast.attention import IS_COMPILED
from ..model.auto import before_forwards
from ..model.configuration import LinearAttentionConfig
from ..model.served import prepare_server
from ..releases import CACHE
from . import attention, recorded_models
from .changes import IS_OURS, Tier, by_class, by_functions, hasten, replace
from .families import HEADS, LAYERS, family_of, made_class, norm_for, replacement_for
from .functions import ByFunctions, expect_bounds, expect_none, functions_class_for
from .losses import change_loss, has_loss, why_not
from .module_classes import change_class, device_type_of, why_it_stays
from .norms import UpstreamNorm
from .packing import forget, tell_base, tell_layers
from .proof.proof import is_proving
from .report import ChangedHead, ChangedLayer, Left, Report, Undoable
from .served import generates, served_class
from .shared_sequences import check_head, forget_group, share_layers, tell_shared_base
from .told_lists import forget_mask, keep_mask, take_lists, tell_lists
from .told_states import take_told, tell_states

# What is called before and after models that hand on nothing but states.
TELLING = {"state": (tell_states, take_told), "states": (tell_lists, take_lists)}
UNKNOWN_NORM = "its source is none that a norm of ours was written for"
ATTENTION = "attention of few queries"
NOTHING = "no layer of it has a replacement, and it is no causal language model on the CPU"


def use_kernels(model: nn.Module, *, state_in_fp64: bool = False) -> Report:
    """Makes a model of Transformers' own run on this package's kernels: a recurrent one, or of any
    causal language model on the CPU its norms, products and loss.

    Each module that has a replacement becomes one of a subclass of its class, which has the same
    name and another `forward`. Parameters, `state_dict`, `isinstance`, `save_pretrained`, PEFT and
    `generate` stay what they are; so do answers, but for rounding, and where Transformers' would be
    wrong (docs/transformers_models.md lists that). Sequences packed in a row are kept apart,
    `generate` takes drafts, and continuous batching has places for states. Other layers that call
    functions which Transformers routes to other packages keep their `forward`, over functions of
    ours: they are faster and keep packed sequences apart, and no more. `loss_function` is ours
    where Transformers' is of the same formula. A causal language model without recurrent layers, as
    Llama, gets products of few rows, attention of few queries, the loss, and norms of known sources
    on the CPU. In any model products of few rows with torchao's weights of 8 and 4 bits become ours
    (docs/quantization.md). Nothing else in the process changes. A recurrent layer whose source in
    Transformers is unknown is changed where a tiny model proves that ours answers the same, and the
    report says so.

        report = use_kernels(model)  # print(report) says what was changed, and what was not and why
        report.undo()

        with use_kernels(model):  # undone at the end
            ...

    Args:
        model: with any weights, in any precision, on any device or several, wrapped by PEFT or not.
        state_in_fp64: whether recurrent layers keep sums in float64, twice as large, and compute
            them so, for texts of millions of tokens, over which float32 drifts. The report says
            which do: not those whose states are on their modules, or that keep their `forward`.

    Returns:
        What was changed, and what was left alone. Where nothing was changed it warns, too, once for
        each class of models.

    Raises:
        ValueError: model is no nn.Module; or state_in_fp64 is no bool, or can't be: no layer of
            the model keeps sums in a cache, or the model is this package's own, whose config
            has a field of that name.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(state_in_fp64, bool):
        raise ValueError(f"state_in_fp64 must be a bool, got {state_in_fp64!r}")
    report = _changed(model)
    if state_in_fp64 and not report.keep_fp64():
        report.undo()
        raise ValueError(
            "state_in_fp64 must be left out where no layer is changed that keeps sums in a cache, "
            f"as in {type(model).__name__}; models of hf-linear-attention have it in their config"
        )
    if not report.has_changes and all(one.why != IS_OURS for one in report.left):
        _warn_of_nothing(type(model), report)
    return report


_one_at_a_time = RLock()


def _changed(model: nn.Module) -> Report:
    """In one thread at a time: trials change settings of the process, and put back what was."""
    with _one_at_a_time:
        return _changed_by(model)


def _changed_by(model: nn.Module) -> Report:
    report = Report()
    tiers: tuple[Tier, ...] = (
        by_class,
        functools.partial(by_functions, functools.cache(functions_class_for)),
    )
    for name, module in model.named_modules():
        replacement = replacement_for(type(module))
        if replacement is None or replacement.is_recurrent:
            replace(report, name, module, replacement, tiers, model)
    # A part of the model may have been given before: what is around its layers has to change, too.
    before = [one for one in report.left if one.why == IS_OURS]
    names = [one.name for one in report.changed] + [one.name for one in before]
    layers = {*map(model.get_submodule, names)}
    can_draft = all(getattr(layer, "takes_tokens_back", False) for layer in layers)
    if layers and can_draft and before == report.left:
        _allow_drafts(report, model, layers)
    stays = bool(report.left) and not layers  # as recurrent models do of which all layers stayed
    core = layers if stays else layers | _embeddings_of_language_models(model)
    if core:
        _replace_parts(report, model, core)
        _let_caches_grow(report, model)
        _replace_losses(report, model, core)
    if layers:
        of_classes = {layer for layer in layers if not isinstance(layer, ByFunctions)}
        _record_tokens(report, model, of_classes)
        _add_hooks(report, model, layers)
        _allow_continuous_batching(report, model, layers)
    _replace_quantized_products(report, model)
    if not report.changed and not report.left:
        report.left.append(Left("", type(model).__name__, IS_OURS if is_own(model) else NOTHING))
    return report


_warned_of: set[str] = set()  # classes of models


def _warn_of_nothing(cls: type[nn.Module], report: Report) -> None:
    """Once for each class of models."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name not in _warned_of:
        _warned_of.add(name)
        warnings.warn(f"use_kernels changes nothing in {cls.__name__}:\n{report}", stacklevel=3)


class Everywhere(Undoable):
    """What `use_kernels_everywhere` returns. `reports` are those of all models so far that are
    still in memory.
    """

    def __init__(self) -> None:
        self.reports: WeakKeyDictionary[nn.Module, Report] = WeakKeyDictionary()
        self._stop = before_forwards(self._prepare)
        prepare_server()

    def undo(self) -> None:
        """Makes all models what they were, and leaves later ones alone."""
        self._stop()
        for report in self.reports.values():
            report.undo()
        self.reports.clear()

    def _prepare(self, model: PreTrainedModel) -> None:
        if model not in self.reports and not is_proving.get():
            self.reports[model] = _changed(model)  # many have nothing for it: no warning
            for part in model.modules():  # its base model is no model of its own
                if isinstance(part, PreTrainedModel) and part is not model:
                    self.reports.setdefault(part, Report())  # unless it was called before


def use_kernels_everywhere() -> Everywhere:
    """`use_kernels` for every model of Transformers that is used from now on, when it is first
    called. `undo()` of what this returns, or the end of a `with` block, ends it.

    A model that torch.compile is given before its first forward stays as it is.
    """
    return Everywhere()


def _embeddings_of_language_models(model: nn.Module) -> set[nn.Module]:
    """Of the tokens of causal language models that compute on the CPU, by which it is seen which of
    their parts are for text. This package's own models run on its kernels anyway.
    """
    found: set[nn.Module] = set()
    for _, part in _models_in(model):
        if (
            isinstance(part, GenerationMixin)
            and not getattr(part.config, "is_encoder_decoder", False)
            and not is_own(part)
        ):
            with contextlib.suppress(NotImplementedError):  # it has none, or nobody says where
                embeddings = part.get_input_embeddings()
                if device_type_of(embeddings) in ("cpu", "meta"):
                    found.add(embeddings)
    return found


def is_own(model: nn.Module) -> bool:
    """Whether it is of this package, also by the code of a checkpoint."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type == LinearAttentionConfig.model_type


def _replace_parts(report: Report, model: nn.Module, core: set[nn.Module]) -> None:
    """Norms and products around recurrent layers and embeddings of tokens, on the CPU; those of
    parts without any, as a vision tower, stay.
    """
    others = {name: part for name, part in _models_in(model) if core.isdisjoint(part.modules())}
    for name, part in others.items():
        report.left.append(Left(name, type(part).__name__, NOTHING))
    aside = {module for part in others.values() for module in part.modules()} | core
    for name, module in model.named_modules():
        if module not in aside:
            _replace_part(report, name, module)


def _replace_part(report: Report, name: str, module: nn.Module) -> None:
    cls = type(module)
    replacement = replacement_for(cls)
    if isinstance(module, UpstreamNorm):
        report.left.append(Left(name, cls.__name__, IS_OURS))
    elif replacement is not None:
        if not replacement.is_recurrent:  # those have been looked at
            replace(report, name, module, replacement, (by_class,))
    elif type(module) is nn.Linear:
        if _is_on_cpu(module) and linear.IS_COMPILED and quantized.bits_of(module.weight) is None:
            hasten(report, name, module, linear, "product of few rows")
    elif hasattr(module, "num_key_value_groups"):  # which Transformers' function asks for
        if IS_COMPILED and device_type_of(module) in ("cpu", "meta"):
            hasten(report, name, module, attention, ATTENTION)
    elif [*module._parameters] == ["weight"] and not cls.__module__.startswith("torch."):
        norm = norm_for(cls)
        if norm is not None and _is_on_cpu(module):
            replace(report, name, module, norm, (by_class,))
        elif norm is None and "Norm" in cls.__name__:
            report.left.append(Left(name, cls.__name__, UNKNOWN_NORM))


def _replace_quantized_products(report: Report, model: nn.Module) -> None:
    """With torchao's weights on the CPU, anywhere in a model: they gain more than others."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and _is_on_cpu(module) and quantized.IS_COMPILED:
            bits = quantized.bits_of(module.weight)
            if bits is not None:
                hasten(report, name, module, linear, f"product of few rows, {bits} bits")


def _let_caches_grow(report: Report, model: nn.Module) -> None:
    """Lets caches of softmax layers with ours write a token without a copy of all others."""
    changed = {one.module() for one in report.changed if one.gist == ATTENTION}
    models = [part for _, part in _models_in(model) if not changed.isdisjoint(part.modules())]
    for part in models:
        if not any(other in models for other in part.modules() if other is not part):
            report.hooks.append(part.register_forward_pre_hook(let_cache_grow, with_kwargs=True))


def _record_tokens(report: Report, model: nn.Module, layers: set[nn.Module]) -> None:
    """Lets layers around recurrent ones do without their Python for a generated token, and models
    of such layers, where that is all that a token does.
    """
    for _, part in _models_in(model):
        if family_of(type(part)).model == type(part).__name__ and not layers.isdisjoint(
            part.modules()
        ):
            if not recorded_models.is_hastened(part) and recorded_models.hasten(part):
                report.recorded_models.append(ref(part))
    for layer in model.modules():
        before = type(layer)
        if (before.__module__, before.__name__) not in LAYERS or why_it_stays(layer) is not None:
            continue
        if not layers.isdisjoint(layer.modules()):
            now = made_class(before)
            change_class(layer, now)
            report.recorded.append(ChangedLayer(ref(layer), before, now))


def _replace_losses(report: Report, model: nn.Module, core: set[nn.Module]) -> None:
    for name, part in _models_in(model):
        if has_loss(part) and not core.isdisjoint(part.modules()):
            why = why_not(part)
            if why is None:
                report.losses.append(change_loss(name, part))
            else:
                report.left.append(Left(name, type(part).__name__, why))


def _add_hooks(report: Report, model: nn.Module, layers: set[nn.Module]) -> None:
    """Lets models tell their layers of packed sequences. Hooks, since Transformers looks up what a
    model can return by its class.
    """
    models = [part for _, part in _models_in(model) if not layers.isdisjoint(part.modules())]
    for part in models:
        inner = [other for other in models if other is not part and other in set(part.modules())]
        ours = (tell_layers, tell_base, check_head)
        if any(hook in ours for hook in part._forward_pre_hooks.values()):
            continue
        if not inner:
            report.hooks.append(part.register_forward_pre_hook(share_layers, with_kwargs=True))
            hook = part.register_forward_pre_hook(tell_layers, with_kwargs=True)
            report.hooks.append(hook)
            if (telling := TELLING.get(family_of(type(part)).hands_on)) is not None:
                tell, take = telling
                report.hooks.append(part.register_forward_pre_hook(tell, with_kwargs=True))
                report.hooks.append(part.register_forward_hook(take))
            if _has_functions(part):
                report.hooks.append(part.register_forward_pre_hook(expect_bounds, with_kwargs=True))
                report.hooks.append(part.register_forward_hook(expect_none, always_call=True))
            continue
        report.hooks.append(part.register_forward_pre_hook(check_head, with_kwargs=True))
        if not family_of(type(part)).head_hands_on:
            shared = part.register_forward_pre_hook(tell_shared_base, with_kwargs=True)
            report.hooks.append(shared)
            told = part.register_forward_hook(forget_group, with_kwargs=True, always_call=True)
            report.hooks.append(told)
            report.hooks.append(part.register_forward_pre_hook(tell_base, with_kwargs=True))
            report.hooks.append(part.register_forward_hook(forget, always_call=True))
            if family_of(type(part)).hands_on == "states":
                report.hooks.append(part.register_forward_pre_hook(keep_mask, with_kwargs=True))
                report.hooks.append(part.register_forward_hook(forget_mask, always_call=True))


def _allow_drafts(report: Report, model: nn.Module, layers: set[nn.Module]) -> None:
    """Lets generate() take drafts of an assistant or of prompt lookup, since all recurrent layers
    can take back tokens. It refuses models that say of themselves that they can't.
    """
    for _, part in _models_in(model):
        if layers.isdisjoint(part.modules()):
            continue
        before, config = type(part), part.config.get_text_config()
        if (before.__module__, before.__name__) in HEADS:
            change_class(part, made_class(before))
            report.takes_drafts.append(ChangedHead(ref(part), before, type(part)))
        elif (
            part._is_stateful
            and CACHE in inspect.signature(part.forward).parameters
            and getattr(config, "number_of_conv_states", 1) == 1  # others are not ours
        ):
            part._is_stateful = False
            report.takes_drafts.append(ChangedHead(ref(part), before, before))


def _allow_continuous_batching(report: Report, model: nn.Module, layers: set[nn.Module]) -> None:
    """Lets `init_continuous_batching` of heads lead to the engine that has places for states, or
    says which layer has none.
    """
    for _, part in _models_in(model):
        before = type(part)
        if generates(before) and not layers.isdisjoint(part.modules()):
            change_class(part, served_class(before.__name__))
            report.takes_batches.append(ChangedHead(ref(part), before, type(part)))


def _models_in(model: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            yield name, module


def _has_functions(model: nn.Module) -> bool:
    """Whether some layers are by functions."""
    return any(isinstance(module, ByFunctions) for module in model.modules())


def _is_on_cpu(module: Any) -> bool:
    """Whether its weight is, or on no device yet."""
    return module.weight.device.type in ("cpu", "meta")
