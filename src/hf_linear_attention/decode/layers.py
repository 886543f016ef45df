# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Traces of layers. The operations of one generated token are traced once, and then run without the
modules around them, whose Python takes longer than small operations do. Consecutive layers share
one trace, with the norm behind the last.

Shapes: B batch, C hidden size.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter, eq, is_
from types import NoneType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig
from transformers.utils import output_capturing

from ..cache.protocol import StepCache
from ..fast.linear import HOOKS, FastForward, products_in_use
from ..ops.backends import forced_backend
from .trace import Recorder

# A recording takes as long as some ten tokens gain by it, so what comes that often is recorded.
TOKENS_BEFORE = 8
MOST_RECORDINGS = 64  # of the same layers: for batches of other sizes, say

KNOWN_PACKAGES = ("torch.nn.", "transformers.activations", "transformers.models.")
COLLECTOR = getattr(output_capturing, "_active_collector", None)
COLLECTING_HOOK = "output_capturing_hook", output_capturing.__name__
# These, what torch notes about them, and those for state_dict(), which nothing here depends on.
FOR_HOOKS = {name for name in vars(nn.Module()) if "_hooks" in name}


class Recording:
    """What layers do with a token, or `run` None where that can't be recorded; as long as they are
    what they were when this was made.
    """

    def __init__(self, layers: Sequence[nn.Module], are_called: bool):
        modules = [module for layer in layers for module in layer.modules()]
        # The layers themselves by weak references: whoever keeps recordings by layers must not keep
        # the layers alive, as hooks might that are methods of theirs.
        self.layers = [*map(ref, layers)]
        self.inner = [module for module in modules if module not in layers]
        self.of_layers_then = [*map(without_hooks, layers)]
        self.attributes = [vars(module) for module in self.inner]
        values = {id(x): x for x in self._values()}
        values.update((id(x), x) for of_layer in self.of_layers_then for x in of_layer.values())
        self.attributes += [vars(x) for x in values.values() if isinstance(x, PreTrainedConfig)]
        self.values_then = [*self._values()]
        values.update((id(x), x) for x in self.values_then)
        # What may change without being replaced. To ask whether those that were empty still are is
        # quicker than to compare them. For hooks, see below.
        for_hooks = {id(vars(module)[name]) for module in modules for name in FOR_HOOKS}
        containers = [x for x in values.values() if isinstance(x, (dict, list, set))]
        containers = [x for x in containers if id(x) not in for_hooks]
        self.empty = [x for x in containers if not x]
        self.filled = [x for x in containers if x]
        self.filled_then = [x.copy() for x in self.filled]
        self.owners: list[dict[str, Any]] = [
            owner for module in modules for owner in (module._parameters, module._buffers) if owner
        ]
        self.tensors_then = [*self._tensors()]
        self.plain = [x for x in self.tensors_then if x is not None and has_memory(x)]
        self.places_then = [*self._places()]
        self.classes_then = [*self._classes()]
        self.classes = [*set(self.classes_then)]
        self.forwards_then = [*self._forwards()]
        heard = self.inner if are_called else modules
        self.hooks = [vars(module)[name] for module in heard for name in HOOKS]
        self.hooks_then = [*map(list, self.hooks)]
        self.next_hook_then = RemovableHandle.next_id
        self.run: Callable[..., Tensor] | None = None
        self.uses = 0

    def is_of(self, layers: Sequence[nn.Module]) -> bool:
        """Whether these are the layers, and not others in their places."""
        return all(map(is_, layers, referents(self.layers)))

    def is_current(self) -> bool:
        """Whether the layers would still do the same."""
        return (
            self._has_no_new_hook()
            and not any(self.empty)
            and all(map(is_, self._tensors(), self.tensors_then))  # before == meets any
            and all(map(eq, self._places(), self.places_then))
            and all(map(is_, self._classes(), self.classes_then))
            and all(map(is_, self._forwards(), self.forwards_then))
            and self._has_the_same_values()
        )

    def _has_the_same_values(self) -> bool:
        try:
            return (
                self.filled == self.filled_then
                and [*self._values()] == self.values_then
                and [*map(without_hooks, referents(self.layers))] == self.of_layers_then
            )
        except (RuntimeError, ValueError):  # tensors and arrays are neither equal nor not
            return False

    def _has_no_new_hook(self) -> bool:
        """Looks only if anything, a module or a tensor, has got a hook since it last did."""
        next_hook = RemovableHandle.next_id
        if next_hook != self.next_hook_then:
            if [*map(list, self.hooks)] != self.hooks_then or _has_any_global_hook():
                return False
            self.next_hook_then = next_hook
        return True

    def _values(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self.attributes))

    def _tensors(self) -> Iterator[Tensor | None]:
        return chain.from_iterable(map(dict.values, self.owners))

    def _places(self) -> Iterator[int]:
        """Of the tensors' numbers in memory, which change with their dtype or layout."""
        return map(Tensor.data_ptr, self.plain)

    def _classes(self) -> Iterator[type]:
        return map(type, chain(referents(self.layers), self.inner))

    def _forwards(self) -> Iterator[Callable]:
        return map(attrgetter("forward"), self.classes)


def without_hooks(module: nn.Module) -> dict[str, Any]:
    """Its attributes, but for hooks."""
    return {name: x for name, x in vars(module).items() if name not in FOR_HOOKS}


def referents(references: Sequence[ref]) -> list[Any]:
    """What weak references refer to, in their order; None where that is gone."""
    return [reference() for reference in references]


def has_memory(x: Tensor) -> bool:
    """Of its own and in one place: a sparse tensor's, or a subclass's, may be several others'."""
    return type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided


class States(NamedTuple):
    """Of layers: tensors that a token changes in place, and what is the same for all such."""

    tensors: list[Tensor]
    layout: tuple


class LastStates(NamedTuple):
    """Those that were last seen, kept by nobody here."""

    references: list[ref]
    mode: bool  # of inference, in which they may be changed
    layout: tuple


class RecordedTokens:
    """The recordings of layers that follow each other, by all that their operations depend on: of
    tensors and of all else. A copy of the layers, whose weights are others, has none.

    are_called: whether the layers are called for each token, and so their own hooks.
    is_proved: whether a token is known to change tensors alone. Else a recording has to give what
        modules give at the next token, to the bit.
    """

    def __init__(self, are_called: bool = False, is_proved: bool = True) -> None:
        self.are_called = are_called
        self.is_proved = is_proved
        self.recordings: dict[tuple, Recording] = {}
        self.seen: dict[tuple, int] = {}  # how many tokens, of what has no recording
        self.last: LastStates | None = None

    def __reduce__(self):
        return RecordedTokens, (self.are_called, self.is_proved)

    def run(
        self,
        layers: Sequence[nn.Module],
        caches: Sequence[StepCache],
        inputs: list[Tensor],
        by_modules: Callable[[], Any],
        constants: tuple = (),
    ) -> Any:
        """What `layers` make of a token, of which these recordings are.

        Args:
            layers: and what follows the last.
            caches: of each layer, with a state.
            inputs: the other tensors that another token has others of.
            by_modules: computes it where there is no recording yet, or can be none: only what is a
                tensor is recorded.
            constants: what else it depends on.
        """
        if are_outputs_collected():
            return by_modules()
        states = self._states_of(caches)
        ids = [*map(id, inputs)]
        given = (
            forced_backend(),
            *products_in_use(),
            *constants,
            *[(x.dtype, x.shape, x.stride()) for x in inputs],
            *map(ids.index, ids),  # which are one tensor: a recording tells them apart by that
            *states.layout,
        )
        inputs = [*inputs, *states.tensors]
        recording = self.recordings.get(given)
        if recording is not None and recording.run is None and not self._comes_often(given):
            return by_modules()  # to look at all modules each time would be in vain
        if recording is not None and recording.is_of(layers) and recording.is_current():
            if recording.run is None:
                return by_modules()
            recording.uses += 1
            if recording.uses == 1 and not self.is_proved:
                return prove(recording, inputs, states, by_modules)
            try:
                result = recording.run(*inputs)
            except RuntimeError:  # of something that is not looked at; once is enough
                self.recordings.pop(given, None)
                raise
            # Lets autograd notice when a backward pass still needs a state as it was.
            torch.autograd.graph.increment_version(states.tensors)
            for cache in caches:
                cache.step_was_taken()
            return result
        self.recordings.pop(given, None)
        if not self._comes_often(given):
            return by_modules()
        self._forget_what_was()
        if not can_be_recorded(layers, self.are_called):
            return by_modules()
        recording, recorder = Recording(layers, self.are_called), Recorder(inputs)
        with recorder:
            result = by_modules()
        if recorder.is_valid and isinstance(result, Tensor):
            recording.run = recorder.function(result)
        put(self.recordings, given, recording)
        return result

    def _states_of(self, caches: Sequence[StepCache]) -> States:
        """Of all caches. Where they are those of the last token, nothing else is asked of them."""
        tensors = [x for cache in caches for x in cache.tensors.values()]
        mode, last = torch.is_inference_mode_enabled(), self.last
        if last is not None and last.mode == mode and len(last.references) == len(tensors):
            if all(map(is_, tensors, referents(last.references))):
                return States(tensors, last.layout)
        states = [cache.read() for cache in caches]
        tensors = [*chain.from_iterable(map(dict.values, states))]
        layout = tuple(cache.layout() for cache in caches)
        self.last = LastStates([*map(ref, tensors)], mode, layout)
        return States(tensors, layout)

    def _forget_what_was(self) -> None:
        """Lets go of recordings of the layers as they no longer are, which would keep their old
        weights in memory.
        """
        for given, recording in list(self.recordings.items()):
            if not recording.is_current():
                self.recordings.pop(given, None)

    def _comes_often(self, given: tuple) -> bool:
        """Counts a token; whether there were TOKENS_BEFORE since it was last true."""
        number = self.seen.get(given, 0)
        if number >= TOKENS_BEFORE:
            self.seen.pop(given, None)
            return True
        put(self.seen, given, number + 1)
        return False


# Not in the models: a model's recordings hold its attributes, and would be held by these, so that
# its weights would stay until garbage is collected.
_of_models: WeakKeyDictionary[nn.Module, RecordedTokens] = WeakKeyDictionary()


def prove(
    recording: Recording,
    inputs: list[Tensor],
    states: States,
    by_modules: Callable[[], Any],
) -> Any:
    """A token by modules. The recording, which has run on copies of the states, is none from now on
    if it has not done the same.
    """
    assert recording.run is not None
    copies = [x.clone() for x in states.tensors]
    others = inputs[: len(inputs) - len(copies)]
    result = None
    with contextlib.suppress(RuntimeError):  # modules will raise it, too, or need not
        result = recording.run(*others, *copies)
    expected = by_modules()
    if not (
        isinstance(expected, Tensor)
        and result is not None
        and are_equal(result, expected)
        and all(map(are_equal, copies, states.tensors))
    ):
        recording.run = None
    return expected


def are_equal(a: Tensor, b: Tensor) -> bool:
    """To the bit, whatever it stands for."""
    of_bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(of_bits), b.view(of_bits))


def recorded_tokens_of(model: nn.Module) -> RecordedTokens:
    """The recordings of a whole model, which is called for each token."""
    found = _of_models.get(model)
    if found is None:
        found = _of_models[model] = RecordedTokens(are_called=True)
    return found


def put(table: dict, key: tuple, value: Any) -> None:
    """In a table of MOST_RECORDINGS at most, in which there is no room for the oldest then."""
    if key not in table and len(table) >= MOST_RECORDINGS:
        table.pop(list(table)[0], None)  # another thread may use it, too
    table[key] = value


def can_be_recorded(layers: Sequence[nn.Module], are_called: bool) -> bool:
    """Whether all modules are such as compute the same things every time, and nobody listens; the
    layers' own hooks are no matter where they are called.
    """
    own_package, *_ = __name__.partition(".")
    known = (f"{own_package}.", *KNOWN_PACKAGES)
    return not _has_any_global_hook() and all(
        type(module).__module__.startswith(known)
        and not module.training
        and not any(isinstance(x, Tensor) for x in vars(module).values())
        and ((module is layer and are_called) or runs_alone(module))
        for layer in layers
        for module in layer.modules()
    )


def runs_alone(module: nn.Module) -> bool:
    """Whether a call of it is what its class does, or a product of ours, and nobody listens."""
    is_ours = isinstance(vars(module).get("forward"), (FastForward, NoneType))
    return is_ours and not any(map(is_heard, hooks_of(module)))


def hooks_of(module: nn.Module) -> Iterator[Callable]:
    return chain.from_iterable(getattr(module, hooks).values() for hooks in HOOKS)


def is_heard(hook: Callable) -> bool:
    """Whether a hook does anything but collect outputs for Transformers. Such stay for good where
    outputs were wanted once; `are_outputs_collected` says whether they are now.
    """
    name = getattr(hook, "__name__", None)
    return COLLECTOR is None or (name, hook.__module__) != COLLECTING_HOOK


def are_outputs_collected() -> bool:
    """Whether Transformers collects hidden states, say, of the modules that run."""
    return COLLECTOR is not None and bool(COLLECTOR.get())


def stretches(caches: Sequence[Any]) -> Iterator[tuple[int, list[Any]]]:
    """Layers that follow each other and have a cache, or have none: the number of the first, and
    their caches.
    """
    first = 0
    for _, group in groupby(caches, lambda cache: cache is None):
        stretch = list(group)
        yield first, stretch
        first += len(stretch)
