# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""For whoever branches on Transformers' cache classes, ours are what they derive from."""

import json

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from transformers import (
    CompileConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from hf_linear_attention import LinearAttentionCache, StaticLinearAttentionCache
from hf_linear_attention.releases import CACHE
from saved_models import WITHOUT_PACKAGE, run
from tiny import NEWER, VARIANTS, random_ids, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SOFTMAX = {"layer_types": ["full_attention"] * 3}
MODELS = {
    **{
        name: VARIANTS[name]
        for name in ("paper", "gated", "aaren", "hybrid", "softmax_first", *NEWER)
    },
    "cross": {"add_cross_attention": True},
    "only_softmax": SOFTMAX,
}
DYNAMIC, STATIC = (DynamicCache, LinearAttentionCache), (StaticCache, StaticLinearAttentionCache)
IMPLEMENTATIONS = {
    None: DYNAMIC,
    "dynamic": DYNAMIC,
    "offloaded": DYNAMIC,
    "static": STATIC,
    "offloaded_static": STATIC,
}
LENGTH, NEW = 7, 3


def generate(model, **options):
    return model.generate(
        random_ids(2, LENGTH),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_attentions=True,
        **options,
    )


@pytest.mark.parametrize("variant", MODELS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_generate_makes_caches_of_transformers_classes(variant, implementation):
    base, own = IMPLEMENTATIONS[implementation]
    model = tiny_model(**MODELS[variant])
    cache = generate(model, cache_implementation=implementation).past_key_values
    assert type(cache) is own and isinstance(cache, base)
    assert isinstance(cache, DynamicCache) != isinstance(cache, StaticCache)
    assert cache.get_seq_length() == LENGTH + NEW - 1


@pytest.mark.parametrize("variant", MODELS)
def test_a_forward_makes_a_dynamic_cache(variant):
    model = tiny_model(**MODELS[variant])
    assert type(model(random_ids(1, 3)).past_key_values) is LinearAttentionCache


@pytest.mark.parametrize("variant", MODELS)
def test_only_the_static_cache_is_compiled_without_being_asked(variant):
    """As generate() decides it on a GPU."""
    model = tiny_model(**MODELS[variant])
    generation_config = GenerationConfig(compile_config=CompileConfig())
    generation_config.compile_config._compile_all_devices = True
    caches = {
        True: StaticLinearAttentionCache(model.config, max_cache_len=9),
        False: LinearAttentionCache(model.config),
    }
    for expected, cache in caches.items():
        for given in (cache, EncoderDecoderCache(cache, DynamicCache())):
            kwargs = {CACHE: given}
            assert model._valid_auto_compile_criteria(kwargs, generation_config) == expected


def llama() -> LlamaForCausalLM:
    """With the softmax layers of tiny_model."""
    sizes = tiny_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = LlamaConfig(**{name: sizes[name] for name in (*names, "num_attention_heads")})
    config.bos_token_id = config.eos_token_id = None
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).eval()


def shapes(attentions) -> list[list[tuple[int, ...]]]:
    return [[tuple(layer.shape) for layer in step] for step in attentions]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "max_cache_len": 13},
        {"cache_implementation": "static", "num_beams": 2},
        {"cache_implementation": "static", "prefill_chunk_size": 3},
        {"num_beams": 2},
        {"use_cache": False},
    ],
    ids=str,
)
def test_attention_maps_are_as_long_as_those_of_llama(options):
    expected = shapes(generate(llama(), **options).attentions)
    model = tiny_model(**SOFTMAX, attn_implementation="eager")
    assert shapes(generate(model, **options).attentions) == expected
    hybrid = tiny_model(
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        attn_implementation="eager",
    )
    of_the_softmax_layer = [step[:1] for step in expected]
    assert shapes(generate(hybrid, **options).attentions) == of_the_softmax_layer


@pytest.mark.parametrize("variant", ["hybrid", "softmax_first", "only_softmax"])
def test_attention_maps_with_a_static_cache_have_its_length(variant):
    """By the rule of Transformers' own tests: isinstance(..., StaticCache), and its length."""
    model = tiny_model(**MODELS[variant], attn_implementation="eager")
    longer = generate(model, cache_implementation="static", max_cache_len=15)
    later = generate(model, cache_implementation="static")  # not compiled again: as long
    for outputs in (longer, later):
        assert outputs.past_key_values.get_max_length() == 15
        for step in outputs.attentions:
            assert {layer.shape[-1] for layer in step} == {15}


def test_states_have_no_maximum_length():
    cache = StaticLinearAttentionCache(tiny_config(), max_cache_len=9)
    assert cache.get_max_length() == LinearAttentionCache(tiny_config()).get_max_length() == -1


@pytest.mark.parametrize("variant", ["paper", "only_softmax"])
def test_drafts_refuse_a_static_cache(variant):
    model = tiny_model(**MODELS[variant])
    cache = StaticLinearAttentionCache(model.config, max_cache_len=20)
    with pytest.raises(RuntimeError, match="a static cache takes no tokens back"):
        model.generate(random_ids(1, 5), past_key_values=cache, prompt_lookup_num_tokens=2)


def test_rows_of_an_encoder_decoder_cache_move():
    """Transformers allows this for DynamicCaches only."""
    model = tiny_model(**VARIANTS["hybrid"])
    cache = LinearAttentionCache(model.config)
    both = EncoderDecoderCache(cache, DynamicCache())
    ids = random_ids(2, 6)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=both)
        both.activate_past_recording()
        model(ids[:, 4:], past_key_values=both)
        both.crop(-2)
        both.batch_repeat_interleave(2)
        both.batch_select_indices(torch.tensor([3]))
        logits = model(ids[1:, 4:], past_key_values=both).logits
        torch.testing.assert_close(logits, model(ids[1:]).logits[:, 4:], rtol=1e-4, atol=1e-4)


REMOTE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
found = []
for implementation in json.loads(sys.argv[2]):
    cache = model.generate(
        torch.tensor([[3, 1, 4, 1, 5, 9, 2]]), max_new_tokens=3, return_dict_in_generate=True,
        cache_implementation=implementation, output_attentions=True,
    ).past_key_values
    bases = [isinstance(cache, DynamicCache), isinstance(cache, StaticCache)]
    found.append([type(cache).__name__, *bases])
print(json.dumps(found))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", ["gated", "hybrid"])
def test_remote_code_makes_caches_of_transformers_classes(variant, tmp_path):
    tiny_model(**VARIANTS[variant]).save_pretrained(tmp_path / "saved")
    names = json.dumps(list(IMPLEMENTATIONS))
    script = WITHOUT_PACKAGE + REMOTE
    found = run(script, tmp_path / "saved", names, modules=tmp_path)
    assert found == [
        [own.__name__, base is DynamicCache, base is StaticCache]
        for base, own in IMPLEMENTATIONS.values()
    ]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_cache_of_another_batch_is_refused_in_words(name):
    model = tiny_model(**MODELS[name])
    memory = {}
    if model.config.add_cross_attention:
        memory["encoder_hidden_states"] = torch.zeros(3, 2, 32).double()
    cache = model(random_ids(3, LENGTH), **memory)[CACHE]
    memory = {name: x[:2] for name, x in memory.items()}
    for length in (1, NEW):
        with pytest.raises(ValueError, match=f"{CACHE} must have .* a batch of 2, got one of 3"):
            model(random_ids(2, length), **{CACHE: cache}, **memory)
    prompts = random_ids(2, LENGTH + 1)
    with pytest.raises(ValueError, match=f"{CACHE} must have 2 rows, as the prompts' batch says"):
        model.generate(prompts, **{CACHE: cache}, max_new_tokens=NEW, **memory)


@pytest.mark.parametrize("name", ["hybrid", "softmax_first", "only_softmax"])
@torch.no_grad()
def test_a_static_cache_that_is_too_short_says_so(name):
    model = tiny_model(**MODELS[name])
    for make in (StaticLinearAttentionCache, StaticCache):
        cache = make(config=model.config, max_cache_len=LENGTH)
        model(random_ids(1, LENGTH), **{CACHE: cache})
        for length in (1, NEW):
            with pytest.raises(ValueError, match=f"{CACHE} must .* {LENGTH}, is given {length} "):
                model(random_ids(1, length), **{CACHE: cache})


@torch.no_grad()
def test_keys_and_values_that_others_made_are_refused_in_words():
    for name in ("paper", "hybrid"):
        model = tiny_model(dtype=torch.float32, **MODELS[name])
        sizes = {"num_layers": 3, "token_dim": 32, "num_attention_heads": 4}
        config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, **sizes)
        adapted = get_peft_model(model, config)
        with pytest.raises(ValueError, match=f"{CACHE} must be .* prefix tuning"):
            adapted(random_ids(1, LENGTH))
