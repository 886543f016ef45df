# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-7 against flash-linear-attention's model with the same weights: logits, gradients, decoding
with a cache, first values. And what its layers hand on, remember and begin with.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from hf_linear_attention import (
    LinearAttentionCache,
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
)
from hf_linear_attention.ops.tokens import Tokens
from hf_linear_attention.recurrences.dplr_delta_rule import DPLRInputs, DPLRRecurrence
from tiny import VARIANTS, random_ids, tiny_model

FOLDER = Path(__file__).parents[1] / "data" / "rwkv7_of_fla"
sys.path.append(str(FOLDER))
from formulas import probe, weight  # noqa: E402

REFERENCE = json.loads((FOLDER / "reference.json").read_text())
IDS = torch.tensor(REFERENCE["ids"])
# A part of fla's names, and of ours.
NAMES = {
    r"^model\.embeddings": "model.embed_tokens",
    r"\.attn\.": ".self_attn.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.ffn\.key": ".mlp.up_proj",
    r"\.ffn\.value": ".mlp.down_proj",
    r"\.ffn\.": ".mlp.",
    r"_lora\.lora\.0\.": "_lora.a_proj.",
    r"_lora\.lora\.2\.weight": "_lora.b_proj.weight",
    r"_lora\.lora\.2\.bias": "_lora.bias",
}
TINY = VARIANTS["preset_rwkv7"]

pytestmark = pytest.mark.usefixtures("one_thread")


def our_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = re.sub(theirs, ours, name)
    return name


def model_of_reference(**fields) -> LinearAttentionForCausalLM:
    sizes = dict(REFERENCE["sizes"])
    num_heads = sizes["hidden_size"] // sizes["head_dim"]
    config = LinearAttentionConfig.from_preset(
        "rwkv7", **sizes, num_attention_heads=num_heads, **fields
    )
    return LinearAttentionForCausalLM(config).double()


def with_their_weights(model: LinearAttentionForCausalLM) -> LinearAttentionForCausalLM:
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for number, name in enumerate(REFERENCE["gradients"]):
            parameter = ours.pop(our_name(name))
            parameter.copy_(weight(number, parameter, name))
    assert not ours
    return model


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_logits_and_gradients_are_those_of_fla():
    model = with_their_weights(model_of_reference())
    logits = model(IDS).logits
    assert_same(logits, torch.tensor(REFERENCE["logits"], dtype=torch.float64))
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    loss.backward()
    assert loss.item() == pytest.approx(REFERENCE["loss"], rel=1e-12)
    for number, (name, expected) in enumerate(REFERENCE["gradients"].items()):
        gradient = model.get_parameter(our_name(name)).grad
        found = [gradient.norm().item(), (gradient * probe(number, gradient)).sum().item()]
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-11), name


@pytest.mark.parametrize("first", [1, 5, 11])
@torch.no_grad()
def test_cached_decoding_is_that_of_fla(first):
    model = with_their_weights(model_of_reference()).eval()
    cache, steps = None, []
    for piece in [IDS[:, :first], *IDS[:, first:].split(1, 1)]:
        out = model(piece, cache=cache, use_cache=True)
        cache = out.cache
        steps.append(out.logits)
    assert_same(torch.cat(steps, 1), torch.tensor(REFERENCE["logits"], dtype=torch.float64))


def test_first_values_are_those_of_fla():
    """Of all that is not random. Where fla draws the last projection of a layer, its authors, and
    so we, begin with 0.
    """
    model = model_of_reference()
    names = list(REFERENCE["gradients"])
    for name, expected in REFERENCE["first_values"].items():
        parameter = model.get_parameter(our_name(name))
        product = (parameter * probe(names.index(name), parameter)).sum().item()
        assert product == pytest.approx(expected, abs=1e-5), name
    for layer in model.model.layers:
        assert not layer.self_attn.o_proj.weight.any() and not layer.mlp.down_proj.weight.any()
        for linear, gain in [("r_proj", 1.0), ("k_proj", 0.1), ("v_proj", 1.0)]:
            drawn = getattr(layer.self_attn, linear).weight / gain
            torch.testing.assert_close(drawn @ drawn.T, torch.eye(16).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("fields", [{}, {"hidden_size": 2048, "head_dim": 128}])
def test_ranks_grow_with_the_model(fields):
    sizes = {"hidden_size": 1024, "head_dim": 64, "num_hidden_layers": 2, **fields}
    heads = sizes["hidden_size"] // sizes["head_dim"]
    config = LinearAttentionConfig.from_preset("rwkv7", **sizes, num_attention_heads=heads)
    with torch.device("meta"):
        mixer = LinearAttentionForCausalLM(config).model.layers[1].self_attn
    ranks = [getattr(mixer, f"{x}_lora").a_proj.out_features for x in "wavg"]
    assert ranks == ([224, 224, 160, 224] if fields else [64, 64, 64, 160])


def gradients_of(model: LinearAttentionForCausalLM, ids: torch.Tensor) -> dict:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters()}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_keeps_the_gradient_of_the_first_values(use_reentrant):
    model, ids = tiny_model(**TINY).train(), random_ids(2, 9)
    expected = gradients_of(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    found = gradients_of(model, ids)
    for name, gradient in expected.items():
        assert_same(found[name], gradient)


def test_layers_take_the_first_values_from_the_first_layer():
    """Not from one before: all of its own would be lost without them."""
    model, ids = tiny_model(**TINY), random_ids(1, 6)
    handed_on = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: handed_on.append(output[1]))
    outputs = model(ids, output_hidden_states=True)
    assert all(x is handed_on[0] for x in handed_on)
    assert len(outputs.hidden_states) == len(model.model.layers) + 1
    assert all(x.shape == (1, 6, 32) for x in outputs.hidden_states)


def test_only_its_own_layers_are_not_to_be_split():
    """FSDP asks for a module of each of these names."""
    model = tiny_model(**TINY)
    assert set(model._no_split_modules) == {"RWKVDecoderLayer"}


def test_pipelines_are_refused():
    """A stage would begin without the first layer's values."""

    class Elsewhere(torch.nn.Module):  # as Transformers' PipelineIdentityLayer
        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states

    model, ids = tiny_model(**TINY), random_ids(2, 6)
    model.model.layers[0] = Elsewhere()
    with pytest.raises(RuntimeError, match="RWKV hand on .* pipelines"):
        model(ids)


# A state to begin with.


def inputs(T: int, rows: int = 2, first: bool = True) -> DPLRInputs:
    H, K, V = 3, 4, 5
    made = torch.Generator().manual_seed(T)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    q, k, a, b = (draw(rows, T, H, K) / 2 for _ in range(4))
    log_decay = -draw(rows, T, H, K).abs() / 4
    return DPLRInputs(q, k, draw(rows, T, H, V), a, b, log_decay, draw(H, K, V) if first else None)


TOKENS = Tokens(is_causal=True)


def test_a_sequence_begins_with_the_first_state():
    given = inputs(6)
    recurrence = DPLRRecurrence(3, 4, 5, has_first_state=True)
    plain = DPLRRecurrence(3, 4, 5)
    rows = given.first_state.expand(2, -1, -1, -1).contiguous()
    expected, after = plain.run(given._replace(first_state=None), {"kv": rows}, TOKENS)
    y, state = recurrence.run(given, {}, TOKENS)
    assert_same(y, expected)
    assert_same(state["kv"], after["kv"])
    emptied = recurrence.start(given)  # as of a static cache that is used again
    assert_same(recurrence.run(given, emptied, TOKENS)[0], expected)


def test_later_tokens_do_not_begin_again():
    given = inputs(6)
    recurrence = DPLRRecurrence(3, 4, 5, has_first_state=True)
    whole, after = recurrence.run(given, {}, TOKENS)
    state = recurrence.start(given)
    steps = [
        recurrence.step_(recurrence.tokens_of(given, lambda x, t=t: x[:, t : t + 1]), state, TOKENS)
        for t in range(6)
    ]
    assert_same(torch.cat(steps, 1), whole)
    assert_same(state["kv"], after["kv"])


@pytest.mark.parametrize("has_first_state", [False, True])
@pytest.mark.parametrize("cuts", [[0, 6], [0, 2, 6], [0, 1, 4, 6]])
def test_pieces_combine_to_the_whole(cuts, has_first_state):
    given = inputs(6, first=has_first_state)
    recurrence = DPLRRecurrence(3, 4, 5, has_first_state)
    expected = recurrence.run(given, {}, TOKENS)[1]
    pieces = [
        recurrence.piece(recurrence.tokens_of(given, lambda x, s=s, e=e: x[:, s:e]), TOKENS)
        for s, e in zip(cuts, cuts[1:], strict=False)
    ]
    joined = {name: torch.stack([piece[name] for piece in pieces]) for name in pieces[0]}
    for name, x in recurrence.combine(joined).items():
        assert_same(x, expected[name])
    nothing = recurrence.combine({name: x[:0] for name, x in joined.items()})
    assert set(nothing) == set(expected) and not any(x.any() for x in nothing.values())


def test_only_the_first_states_need_be_trained():
    model, ids = tiny_model(**TINY), random_ids(2, 9)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.initial_state.requires_grad_(True)
    model.train()
    before = model(ids, labels=ids).loss
    before.backward()
    with torch.no_grad():
        for layer in model.model.layers:
            state = layer.self_attn.initial_state
            assert state.grad.any()
            state -= 0.05 * state.grad
    assert model(ids, labels=ids).loss < before


def test_weights_without_first_states_load_into_a_model_that_learns_them(tmp_path):
    model, ids = tiny_model(**VARIANTS["rwkv7_alone"]), random_ids(2, 9)
    model.save_pretrained(tmp_path)
    loaded = LinearAttentionForCausalLM.from_pretrained(
        tmp_path, learn_initial_state=True, dtype=torch.float64
    )
    assert all(not layer.self_attn.initial_state.any() for layer in loaded.model.layers)
    assert_same(loaded(ids).logits, model(ids).logits)


def test_tokens_are_taken_back_to_the_first_state():
    model, ids = tiny_model(**TINY), random_ids(2, 9)
    cache = LinearAttentionCache(model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        for piece in ids.split([4, 1, 4], 1):
            model(piece, cache=cache)
        cache.crop(-7)
        rest = model(ids[:, 2:], cache=cache).logits
        assert_same(rest, model(ids).logits[:, 2:])


@torch.no_grad()
def test_a_token_that_may_be_taken_back_is_not_the_state_of_the_next():
    """What is recorded of a token must not change as the state does."""
    model, ids = tiny_model(**TINY), random_ids(2, 9)
    cache = LinearAttentionCache(model.config)
    model(ids[:, :4], cache=cache)
    cache.activate_past_recording()
    for token in ids[:, 4:8].split(1, 1):
        model(token, cache=cache)
    cache.crop(-3)
    assert_same(model(ids[:, 5:], cache=cache).logits, model(ids).logits[:, 5:])


@pytest.mark.parametrize("shape", [(2, 0), (0, 5)])
def test_no_tokens_and_no_rows_are_read(shape):
    model = tiny_model(**TINY)
    with torch.no_grad():
        assert model(torch.zeros(shape, dtype=torch.long)).logits.shape == (*shape, 41)
