# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' own recurrent models as graphs."""

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession

from hf_linear_attention import export_onnx, use_kernels
from hf_linear_attention.to_onnx.genai import genai_config
from hf_linear_attention.to_onnx.generate import nothing, read
from hf_linear_attention.to_onnx.graph import check_exports
from hf_linear_attention.to_onnx.states import State
from hf_linear_attention.to_onnx.stock import STOCK
from onnx_graphs import all_real, check_padding, distance, read_pieces, session_of
from upstream_models import tiny_upstream


@torch.no_grad()
def read_by(model):
    """Tokens, the same each time, and the model's logits, in float32."""
    ids = torch.randint(1, 60, (5, 20), generator=torch.Generator().manual_seed(0))
    return ids, model(ids, use_cache=False).logits.float().numpy()


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", STOCK)
def test_a_graph_computes_what_transformers_does(model_type, tmp_path):
    model = tiny_upstream(model_type)
    ids, expected = read_by(model)
    session = session_of(model, tmp_path)
    whole, _ = read_pieces(session, ids.numpy(), all_real(ids.numpy()), [])
    pieces, _ = read_pieces(session, ids.numpy(), all_real(ids.numpy()), [1, 2, 9])
    assert distance(whole, expected) < 3e-5 and distance(pieces, whole) < 3e-5
    last, _ = read(session, nothing(session, 5), ids.numpy(), all_real(ids.numpy()), keep=3)
    assert last.shape[1] == 3 and distance(last, expected[:, -3:]) < 3e-5
    check_padding(session, ids)


@pytest.mark.thorough
def test_functions_are_transformers_own_again(tmp_path):
    model = tiny_upstream("qwen3_5_text")
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        compared = export_onnx(model, tmp_path)
        after = model(ids, use_cache=False).logits
    assert torch.equal(before, after)
    assert compared.difference < 3e-5 and compared.same == compared.generated


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", STOCK)
def test_half_precision_loses_as_much_as_transformers_own(model_type, tmp_path):
    model = tiny_upstream(model_type)
    ids, exact = read_by(model)
    _, half = read_by(model.half())
    export_onnx(model, tmp_path)
    session = InferenceSession(tmp_path / "onnx" / "model_fp16.onnx")
    found, _ = read_pieces(session, ids.numpy(), all_real(ids.numpy()), [])
    by_token = np.abs(found - exact).max(-1)
    # Nearly equal scores of experts may come in another order: a token in a hundred has others.
    assert 0 < np.quantile(by_token, 0.98) < 2 * distance(half, exact) + 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "mamba2", "falcon_h1"])
def test_onnxruntime_genai_generates_from_a_folder(model_type, tmp_path):
    onnxruntime_genai = pytest.importorskip("onnxruntime_genai")
    model = tiny_upstream(model_type)
    export_onnx(model, tmp_path)
    ids = list(range(5, 25))
    theirs = onnxruntime_genai.Model(str(tmp_path))
    params = onnxruntime_genai.GeneratorParams(theirs)
    params.set_search_options(max_length=40, min_length=40)  # no end
    generator = onnxruntime_genai.Generator(theirs, params)
    generator.append_tokens(ids)
    logits = generator.get_logits()[0]
    for _ in range(20):
        generator.generate_next_token()
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0, -1:].numpy()
    assert distance(logits, expected) < 3e-5
    made = model.generate(torch.tensor([ids]), **options)
    assert generator.get_sequence(0).tolist() == made[0].tolist()


def test_states_that_onnxruntime_genai_does_not_take_get_no_config(tmp_path):
    state = State("past_conv.0", "present_conv.0", (8, 3), torch.float32)
    assert genai_config(tiny_upstream("mamba2"), [state], "model.onnx") is None
    three = [state._replace(past=f"past_conv.0.{x}") for x in ("query", "key", "value")]
    assert genai_config(tiny_upstream("mamba2"), three, "model.onnx") is None


def test_experts_of_another_kind_are_refused():
    model = tiny_upstream("qwen3_next")
    check_exports(model)
    experts = next(x for x in model.modules() if type(x).__name__ == "Qwen3NextExperts")
    experts.act_fn = torch.nn.GELU()
    with pytest.raises(ValueError, match="experts must be .* got Qwen3NextExperts"):
        check_exports(model)


@pytest.mark.thorough
def test_experts_are_no_operator_of_the_standard_and_keep_their_bits(tmp_path):
    model = tiny_upstream("lfm2_moe")
    with pytest.raises(ValueError, match="standard must be False for mixtures of experts"):
        export_onnx(model, tmp_path / "standard", standard=True)
    said = []
    export_onnx(model, tmp_path, bits=8, progress=said.append)
    assert any("down_proj" in line and "of experts" in line for line in said)


def test_other_models_are_refused_by_name():
    with pytest.raises(ValueError, match="model_type must be one of 'linear_att.*got 'jamba'"):
        check_exports(tiny_upstream("jamba"))
    base = tiny_upstream("qwen3_5_text").model
    with pytest.raises(ValueError, match="must be a causal language model .* got a Qwen3_5TextM"):
        check_exports(base)
    with pytest.raises(ValueError, match="sliding_window must be None for ONNX, got 4"):
        check_exports(tiny_upstream("minimax", sliding_window=4))
    model = tiny_upstream("qwen3_5_text")
    use_kernels(model)
    with pytest.raises(ValueError, match="model must be .* without use_kernels, got one with a"):
        check_exports(model)


def test_positions_that_depend_on_the_length_are_refused():
    model = tiny_upstream("olmo_hybrid")
    check_exports(model)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model.config.rope_parameters = rope
    with pytest.raises(ValueError, match="rope_type must be .*, got 'dynamic'"):
        check_exports(model)
