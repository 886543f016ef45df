# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What generate() can do beyond choosing tokens, with the numbers of a model without a cache."""

import asyncio
import threading

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AsyncTextIteratorStreamer,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
    set_seed,
)

from hf_linear_attention import LinearAttentionCache, StaticLinearAttentionCache
from hf_linear_attention.releases import CACHE
from tiny import (
    NEWER,
    VARIANTS,
    VOCAB_SIZE,
    assert_near,
    random_ids,
    tiny_model,
    tokenizer_of_letters,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = ["paper", "gated", "aaren", "hybrid", "softmax_first", *NEWER]
TWO = ["gated", "hybrid"]  # every kind of state, and of layer
PAD, NEW = 0, 12
TOKENIZER = tokenizer_of_letters("th/he/in/er/an/re/on/at/en/nd/ti/es/or")  # of as many tokens
LENGTHS = (7, 4, 1)


def padded_prompts() -> dict[str, torch.Tensor]:
    T = max(LENGTHS)
    mask = torch.tensor([[0] * (T - n) + [1] * n for n in LENGTHS])
    return {"input_ids": random_ids(len(LENGTHS), T) * mask, "attention_mask": mask}


def generate(model, inputs, seed=0, **kwargs):
    set_seed(seed)
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": PAD,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    return model.generate(**inputs, **{**options, **kwargs})


def whole_text(model, sequences, inputs, **kwargs):
    """What the model says of finished texts, read at once and without a cache."""
    mask = inputs["attention_mask"]
    mask = mask.repeat_interleave(len(sequences) // len(mask), dim=0)
    mask = F.pad(mask, (0, sequences.shape[1] - mask.shape[1]), value=1)
    with torch.no_grad():
        return model(sequences, attention_mask=mask, use_cache=False, **kwargs)


GREEDY_OR_SAMPLED = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "offloaded": {"cache_implementation": "offloaded"},
    "chunks": {"prefill_chunk_size": 3},
    "uncached": {"use_cache": False},
}


@pytest.mark.sample(24)
@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("how", GREEDY_OR_SAMPLED)
def test_logits_scores_and_hidden_states_are_those_of_the_whole_text(variant, how):
    model = tiny_model(**VARIANTS[variant])
    inputs = padded_prompts()
    outputs = generate(model, inputs, output_hidden_states=True, **GREEDY_OR_SAMPLED[how])
    whole = whole_text(model, outputs.sequences, inputs, output_hidden_states=True)
    expected = whole.logits[:, -NEW - 1 : -1].float()
    assert_near(torch.stack(outputs.logits, 1), expected)
    if how == "sampled":  # the default generation config keeps 50 tokens, more than there are
        assert VOCAB_SIZE < 50
    assert_near(torch.stack(outputs.scores, 1), expected)
    for step, layers in enumerate(outputs.hidden_states):
        for states, at_once in zip(layers, whole.hidden_states, strict=True):
            last = at_once.shape[1] - NEW - 1 + step
            assert_near(states[:, -1], at_once[:, last])


def test_attentions_are_those_of_the_whole_text():
    model = tiny_model(dtype=torch.float32, **VARIANTS["softmax_first"])
    model.set_attn_implementation("eager")
    inputs = padded_prompts()
    outputs = generate(model, inputs, output_attentions=True)
    whole = whole_text(model, outputs.sequences, inputs, output_attentions=True)
    for step, layers in enumerate(outputs.attentions):
        for weights, at_once in zip(layers, whole.attentions, strict=True):
            last = at_once.shape[2] - NEW - 1 + step
            seen = min(weights.shape[-1], last + 1)
            assert_near(weights[:, :, -1, -seen:], at_once[:, :, last, last + 1 - seen : last + 1])


@pytest.mark.sample(15)
@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
    ],
    ids=["greedy", "beams", "sampled_beams"],
)
def test_transition_scores_are_the_log_probabilities_of_the_text(variant, how):
    model = tiny_model(**VARIANTS[variant])
    inputs = padded_prompts()
    outputs = generate(model, inputs, **how)
    scores = model.compute_transition_scores(
        outputs.sequences,
        outputs.scores,
        getattr(outputs, "beam_indices", None),
        normalize_logits=not how,  # those of beams are log probabilities
    )
    logits = whole_text(model, outputs.sequences, inputs).logits[:, -NEW - 1 : -1]
    chosen = outputs.sequences[:, -NEW:, None]
    expected = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    assert_near(scores, expected.float())


class OnlyEven(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 1, -torch.inf)


def follows_by_at_most_nine(row, tokens):
    return [(int(tokens[-1]) + i) % VOCAB_SIZE for i in range(1, 10)]


NEGATIVE = {
    "negative_prompt_ids": random_ids(3, 4, seed=1),
    "negative_prompt_attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]),
}
CHOICES = {
    "allowed": {"prefix_allowed_tokens_fn": follows_by_at_most_nine},
    "allowed_beams": {"prefix_allowed_tokens_fn": follows_by_at_most_nine, "num_beams": 3},
    "processor": {"logits_processor": LogitsProcessorList([OnlyEven()])},
    "bad_words": {"bad_words_ids": [[n] for n in range(1, 20)] + [[21, 22], [30, 25]]},
    "bias": {"sequence_bias": [[[25], 4.0], [[25, 30], -8.0]]},
    "ngrams": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "min_new": {"min_new_tokens": 6, "eos_token_id": list(range(1, VOCAB_SIZE, 3))},
    "forced": {"forced_eos_token_id": 5, "suppress_tokens": [3, 4]},
    "guided": {"guidance_scale": 1.5},
    "guided_negative": {"guidance_scale": 3.0, **NEGATIVE},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "synth_id": {
        "do_sample": True,
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 14, 15], ngram_len=3),
    },
    "warped": {"do_sample": True, "temperature": 0.7, "min_p": 0.05, "typical_p": 0.9},
    "top_p": {"do_sample": True, "top_p": 0.8, "epsilon_cutoff": 1e-3, "num_return_sequences": 2},
    "early_beams": {
        "num_beams": 4,
        "early_stopping": True,
        "eos_token_id": [3, 14, 15],
        "num_return_sequences": 4,
    },
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("variant", TWO)
@pytest.mark.parametrize("how", CHOICES)
def test_constraints_and_guidance_give_the_scores_they_give_without_a_cache(variant, how):
    model = tiny_model(**VARIANTS[variant])
    cached = generate(model, padded_prompts(), **CHOICES[how])
    uncached = generate(model, padded_prompts(), use_cache=False, **CHOICES[how])
    assert cached.sequences.tolist() == uncached.sequences.tolist()
    for ours, expected in zip(cached.scores, uncached.scores, strict=True):
        assert_near(ours, expected)


@pytest.mark.parametrize("how", CHOICES)
def test_these_constraints_change_the_tokens(how):
    model = tiny_model()
    options = {name: CHOICES[how].get(name, 1) for name in ("num_beams", "num_return_sequences")}
    options["do_sample"] = CHOICES[how].get("do_sample", False)
    plain = generate(model, padded_prompts(), top_k=0, **options)
    assert (
        generate(model, padded_prompts(), **CHOICES[how]).sequences.tolist()
        != plain.sequences.tolist()
    )


@pytest.mark.parametrize("variant", TWO)
@pytest.mark.parametrize("how", ["allowed", "processor", "bad_words", "ngrams", "min_new"])
def test_drafts_obey_constraints(variant, how):
    model = tiny_model(**VARIANTS[variant])
    inputs = {"input_ids": random_ids(1, 5).repeat(1, 2)}
    plain = generate(model, inputs, **CHOICES[how])
    drafted = generate(model, inputs, prompt_lookup_num_tokens=4, **CHOICES[how])
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert_near(torch.cat(drafted.scores), torch.cat(plain.scores))


def contrastive_search(model, input_ids, stopping_criteria, **kwargs):
    """Of arXiv 2202.06417, as users pass their own search to generate(): each of the likeliest
    tokens is tried, and that one kept which is likely and unlike what came before.
    """
    cache, mask = kwargs.get(CACHE), kwargs["attention_mask"]
    B, T = input_ids.shape
    top_k, hidden = 4, None
    while True:
        if hidden is None or cache is None:
            outputs = model(
                input_ids, attention_mask=mask, past_key_values=cache, output_hidden_states=True
            )
            hidden, logits = outputs.hidden_states[-1], outputs.logits[:, -1]
        probabilities, candidates = logits.softmax(-1).topk(top_k)
        texts = input_ids.repeat_interleave(top_k, 0)
        texts = torch.cat([texts, candidates.view(-1, 1)], 1)
        mask = F.pad(mask, (0, 1), value=1)
        if cache is not None:
            cache.batch_repeat_interleave(top_k)
        outputs = model(
            texts if cache is None else texts[:, -1:],
            attention_mask=mask.repeat_interleave(top_k, 0),
            past_key_values=cache,
            output_hidden_states=True,
        )
        new = outputs.hidden_states[-1][:, -1].view(B, top_k, -1)
        likeness = torch.cosine_similarity(new[:, :, None], hidden[:, None], dim=-1)
        likeness = likeness.masked_fill(mask[:, None, :-1] == 0, -1).amax(-1)
        best = (0.4 * probabilities - 0.6 * likeness).argmax(-1)
        rows = torch.arange(B) * top_k + best
        if cache is not None:
            cache.batch_select_indices(rows)
        input_ids, logits = texts[rows], outputs.logits[rows, -1]
        hidden = torch.cat([hidden, new[torch.arange(B), best][:, None]], 1)
        if stopping_criteria(input_ids, None).all():
            return input_ids, hidden[:, T:]


@pytest.mark.parametrize("variant", TWO)
def test_a_search_of_one_s_own_moves_the_rows_of_the_cache(variant):
    model = tiny_model(**VARIANTS[variant])
    options = {"custom_generate": contrastive_search, "return_dict_in_generate": False}
    sequences, hidden = generate(model, padded_prompts(), **options)
    expected, _ = generate(model, padded_prompts(), use_cache=False, **options)
    assert sequences.tolist() == expected.tolist()
    whole = whole_text(model, sequences, padded_prompts(), output_hidden_states=True)
    assert_near(hidden, whole.hidden_states[-1][:, -NEW:])


@pytest.mark.parametrize("variant", TWO)
def test_a_process_that_ended_runs_on_for_the_others(variant, monkeypatch):
    model = tiny_model(**VARIANTS[variant])
    expected = generate(model, padded_prompts(), max_new_tokens=3)
    others = iter([1.0] * 8 + [0.0])  # unfinished sequences elsewhere
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flag, op: flag.fill_(next(others)))
    outputs = generate(model, padded_prompts(), max_new_tokens=3, synced_gpus=True)
    assert list(others) == []
    assert outputs.sequences.tolist() == expected.sequences.tolist()
    assert_near(torch.cat(outputs.logits), torch.cat(expected.logits))


# prompts


EMBEDDED = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sequences": {"do_sample": True, "num_return_sequences": 2},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "without_cache": {"use_cache": False},
    "chunks": {"prefill_chunk_size": 3},
}


@pytest.mark.parametrize("variant", TWO)
@pytest.mark.parametrize("how", EMBEDDED)
@pytest.mark.parametrize("with_ids", [False, True])
def test_embeddings_are_read_in_place_of_tokens(variant, how, with_ids):
    model = tiny_model(**VARIANTS[variant])
    inputs = padded_prompts()
    from_ids = generate(model, inputs, **EMBEDDED[how])
    embedded = {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    if with_ids:
        embedded["input_ids"] = inputs["input_ids"]
    outputs = generate(model, embedded, **EMBEDDED[how])
    assert outputs.sequences[:, -NEW:].tolist() == from_ids.sequences[:, -NEW:].tolist()
    assert_near(torch.cat(outputs.scores), torch.cat(from_ids.scores))


@pytest.mark.parametrize("variant", TWO)
@pytest.mark.parametrize("static", [False, True])
def test_a_cache_of_upstream_s_classes_is_filled(variant, static):
    model = tiny_model(**VARIANTS[variant])
    cache = DynamicCache(config=model.config)
    if static:
        cache = StaticCache(config=model.config, max_cache_len=max(LENGTHS) + NEW)
    outputs = generate(model, padded_prompts(), past_key_values=cache)
    assert outputs.past_key_values is cache and cache.get_seq_length() == max(LENGTHS) + NEW - 1
    expected = generate(model, padded_prompts())
    assert outputs.sequences.tolist() == expected.sequences.tolist()
    assert_near(torch.cat(outputs.logits), torch.cat(expected.logits))


def read_but_two(model, ids, copies=1, max_cache_len=None):
    cache = LinearAttentionCache(model.config)
    if max_cache_len is not None:
        cache = StaticLinearAttentionCache(model.config, max_cache_len)
    with torch.no_grad():
        model(ids[:, :-2], past_key_values=cache)
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return cache


@pytest.mark.parametrize("variant", TWO)
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(
    "how",
    [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}],
    ids=["beams", "sequences"],
)
def test_a_cache_continues_for_several_texts(variant, copies, how):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(2, 6)
    expected = generate(model, {"input_ids": ids}, **how)
    cache = read_but_two(model, ids, copies)
    outputs = generate(model, {"input_ids": ids}, past_key_values=cache, **how)
    assert outputs.sequences.tolist() == expected.sequences.tolist()
    assert_near(torch.cat(outputs.scores), torch.cat(expected.scores))


# the end


class FiveTokens(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 12)


STOPS = {  # by the tokens that would come in the first two rows
    "time": lambda tokens: {"max_time": 0.0},
    "criteria": lambda tokens: {"stopping_criteria": StoppingCriteriaList([FiveTokens()])},
    "strings": lambda tokens: {
        "stop_strings": [TOKENIZER.decode(token) for token in tokens[:, 4]],
        "tokenizer": TOKENIZER,
        "eos_token_id": VOCAB_SIZE - 1,  # without one, ended rows are not padded
    },
    "tokens": lambda tokens: {"eos_token_id": tokens[:, 4].tolist()},
}


@pytest.mark.parametrize("variant", TWO)
@pytest.mark.parametrize("how", STOPS)
def test_rows_end_where_they_should_and_leave_the_others_alone(variant, how):
    model = tiny_model(**VARIANTS[variant])
    plain = generate(model, padded_prompts()).sequences
    stops = STOPS[how](plain[:2, max(LENGTHS) :])
    stopped = generate(model, padded_prompts(), **stops)
    whole = whole_text(model, stopped.sequences, padded_prompts()).logits
    T = stopped.sequences.shape[1]
    assert T < plain.shape[1] or (stopped.sequences[:, -1] == PAD).any()
    for row, tokens in enumerate(stopped.sequences):
        ends = (tokens[max(LENGTHS) :] == PAD).nonzero()
        end = max(LENGTHS) + int(ends[0]) if len(ends) else T
        assert tokens[:end].tolist() == plain[row, :end].tolist()
    steps = T - max(LENGTHS)
    assert_near(torch.stack(stopped.logits, 1), whole[:, -steps - 1 : -1].float())
    assert stopped.past_key_values.get_seq_length() == T - 1


# while it runs


def printed(model, ids, options, capsys):
    model.generate(ids, streamer=TextStreamer(TOKENIZER, skip_prompt=True), **options)
    return capsys.readouterr().out.removesuffix("\n")


def iterated(model, ids, options, capsys):
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60)
    thread = threading.Thread(
        target=model.generate, args=(ids,), kwargs={**options, "streamer": streamer}
    )
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert len(pieces) > 5
    return "".join(pieces)


def awaited(model, ids, options, capsys):
    async def collect():
        streamer = AsyncTextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60)
        thread = threading.Thread(
            target=model.generate, args=(ids,), kwargs={**options, "streamer": streamer}
        )
        thread.start()
        pieces = [piece async for piece in streamer]
        thread.join()
        return "".join(pieces)

    return asyncio.run(collect())


@pytest.mark.parametrize("variant", TWO)
@pytest.mark.parametrize("read", [printed, iterated, awaited])
@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 3}], ids=["plain", "drafts"])
def test_streamers(variant, read, drafts, capsys):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(1, 5).repeat(1, 2)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    expected = TOKENIZER.decode(model.generate(ids, **options)[0, 10:])
    assert read(model, ids, {**options, **drafts}, capsys) == expected


# what Transformers would do wrong, or can't


GUIDANCE = "guidance_scale must be None or 1 .* got 2.0"
REFUSED = {
    "guided_beams": (
        {"guidance_scale": 2.0, "num_beams": 2},
        "guidance_scale must be None or 1 .*2.0",
    ),
    "guided_drafts": (
        {"guidance_scale": 2.0, "prompt_lookup_num_tokens": 2},
        "guidance_scale must be None or 1 .*2.0",
    ),
    "quantized": ({"cache_implementation": "quantized"}, "cache_implementation must be one of"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_would_give_other_tokens_is_refused(how):
    options, message = REFUSED[how]
    with pytest.raises(ValueError, match=message):
        generate(tiny_model(), {"input_ids": random_ids(1, 5)}, **options)


@pytest.mark.parametrize(("rows", "max_cache_len"), [(2, None), (1, 40)], ids=["other", "static"])
def test_a_cache_of_other_rows_is_refused(rows, max_cache_len):
    model = tiny_model()
    cache = read_but_two(model, random_ids(rows, 5), max_cache_len=max_cache_len)
    message = f"{CACHE} must have 3 rows, or 1 if it is not static, as .*, got {rows}"
    with pytest.raises(ValueError, match=message):
        generate(model, {"input_ids": random_ids(1, 5)}, past_key_values=cache, num_beams=3)


@pytest.mark.parametrize("variant", TWO)
def test_an_error_while_first_layers_draft_leaves_the_model_whole(variant):
    class Failing(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls == 2:  # of a draft
                raise InterruptedError
            return scores

    model, inputs = tiny_model(**VARIANTS[variant]), {"input_ids": random_ids(1, 7)}
    expected = generate(model, inputs).sequences
    with pytest.raises(InterruptedError):
        generate(
            model,
            inputs,
            assistant_early_exit=1,
            logits_processor=LogitsProcessorList([Failing()]),
        )
    assert torch.equal(generate(model, inputs).sequences, expected)
