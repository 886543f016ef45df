# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""HGRN as a layer of a model: a gated recurrent network whose channels do not meet, so that its
state is a vector, as large as a token.

Source: Qin et al., "Hierarchically Gated Recurrent Neural Network for Sequence Modeling",
arXiv 2311.04823, without the phase of its forget gates, as flash-linear-attention's HGRNAttention.

Shapes: B batch, T time, C hidden size, H heads, D head dim. Heads are shares of the channels.
"""

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..fast.linear import project
from ..ops.tokens import Tokens
from ..recurrences.elementwise_scan import ElementwiseInputs, ElementwiseRecurrence
from .linear_attention import Heads, LinearAttentionBase
from .parts.decays import build_decay
from .parts.tensor_parallel import find_head_shard


class HGRN(LinearAttentionBase):
    """h_t = f_t h_(t-1) + (1 - f_t) act(v_t), channel by channel, with forget gates f_t in (b, 1),
    which the decay makes of k_t: its keys are 1 - f_t.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        heads = Heads.sharing_queries(config)
        super().__init__(config, config.hidden_size, heads, made=("k", "v"))
        self.layer_idx = layer_idx
        self.recurrence = ElementwiseRecurrence(
            heads.values, heads.value_dim, in_fp64=config.state_in_fp64
        )
        self.add_convolutions(config)
        self.decay = build_decay(config, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        tokens: Tokens,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """hidden_states (B, T, C) -> (B, T, C), and no attention weights, for there are none."""
        B, T, C = hidden_states.shape
        hidden_states, _, memory = self.begin(hidden_states, tokens, past_key_values)
        k, v = project(self.k_proj, hidden_states), project(self.v_proj, hidden_states)
        shard = find_head_shard(k, self.k_proj, self.heads.keys)
        k, v = self.convolve("k", k, shard, memory), self.convolve("v", v, shard, memory)
        if self.value_act is not None:
            v = self.value_act(v)
        k, v = self.split(k, v)
        room, log_decay = self.decay(k, shard)
        x = (room * v).to(v.dtype)
        y = memory.run(self.recurrence, ElementwiseInputs(x.flatten(2), log_decay.flatten(2)))
        memory.write(v.dtype)
        return self.project_out(hidden_states, y.view(v.shape), shard).view(B, T, C), None
