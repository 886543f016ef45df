# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The indexer of keys in Transformers' GLM-5 Next, for sequences packed in a row.

Shapes: B batch, T time, C hidden size, R rank of the queries, N packed sequences, L tokens of the
longest, K keys that a query may read.
"""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ...releases import cache_among
from ..bounds import MaskAndBounds


class PackedIndexer(nn.Module):
    """Chooses the keys of each packed sequence as if it were a row of its own. Of keys with equal
    scores Transformers' takes any.
    """

    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        attention_mask: Tensor | MaskAndBounds,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,  # its name before 5.24
    ) -> Tensor:
        """hidden_states (B, T, C) and q_resid (B, T, R) -> indices of keys in the row (B, T, K),
        int32, -1 where there are fewer.
        """
        cache = cache_among(cache=cache, past_key_values=past_key_values)
        if not isinstance(attention_mask, MaskAndBounds):
            return super().forward(hidden_states, q_resid, attention_mask, cache)
        mask, bounds = attention_mask.mask, attention_mask.bounds.long()
        B, T, _ = hidden_states.shape
        starts, lengths = bounds[:-1], bounds.diff()
        place = torch.arange(int(lengths.max()), device=bounds.device)
        is_token = place < lengths[:, None]  # (N, L)
        token = torch.where(is_token, starts[:, None] + place, 0)  # among all B T
        is_real = is_token if mask is None else is_token & mask.bool().flatten()[token]
        of_sequences = [x.flatten(0, 1)[token] for x in (hidden_states, q_resid)]
        chosen = super().forward(*of_sequences, is_real, None)  # (N, L, K), counted in each
        in_row = torch.where(chosen >= 0, chosen + (starts % T)[:, None, None].int(), -1)
        return in_row[is_token].view(B, T, -1)
