# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A graph computes what its model does, for batches with padding and for pieces of any size."""

import numpy as np
import pytest
import torch

from hf_linear_attention.to_onnx.generate import generate, nothing, read
from hf_linear_attention.to_onnx.graph import check_exports
from onnx_graphs import all_real, check_padding, distance, read_pieces, session_of
from tiny import VARIANTS, random_ids, shallow, tiny_model

REFUSED = {
    "aaren": "'aaren', which needs a AarenRecurrence",
    "window": "'window', which needs a WindowRecurrence",
    "rwkv7_alone": "'rwkv7', which needs a Delay",
    "preset_aaren": "'aaren'",
    "preset_comba": "'comba', which needs a DPLRRecurrence",
    "preset_gdn2": "'gdn2'",
    "preset_precond_gdn": "'preconditioned'",
    "preset_precond_kda": "'preconditioned'",
    "preset_rwkv7": "'rwkv7'",
    "preset_rwkv6": "'rwkv6'",
    "preset_mamba3": "'mamba3'",
}
# Sums of products of features that cancel: no two orders of summation agree.
ILL_CONDITIONED = ("preset_polynomial",)


def in_float64(variant, ids):
    with torch.no_grad():
        return tiny_model(**shallow(variant))(torch.from_numpy(ids)).logits.numpy()


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - REFUSED.keys()))
def test_a_graph_computes_what_its_model_does(variant, tmp_path):
    """The tiny models amplify: what is asked is that the graph be as near to the model in float64
    as the model in float32 is. One graph is asked all, for to make it takes long.
    """
    model = tiny_model(dtype=torch.float32, **shallow(variant))
    session = session_of(model, tmp_path)
    ids = random_ids(2, 24).numpy()
    exact = in_float64(variant, ids)
    with torch.no_grad():
        ours = model(torch.from_numpy(ids)).logits.numpy()
    whole, _ = read_pieces(session, ids, all_real(ids), [])
    if variant not in ILL_CONDITIONED:
        assert distance(whole, exact) < 4 * distance(ours, exact) + 1e-5
    pieces, _ = read_pieces(session, ids, all_real(ids), [1, 2, 9, 10, 11])
    assert distance(pieces, whole) < 1e-4
    check_padding(session, random_ids(5, 20))


@pytest.mark.parametrize("variant", REFUSED)
def test_what_no_operator_computes_is_refused_by_name(variant):
    with pytest.raises(ValueError, match=f"mixer must be .*, got .*{REFUSED[variant]}"):
        check_exports(tiny_model(dtype=torch.float32, **VARIANTS[variant]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state_in_fp64": True}, "state_in_fp64 must be False for ONNX, got True"),
        ({"rms_norm_eps": 1e-8}, "rms_norm_eps must be above 1e-8 for ONNX, got 1e-08"),
        ({"add_cross_attention": True}, "add_cross_attention must be False for ONNX, got True"),
        (
            {
                "position_embedding_type": "rotary",
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            },
            "rope_type must be .*, got 'dynamic'",
        ),
    ],
)
def test_fields_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        check_exports(tiny_model(dtype=torch.float32, **fields))


def test_another_model_or_dtype_is_refused():
    with pytest.raises(ValueError, match="model must be in float32 or float16, got torch.bfloat16"):
        check_exports(tiny_model(dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="model must be in eval mode, got training=True"):
        check_exports(tiny_model(dtype=torch.float32).train())
    with pytest.raises(ValueError, match="model must be a LinearAttention.* got a Linear"):
        check_exports(torch.nn.Linear(1, 1))


@pytest.fixture(scope="module")
def gated_deltanet(tmp_path_factory):
    """A model of an ordinary scale, and its graph."""
    fields = {**VARIANTS["preset_gated_deltanet"], "initializer_range": 0.1}
    model = tiny_model(dtype=torch.float32, **fields)
    return model, session_of(model, tmp_path_factory.mktemp("graph"))


@pytest.mark.thorough
def test_two_hundred_tokens_are_the_models(gated_deltanet):
    model, session = gated_deltanet
    prompt = random_ids(2, 11)
    prompt[1, :4] = 0
    mask = (prompt != 0).long()
    made = generate(session, prompt.numpy(), mask.numpy(), 200)
    options = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=mask, **options)[:, 11:]
    assert (torch.from_numpy(made) == expected).all()
    ids = torch.cat([prompt, expected], 1)
    mask = torch.nn.functional.pad(mask, (0, 200), value=1)
    logits, _ = read(session, nothing(session, 2), ids.numpy(), mask.numpy())
    with torch.no_grad():
        ours = model(ids, attention_mask=mask).logits
    assert distance(logits[mask == 1], ours[mask == 1].numpy()) < 1e-5


@pytest.mark.thorough
def test_states_are_arrays_that_fork_and_go_back(gated_deltanet):
    _, session = gated_deltanet
    ids, other = random_ids(1, 12).numpy(), random_ids(1, 5, seed=1).numpy()
    _, states = read(session, nothing(session, 1), ids, all_real(ids))
    kept = {name: x.copy() for name, x in states.items()}
    mask = np.ones((1, 17), int)
    first, _ = read(session, states, other, mask)
    again, _ = read(session, kept, other, mask)
    two = {name: np.repeat(x, 2, 0) for name, x in kept.items()}
    forked, _ = read(session, two, np.repeat(other, 2, 0), np.repeat(mask, 2, 0))
    assert (first == again).all() and (forked == first).all()


@pytest.mark.thorough
def test_inputs_have_the_names_of_transformers_js(gated_deltanet):
    _, session = gated_deltanet
    inputs = {x.name: x.shape for x in session.get_inputs()}
    of_tokens = ["input_ids", "attention_mask", "position_ids", "num_logits_to_keep"]
    assert list(inputs)[:4] == of_tokens
    assert inputs["past_recurrent.2"] == ["batch_size", 4, 8, 12]
    assert inputs["past_conv.0.value"] == ["batch_size", 48, 3]
    names = [x.name for x in session.get_outputs()]
    assert names == ["logits", *(x.replace("past", "present") for x in list(inputs)[4:])]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "tolerance"),
    [("preset_gated_deltanet", 1e-4), ("preset_gla", 1e-4), ("preset_kda", 1e-4), ("paper", 4e-3)],
)
def test_a_hundred_thousand_tokens_in_pieces(variant, tolerance, tmp_path):
    """Where nothing is forgotten ONNX Runtime's sums, plain float32 ones, drift."""
    fields = {**VARIANTS[variant], "initializer_range": 0.1}
    model = tiny_model(dtype=torch.float32, **fields)
    session = session_of(model, tmp_path)
    ids = random_ids(1, 100_000).numpy()
    states, mask = nothing(session, 1), all_real(ids)
    for start in range(0, 100_000, 5000):
        stop = start + 5000
        logits, states = read(session, states, ids[:, start:stop], mask[:, :stop])
    with torch.no_grad():
        exact = tiny_model(**fields)(torch.from_numpy(ids), logits_to_keep=50).logits.numpy()
    assert distance(logits[:, -50:], exact) < tolerance


@pytest.mark.thorough
@torch.no_grad()
def test_zero_keys_and_strong_decays(tmp_path):
    fields = {**VARIANTS["preset_gated_deltanet"], "conv_kernel_size": 0, "head_dim": 128}
    models = [tiny_model(dtype=dtype, **fields) for dtype in (torch.float32, torch.float64)]
    for model in models:
        for layer, strength in zip(model.model.layers, (60.0, 1e4, 0.0), strict=True):
            layer.self_attn.decay.dt_bias.fill_(strength)
            if strength == 0:
                layer.self_attn.k_proj.weight.zero_()
    ids = random_ids(2, 20).numpy()
    logits, _ = read_pieces(session_of(models[0], tmp_path), ids, all_real(ids), [7])
    ours, exact = (model(torch.from_numpy(ids)).logits.numpy() for model in models)
    assert distance(logits, exact) < 4 * distance(ours, exact) + 1e-5
