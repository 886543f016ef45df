# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' recurrent models take back tokens on our kernels, so generate() may draft."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from hf_linear_attention import use_kernels
from hf_linear_attention.releases import CACHE, CACHE_NAMES
from hf_linear_attention.upstream.minimax_cache import CroppableMiniMaxCache
from upstream_models import CONFIGS, VOCAB_SIZE, cache_name, tiny_upstream


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    model = tiny_upstream(request.param)
    use_kernels(model)
    return model


@pytest.fixture
def ids():
    return torch.randint(2, VOCAB_SIZE - 4, (1, 9))


def counted(model, monkeypatch):
    calls, forward = [], model.forward

    def count(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", count)
    return calls


@pytest.mark.sample(5)
def test_an_assistant_that_is_always_right_saves_forwards(model, ids, monkeypatch):
    options = dict(max_new_tokens=12, do_sample=False)
    want = model.generate(ids, **options)
    assistant = copy.deepcopy(model)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0
    calls = counted(model, monkeypatch)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), want)
    # Of its loops, that of Transformers takes one more, with and without us.
    assert len(calls) <= (5 if model.config.model_type == "inkling2_loop_text" else 4)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba", "xlstm"])
def test_an_assistant_of_recurrent_layers_only_reads_a_text_once(model_type, ids):
    model = tiny_upstream(model_type)
    use_kernels(model)
    assistant = copy.deepcopy(model)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0
    read = []
    assistant.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    model.generate(ids, assistant_model=assistant, max_new_tokens=12, do_sample=False)
    assert sum(read) <= ids.shape[1] + 12, read


@pytest.mark.sample(12)
def test_prompt_lookup_writes_the_same_tokens(model, ids):
    ids = ids.repeat(1, 2)
    options = dict(max_new_tokens=10, do_sample=False)
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), want)


@pytest.mark.parametrize("removed", [1, 4, 6])
def test_a_cache_without_its_last_tokens_is_one_that_never_saw_them(removed, ids):
    model = tiny_upstream("qwen3_next")
    use_kernels(model)
    with torch.no_grad():
        want = model(ids).logits
        cache = DynamicCache(config=model.config)
        model(ids[:, :3], **{CACHE: cache})
        cache.activate_past_recording()
        for start, end in ((3, 5), (5, 6), (6, 9)):
            model(ids[:, start:end], **{CACHE: cache})
        cache.crop(-removed)
        cache.crop(0)
        later = model(ids[:, 9 - removed :], **{CACHE: cache}).logits
    torch.testing.assert_close(later, want[:, 9 - removed :], rtol=0, atol=1e-4)


def test_a_cache_that_did_not_record_takes_nothing_back(ids):
    model = tiny_upstream("bamba")
    use_kernels(model)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        with pytest.raises(RuntimeError, match="crop.-10. can't be: 9 tokens can be removed"):
            cache.crop(-10)


def test_a_cache_layer_that_nobody_knows_refuses_to_record(ids):
    class Unknown(LinearAttentionLayer):
        pass

    model = tiny_upstream("bamba")
    use_kernels(model)
    cache = DynamicCache(config=model.config)
    cache.layers[0] = Unknown()
    cache.activate_past_recording()
    with pytest.raises(RuntimeError, match="a cache's Unknown can't take tokens back"):
        model(ids, **{CACHE: cache})


@pytest.mark.parametrize(
    "pair", [("mamba2", "qwen3_next"), ("minimax", "mamba"), ("lfm2", "mamba2")]
)
def test_an_assistant_may_be_of_another_family(pair, ids):
    model, assistant = (tiny_upstream(model_type) for model_type in pair)
    for each in (model, assistant):
        use_kernels(each)
    options = dict(max_new_tokens=10, do_sample=False)
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), want)


def test_minimax_drafts_with_a_linear_layer_first(ids):
    model = tiny_upstream("minimax", layer_types=["linear_attention", "full_attention"])
    use_kernels(model)
    ids = ids.repeat(1, 2)
    options = dict(max_new_tokens=10, do_sample=False)
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), want)


def test_minimax_takes_back_no_more_than_it_recorded(ids):
    model = tiny_upstream("minimax")
    use_kernels(model)
    cache = CroppableMiniMaxCache.made_of(None)
    with torch.no_grad():
        want = model(ids).logits
        model(ids[:, :4], **{CACHE: cache}, use_cache=True)
        cache.activate_past_recording()
        model(ids[:, 4:], **{CACHE: cache}, use_cache=True)
        with pytest.raises(RuntimeError, match="crop.-6. can't be: 5 tokens can be removed"):
            cache.crop(-6)
        cache.crop(-5)
        later = model(ids[:, 4:], **{CACHE: cache}, use_cache=True).logits
    torch.testing.assert_close(later, want[:, 4:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", ["mamba2", "minimax"])
def test_copies_draft_too_and_saved_ones_are_transformers_own(model_type, ids, tmp_path):
    model = tiny_upstream(model_type)
    before = type(model)
    report = use_kernels(model)
    assert isinstance(model, before) and type(model).__name__ == before.__name__
    options = dict(max_new_tokens=5, do_sample=False)
    want = model.generate(ids, **options)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied.generate(ids, prompt_lookup_num_tokens=3, **options), want)
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(saved) is before and saved.config.architectures == [before.__name__]
    report.undo()
    assert type(model) is before


def test_no_output_has_another_name_for_the_cache_unless_it_drafts(ids):
    model = tiny_upstream("mamba2")
    use_kernels(model)
    output = model(ids, use_cache=True)
    assert set(output.keys()) & set(CACHE_NAMES) == {cache_name(model)}
    options = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    plain, drafted = (
        model.generate(ids, **options, **more) for more in ({}, {"prompt_lookup_num_tokens": 3})
    )
    assert torch.equal(plain.sequences, drafted.sequences)
    assert type(plain[CACHE]) is DynamicCache


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba"])
def test_what_generate_takes_is_what_it_took_before(model_type, ids):
    model = tiny_upstream(model_type)
    embeddings = model.get_input_embeddings()(ids)
    options = dict(max_new_tokens=5, do_sample=False)

    def answers():
        """Tokens, or the error, of each way."""
        yield model.generate(inputs_embeds=embeddings, **options).tolist()
        for name in CACHE_NAMES:
            try:
                cache = DynamicCache(config=model.config)
                yield model.generate(ids, **{name: cache}, **options).tolist()
            except ValueError as error:
                yield str(error)

    want = list(answers())
    use_kernels(model)
    assert list(answers()) == want


@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba2"])
def test_undone_they_refuse_drafts_again(model_type, ids):
    model = tiny_upstream(model_type)
    use_kernels(model).undo()
    with pytest.raises(ValueError, match="not supported with stateful models"):
        model.generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=3)
