# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Gated DeltaNet-2's layer against flash-linear-attention's, which gave its answers in tests/data,
and against Kimi Delta Attention, which it is where both gates are one number.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM
from hf_linear_attention.ops.tokens import Tokens

DATA = Path(__file__).parents[1] / "data"
sys.path.append(str(DATA / "rwkv7_of_fla"))
from formulas import probe, weight  # noqa: E402

REFERENCE = json.loads((DATA / "gdn2_of_fla" / "reference.json").read_text())
# Parts of names there that are others here.
NAMES = {
    "f_proj.0": "decay.f_a_proj",
    "f_proj.1": "decay.f_b_proj",
    "A_log": "decay.A_log",
    "dt_bias": "decay.dt_bias",
    "g_proj.0": "g_a_proj",
    "g_proj.1": "g_b_proj",
}


def our_name(name: str) -> str:
    return next((name.replace(x, y) for x, y in NAMES.items() if name.startswith(x)), name)


def make_layer(preset: str = "gdn2", **fields):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"linear_key_head_dim": 6, "linear_value_head_dim": 9}
    config = LinearAttentionConfig.from_preset(preset, **sizes, **heads, **fields)
    return LinearAttentionForCausalLM(config).double().eval().model.layers[0].self_attn


def inputs(rows: int = 2, T: int = 11):
    return torch.stack([probe(i, torch.empty(T, 16)) for i in range(rows)])


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_it_answers_as_flash_linear_attention_s(allow_neg_eigval):
    layer = make_layer(
        gate_bias=True, output_norm_eps=1e-5, linear_allow_neg_eigval=allow_neg_eigval
    )
    parameters = dict(layer.named_parameters())
    names = REFERENCE["shapes"]
    assert {our_name(name) for name in names} == parameters.keys()
    with torch.no_grad():
        for number, (name, shape) in enumerate(names.items()):
            own = parameters[our_name(name)]
            own.copy_(weight(number, torch.empty(shape), name).view(own.shape))
        y, _ = layer(inputs(), Tokens(is_causal=True))
    expected = torch.tensor(REFERENCE["outputs"][str(allow_neg_eigval)], dtype=torch.float64)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_with_gates_of_one_number_it_is_kimi_delta_attention():
    layer, kda = make_layer(), make_layer("kda")
    state = {name: x for name, x in kda.state_dict().items() if not name.startswith("b_proj")}
    with torch.no_grad():
        layer.load_state_dict({**layer.state_dict(), **state})
        rows = kda.b_proj.weight  # (heads, hidden size)
        layer.b_proj.weight.copy_(rows.repeat_interleave(6, 0))
        layer.w_proj.weight.copy_(rows.repeat_interleave(9, 0))
        y, _ = layer(inputs(), Tokens(is_causal=True))
        expected, _ = kda(inputs(), Tokens(is_causal=True))
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_what_it_needs_is_named():
    for fields, message in (
        ({"decay": "per_token"}, "decay must be 'kda' or 'kda_bounded' with mixer='gdn2'"),
        ({"linear_num_key_heads": 1}, "linear_num_key_heads must be linear_num_value_heads=2"),
        ({"normalizer": "z"}, "normalizer must be 'rms_norm' or 'gated_rms_norm'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_layer(**fields)
