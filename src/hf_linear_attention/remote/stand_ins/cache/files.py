# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Whose cache one is."""

from transformers import PreTrainedConfig

from ....releases import CACHE

OF_THE_STATE = (
    *("mixer", "decay", "feature_map", "conv_kernel_size", "num_key_value_heads", "head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "sliding_window", "state_in_fp64"),
)


def check_same_state(made_for: PreTrainedConfig, config: PreTrainedConfig) -> None:
    """Raises a ValueError where a cache was made for a model with other states."""
    for name in OF_THE_STATE:
        theirs, ours = getattr(made_for, name), getattr(config, name)
        if theirs != ours:
            raise ValueError(
                f"{CACHE} must be made for this model, with {name}={ours!r}, got a cache of one "
                f"with {name}={theirs!r}"
            )
