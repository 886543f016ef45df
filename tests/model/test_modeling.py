# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The model and its heads: every way of giving it the same tokens gives the same numbers."""

import functools
import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    LinearAttentionForMaskedLM,
    LinearAttentionForQuestionAnswering,
    LinearAttentionForSequenceClassification,
    LinearAttentionForTokenClassification,
    LinearAttentionModel,
)
from hf_linear_attention.fast.sinusoids import sinusoidal_positions
from hf_linear_attention.ops import backends
from hf_linear_attention.releases import CACHE
from tiny import (
    HYBRID,
    NEWER,
    VARIANTS,
    VOCAB_SIZE,
    assert_near,
    over_variants,
    random_ids,
    tiny_config,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = ["paper", "gated", "hybrid", "softmax_first", "learned", *NEWER]
BIDIRECTIONAL = {
    "paper": {},
    "conv": {"conv_kernel_size": 3, "feature_map": "hedgehog", "num_key_value_heads": 2},
    "hybrid": {"layer_types": HYBRID, "sliding_window": 5, "position_embedding_type": "rotary"},
}


def logits_of(model, input_ids, **kwargs):
    with torch.no_grad():
        return model(input_ids, **kwargs).logits


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Cutting


@over_variants(SOME, "cuts", [(5, 1, 3), (1,) * 9, (4, 5), (1, 8)])
def test_any_cut_equals_the_whole(variant, cuts):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(2, 9)
    cache, pieces = None, []
    for piece in ids.split(cuts, dim=1):
        with torch.no_grad():
            outputs = model(piece, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        pieces.append(outputs.logits)
    assert_near(torch.cat(pieces, 1), logits_of(model, ids))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
@pytest.mark.parametrize("variant", ["paper", "gated", "preset_gated_deltanet"])
def test_nothing_to_read(variant, shape):
    model = tiny_model(**VARIANTS[variant])
    assert logits_of(model, random_ids(*shape)).shape == (*shape, VOCAB_SIZE)


@pytest.mark.parametrize("variant", ["paper", "gated", "preset_gated_deltanet"])
def test_nothing_new_to_read_leaves_the_cache_alone(variant):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(2, 6)
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
        model(ids[:, :0], attention_mask=torch.ones(2, 4), past_key_values=cache)
        assert cache.get_seq_length() == 4
        rest = model(ids[:, 4:], past_key_values=cache).logits
    assert_near(rest, logits_of(model, ids)[:, 4:])


# Padding

MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0]],
    "middle": [[1, 0, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]],
    "everywhere": [[0, 1, 1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 1]],
}


@pytest.mark.parametrize(
    ("variant", "side"),
    [
        (variant, side)
        for variant in VARIANTS
        for side in MASKS
        # Transformers' sliding window counts the padding in the middle
        if side in ("left", "right") or "sliding_window" not in VARIANTS[variant]
    ],
)
def test_padded_equals_unpadded(variant, side):
    model = tiny_model(**VARIANTS[variant])
    ids, mask = random_ids(2, 8), torch.tensor(MASKS[side])
    padded = logits_of(model, ids, attention_mask=mask)
    for row in range(2):
        real = mask[row].bool()
        assert_near(padded[row, real], logits_of(model, ids[row, real][None])[0])


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("cuts", [(1,) * 8, (3, 5), (6, 1, 1)])
def test_padded_and_cut_equals_padded(variant, cuts):
    model = tiny_model(**VARIANTS[variant])
    ids, mask = random_ids(2, 8), torch.tensor(MASKS["left"])
    whole = logits_of(model, ids, attention_mask=mask)
    cache, end = None, 0
    for piece in ids.split(cuts, dim=1):
        end += piece.shape[1]
        with torch.no_grad():
            outputs = model(
                piece, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True
            )
        cache = outputs.past_key_values
        real = mask[:, end - piece.shape[1] : end].bool()
        assert_near(outputs.logits[real], whole[:, end - piece.shape[1] : end][real])


@pytest.mark.parametrize("variant", ["paper", "gated", "preset_gated_deltanet"])
def test_padding_one_by_one_changes_nothing(variant):
    model = tiny_model(**VARIANTS[variant])
    ids, mask = random_ids(2, 8), torch.tensor(MASKS["everywhere"])
    cache = None
    for t in range(8):
        with torch.no_grad():
            outputs = model(
                ids[:, t : t + 1],
                attention_mask=mask[:, : t + 1],
                past_key_values=cache,
                use_cache=True,
            )
        cache = outputs.past_key_values
        for row in range(2):
            if mask[row, t]:
                real = ids[row, : t + 1][mask[row, : t + 1].bool()][None]
                assert_near(outputs.logits[row, 0], logits_of(model, real)[0, -1])


def test_a_mask_of_the_new_tokens_alone_counts_the_cached_as_real():
    model = tiny_model(**VARIANTS["hybrid"])
    ids = random_ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 7:] = 0
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
        new = model(ids[:, 5:], attention_mask=mask[:, 5:], past_key_values=cache).logits
    real = mask.bool()
    expected = logits_of(model, ids, attention_mask=mask)
    assert_near(new[real[:, 5:]], expected[:, 5:][real[:, 5:]])


@pytest.mark.parametrize("variant", ["paper", "gated", "hybrid"])
def test_what_padding_holds_reaches_nothing(variant):
    model = tiny_model(**VARIANTS[variant])
    mask = torch.tensor(MASKS["left"])
    embeddings = model.get_input_embeddings()(random_ids(2, 8)).detach()
    labels = random_ids(2, 8).masked_fill(mask == 0, -100)
    poisoned = embeddings.masked_fill(mask[..., None] == 0, float("nan"))

    def run(inputs_embeds):
        return model(inputs_embeds=inputs_embeds, attention_mask=mask, labels=labels).loss

    expected = gradients_of(model, run(embeddings))
    for name, gradient in gradients_of(model, run(poisoned)).items():
        assert_near(gradient, expected[name])


@pytest.mark.parametrize("shape", [(2, 7), (2, 9), (1, 8), (16,), (2, 8, 1)])
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        logits_of(tiny_model(), random_ids(2, 8), attention_mask=torch.ones(shape))


def four_dimensions(mask, dtype):
    visible = mask[:, None, None, :].bool() & torch.ones(8, 8, dtype=torch.bool).tril()
    if dtype == torch.bool:
        return visible
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


@pytest.mark.parametrize("layer_type", ["linear_attention", "full_attention"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_a_mask_of_four_dimensions_that_hides_padding_and_the_future(layer_type, dtype):
    layer_types = ["linear_attention", layer_type, "linear_attention"]
    model = tiny_model(layer_types=layer_types, conv_kernel_size=3)
    ids, mask = random_ids(2, 8), torch.tensor(MASKS["right"])
    expected = logits_of(model, ids, attention_mask=mask)[mask.bool()]
    four = four_dimensions(mask, dtype)
    by_type = {"linear_attention": mask, "full_attention": four}
    positions = torch.arange(8)[None]  # which no such mask tells
    for given in (four, by_type):
        actual = logits_of(model, ids, attention_mask=given, position_ids=positions)
        assert_near(actual[mask.bool()], expected)


@pytest.mark.parametrize("layer_type", ["linear_attention", "full_attention"])
def test_a_mask_of_four_dimensions_of_one_row_is_that_of_all(layer_type):
    layer_types = ["linear_attention", layer_type, "linear_attention"]
    model = tiny_model(layer_types=layer_types, conv_kernel_size=3)
    ids, positions = random_ids(2, 8), torch.arange(8)[None]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]])
    one = four_dimensions(mask, torch.bool)
    actual = logits_of(model, ids, attention_mask=one, position_ids=positions)
    expected = logits_of(model, ids, attention_mask=mask.expand(2, 8), position_ids=positions)
    assert_near(actual[:, 2:7], expected[:, 2:7])


@pytest.mark.parametrize("shape", [(3, 1, 8, 8), (2, 1, 1, 8), (2, 1, 8, 5)])
def test_a_mask_of_four_dimensions_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"attention_mask with 4 dim.* shape \(B or 1, 1, T"):
        logits_of(tiny_model(), random_ids(2, 8), attention_mask=torch.ones(shape).bool())


def test_a_mask_of_four_dimensions_that_hides_more_is_refused():
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    mask[..., 5, 2] = False
    with pytest.raises(ValueError, match="4 dimensions must hide only padding and the future"):
        logits_of(tiny_model(), random_ids(1, 8), attention_mask=mask)


def test_a_dict_of_masks_must_be_complete():
    mask = torch.ones(2, 8)
    with pytest.raises(ValueError, match="has no {'full_attention'}"):
        logits_of(
            tiny_model(layer_types=["linear_attention", "full_attention", "linear_attention"]),
            random_ids(2, 8),
            attention_mask={"linear_attention": mask},
        )


# Packing

HOW_PACKED = ("position_ids", "cu_seq_lens_q", "seq_idx")
LENGTHS = {1: (3, 1, 5, 3), 3: (3, 1, 4, 2, 2)}  # of the sequences in so many rows of 12 tokens


def pack(how, rows):
    """ids (rows, 12 / rows), the bounds of the sequences in them, and the argument that says so."""
    lengths = LENGTHS[rows]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    values = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).view(rows, -1),
        "cu_seq_lens_q": bounds.to(torch.int32),
        "seq_idx": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
    }
    values["seq_idx"] = values["seq_idx"].to(torch.int32).view(rows, -1)
    return random_ids(rows, 12 // rows), bounds.tolist(), {how: values[how]}


@pytest.mark.sample(17)
@over_variants(
    SOME, "said", itertools.product(["position_ids", "cu_seq_lens_q", "seq_idx"], LENGTHS)
)
def test_packed_equals_separate(variant, said):
    how, rows = said
    model = tiny_model(**VARIANTS[variant])
    ids, bounds, packing = pack(how, rows)
    labels = ids.flatten().clone()
    labels[bounds[:-1]] = -100  # nothing comes before the first token of a sequence
    packed = model(ids, labels=labels.view(rows, -1), **packing)
    packed_gradients = gradients_of(model, packed.loss)

    sequences = [ids.flatten()[i:j] for i, j in zip(bounds[:-1], bounds[1:], strict=True)]
    separate = [model(sequence[None]).logits[0] for sequence in sequences]
    assert_near(packed.logits.flatten(0, 1), torch.cat(separate))
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], sequence[1:], reduction="sum")
        for logits, sequence in zip(separate, sequences, strict=True)
    ]
    loss = sum(losses) / (12 - len(sequences))
    assert_near(packed.loss.double(), loss)
    for name, gradient in gradients_of(model, loss).items():
        assert_near(packed_gradients[name], gradient)


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize(
    "options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}]
)
def test_what_the_collator_packs(variant, options):
    model = tiny_model(**VARIANTS[variant])
    sequences = [random_ids(n, seed=n) for n in (4, 2, 6)]
    collate = DataCollatorWithFlattening(return_tensors="pt", **options)
    batch = collate([{"input_ids": sequence.tolist()} for sequence in sequences])
    separate = [logits_of(model, sequence[None])[0] for sequence in sequences]
    assert_near(logits_of(model, **batch)[0], torch.cat(separate))
    assert model(**batch, use_cache=True).past_key_values is None


def test_positions_of_packed_sequences_may_be_anything():
    model = tiny_model(layer_types=HYBRID, sliding_window=5, position_embedding_type="learned")
    ids, bounds, packing = pack("cu_seq_lens_q", 1)
    positions = torch.arange(12)[None]  # as if one sequence
    packed = logits_of(model, ids, position_ids=positions, **packing)
    for i, j in zip(bounds[:-1], bounds[1:], strict=True):
        alone = logits_of(model, ids[:, i:j], position_ids=positions[:, i:j])
        assert_near(packed[:, i:j], alone)


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens_q", "seq_idx"])
def test_packed_sequences_take_no_cache(how):
    model = tiny_model()
    cache = model(random_ids(1, 2), use_cache=True).past_key_values
    ids, _, packing = pack(how, 1)
    with pytest.raises(ValueError, match=f"{CACHE} must be None with packed sequences"):
        model(ids, past_key_values=cache, **packing)


def test_packed_sequences_hold_no_padding():
    ids, _, packing = pack("cu_seq_lens_q", 1)
    mask = torch.ones_like(ids)
    model = tiny_model(**VARIANTS["hybrid"])
    assert_near(
        logits_of(model, ids, attention_mask=mask, **packing), logits_of(model, ids, **packing)
    )
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="attention_mask must hide nothing"):
        logits_of(model, ids, attention_mask=mask, **packing)


@pytest.mark.parametrize(
    "name, given",
    [
        ("cu_seq_lens_q", torch.zeros(0, dtype=torch.int32)),
        ("cu_seq_lens_q", torch.tensor([[0, 12]], dtype=torch.int32)),
        ("position_ids", torch.arange(12)),
        ("seq_idx", torch.zeros(12, dtype=torch.int32)),
    ],
)
def test_packing_of_another_shape_is_refused(name, given):
    with pytest.raises(ValueError, match=rf"{name} must be a tensor \(.* got \("):
        tiny_model()(random_ids(1, 12), **{name: given})


@pytest.mark.parametrize("bounds", [[0, 4, 11], [0, 4, 13], [1, 12], [0, 7, 5, 12]])
def test_bounds_must_cover_the_batch(bounds):
    with pytest.raises(ValueError, match="cu_seq_lens_q must rise from 0 to B T = 12 "):
        logits_of(tiny_model(), random_ids(1, 12), cu_seq_lens_q=torch.tensor(bounds))


# Both directions


@pytest.mark.parametrize("variant", BIDIRECTIONAL)
def test_without_causality_every_token_is_seen(variant):
    model = tiny_model(LinearAttentionModel, is_causal=False, **BIDIRECTIONAL[variant])
    ids = random_ids(1, 4)
    changed = ids.clone()
    changed[0, 3] += 1
    outputs = [model(x).last_hidden_state[0, 0] for x in (ids, changed)]
    assert (outputs[0] - outputs[1]).abs().max() > 0.01
    assert model(ids, use_cache=True).past_key_values is None


@pytest.mark.parametrize("variant", BIDIRECTIONAL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_unpadded_in_both_directions(variant, side):
    model = tiny_model(LinearAttentionModel, is_causal=False, **BIDIRECTIONAL[variant])
    ids, mask = random_ids(2, 8), torch.tensor(MASKS[side])
    padded = model(ids, attention_mask=mask).last_hidden_state
    for row in range(2):
        real = mask[row].bool()
        assert_near(padded[row, real], model(ids[row, real][None]).last_hidden_state[0])


@pytest.mark.parametrize("variant", BIDIRECTIONAL)
def test_packed_equals_separate_in_both_directions(variant):
    model = tiny_model(LinearAttentionModel, is_causal=False, **BIDIRECTIONAL[variant])
    ids, bounds, packing = pack("position_ids", 1)
    packed = model(ids, **packing).last_hidden_state
    for i, j in zip(bounds[:-1], bounds[1:], strict=True):
        assert_near(packed[:, i:j], model(ids[:, i:j]).last_hidden_state)


@pytest.mark.parametrize("variant", BIDIRECTIONAL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_masked_language_model_is_exact_under_padding(variant, side, tmp_path):
    model = tiny_model(
        LinearAttentionForMaskedLM,
        dtype=torch.float32,
        is_causal=False,
        tie_word_embeddings=True,
        **BIDIRECTIONAL[variant],
    )
    ids, mask = random_ids(2, 8), torch.tensor(MASKS[side])
    padded = logits_of(model, ids, attention_mask=mask)
    for row in range(2):
        real = mask[row].bool()
        assert_near(padded[row, real], logits_of(model, ids[row, real][None])[0], 1e-3)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is LinearAttentionForMaskedLM
    assert torch.equal(logits_of(loaded, ids, attention_mask=mask), padded)


def test_the_loss_of_a_masked_language_model_is_of_the_hidden_tokens_alone():
    model = tiny_model(LinearAttentionForMaskedLM, is_causal=False)
    ids = random_ids(2, 8)
    hidden = torch.tensor([[0, 1, 0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0, 0]]).bool()
    outputs = model(ids.masked_fill(hidden, 1), labels=ids.masked_fill(~hidden, -100))
    expected = torch.nn.functional.cross_entropy(outputs.logits[hidden], ids[hidden])
    assert_near(outputs.loss, expected)
    outputs.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_masked_language_model_learns_what_comes_later():
    torch.manual_seed(0)
    ids = torch.randint(1, 8, (64, 1)).expand(64, 6)  # seven words, each six times
    hidden = torch.tensor([True, True, True, True, True, False]).expand(ids.shape)
    labels = ids.masked_fill(~hidden, -100)
    model = tiny_model(
        LinearAttentionForMaskedLM, torch.float32, initializer_range=0.1, is_causal=False
    ).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(30):
        loss = model(ids.masked_fill(hidden, 8), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.2  # log 7 = 1.95 without the last token


def test_the_cost_of_both_directions_is_linear(monkeypatch):
    monkeypatch.setattr(backends, "FORCED_BACKEND", "chunked")
    model = tiny_model(LinearAttentionForMaskedLM, torch.float32, is_causal=False)
    flops = []
    for length in (500, 1000):
        with FlopCounterMode(display=False) as counter:
            logits_of(model, random_ids(1, length))
        flops.append(counter.get_total_flops())
    assert flops[1] < 2.01 * flops[0]


def test_a_masked_language_model_is_not_causal():
    with pytest.raises(ValueError, match="is_causal=False, got is_causal=True"):
        LinearAttentionForMaskedLM(tiny_config())


def test_a_language_model_is_causal():
    with pytest.raises(ValueError, match="is_causal=True, got is_causal=False"):
        LinearAttentionForCausalLM(tiny_config(is_causal=False))
    model = tiny_model(LinearAttentionModel)
    cache = model(random_ids(1, 2), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=f"{CACHE} must be None with is_causal=False"):
        model(random_ids(1, 2), past_key_values=cache, is_causal=False)


# What users of Transformers expect


@pytest.mark.sample(13)
@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpointing_changes_no_gradient(variant):
    model = tiny_model(**VARIANTS[variant]).train()
    ids = random_ids(2, 7)
    torch.manual_seed(0)
    expected = gradients_of(model, model(ids, labels=ids).loss)
    model.gradient_checkpointing_enable()
    torch.manual_seed(0)
    for name, gradient in gradients_of(model, model(ids, labels=ids).loss).items():
        assert_near(gradient, expected[name])


@pytest.mark.sample(20)
@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpointing_leaves_the_cache_where_there_are_no_gradients(variant):
    # Transformers until 5.23 took it from each layer, and every token was read as if the first.
    model, ids = tiny_model(**VARIANTS[variant]), random_ids(2, 7)
    generate = functools.partial(model.generate, ids, max_new_tokens=4, do_sample=False)
    expected, of_all = generate(), logits_of(model, ids)
    model.gradient_checkpointing_enable()
    model.train()
    assert model.is_gradient_checkpointing
    assert torch.equal(generate(), expected)
    with torch.no_grad():
        cache = getattr(model(ids[:, :4], use_cache=True), CACHE)
        assert_near(model(ids[:, 4:], past_key_values=cache).logits, of_all[:, 4:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_learns(variant):
    model = tiny_model(**VARIANTS[variant])
    ids = random_ids(2, 9)
    gradients = gradients_of(model, model(ids, labels=ids).loss)
    still = [name for name, p in model.named_parameters() if not gradients[name].abs().sum() > 0]
    assert still == []


def test_logits_to_keep():
    model, ids = tiny_model(), random_ids(2, 6)
    logits = logits_of(model, ids)
    assert_near(logits_of(model, ids, logits_to_keep=2), logits[:, -2:])
    assert_near(logits_of(model, ids, logits_to_keep=torch.tensor([0, 3])), logits[:, [0, 3]])
    rows = torch.tensor([[1, 2], [0, 5]])
    assert_near(
        logits_of(model, ids, logits_to_keep=rows), torch.stack([logits[0, 1:3], logits[1, [0, 5]]])
    )
    assert_near(logits_of(model, ids, logits_to_keep=ids > 20), logits[ids > 20])


def test_num_items_in_batch_is_what_the_loss_is_divided_by():
    model, ids = tiny_model(), random_ids(2, 6)
    mean = model(ids, labels=ids).loss
    assert_near(model(ids, labels=ids, num_items_in_batch=40).loss, mean * 10 / 40)


def test_hidden_states_and_attentions():
    model = tiny_model(**VARIANTS["hybrid"])
    model.set_attn_implementation("eager")
    outputs = model(random_ids(2, 6), output_hidden_states=True, output_attentions=True)
    assert [x.shape for x in outputs.hidden_states] == [(2, 6, 32)] * 4
    assert [x.shape for x in outputs.attentions] == [(2, 4, 6, 6)] * 2  # of the softmax layers


@pytest.mark.parametrize("variant", ["hybrid", "softmax_first"])
def test_eager_equals_sdpa(variant):
    # float64 scores plus the mask's lowest float64 number make eager's float32 softmax overflow
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant])
    ids, mask = random_ids(2, 8), torch.tensor(MASKS["left"])
    sdpa = logits_of(model, ids, attention_mask=mask)
    model.set_attn_implementation("eager")
    eager = logits_of(model, ids, attention_mask=mask)
    assert_near(eager[mask.bool()], sdpa[mask.bool()], 1e-3)


@pytest.mark.parametrize("kind", ["sinusoidal", "none", "learned", "rotary"])
def test_embeddings_in_place_of_tokens(kind):
    model, ids = tiny_model(position_embedding_type=kind), random_ids(2, 6)
    embeddings = model.get_input_embeddings()(ids)
    assert_near(logits_of(model, None, inputs_embeds=embeddings), logits_of(model, ids))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(ids, inputs_embeds=embeddings)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()


@pytest.mark.parametrize("kind", ["sinusoidal", "none", "learned", "rotary"])
def test_scaled_embeddings_are_the_embeddings_times_the_root_of_their_size(kind):
    scaled, plain = (
        tiny_model(position_embedding_type=kind, scale_embeddings=x) for x in (True, False)
    )
    ids = random_ids(2, 6)
    embeddings = plain.get_input_embeddings()(ids) * 32**0.5
    assert_near(logits_of(scaled, ids), logits_of(plain, None, inputs_embeds=embeddings))


def test_tied_embeddings_can_be_resized(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    model.resize_token_embeddings(VOCAB_SIZE + 9)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = random_ids(1, 5) + 8
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert logits_of(loaded, ids).shape == (1, 5, VOCAB_SIZE + 9)
    assert_near(logits_of(loaded, ids), logits_of(model, ids))


def test_sinusoidal_positions_have_no_end():
    x = sinusoidal_positions(torch.tensor([[0, 1, 100_000]]), 6)
    angles = torch.tensor([1.0, 1e4 ** (-1 / 3), 1e4 ** (-2 / 3)], dtype=torch.float64)
    for t, position in enumerate((0, 1, 100_000)):
        expected = torch.cat([(position * angles).sin(), (position * angles).cos()])
        assert_near(x[0, t].double(), expected, 1e-2)


def test_learned_positions_end():
    model = tiny_model(position_embedding_type="learned", max_position_embeddings=8)
    logits_of(model, random_ids(1, 8))
    with pytest.raises(ValueError, match="less than max_position_embeddings=8 .*got 8"):
        logits_of(model, random_ids(1, 9))
    mask = torch.ones(1, 9, dtype=torch.long)
    mask[0, 0] = 0
    logits_of(model, random_ids(1, 9), attention_mask=mask)  # eight real tokens


@pytest.mark.sample(5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_and_loaded_it_is_the_same(variant, tmp_path):
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant])
    with torch.no_grad():
        for parameter in model.parameters():  # nothing is as it was initialised
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LinearAttentionForCausalLM
    ids = random_ids(1, 7)
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


@pytest.mark.sample(5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_missing_weights_are_initialised(variant, tmp_path):
    """As when a head, or a convolution, is added to a checkpoint."""
    config = tiny_config(**VARIANTS[variant])
    LinearAttentionForCausalLM(config).save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.manual_seed(0)
    made = LinearAttentionForCausalLM(config)
    for (name, x), y in zip(loaded.state_dict().items(), made.state_dict().values(), strict=True):
        assert x.isfinite().all(), name
        if x.numel() >= 256:
            assert 0.7 * y.std() <= x.std() <= 1.3 * y.std(), name
    for name, x in loaded.named_buffers():
        if not name.endswith("projection"):  # which is drawn
            assert torch.equal(x, made.get_buffer(name)), name


@pytest.mark.sample(4)
@pytest.mark.parametrize("variant", SOME)
def test_bfloat16_weights(variant, tmp_path):
    model = tiny_model(dtype=torch.float32, initializer_range=0.05, **VARIANTS[variant])
    ids = random_ids(2, 9)
    expected = logits_of(model, ids)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for half in (loaded, model.to(torch.bfloat16)):
        kept = "decay.dt_bias" if half is loaded and model.config.decay == "kda" else "no name"
        kept = "_lora.bias" if half is loaded and model.config.mixer in ("rwkv6", "rwkv7") else kept
        learned = [p for name, p in half.named_parameters() if not name.endswith(kept)]
        assert {p.dtype for p in learned} == {torch.bfloat16}
        logits = logits_of(half, ids)
        assert logits.dtype == torch.bfloat16
        assert_near(logits.float(), expected, 0.05)
        half(ids, labels=ids).loss.backward()


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast(variant):
    model = tiny_model(dtype=torch.float32, **{**VARIANTS[variant], "initializer_range": 0.05})
    ids = random_ids(2, 9)
    expected = logits_of(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_near(logits_of(model, ids).float(), expected, 0.05)
        loss = model(ids, labels=ids).loss
    loss.backward()


# Heads

HEADS = {
    LinearAttentionForSequenceClassification: AutoModelForSequenceClassification,
    LinearAttentionForTokenClassification: AutoModelForTokenClassification,
    LinearAttentionForQuestionAnswering: AutoModelForQuestionAnswering,
}


@pytest.mark.parametrize("model_class", HEADS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_heads(model_class, is_causal, tmp_path):
    model = tiny_model(model_class, pad_token_id=0, num_labels=3, is_causal=is_causal)
    mask = torch.tensor(MASKS["right"])
    ids = random_ids(2, 8) * mask
    labels = {"labels": torch.tensor([0, 2])}
    if model_class is LinearAttentionForTokenClassification:
        labels = {"labels": random_ids(2, 8) % 3}
    elif model_class is LinearAttentionForQuestionAnswering:
        labels = {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 3])}
    outputs = model(ids, attention_mask=mask, **labels)
    outputs.loss.backward()
    logits = outputs["logits" if "logits" in outputs else "start_logits"]
    alone = model(ids[:1, :5])
    alone = alone["logits" if "logits" in alone else "start_logits"]
    assert_near(logits[:1, :5], alone)
    model.save_pretrained(tmp_path)
    assert type(HEADS[model_class].from_pretrained(tmp_path)) is model_class


def test_a_language_model_becomes_a_base_model(tmp_path):
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    ids = random_ids(1, 4)
    assert type(base) is LinearAttentionModel
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_parameters_are_named_as_in_llama():
    names = [name for name, _ in tiny_model(num_hidden_layers=1).named_parameters()]
    assert names == [
        "model.embed_tokens.weight",
        *(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]


def test_a_config_changed_to_nonsense_builds_no_model():
    config = tiny_config()
    config.feature_map = "nonsense"
    with pytest.raises(ValueError, match="feature_map must be one of"):
        LinearAttentionModel(config)


# Training


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_trainer_shifts_the_labels_with_and_without_smoothing(smoothing, tmp_path):
    model = tiny_model(dtype=torch.float32, initializer_range=0.1, **{**VARIANTS["gated"]})
    ids = random_ids(2, 8)
    log_probabilities = logits_of(model, ids)[:, :-1].log_softmax(-1)
    right = -log_probabilities.gather(-1, ids[:, 1:, None]).mean()
    expected = (1 - smoothing) * right - smoothing * log_probabilities.mean()
    arguments = TrainingArguments(
        output_dir=tmp_path,
        max_steps=1,
        per_device_train_batch_size=2,
        label_smoothing_factor=smoothing,
        learning_rate=1e-2,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    before = model.lm_head.weight.detach().clone()
    dataset = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    assert_near(torch.tensor(trainer.train().training_loss), expected.float(), 1e-3)
    assert not torch.equal(model.lm_head.weight, before)


@pytest.mark.thorough
def test_it_compiles_into_one_graph():
    layer_types = ["linear_attention", "full_attention"]
    model = tiny_model(num_hidden_layers=2, **{**VARIANTS["gated"], "layer_types": layer_types})
    ids = random_ids(2, 9)
    expected = gradients_of(model, model(ids, labels=ids, use_cache=False).loss)
    logits = logits_of(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = gradients_of(model, compiled(ids, labels=ids, use_cache=False).loss)
    for name, gradient in actual.items():
        assert_near(gradient, expected[name])
    with torch.no_grad():
        cache = model(ids[:, :7], use_cache=True).past_key_values
        steps = [compiled(ids[:, t : t + 1], past_key_values=cache).logits for t in (7, 8)]
    assert_near(torch.cat(steps, 1), logits[:, 7:])


def test_importing_registers_the_config():
    assert type(AutoConfig.for_model("linear_attention")) is LinearAttentionConfig
