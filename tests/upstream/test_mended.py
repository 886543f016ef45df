# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Where Transformers' recurrent layers answer wrongly, ours do not: held against runs without the
padding, or in one piece.
"""

import copy
import inspect

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import DynamicCache, EncoderDecoderCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from hf_linear_attention import LinearAttentionCache, LinearAttentionConfig, use_kernels
from hf_linear_attention.releases import CACHE, CACHE_NAMES
from hf_linear_attention.upstream.families import replacement_for
from upstream_models import CONFIGS, VOCAB_SIZE, cache_name, close, tiny_upstream

T = 9
HIDDEN = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 0])  # 1 for real tokens


class Layer:
    """The first recurrent layer of a model, on our kernels."""

    def __init__(self, model_type, **changes):
        self.model = tiny_upstream(model_type, **changes)
        report = use_kernels(self.model)
        recurrent = [change for change in report.changed if replacement_for(change.before)]
        recurrent = [c for c in recurrent if replacement_for(c.before).is_recurrent]
        self.layer = recurrent[0].module()
        names = inspect.signature(self.layer.forward).parameters
        self.mask_name = "conv_mask" if "conv_mask" in names else "attention_mask"
        self.more = {"position_embeddings": None} if "position_embeddings" in names else {}

    def new_cache(self):
        if self.model.config.model_type == "minimax":
            return MiniMaxCache()
        return DynamicCache(config=self.model.config)

    def __call__(self, x, mask=None, cache=None, name=CACHE):
        """x (B, T, C) -> (B, T, C)"""
        with torch.no_grad():
            return self.forward(x, mask, cache, name)

    def forward(self, x, mask, cache, name=CACHE):
        y = self.layer(x, **{self.mask_name: mask, name: cache}, **self.more)
        return y[0] if isinstance(y, tuple) else y


EXTREMES = {
    "A_log": [-300, -104, 0, 60, 88, 89, 95, 300],
    "dt_bias": [-1e4, -110, -104, -90, 0, 30, 1e4],
    "dt_proj.bias": [-1e4, -110, -104, -90, 0, 30, 1e4],
    "dt_proj_bias": [-1e4, -110, -104, -90, 0, 30, 1e4],
}


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "olmo_hybrid", "mamba2", "mamba", "zamba"])
def test_no_infinity_meets_a_zero_in_decays_out_of_range(model_type):
    """Numbers are finite where those of float64 are."""
    generator = torch.Generator().manual_seed(0)
    ours = tiny_upstream(model_type)
    use_kernels(ours)
    for name, parameter in ours.named_parameters():
        for end, numbers in EXTREMES.items():
            if name.endswith(end):
                which = torch.randint(len(numbers), parameter.shape, generator=generator)
                parameter.data.copy_(torch.tensor(numbers)[which])
    ids = torch.randint(2, VOCAB_SIZE, (2, T), generator=generator)
    found = []
    for model in (ours, copy.deepcopy(ours).double()):
        output = model(ids, labels=ids)
        output.loss.backward()
        found.append([output.logits, *(parameter.grad for parameter in model.parameters())])
    assert found[1][0].isfinite().all()
    for mine, exact in zip(*found, strict=True):
        assert mine[exact.abs() < 1e30].isfinite().all()


# Whose layers are given a cache and a mask; others have tests of their own.
WITH_CACHES = [name for name in CONFIGS if name != "xlstm"]


@pytest.fixture(scope="module", params=WITH_CACHES)
def layer(request):
    return Layer(request.param)


@pytest.fixture
def x():
    return torch.randn(1, T, 32)


def test_padding_anywhere_neither_writes_nor_forgets(layer, x):
    """Upstream forgets over padding, and its convolutions see zeros there."""
    is_real = HIDDEN.bool()
    padded = x.masked_fill(~is_real[None, :, None], torch.nan)
    caches = layer.new_cache(), layer.new_cache()
    y = layer(padded, HIDDEN[None], caches[0])
    want = layer(x[:, is_real], None, caches[1])
    close(y[:, is_real], want)
    later = torch.randn(1, 3, 32)
    close(layer(later, None, caches[0]), layer(later, None, caches[1]))


def test_a_cache_is_read_by_every_name_that_it_has_had_and_no_other(layer, x):
    want = layer(x)
    for name in CACHE_NAMES:
        cache = layer.new_cache()
        pieces = [layer(piece, None, cache, name) for piece in x.split([5, 1, 3], dim=1)]
        close(torch.cat(pieces, dim=1), want)
    with pytest.raises(TypeError, match="no name like 'memory'"):
        layer(x, None, layer.new_cache(), "memory")
    both = {name: layer.new_cache() for name in CACHE_NAMES[:2]}
    with pytest.raises(ValueError, match="different ones as cache and past_key_values"):
        layer.layer(x, **{layer.mask_name: None}, **both, **layer.more)


def test_rows_continue_a_cache_by_different_numbers_of_tokens(layer, x):
    both = torch.cat([x, x.flip(1)])
    mask = torch.stack([HIDDEN, torch.ones_like(HIDDEN)])
    cache, alone = layer.new_cache(), layer.new_cache()
    layer(both[:, :4], None, cache)
    y = layer(both, mask, cache)
    layer(both[:1, :4], None, alone)
    close(y[:1, HIDDEN.bool()], layer(x[:, HIDDEN.bool()], None, alone))


def test_gradients_flow_through_a_cache(layer, x):
    """Of several tokens after a cache that was written with gradients."""
    cache, x = layer.new_cache(), x.requires_grad_()
    y = torch.cat([layer.forward(piece, None, cache) for piece in x.split([5, 1, 3], dim=1)], dim=1)
    weights = torch.randn_like(y)
    (got,) = torch.autograd.grad((y * weights).sum(), x)
    whole = layer.forward(x, None, None)
    (want,) = torch.autograd.grad((whole * weights).sum(), x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())


@pytest.mark.parametrize("limits", [(0.02, 0.05), (0.0, 0.01)])
def test_single_tokens_have_the_limits_of_step_sizes_too(limits, x):
    layer = Layer("mamba2", time_step_limit=limits)
    cache = layer.new_cache()
    pieces = [layer(token, None, cache) for token in x.split(1, dim=1)]
    close(torch.cat(pieces, dim=1), layer(x))


def test_left_padding_does_not_reach_through_the_biases_of_projections():
    model = tiny_upstream("mamba2", use_bias=True)
    use_kernels(model)
    ids = torch.randint(2, VOCAB_SIZE - 4, (1, T))
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    with torch.no_grad():
        close(model(ids, attention_mask=mask).logits[:, 3:], model(ids[:, 3:]).logits)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (3,)])
@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "jamba", "qwen3_next"])
def test_a_padded_batch_goes_on_from_a_cache_with_a_mask_of_all_tokens(model_type, lengths):
    """Mamba hands it to its layers as it is given, and Transformers' take it for one of theirs."""
    model = tiny_upstream(model_type)
    use_kernels(model)
    ids = torch.randint(2, VOCAB_SIZE - 4, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    name, cache, pieces = cache_name(model), {}, []
    with torch.no_grad():
        want = model(ids[:1, 4:]).logits
        stop = 0
        for piece in ids.split((9, *lengths), dim=1):
            stop += piece.shape[1]
            output = model(piece, attention_mask=mask[:, :stop], use_cache=True, **cache)
            cache = {name: output[name]}
            pieces.append(output.logits)
    close(torch.cat(pieces, dim=1)[:1, 4:], want)


@pytest.mark.parametrize("norm", [{}, {"mamba_rms_norm": True}, {"mamba_norm_before_gate": True}])
def test_every_norm_of_falcon_is_as_upstream(norm):
    model = tiny_upstream("falcon_h1", **{"mamba_rms_norm": bool(norm), **norm})
    ids = torch.randint(2, VOCAB_SIZE - 4, (2, T))
    with torch.no_grad():
        want = model(ids).logits
        use_kernels(model)
        close(model(ids).logits, want)


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "jamba"])
def test_an_adapter_on_the_step_sizes_of_mamba_counts(model_type):
    """Upstream reads the weights of dt_proj past it, if it was not merged into them."""
    model = tiny_upstream(model_type)
    ids = torch.randint(2, VOCAB_SIZE - 4, (2, T))
    adapter = LoraConfig(target_modules=["dt_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, adapter)
    with torch.no_grad():
        without = adapted(input_ids=ids).logits
        with use_kernels(adapted):
            got = adapted(input_ids=ids).logits
        want = adapted.merge_and_unload()(input_ids=ids).logits
    close(got, want)
    assert (want - without).abs().max() > 1e-2 * want.abs().max()


def test_a_mask_of_another_length_is_refused(x):
    layer = Layer("qwen3_next")
    with pytest.raises(ValueError, match=r"attention_mask must be \(1, 9\) like the tokens"):
        layer(x, torch.ones(1, T + 1))


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba"])
def test_guidance_is_right_or_says_what_helps(model_type):
    """Before Transformers 5.24 it loses the cache of these models."""
    model = tiny_upstream(model_type)
    use_kernels(model)
    options = dict(max_new_tokens=3, do_sample=False, guidance_scale=1.5)
    ids = torch.randint(2, VOCAB_SIZE, (2, 5))
    want = model.generate(ids, use_cache=False, **options)
    if CACHE == "cache":
        assert torch.equal(model.generate(ids, **options), want)
    else:
        with pytest.raises(ValueError, match=r"guidance_scale .* needs use_cache=False"):
            model.generate(ids, **options)
    assert want.shape == (2, 8)


# Caches that are not the model's


def keys_and_values(B):
    cache = DynamicCache()
    cache.update(torch.zeros(B, 2, 3, 4), torch.zeros(B, 2, 3, 4), 0)
    return cache


@pytest.mark.parametrize("model_type", [name for name in WITH_CACHES if name != "minimax"])
def test_a_cache_of_another_model_or_batch_is_refused_in_words(model_type, x):
    layer = Layer(model_type)  # MiniMax's own model looks at the class of its cache
    for cache in (
        DynamicCache(),
        keys_and_values(1),
        EncoderDecoderCache(layer.new_cache(), DynamicCache()),
        LinearAttentionCache(LinearAttentionConfig(num_hidden_layers=9)),
    ):
        with pytest.raises(ValueError, match=f"{CACHE} must be made for this model.*linear att"):
            layer(x, cache=cache)
    cache = layer.new_cache()
    layer(x.expand(3, T, -1), cache=cache)
    for length in (1, T):
        with pytest.raises(ValueError, match=f"{CACHE} must .* a batch of 1, got one of 3"):
            layer(x[:, :length], cache=cache)


@torch.no_grad()
def test_a_model_that_is_given_keys_and_values_says_what_is_wrong():
    model = tiny_upstream("qwen3_next")
    use_kernels(model)
    for length in (1, T):  # the first in generation's own way
        ids = torch.randint(2, VOCAB_SIZE - 4, (1, length))
        with pytest.raises(ValueError, match=rf"{CACHE} must be made .*\(config=model.config\)"):
            model(ids, **{CACHE: DynamicCache()})
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match=f"{CACHE} must be made .* prefix tuning"):
        get_peft_model(model, config)(ids)
