# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Layers of the sum family are their sources': Mamba-2 and MiniMax with the weights of
Transformers' own classes, GLA, HGRN2 and RetNet as loops over the equations of their papers.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Mamba2Config, Mamba2ForCausalLM, MiniMaxConfig
from transformers.models.minimax.modeling_minimax import (
    MiniMaxAttention,
    MiniMaxCache,
    MiniMaxLightningAttention,
    MiniMaxRotaryEmbedding,
)

from hf_linear_attention import (
    LinearAttentionCache,
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
)
from hf_linear_attention.ops.tokens import Tokens
from tiny import VOCAB_SIZE, random_ids

B, T, C, H, LAYERS = 2, 11, 32, 4, 3
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": C,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "initializer_range": 0.2,
}
LEFT = torch.tensor([[1] * T, [0] * 4 + [1] * (T - 4)])

pytestmark = pytest.mark.usefixtures("one_thread")


def preset(name, dtype=torch.float64, **overrides):
    """A model whose parameters, norms' too, are all drawn at random."""
    torch.manual_seed(0)
    config = LinearAttentionConfig.from_preset(name, **{**SIZES, **overrides})
    model = LinearAttentionForCausalLM(config).to(dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def near(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def copy_weights(ours: nn.Module, theirs: dict[str, torch.Tensor]) -> None:
    """All parameters of ours, and nothing else, from theirs."""
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == theirs.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(theirs[name])


def assert_gradients(ours: nn.Module, theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 1e-3, name
        near(parameters[name].grad, gradient, tolerance)


# ---- Mamba-2: Transformers' model without an MLP, whole ----


def mamba2_pair(groups=2, state=6, dtype=torch.float32, **kwargs):
    """Their model and ours, of the same weights."""
    torch.manual_seed(1)
    theirs = Mamba2ForCausalLM(
        Mamba2Config(
            **{**SIZES, "initializer_range": 0.2},
            num_heads=H,
            head_dim=2 * C // H,
            state_size=state,
            n_groups=groups,
            chunk_size=4,
            layer_norm_epsilon=1e-5,
            **kwargs,
        )
    )
    if groups > 1 and not hasattr(theirs.backbone.layers[0].mixer.norm, "group_size"):
        pytest.skip("before 5.21, Transformers' Mamba-2 normalises all groups as one")
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    ours = preset(
        "mamba2",
        intermediate_size=0,
        scale_embeddings=False,
        linear_num_key_heads=groups,
        linear_key_head_dim=state,
        rms_norm_eps=1e-5,
        attention_bias=kwargs.get("use_bias", False),
        conv_bias=kwargs.get("use_conv_bias", True),
        time_step_limit=kwargs.get("time_step_limit"),
    )
    theirs, ours = theirs.to(dtype).eval(), ours.to(dtype)
    copy_weights(ours, as_ours(theirs, dict(theirs.named_parameters())))
    return theirs, ours


def as_ours(model: Mamba2ForCausalLM, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the names of their parameters -> by ours, the joined ones cut."""
    config = model.config
    inner, keys = 2 * C, config.n_groups * config.state_size
    cut = {
        "mixer.in_proj": (
            ("g_proj", "v_proj", "B_proj", "C_proj", "dt_proj"),
            (inner, inner, keys, keys, H),
        ),
        "mixer.conv1d": (("v_conv1d", "B_conv1d", "C_conv1d"), (inner, keys, keys)),
    }
    names = {
        ".norm.": ".input_layernorm.",
        "backbone.embeddings": "model.embed_tokens",
        "backbone.norm_f": "model.norm",
        "backbone.layers": "model.layers",
        "mixer.input_layernorm": "mixer.o_norm",
        "mixer.out_proj": "mixer.o_proj",
        "mixer": "self_attn",
    }
    renamed = {}
    for name, x in tensors.items():
        parts = [(joined, *of) for joined, of in cut.items() if joined in name]
        pieces = {name: x}
        if parts:
            joined, new, sizes = parts[0]
            pieces = {
                name.replace(joined, f"mixer.{part}"): piece
                for part, piece in zip(new, x.split(sizes), strict=True)
            }
        for piece_name, piece in pieces.items():
            for old, ours in names.items():
                piece_name = piece_name.replace(old, ours)
            renamed[piece_name] = piece
    return renamed


MAMBA2 = {
    "groups": {},
    "one_group": {"groups": 1},
    "a_group_for_each_head": {"groups": 4, "state": 5},
    "biases": {"use_bias": True},
    "no_bias": {"use_conv_bias": False},
    "limits": {"time_step_limit": (0.05, 0.2)},
}


@pytest.mark.parametrize(
    ("case", "mask"),
    # theirs lets the biases of projections reach tokens from the padding before them
    [*((case, None) for case in MAMBA2), *((case, LEFT) for case in MAMBA2 if case != "biases")],
)
def test_mamba2_is_that_of_transformers(case, mask):
    theirs, ours = mamba2_pair(**MAMBA2[case])
    ids = random_ids(B, T)
    expected = theirs(ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
    outputs = ours(ids, attention_mask=mask, output_hidden_states=True)
    real = torch.ones(B, T).bool() if mask is None else mask.bool()
    near(outputs.logits[real], expected.logits[real], 1e-4)
    # ours are what layers are given, theirs what they answer
    for y, layer in zip(outputs.hidden_states[1:-1], expected.hidden_states[:-2], strict=True):
        near(y[real], layer[real], 1e-4)

    weights = torch.randn(int(real.sum()), VOCAB_SIZE)
    (outputs.logits[real] * weights).sum().backward()
    (expected.logits[real] * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    scale = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in as_ours(theirs, gradients).items():
        assert gradient.abs().max() > 0, name
        near(ours.get_parameter(name).grad / scale, gradient / scale, 1e-5)


@pytest.mark.parametrize("case", [case for case in MAMBA2 if case != "limits"])
@torch.no_grad()
def test_mamba2_decodes_as_that_of_transformers(case):
    """Theirs forgets its limits in single steps, which is why they are left out."""
    theirs, ours = mamba2_pair(**MAMBA2[case])
    ids = random_ids(B, T)
    whole = ours(ids).logits
    first = theirs(ids[:, :5], use_cache=True)
    own = ours(ids[:, :5], use_cache=True)
    near(own.logits, first.logits, 1e-4)
    for t in range(5, T):
        step = theirs(ids[:, t : t + 1], cache_params=first.cache_params, use_cache=True)
        own = ours(ids[:, t : t + 1], past_key_values=own.past_key_values)
        near(own.logits, step.logits, 1e-4)
        near(own.logits[:, 0], whole[:, t], 1e-4)
    state = own.past_key_values.layers[1].read()["kv"]
    near(state.transpose(2, 3), first.cache_params.layers[1].recurrent_states[0], 1e-4)


def test_mamba2_starts_as_that_of_transformers():
    theirs, ours = (model.to(torch.float32) for model in mamba2_pair())
    theirs, ours = theirs.backbone.layers[0].mixer, ours.model.layers[0].self_attn
    steps = {}
    for name, layer, write in (
        ("theirs", theirs, theirs.init_mamba2_weights),
        ("ours", ours, ours.reset_parameters),
    ):
        steps[name] = []
        for seed in range(300):
            torch.manual_seed(seed)
            write()
            steps[name].append(F.softplus(layer.dt_bias.detach()))
    assert torch.equal(ours.A_log, theirs.A_log) and torch.equal(ours.D, theirs.D)
    smallest, largest = torch.cat(steps["ours"]).aminmax()
    assert 0.001 <= smallest < 0.0012 and 0.09 < largest <= 0.1 + 1e-6
    ours, theirs = (torch.cat(steps[name]).log().mean() for name in ("ours", "theirs"))
    assert abs(ours - theirs) < 0.1


# ---- MiniMax: its two layers; around them its block is another ----


def minimax_layers(layer_idx):
    """Our layer and theirs, of the same weights, and what turns queries and keys at positions."""
    model = preset("minimax", num_hidden_layers=8, rms_norm_eps=1e-6)
    ours = model.model.layers[layer_idx].self_attn
    config = MiniMaxConfig(
        **{**SIZES, "num_hidden_layers": 8},
        num_key_value_heads=H,
        head_dim=C // H,
        layer_types=model.config.layer_types,
        block_size=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )
    is_linear = config.layer_types[layer_idx] == "linear_attention"
    theirs = (MiniMaxLightningAttention if is_linear else MiniMaxAttention)(config, layer_idx)
    theirs = theirs.double()
    weights = dict(ours.named_parameters())
    if is_linear:
        heads = [weights[f"{name}_proj.weight"].unflatten(0, (H, -1)) for name in "qkv"]
        theirs.qkv_proj.weight.data = torch.cat(heads, 1).flatten(0, 1).clone()
        theirs.output_gate.weight.data = weights["g_proj.weight"].data.clone()
        theirs.out_proj.weight.data = weights["o_proj.weight"].data.clone()
        theirs.norm.weight.data = weights["o_norm.weight"].data.clone()
    else:
        copy_weights(theirs, weights)
    return ours, theirs, MiniMaxRotaryEmbedding(config), model.config


def minimax_gradients(theirs):
    if isinstance(theirs, MiniMaxAttention):
        return {name: parameter.grad for name, parameter in theirs.named_parameters()}
    q, k, v = theirs.qkv_proj.weight.grad.unflatten(0, (H, 3, -1)).unbind(1)
    return {
        "q_proj.weight": q.flatten(0, 1),
        "k_proj.weight": k.flatten(0, 1),
        "v_proj.weight": v.flatten(0, 1),
        "g_proj.weight": theirs.output_gate.weight.grad,
        "o_proj.weight": theirs.out_proj.weight.grad,
        "o_norm.weight": theirs.norm.weight.grad,
    }


@pytest.mark.parametrize("layer_idx", [0, 3, 7])
def test_minimax_s_layers_are_those_of_transformers(layer_idx):
    ours, theirs, rotary, _ = minimax_layers(layer_idx)
    x = torch.randn(B, T, C, dtype=torch.float64)
    turns = rotary(x, torch.arange(T)[None])
    future = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    mask = None if layer_idx < 7 else future
    expected, _ = theirs(x, position_embeddings=turns, attention_mask=mask)
    tokens = Tokens(
        is_causal=True, position_embeddings=turns, attention_masks={"full_attention": mask}
    )
    y, _ = ours(x, tokens)
    near(y, expected, 1e-5)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_gradients(ours, minimax_gradients(theirs), 1e-5)


@pytest.mark.parametrize("layer_idx", [0, 3])
@torch.no_grad()
def test_lightning_attention_decodes_as_that_of_transformers(layer_idx):
    ours, theirs, rotary, config = minimax_layers(layer_idx)
    x = torch.randn(B, T, C, dtype=torch.float64)
    cache, their_cache = LinearAttentionCache(config), MiniMaxCache()
    for piece, positions in zip(
        x.split([5, 1, 1, 4], 1), torch.arange(T)[None].split([5, 1, 1, 4], 1), strict=True
    ):
        turns = rotary(x, positions)
        expected, _ = theirs(
            piece, position_embeddings=turns, attention_mask=None, past_key_values=their_cache
        )
        y, _ = ours(piece, Tokens(is_causal=True, position_embeddings=turns), cache)
        near(y, expected, 1e-5)
    near(cache.layers[layer_idx].read()["kv"], their_cache.get_linear_cache(layer_idx), 1e-5)


# ---- GLA, HGRN2, RetNet: the papers' equations, token by token ----


def heads(x):
    return x.unflatten(-1, (H, -1))


def recurrence(q, k, v, remembered):
    """S_t = Diag(remembered_t) S_(t-1) + k_t v_t^T, y_t = S_t^T q_t, all (B, T, H, ...)."""
    S = q.new_zeros(B, H, q.shape[-1], v.shape[-1])
    y = []
    for t in range(T):
        S = remembered[:, t, :, :, None] * S + k[:, t, :, :, None] * v[:, t, :, None]
        y.append((S * q[:, t, :, :, None]).sum(2))
    return torch.stack(y, 1)


def unit(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def gla(layer, x, bound):
    """arXiv 2312.06635, section 4.4: alpha = sigmoid(x W1 W2 + b)^(1/16); a norm of each head, and
    swish(x W_r) for a gate.
    """
    q, k, v = (heads(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    first, second = layer.decay.gk_proj
    assert first.weight.shape == (16, C) and first.bias is None
    alpha = (x @ first.weight.T @ second.weight.T + second.bias).sigmoid() ** (1 / 16)
    y = unit(recurrence(q, k, v, heads(alpha)), layer.o_norm.weight)
    return layer.o_proj(y.flatten(2) * F.silu(layer.g_proj(x)))


def hgrn2(layer, x, bound):
    """arXiv 2404.07904, section 3: f = b + (1 - b) sigmoid(x W), keys 1 - f; one norm."""
    q, v = heads(F.silu(layer.q_proj(x))), heads(layer.v_proj(x))
    f = bound + (1 - bound) * heads(layer.k_proj(x)).sigmoid()
    return layer.o_proj(unit(recurrence(q, 1 - f, v, f).flatten(2), layer.o_norm.weight))


def hgrn(layer, x, bound):
    """arXiv 2311.04823, section 3.2, with real gates: f = b + (1 - b) sigmoid(x W), and the rest,
    1 - f, for what comes in; swish of a gate after one norm.
    """
    f = bound + (1 - bound) * heads(layer.k_proj(x)).sigmoid()
    added = (1 - f) * heads(F.silu(layer.v_proj(x)))
    h, states = torch.zeros_like(f[:, 0]), []
    for t in range(x.shape[1]):
        h = f[:, t] * h + added[:, t]
        states.append(h.flatten(1))
    y = unit(torch.stack(states, 1), layer.o_norm.weight)
    return layer.o_proj(y * F.silu(layer.g_proj(x)))


def retnet(layer, x, bound):
    """arXiv 2307.08621, section 2.2: gamma = 1 - 2^(-5-h), q and k turned by e^(i n theta)."""
    q, k, v = (heads(proj(x)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    assert v.shape[-1] == 2 * k.shape[-1]
    D = k.shape[-1]
    theta = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = torch.arange(T, dtype=torch.float64)[:, None, None] * theta

    def turned(x):
        z = torch.complex(x[..., : D // 2], x[..., D // 2 :])
        z = z * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([z.real, z.imag], -1)

    gamma = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(H)], dtype=torch.float64)
    y = recurrence(turned(q), turned(k), v, gamma[None, None, :, None].expand(k.shape))
    y = unit(y, layer.o_norm.weight)
    return layer.o_proj(y.flatten(2) * F.silu(layer.g_proj(x)))


def lower_bounds(model):
    """For each layer b_l = sum of softmax(Gamma)_2 ... softmax(Gamma)_l, 0 for the first."""
    if model.config.decay != "hgrn2":
        return [None] * LAYERS
    shares = model.model.lower_bounds.weight
    shares = shares.exp() / shares.exp().sum(0)
    return [heads(shares[1 : layer + 1].sum(0)) for layer in range(LAYERS)]


PAPERS = {form.__name__: form for form in (gla, hgrn, hgrn2, retnet)}


def layers_of(model, ids):
    """What each layer was given and answered in one forward of the model."""
    seen, hooks = [], []
    for layer in model.model.layers:
        hooks.append(
            layer.self_attn.register_forward_hook(
                lambda module, args, result: seen.append((module, args[0], result[0]))
            )
        )
    model(ids)
    for hook in hooks:
        hook.remove()
    return seen


def paper_s_model(name):
    model = preset(name)
    if model.config.decay == "hgrn2":
        model.model.lower_bounds.weight.data.normal_()
    return model


@pytest.mark.parametrize("name", PAPERS)
def test_a_layer_and_its_gradients_are_the_paper_s(name):
    model = paper_s_model(name)
    for number, (layer, x, y) in enumerate(layers_of(model, random_ids(B, T))):
        expected = PAPERS[name](layer, x, bound=lower_bounds(model)[number])
        tolerance = 1e-5 if name == "retnet" else 1e-9  # Llama's rotary positions are float32
        near(y, expected, tolerance)
        parameters = dict(layer.named_parameters())
        if number > 0 and model.config.decay == "hgrn2":
            parameters["lower_bounds"] = model.model.lower_bounds.weight
        weights = torch.randn_like(y)
        wrt = [x, *parameters.values()]
        actual, exact = (
            torch.autograd.grad((out * weights).sum(), wrt, retain_graph=True)
            for out in (y, expected)
        )
        for gradient, other in zip(actual, exact, strict=True):
            assert other.abs().max() > 1e-4
            near(gradient, other, 10 * tolerance)


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("lengths", [[1] * T, [5, 1, 1, 4]], ids=["steps", "pieces"])
@torch.no_grad()
def test_it_decodes_as_the_paper_s_loop(name, lengths):
    model, ids = paper_s_model(name), random_ids(B, T)
    cache, logits = LinearAttentionCache(model.config), []
    for piece in ids.split(lengths, 1):
        logits.append(model(piece, past_key_values=cache).logits)
    near(torch.cat(logits, 1), model(ids).logits, 1e-9)
    layer, x, y = layers_of(model, ids)[-1]
    near(y, PAPERS[name](layer, x, bound=lower_bounds(model)[-1]), 1e-5)


def test_hgrn2_s_bounds_rise_from_layer_to_layer_and_stay_below_1():
    model = paper_s_model("hgrn2").float()
    for scale in (1.0, 100.0):  # at which softmax is 0 and 1
        model.model.lower_bounds.weight.data.normal_(std=scale)
        others = [model.model.lower_bounds(layer) for layer in range(1, LAYERS)]
        assert model.model.layers[0].self_attn.decay.lower_bounds == ()
        for lower, upper in zip(others[:-1], others[1:], strict=True):
            assert (lower <= upper).all() and (upper <= 1 + 1e-6).all()
        loss = model(random_ids(B, T), labels=random_ids(B, T)).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("value", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hgrn2_forgets_no_less_than_all_and_no_more_than_its_bound(value, dtype):
    layer = preset("hgrn2", dtype=torch.float32).model.layers[1].self_attn
    bound = torch.full((H, C // H), 0.25)
    layer.decay.lower_bounds = (lambda layer_idx: bound,)
    k, log_decay = layer.decay(torch.full((1, 1, H, C // H), value, dtype=dtype))
    assert log_decay.dtype == torch.float32 and k.dtype == torch.float32
    assert (math.log(0.25) - 1e-6 <= log_decay).all() and (log_decay <= 0).all()
    near(k + log_decay.exp(), torch.ones_like(k), 1e-6)
