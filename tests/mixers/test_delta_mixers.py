# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule's layers and models against Transformers' own classes, with the same weights:
outputs, logits, gradients, and decoding with a cache. And what the recurrence says of itself.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    OlmoHybridConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM
from hf_linear_attention.mixers.delta_rule import DeltaRule
from hf_linear_attention.ops.tokens import Tokens
from hf_linear_attention.recurrences.delta_rule import (
    DeltaInputs,
    DeltaRecurrence,
    ErasingInputs,
    ErasingRecurrence,
)
from hf_linear_attention.recurrences.interface import SlotPieces
from tiny import VOCAB_SIZE, assert_near, random_ids

B, T, C, LAYERS = 2, 70, 32, 4  # more tokens than a chunk of either has
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": C,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "head_dim": 16,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
}
# Of the linear layers: value heads that share key heads, and are wider than these.
GROUPED = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EQUAL = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LAYER_TYPES = ["linear_attention"] * 3 + ["full_attention"]
Weights = dict[str, Tensor]

pytestmark = pytest.mark.usefixtures("one_thread")


# Weights by Transformers' names. The same tables take gradients, which move as the weights do.


def by_head(num_heads: int, *parts: Tensor) -> Tensor:
    """Rows of several projections as rows of one: head after head what is each one's."""
    heads = [x.unflatten(0, (num_heads, -1)) for x in parts]
    return torch.cat(heads, dim=1).flatten(0, 1)


def convolution(w: Weights) -> Tensor:
    return torch.cat([w[f"{name}_conv1d.weight"] for name in "qkv"])


def qwen3_next_delta(w: Weights, Hk: int) -> Weights:
    qkvz = [w[f"{name}_proj.weight"] for name in "qkvg"]
    return {
        "in_proj_qkvz.weight": by_head(Hk, *qkvz),
        "in_proj_ba.weight": by_head(Hk, w["b_proj.weight"], w["decay.dt_proj.weight"]),
        "conv1d.weight": convolution(w),
        "dt_bias": w["decay.dt_bias"],
        "A_log": w["decay.A_log"],
        "norm.weight": w["o_norm.weight"],
        "out_proj.weight": w["o_proj.weight"],
    }


def qwen3_5_delta(w: Weights, Hk: int) -> Weights:
    return {
        "in_proj_qkv.weight": torch.cat([w[f"{name}_proj.weight"] for name in "qkv"]),
        "in_proj_z.weight": w["g_proj.weight"],
        "in_proj_b.weight": w["b_proj.weight"],
        "in_proj_a.weight": w["decay.dt_proj.weight"],
        "conv1d.weight": convolution(w),
        "dt_bias": w["decay.dt_bias"],
        "A_log": w["decay.A_log"],
        "norm.weight": w["o_norm.weight"],
        "out_proj.weight": w["o_proj.weight"],
    }


def olmo_hybrid_delta(w: Weights, Hk: int) -> Weights:
    same = ("q_proj", "k_proj", "v_proj", "b_proj", "g_proj", "o_norm", "o_proj")
    return {
        **{f"{name}.weight": w[f"{name}.weight"] for name in same},
        "a_proj.weight": w["decay.dt_proj.weight"],
        "conv1d.weight": convolution(w),
        "dt_bias": w["decay.dt_bias"],
        "A_log": w["decay.A_log"],
    }


def kimi_delta(w: Weights, Hk: int) -> Weights:
    same = ("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj")
    return {
        **{f"{name}.weight": w[f"{name}.weight"] for name in same},
        "conv1d.weight": convolution(w),
        "forget_gate.f_a_proj.weight": w["decay.f_a_proj.weight"],
        "forget_gate.f_b_proj.weight": w["decay.f_b_proj.weight"],
        "forget_gate.dt_bias": w["decay.dt_bias"],
        "forget_gate.A_log": w["decay.A_log"].view(1, 1, -1, 1),
    }


def qwen_softmax(w: Weights) -> Weights:
    both = by_head(SIZES["num_attention_heads"], w.pop("q_proj.weight"), w.pop("g_proj.weight"))
    return {**w, "q_proj.weight": both}


def part(w: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): x for name, x in w.items() if name.startswith(prefix)}


def whole_model(w: Weights, delta: Callable, softmax: Callable, folder: str) -> Weights:
    """A model's weights: its mixers' by those tables, in that folder of a layer."""
    renamed = {name: x for name, x in w.items() if ".self_attn." not in name}
    for layer, layer_type in enumerate(LAYER_TYPES):
        prefix = f"model.layers.{layer}."
        mixer = part(w, f"{prefix}self_attn.")
        if layer_type == "linear_attention":
            mixer = delta(mixer, GROUPED["linear_num_key_heads"])
            renamed |= {f"{prefix}{folder}.{name}": x for name, x in mixer.items()}
        else:
            renamed |= {f"{prefix}self_attn.{name}": x for name, x in softmax(mixer).items()}
    return renamed


def with_norms_around_zero(w: Weights, shift: float = 1.0) -> Weights:
    """Transformers' Qwen multiplies by 1 + weight, but for the norm of the delta rule."""
    return {
        name: x - shift if name.endswith("norm.weight") and "linear_attn" not in name else x
        for name, x in w.items()
    }


def gradients(module: nn.Module) -> Weights:
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def assert_same(actual: Weights, expected: Weights, tolerance: float = 1e-4) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        scale = x.abs().max().clamp(min=1)
        torch.testing.assert_close(
            actual[name] / scale,
            x / scale,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def draw(module: nn.Module) -> None:
    """Every weight anew: norms and biases at their first values would hide mistakes."""
    for name, x in module.named_parameters():
        with torch.no_grad():
            if "norm" in name:
                x.uniform_(0.5, 1.5)
            elif "A_log" in name:
                x.uniform_(-1, 1)
            else:
                x.normal_(0, 0.2)


# Layers


class NormWithoutGate(LlamaRMSNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x)


def of_qwen3_next(config: LinearAttentionConfig) -> nn.Module:
    sizes = {name: getattr(config, name) for name in GROUPED}
    return Qwen3NextGatedDeltaNet(Qwen3NextConfig(**SIZES, **sizes, layer_types=LAYER_TYPES), 0)


def of_qwen3_5(config: LinearAttentionConfig) -> nn.Module:
    sizes = {name: getattr(config, name) for name in GROUPED}
    return Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**SIZES, **sizes, layer_types=LAYER_TYPES), 0)


def of_olmo_hybrid(config: LinearAttentionConfig) -> nn.Module:
    sizes = {name: getattr(config, name) for name in (*GROUPED, "linear_allow_neg_eigval")}
    return OlmoHybridGatedDeltaNet(
        OlmoHybridConfig(**SIZES, **sizes, layer_types=LAYER_TYPES, pad_token_id=0), 0
    )


def of_olmo_hybrid_without_decay_and_gate(config: LinearAttentionConfig) -> nn.Module:
    """Which is DeltaNet; Transformers has no class of it."""
    layer = of_olmo_hybrid(config)
    layer.o_norm = NormWithoutGate(config.linear_value_head_dim, config.rms_norm_eps)
    return layer


def of_kimi_linear(config: LinearAttentionConfig) -> nn.Module:
    return KimiLinearDeltaAttention(kimi_config(config), 0)


def kimi_config(config: LinearAttentionConfig) -> KimiLinearConfig:
    heads = {
        "linear_num_heads": config.linear_num_key_heads,
        "linear_head_dim": config.linear_key_head_dim,
    }
    latent = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = {name: getattr(config, name) for name in latent}  # None where no layer has it
    return KimiLinearConfig(
        **{name: x for name, x in SIZES.items() if name != "head_dim"},
        **heads,
        **{name: size for name, size in latent.items() if size is not None},
        num_key_value_heads=SIZES["num_attention_heads"],
        layer_types=LAYER_TYPES,
        mlp_layer_types=["dense"] * LAYERS,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    )


def deltanet_as_olmo(w: Weights, Hk: int) -> Weights:
    whole = {"g_proj.weight": None, "decay.dt_proj.weight": None}
    whole |= {"decay.dt_bias": None, "decay.A_log": None}
    return {name: x for name, x in olmo_hybrid_delta({**whole, **w}, Hk).items() if x is not None}


LAYER_CASES = {  # preset, fields, Transformers' class, names
    "qwen3_next": ("gated_deltanet", GROUPED, of_qwen3_next, qwen3_next_delta),
    "qwen3_5": ("gated_deltanet", GROUPED, of_qwen3_5, qwen3_5_delta),
    "olmo_hybrid": (
        "gated_deltanet",
        {**EQUAL, "linear_value_head_dim": 16},
        of_olmo_hybrid,
        olmo_hybrid_delta,
    ),
    "negative_eigenvalues": (
        "gated_deltanet",
        {**EQUAL, "linear_allow_neg_eigval": True},
        of_olmo_hybrid,
        olmo_hybrid_delta,
    ),
    "deltanet": ("deltanet", EQUAL, of_olmo_hybrid_without_decay_and_gate, deltanet_as_olmo),
    "kimi_linear": ("kda", EQUAL, of_kimi_linear, kimi_delta),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", LAYER_CASES)
def test_a_layer_and_its_gradients_are_those_of_transformers(case, dtype):
    preset, fields, upstream, names = LAYER_CASES[case]
    config = LinearAttentionConfig.from_preset(preset, **SIZES, **fields)
    layer = DeltaRule(config, 0).to(dtype)
    draw(layer)
    theirs = upstream(config).to(dtype)
    weights = {name: x.detach() for name, x in layer.named_parameters()}
    missing = theirs.load_state_dict(names(weights, config.linear_num_key_heads), strict=False)
    assert not missing.unexpected_keys
    if case == "deltanet":  # nothing is forgotten
        assert {"A_log", "dt_bias", "a_proj.weight", "g_proj.weight"} == set(missing.missing_keys)
        theirs.A_log.data.fill_(-torch.inf)
    else:
        assert not missing.missing_keys

    x = torch.randn(B, T, C, dtype=dtype)
    ours_x, their_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, _ = layer(ours_x, Tokens(is_causal=True))
    expected = theirs(their_x)
    assert_near(y, expected)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    assert_near(ours_x.grad, their_x.grad)
    moved = names(gradients(layer), config.linear_num_key_heads)
    given = {name: x.grad for name, x in theirs.named_parameters() if name in moved}
    assert_same(moved, given)


# Models


def qwen_config(config_class, config: LinearAttentionConfig):
    sizes = {name: getattr(config, name) for name in GROUPED}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return config_class(
        **SIZES,
        **sizes,
        num_key_value_heads=2,
        layer_types=LAYER_TYPES,
        rope_parameters=rope,
        **({"mlp_only_layers": list(range(LAYERS))} if config_class is Qwen3NextConfig else {}),
    )


def qwen3_next(config: LinearAttentionConfig) -> nn.Module:
    return Qwen3NextForCausalLM(qwen_config(Qwen3NextConfig, config))


def qwen3_5(config: LinearAttentionConfig) -> nn.Module:
    mrope = qwen_config(Qwen3_5TextConfig, config)
    mrope.rope_parameters |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    return Qwen3_5ForCausalLM(mrope)


def qwen3_next_names(w: Weights, shift: float = 0.0) -> Weights:
    renamed = whole_model(w, qwen3_next_delta, qwen_softmax, "linear_attn")
    return with_norms_around_zero(renamed, shift)


def qwen3_5_names(w: Weights, shift: float = 0.0) -> Weights:
    renamed = whole_model(w, qwen3_5_delta, qwen_softmax, "linear_attn")
    return with_norms_around_zero(renamed, shift)


def kimi_names(w: Weights, shift: float = 0.0) -> Weights:
    return whole_model(w, kimi_delta, dict, "self_attn")


MODEL_CASES = {  # preset, fields, Transformers' class, names
    "qwen3_next": (
        "qwen3_next",
        {**GROUPED, "num_key_value_heads": 2},
        qwen3_next,
        qwen3_next_names,
    ),
    "qwen3_5": ("qwen3_next", {**GROUPED, "num_key_value_heads": 2}, qwen3_5, qwen3_5_names),
    "kimi_linear": (
        "kimi_linear",
        EQUAL,
        lambda c: KimiLinearForCausalLM(kimi_config(c)),
        kimi_names,
    ),
}


def both(case: str) -> tuple[LinearAttentionForCausalLM, nn.Module, Callable]:
    preset, fields, upstream, names = MODEL_CASES[case]
    config = LinearAttentionConfig.from_preset(
        preset, **{**SIZES, "scale_embeddings": False}, **fields
    )
    model = LinearAttentionForCausalLM(config).double().eval()
    draw(model)
    theirs = upstream(config).double().eval()
    weights = {name: x.detach() for name, x in model.named_parameters()}
    theirs.load_state_dict(names(weights, shift=1.0))
    return model, theirs, names


@pytest.mark.parametrize("case", MODEL_CASES)
def test_logits_and_gradients_are_those_of_transformers(case):
    model, theirs, names = both(case)
    ids = random_ids(B, T)
    outputs, expected = model(ids, labels=ids), theirs(ids, labels=ids)
    assert_near(outputs.logits, expected.logits)
    assert_near(outputs.loss, expected.loss.double())
    outputs.loss.backward()
    expected.loss.backward()
    assert_same(names(gradients(model)), gradients(theirs))


@torch.no_grad()
@pytest.mark.parametrize("case", MODEL_CASES)
def test_decoding_with_a_cache_is_that_of_transformers(case):
    model, theirs, _ = both(case)
    ids = random_ids(B, 16)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padding on the left, which is all that they understand
    caches = [None, None]
    for start, stop in ((0, 8), (8, 9), (9, 10), (10, 15), (15, 16)):
        piece = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop]}
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:stop]
        results = [
            m(**piece, position_ids=positions, past_key_values=cache, use_cache=True)
            for m, cache in zip((model, theirs), caches, strict=True)
        ]
        caches = [outputs.past_key_values for outputs in results]
        is_real = mask[:, start:stop].bool()
        assert_near(*(outputs.logits[is_real] for outputs in results))


@pytest.mark.parametrize("case", MODEL_CASES)
def test_generated_tokens_are_those_of_transformers(case):
    model, theirs, _ = both(case)
    ids = random_ids(B, 9)
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **how).tolist() == theirs.generate(ids, **how).tolist()


# The recurrence


def inputs(T: int, decay: str, dtype=torch.float64) -> DeltaInputs:
    Hk, Hv, K, V = 2, 4, 5, 3
    log_decay = {"none": None, "per_head": torch.rand(B, T, Hv), "kda": torch.rand(B, T, Hv, K)}
    g = log_decay[decay]
    return DeltaInputs(
        torch.randn(B, T, Hk, K, dtype=dtype),
        torch.randn(B, T, Hk, K, dtype=dtype),
        torch.randn(B, T, Hv, V, dtype=dtype),
        2 * torch.rand(B, T, Hv, dtype=dtype),
        None if g is None else -g.to(dtype),
    )


def erasing_inputs(T: int) -> ErasingInputs:
    of_rule = inputs(T, "kda")
    q, k = (x / 3 for x in of_rule[:2])
    return ErasingInputs(q, k, *of_rule[2:], torch.randn_like(k) / 3)


@torch.no_grad()
def test_with_an_erase_key_steps_and_pieces_in_slots_are_the_whole():
    recurrence, whole, tokens = (
        ErasingRecurrence(4, 5, 3),
        erasing_inputs(9),
        Tokens(is_causal=True),
    )
    expected, state = recurrence.run(whole, {}, tokens)

    def cut(start: int, end: int) -> ErasingInputs:
        return ErasingInputs(*(x[:, start:end] for x in whole))

    stepped = {"kv": torch.zeros_like(state["kv"])}
    y = torch.cat([recurrence.step_(cut(t, t + 1), stepped, tokens) for t in range(9)], 1)
    assert_near(y, expected, 1e-10)
    assert_near(stepped["kv"], state["kv"], 1e-10)

    slots = {"kv": torch.full((5, 4, 5, 3), torch.nan, dtype=torch.float64)}
    rows = torch.arange(B, dtype=torch.int32) + 2
    for start, end in ((0, 4), (4, 9)):
        packed = ErasingInputs(*(x.flatten(0, 1)[None] for x in cut(start, end)))
        bounds = (end - start) * torch.arange(B + 1, dtype=torch.int32)
        pieces = SlotPieces(rows, torch.full((B,), start == 0), bounds, ())
        y = recurrence.run_in_slots_(packed, slots, pieces, tokens)
        assert_near(y.view(B, end - start, 4, 3), expected[:, start:end], 1e-10)
    assert_near(slots["kv"][rows.long()], state["kv"], 1e-10)


@pytest.mark.parametrize("decay", ["none", "per_head", "kda", "erasing"])
def test_pieces_combine_to_the_state_of_the_whole_with_its_gradients(decay):
    if decay == "erasing":
        recurrence, whole = ErasingRecurrence(4, 5, 3), erasing_inputs(12)
    else:
        recurrence, whole = DeltaRecurrence(4, 5, 3), inputs(12, decay)
    key_mask = torch.rand(B, 12) > 0.3
    leaves = [x.requires_grad_() for x in whole if x is not None]
    _, state = recurrence.run(whole, {}, Tokens(is_causal=True, key_mask=key_mask))
    pieces = []
    for cut in (slice(0, 5), slice(5, 6), slice(6, 12)):
        piece = recurrence.tokens_of(whole, lambda x, cut=cut: x[:, cut])
        of_piece = Tokens(is_causal=True, key_mask=key_mask[:, cut])
        pieces.append(recurrence.piece(piece, of_piece))
    stacked = {name: torch.stack([x[name] for x in pieces]) for name in pieces[0]}
    combined = recurrence.combine(stacked)
    assert combined.keys() == state.keys() == recurrence.state_sizes().keys()
    assert_near(combined["kv"], state["kv"], 1e-10)
    d = torch.randn_like(state["kv"])
    del leaves[0]  # nobody reads
    actual = torch.autograd.grad(combined["kv"], leaves, d)
    for x, expected in zip(actual, torch.autograd.grad(state["kv"], leaves, d), strict=True):
        assert_near(x, expected, 1e-9)


def test_no_piece_leaves_nothing_and_has_a_gradient():
    recurrence = DeltaRecurrence(4, 5, 3)
    piece = recurrence.piece(inputs(4, "per_head"), Tokens(is_causal=True))
    none = {name: x[None][:0].requires_grad_() for name, x in piece.items()}
    state = recurrence.combine(none)["kv"]
    assert state.requires_grad and not state.any()
    assert state.shape == (B, *recurrence.state_sizes()["kv"].shape)
