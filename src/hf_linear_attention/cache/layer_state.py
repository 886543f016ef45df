# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The state of one layer during one forward: read once, written once."""

from typing import Any

import torch
from torch import Tensor

from ..ops.tokens import Tokens
from ..recurrences.interface import Inputs, Recurrence, State, is_floating
from ..recurrences.sequence_parallel import run_shared
from ..recurrences.tree import run_tree
from .protocol import CacheLayer
from .rollback import Recorded
from .slots import SlotLayer


class LayerMemory:
    """Runs a layer's recurrences from what was read before, be that cached, in slots, on other
    ranks or nothing, and keeps what they leave:

        memory = LayerMemory(cache_layer, tokens, num_tokens)
        y = memory.run(recurrence, inputs)  # for each of the layer's
        memory.write(dtype)
    """

    slots: Any = None

    def __init__(self, cache: CacheLayer, tokens: Tokens, num_tokens: int):
        if isinstance(cache, SlotLayer):  # which reads and writes by itself
            self.slots, cache = cache, None
        self.cache = cache
        self.tokens = tokens
        self.state: State = {} if cache is None else cache.read()
        self.is_empty = not self.state
        self.read = Recorded(num_tokens, tokens.key_mask, [])
        # A token is generated: the state changes in place.
        self.is_step = (
            cache is not None
            and num_tokens == 1
            and not torch.is_grad_enabled()
            and cache.may_change
        )

    def run(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """The recurrence's outputs for the inputs (B, T, ...), in their lowest precision."""
        if not recurrence.in_fp64:
            return self._run(recurrence, inputs)
        dtypes = {x.dtype.itemsize: x.dtype for x in inputs if is_floating(x)}
        y = self._run(recurrence, recurrence.exact(inputs))
        return y.to(dtypes[min(dtypes)])

    def _run(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        if self.slots is not None:
            return self.slots.run(recurrence, inputs, self.tokens)
        if self.cache is not None:
            self.read.parts.append((recurrence, inputs))
        if self.is_step:
            if self.is_empty:
                self.state |= recurrence.start(inputs)
            return recurrence.step_(inputs, self.state, self.tokens)
        if self.tokens.shards is not None:
            return run_shared(recurrence, inputs, self.tokens)
        if self.tokens.tree is not None:
            return run_tree(recurrence, inputs, self.tokens)
        y, after = recurrence.run(inputs, self.state, self.tokens)
        self.state |= after
        return y

    def write(self, dtype: torch.dtype) -> None:
        """Keeps the states, in a model that computes in `dtype`."""
        if self.cache is not None:
            self.cache.write(self.state, self.read, dtype)
            if self.cache.recording is not None:
                self.cache.recording.append(self.read)
