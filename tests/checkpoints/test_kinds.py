# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Values of a config.json that are of another kind than their keys are refused by name."""

import math

import pytest
from huggingface_hub.errors import StrictDataclassError

from hf_linear_attention.checkpoints.tables import FAMILIES

SIZE = "a whole number of at least 1"
NO_SIZES = (0, -1, 1.5, 16.0, "x", True, [], math.nan)
NO_SHARES = (0, -1, "x", True, [], math.nan, math.inf, 10**400)
ODD = (None, "x", 0, -1, 1.5, math.nan, math.inf, True, [], {}, [1], [[1], [2]], 3)
OF_ATTN = {"layers": [0], "num_heads": 2}


def read(model_type, **keys):
    """Our config for the defaults of a family and these keys."""
    family = FAMILIES[model_type]
    return family.config_for(family.read({"num_hidden_layers": 2, **keys}))


@pytest.mark.parametrize(
    ("model_type", "key", "values", "expected"),
    [
        ("gla", "hidden_size", (None, *NO_SIZES), SIZE),
        ("gla", "num_hidden_layers", (None, *NO_SIZES), SIZE),
        ("gla", "intermediate_size", NO_SIZES, f"{SIZE} or null"),
        ("gla", "conv_size", (None, *NO_SIZES), SIZE),
        ("gla", "num_heads", (None, *NO_SIZES), SIZE),
        ("gla", "num_kv_heads", NO_SIZES, f"{SIZE} or null"),
        ("gla", "expand_k", (None, *NO_SHARES), "a positive number"),
        ("hgrn", "expand_ratio", (None, *NO_SHARES), "a positive number"),
        ("gla", "hidden_ratio", NO_SHARES, "a positive number or null"),
        ("gla", "norm_eps", (None, -1, "x", True, math.nan), "a number of at least 0"),
        ("gla", "tie_word_embeddings", (None, "x", 0, 1, []), "true or false"),
        ("kda", "head_dim", (None, *NO_SIZES), SIZE),
        ("kda", "num_v_heads", NO_SIZES, f"{SIZE} or null"),
        ("kda", "lower_bound", (0, 1, "x", math.nan), "a negative number or null"),
        ("mamba2", "conv_kernel", (None, *NO_SIZES), SIZE),
        ("mamba2", "expand", (None, *NO_SHARES), "a positive number"),
        ("mamba2", "dt_limit", (None, 1, [0], [0, "x"], [0, math.nan]), "a list of two numbers"),
        ("rwkv7", "attention_hidden_size", NO_SIZES, f"{SIZE} or null"),
        ("transformer", "window_size", NO_SIZES, f"{SIZE} or null"),
        ("transformer", "rope_theta", (None, *NO_SHARES), "a positive number"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(model_type, key, values, expected):
    for value in values:
        with pytest.raises(ValueError) as caught:
            read(model_type, **{key: value})
        message = f"{key} of its config.json must be {expected}, got {value!r}"
        assert str(caught.value) == message


def test_so_is_one_of_a_softmax_layer():
    for key, values, expected in (
        ("num_heads", (None, *NO_SIZES), SIZE),
        ("num_kv_heads", NO_SIZES, f"{SIZE} or null"),
        ("window_size", NO_SIZES, f"{SIZE} or null"),
        ("rope_theta", (None, *NO_SHARES), "a positive number"),
        ("layers", (3, "0", [1.0], [True], [[0]], [None], [-1], [0, 0]), "numbers from 0 to 1"),
    ):
        for value in values:
            with pytest.raises(ValueError) as caught:
                read("gla", attn={**OF_ATTN, key: value})
            assert f"attn[{key!r}] of its config.json must be {expected}" in str(caught.value)


def test_what_may_be_null_or_a_fraction_is_taken():
    null = {"hidden_ratio": None, "intermediate_size": None, "num_kv_heads": None, "attn": None}
    assert read("gla", **null).intermediate_size == read("gla").intermediate_size
    assert read("hgrn2", expand_ratio=None, num_heads=16).linear_key_head_dim == 128
    assert read("hgrn2", expand_ratio=64.0).linear_key_head_dim == 64
    assert read("hgrn", expand_ratio=1.5).linear_num_value_heads == 48
    assert read("rwkv7", head_dim=None, num_heads=32, a_low_rank_dim=None).head_dim == 64
    assert read("gla", attn={**OF_ATTN, "layers": []}).layer_types == read("gla").layer_types
    assert read("gla", pad_token_id=None, eos_token_id=[2, 3]).eos_token_id == [2, 3]


def test_widths_that_no_model_has_are_refused():
    for model_type, keys, message in (
        ("gla", {"hidden_ratio": 1e-6}, "hidden_size . hidden_ratio .* MLPs have features"),
        ("rwkv7", {"hidden_ratio": 1e-6}, "hidden_size . hidden_ratio .* MLPs have features"),
        ("hgrn2", {"expand_ratio": 0.5}, "expand_ratio .* features are whole numbers, got 0.5"),
        ("rwkv7", {"value_dim": []}, "value_dim .* the same multiple"),
        ("rwkv7", {"value_dim": 0}, "value_dim .* the same multiple"),
        ("rwkv7", {"value_dim": [[1], [2]]}, "value_dim .* the same multiple"),
    ):
        with pytest.raises(ValueError, match=message):
            read(model_type, **keys)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_value_of_any_key_leads_to_another_error(model_type):
    for key in FAMILIES[model_type].defaults:
        for value in ODD:
            try:
                read(model_type, **{key: value})
            except (ValueError, StrictDataclassError):  # as load_checkpoint expects
                pass
