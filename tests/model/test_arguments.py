# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What a forward takes: the cache by either of its names, what clients hand to every model, and
nothing else; and how generate() tells that a forward was not given the cache it made.
"""

import functools
import inspect
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from transformers.utils.generic import TransformersKwargs
from trl.trainer.reward_trainer import DataCollatorForPreference

from hf_linear_attention import (
    LinearAttentionForCausalLM,
    LinearAttentionForSequenceClassification,
    LinearAttentionModel,
)
from hf_linear_attention.releases import CACHE
from tiny import VARIANTS, random_ids, tiny_config, tiny_model

NAMES = ("past_key_values", "cache")


@pytest.mark.parametrize("variant", ["paper", "hybrid", "preset_kimi_linear"])
@torch.no_grad()
def test_a_cache_goes_by_either_name(variant):
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant])
    ids = random_ids(2, 9)
    expected = model(ids).logits[:, 5:]
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    for name in NAMES:
        cache = getattr(model(ids[:, :5]), CACHE)
        logits = model(ids[:, 5:], **{name: cache}).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        cache = getattr(model(ids[:, :5]), CACHE)
        given = {name: cache}
        again = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, **given)
        assert torch.equal(again, wanted)


@torch.no_grad()
def test_two_caches_are_too_many():
    model = tiny_model()
    one, other = (getattr(model(random_ids(1, 3)), CACHE) for _ in range(2))
    model(random_ids(1, 1), past_key_values=one, cache=one)
    for call in (model, model.model, model.generate):
        with pytest.raises(ValueError, match="give one cache, got different ones"):
            call(random_ids(1, 1), past_key_values=one, cache=other)


@pytest.mark.parametrize("model_class", [LinearAttentionForCausalLM, LinearAttentionModel])
@torch.no_grad()
def test_an_argument_that_nobody_reads_is_refused_by_name(model_class):
    model = model_class(tiny_config())
    for name in ("past_key_value", "atention_mask", "head_mask"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            model(random_ids(1, 3), **{name: None})


@pytest.mark.parametrize("variant", ["paper", "hybrid"])
def test_what_transformers_hands_to_every_model_is_taken(variant):
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant])
    ids = random_ids(2, 6)
    named = inspect.signature(model.forward).parameters
    handed = [*TransformersKwargs.__annotations__, "token_type_ids", "return_dict"]
    for name in set(handed) - set(named):
        model(ids, **{name: None})


@torch.no_grad()
def test_the_batch_of_a_reward_trainer_is_taken_as_it_is():
    model = LinearAttentionForSequenceClassification(tiny_config(num_labels=1, pad_token_id=0))
    texts = {"chosen_ids": [3, 1, 4], "rejected_ids": [1, 5], "margin": 0.5}
    batch = DataCollatorForPreference(pad_token_id=0)([texts, texts])
    assert "margin" in batch
    assert model(**batch, use_cache=False).logits.shape == (4, 1)


def test_the_label_that_is_left_out_can_be_named():
    model = tiny_model(dtype=torch.float32)
    ids = random_ids(2, 9)
    word = int(ids[0, 4])
    for fused in (False, True):
        model.config.fuse_linear_cross_entropy = fused
        model.train(fused)
        expected = model(ids, labels=ids.masked_fill(ids == word, -100)).loss
        loss = model(ids, labels=ids, ignore_index=word).loss
        torch.testing.assert_close(loss, expected)


def forward_without_cache(module, args, kwargs):
    return args, {name: x for name, x in kwargs.items() if name not in NAMES}


@torch.no_grad()
def test_generate_that_loses_its_cache_raises():
    model = tiny_model()
    ids = random_ids(1, 4)
    handle = model.register_forward_pre_hook(forward_without_cache, with_kwargs=True)
    with pytest.raises(RuntimeError, match="the forward of the prompt was given none"):
        model.generate(ids, max_new_tokens=3)
    model.generate(ids, max_new_tokens=3, use_cache=False)
    handle.remove()
    model(ids)
    model.generate(ids, max_new_tokens=3)


@torch.no_grad()
def test_a_forward_of_another_thread_needs_no_cache_while_one_generates():
    model = tiny_model(dtype=torch.float32)
    ids = random_ids(1, 4)
    expected = model(ids).logits
    logits = []

    def forward_elsewhere(*inputs):
        with ThreadPoolExecutor(1) as thread:
            logits.append(thread.submit(torch.no_grad()(model.forward), ids).result().logits)

    model.register_forward_pre_hook(forward_elsewhere)
    model.generate(ids, max_new_tokens=2, min_new_tokens=2, pad_token_id=0)
    assert len(logits) == 2
    for other in logits:
        torch.testing.assert_close(other, expected)


ADAPTERS = {
    "lora": LoraConfig(task_type="CAUSAL_LM", target_modules=["v_proj"], init_lora_weights=False),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "encoder": PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8
    ),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("variant", ["paper", "hybrid", "preset_kimi_linear"])
@torch.no_grad()
def test_with_adapters_of_peft_tokens_are_those_without_a_cache(variant, adapter):
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant])
    model = get_peft_model(model, ADAPTERS[adapter]).eval()
    ids = random_ids(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for how in ({}, {"num_beams": 3}):
        options = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0, **how}
        options |= {"min_new_tokens": 6, "do_sample": False}
        expected = model.generate(input_ids=ids, use_cache=False, **options)
        assert torch.equal(model.generate(input_ids=ids, **options), expected)


def test_a_loss_of_the_users_own_has_arguments_of_its_own():
    model, ids = tiny_model(), random_ids(2, 7)

    def weighted(logits, labels, vocab_size, token_weight=1.0, **kwargs):
        return token_weight * logits.square().mean()

    expected = model(ids).logits.square().mean()
    model.loss_function = weighted
    torch.testing.assert_close(model(ids, labels=ids, token_weight=3.0).loss, 3 * expected)
    with pytest.raises(TypeError, match="token_wait"):
        model(ids, labels=ids, token_wait=3.0)


@pytest.mark.parametrize("variant", ["paper", "preset_mamba2", "preset_kimi_linear"])
@pytest.mark.parametrize("adapters", [LoraConfig, IA3Config, LoHaConfig, VeraConfig])
def test_adapters_need_no_names_of_modules(variant, adapters):
    model = get_peft_model(tiny_model(**VARIANTS[variant]), adapters(task_type="CAUSAL_LM"))
    ids = random_ids(2, 5)
    model(ids, labels=ids).loss.backward()
    trained = [x for x in model.parameters() if x.requires_grad]
    assert any(x.grad is not None and x.grad.any() for x in trained)


def test_prompt_tuning_goes_with_static_caches_and_chunks_and_refuses_drafts():
    """PEFT hands on one token of several where a cache is there."""
    for variant in ("paper", "preset_gated_deltanet"):
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = get_peft_model(tiny_model(**VARIANTS[variant]), config).eval()
        ids = random_ids(1, 11)
        generate = functools.partial(
            model.generate, input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        expected = generate(use_cache=False)
        for settings in ({"prefill_chunk_size": 3}, {"cache_implementation": "static"}):
            assert torch.equal(generate(**settings), expected), settings
        with pytest.raises(ValueError, match="can't draft tokens for a model with prompts of PEFT"):
            generate(prompt_lookup_num_tokens=2)


def test_prefix_tuning_is_refused_in_words():
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(tiny_model(), config)
    for call in (model, functools.partial(model.generate, max_new_tokens=2)):
        with pytest.raises(ValueError, match="prefix tuning .* no state of linear attention"):
            call(input_ids=random_ids(1, 3))


MASK = torch.ones(5, 5).tril()[None, None]
MALFORMED = {  # by what the error says
    "input_ids must be a tensor .B, T., got .2,.": dict(input_ids=torch.tensor([3, 1])),
    "input_ids must be a tensor .B, T., got list": dict(input_ids=[[3, 1]]),
    "input_ids must be of int64 or int32, got torch.float32": dict(input_ids=torch.ones(1, 2)),
    "input_ids must be from 0 to 40, .* got 3 to 99": dict(input_ids=torch.tensor([[3, 99]])),
    "inputs_embeds must be a tensor .* got .2, 32.": dict(inputs_embeds=torch.ones(2, 32)),
    "inputs_embeds must be a tensor .* got .2, 5, 33.": dict(inputs_embeds=torch.ones(2, 5, 33)),
    "position_ids must be a tensor .* got .1, 2.": dict(position_ids=torch.ones(1, 2)),
    "position_ids must be a tensor .* got list": dict(position_ids=[[0, 1, 2, 3, 4]]),
    "seq_idx must be a tensor .* got .2, 3.": dict(seq_idx=torch.zeros(2, 3)),
    "seq_idx must be a tensor .* got .3, 5.": dict(seq_idx=torch.zeros(3, 5)),
    "seq_idx must be a tensor .* got list": dict(seq_idx=[[0, 0, 0, 1, 1]]),
    "cu_seq_lens_q must be a tensor .* got .1, 3.": dict(cu_seq_lens_q=torch.tensor([[0, 5, 10]])),
    "cu_seq_lens_q must be a tensor .* got list": dict(cu_seq_lens_q=[0, 5, 10]),
    "attention_mask must be a tensor, got list": dict(attention_mask=[[1] * 5] * 2),
    "attention_mask must have shape .* got .5,.": dict(attention_mask=torch.ones(5)),
    "attention_mask must be a tensor, got ndarray": dict(attention_mask=np.ones((2, 5))),
    "labels must be a tensor, got list": dict(labels=[[1] * 5] * 2),
    "logits_to_keep must be .* got float": dict(logits_to_keep=1.5),
    "logits_to_keep must be .* got NoneType": dict(logits_to_keep=None),
    "4 dimensions must be bool, .* got one of torch.int64": dict(attention_mask=MASK.long()),
    "4 dimensions must be bool, .* torch.float32 with 1": dict(attention_mask=MASK),
}


@pytest.mark.parametrize("message", MALFORMED)
@torch.no_grad()
def test_malformed_arguments_are_named(message):
    given = MALFORMED[message]
    if not given.keys() & {"input_ids", "inputs_embeds"}:
        given = {"input_ids": random_ids(2, 5), **given}
    with pytest.raises((ValueError, IndexError), match=message):
        tiny_model()(**given)


@torch.no_grad()
def test_a_token_that_is_none_is_named_where_others_were_recorded():
    model = tiny_model()
    cache = getattr(model(random_ids(1, 3)), CACHE)
    for _ in range(5):
        model(random_ids(1, 1), past_key_values=cache)
    with pytest.raises(IndexError, match="input_ids must be from 0 to 40"):
        model(torch.tensor([[99]]), past_key_values=cache)


def test_prompts_without_rows_or_tokens_are_refused():
    for prompt in (torch.tensor([3, 1]), torch.ones(2, 0, dtype=torch.long)):
        for name in ("inputs", "input_ids"):
            with pytest.raises(ValueError, match="inputs must be a tensor .* a token at least"):
                tiny_model().generate(**{name: prompt}, max_new_tokens=2)
