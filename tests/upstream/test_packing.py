# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Sequences packed in a row train as rows of their own would, in every family."""

import copy
import functools
from unittest import mock

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening
from transformers.models.glm5_next import modeling_glm5_next

from hf_linear_attention import use_kernels
from hf_linear_attention.releases import CACHE
from upstream_models import CONFIGS, VOCAB_SIZE, is_here, tiny_upstream

LENGTHS = (7, 1, 12, 3)  # shorter and longer than a convolution and than chunks of upstream's


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    model = tiny_upstream(request.param).train()
    use_kernels(model)
    return model


@pytest.fixture
def sequences():
    return [torch.randint(2, VOCAB_SIZE - 4, (n,)) for n in LENGTHS]


def logits_and_gradients(model, rows):
    """Of rows of arguments, one after the other."""
    model.zero_grad()
    logits = torch.cat([model(**row).logits.flatten(0, 1) for row in rows])
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)  # a loss over all
    (logits * weights).sum().backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def told_by_bounds(n):
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}


def told_by_numbers(n):
    return {"seq_idx": torch.arange(n).repeat_interleave(torch.tensor(LENGTHS))[None].int()}


def told_by_positions(n):
    return {"position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]}


@pytest.mark.sample(25)
@pytest.mark.parametrize("told", [told_by_positions, told_by_bounds, told_by_numbers])
def test_packed_is_separate(model, sequences, told):
    packed = {"input_ids": torch.cat(sequences)[None], **told(len(sequences))}
    y, gradients = logits_and_gradients(model, [packed])
    rows = [{"input_ids": row[None], "use_cache": False} for row in sequences]
    want, wanted = logits_and_gradients(model, rows)
    torch.testing.assert_close(y, want, rtol=0, atol=2e-5 * want.abs().max().item())
    for mine, their in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, their, rtol=0, atol=1e-3 * their.abs().max().item())


def test_bounds_that_are_none_are_named_in_the_words_of_the_call(model):
    ids = torch.full((2, 6), 3)
    for bounds, got in (
        ([0, 6], r"must rise from 0 to B T = 12 without falling, got \[0, 6\]"),
        ([0, 7, 5, 12], r"must rise from 0 .*, got \[0, 7, 5, 12\]"),
        ([1, 12], "must rise from 0"),
        ([0.0, 12.0], "must be int32 or int64, got torch.float32"),
        ([[0, 12]], r"must be a tensor \(number of sequences \+ 1,\), got \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=f"cu_seq_lens_q {got}"):
            model(ids, cu_seq_lens_q=torch.tensor(bounds))
    with pytest.raises(ValueError, match=r"seq_idx must be a tensor .*, got \(12,\)"):
        model(ids, seq_idx=torch.zeros(12))


def test_several_packed_rows(model, sequences):
    """Each row has bounds of its own; none reaches into the next row."""
    row = torch.cat(sequences)
    ids = torch.stack([row, row.flip(0)])
    positions = torch.stack([told_by_positions(4)["position_ids"][0], torch.arange(len(row))])
    with torch.no_grad():
        y = model(ids, position_ids=positions).logits
        want = torch.cat([model(row[None]).logits for row in (*sequences, ids[1])], dim=1)
    assert (y[0] - want[0, : len(row)]).abs().max() < 2e-5 * want.abs().max()
    assert (y[1] - want[0, len(row) :]).abs().max() < 2e-5 * want.abs().max()


@pytest.mark.sample(11)
def test_what_the_collator_makes_trains(model, sequences):
    features = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in sequences]
    for options in ({}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}):
        batch = DataCollatorWithFlattening(**options)(features)
        loss = model(**batch).loss
        logits = torch.cat([model(row[None]).logits[0, :-1] for row in sequences])
        labels = torch.cat([row[1:] for row in sequences])
        torch.testing.assert_close(loss, cross_entropy(logits, labels), rtol=1e-4, atol=1e-5)


def test_packed_sequences_are_not_cached():
    model = tiny_upstream("qwen3_next")
    use_kernels(model)
    ids, told = torch.full((1, sum(LENGTHS)), 3), told_by_positions(4)
    with torch.no_grad():
        assert getattr(model(ids, **told), CACHE) is None  # none was asked for
        cache = {CACHE: model(ids[:, :4], use_cache=True)[CACHE]}
        with pytest.raises(ValueError, match="packed sequences can't be cached"):
            model(ids, **cache, **told_by_bounds(4))


@pytest.mark.parametrize("kpool, topk", [(1, 4), (4, 4)])
def test_an_indexer_chooses_few_keys_in_each_sequence(kpool, topk, sequences):
    """By pools of keys, from the beginning of each sequence on, and its last incomplete one. With
    so many heads that no scores are equal, all of them behind a ReLU.
    """
    config = copy.deepcopy(CONFIGS["glm5_next"])
    config["text_config"] |= {"index_kpool": kpool, "index_topk": topk, "index_n_heads": 16}
    model = tiny_upstream("glm5_next", **config)
    want = [model(row[None]).logits for row in sequences]
    use_kernels(model)
    y = model(torch.cat(sequences)[None], **told_by_positions(4)).logits
    torch.testing.assert_close(y, torch.cat(want, dim=1), rtol=1e-4, atol=1e-4)


def test_a_model_that_would_mix_them_refuses():
    """Where its indexer is another than ours stands in for."""
    model = tiny_upstream("glm5_next")
    indexer = modeling_glm5_next.Glm5NextTextIndexer
    with mock.patch.object(indexer, "get_visible_tokens", lambda *args: None):
        report = use_kernels(model)
    assert [one.class_name for one in report.left if "otherwise" in one.why] == [indexer.__name__]
    with pytest.raises(ValueError, match="Glm5NextTextModel can't take packed sequences"):
        model(torch.full((1, sum(LENGTHS)), 3), **told_by_positions(4))


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_h1"])
@pytest.mark.parametrize("told", [told_by_positions, told_by_bounds])
def test_a_model_with_a_layer_that_stayed_refuses(model_type, told):
    """The others know the bounds, and that one would mix the sequences, or meet an error."""
    model = tiny_upstream(model_type)
    stays = next(x for x in model.modules() if type(x).__name__.endswith("Mixer"))
    stays.forward = functools.partial(type(stays).forward, stays)
    report = use_kernels(model)
    assert [one.why for one in report.left] == ["its forward was replaced on the module itself"]
    with pytest.raises(ValueError, match=f"its {type(stays).__name__} is as Transformers has it"):
        model(torch.full((1, sum(LENGTHS)), 3), **told(4))


@pytest.mark.parametrize("model_type", filter(is_here, ["inkling_text"]))
def test_a_model_that_scales_by_places_in_a_row_refuses_long_rows(model_type):
    model = tiny_upstream(model_type, log_scaling_n_floor=sum(LENGTHS) - 1)
    use_kernels(model)
    with pytest.raises(ValueError, match="in rows of over 22 tokens: its softmax"):
        model(torch.full((1, sum(LENGTHS)), 3), **told_by_positions(4))


NOT_HANDED_ON = ("mamba", "mamba2")  # by the head, or by head and base model


@pytest.mark.parametrize("model_type", NOT_HANDED_ON)
def test_a_compiled_graph_that_would_mix_them_is_refused(model_type, sequences):
    model = tiny_upstream(model_type, num_hidden_layers=1)
    use_kernels(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises((ValueError, Unsupported), match="takes no packed sequences compiled"):
        compiled(torch.cat(sequences)[None], **told_by_bounds(4))


@pytest.mark.thorough
@pytest.mark.parametrize("also", [{}, {"attention_mask": torch.ones(1, sum(LENGTHS)).long()}])
def test_a_compiled_graph_whose_softmax_layers_would_mix_them_is_refused(also, sequences):
    model = tiny_upstream("qwen3_5_text")
    use_kernels(model)
    row, bounds = torch.cat(sequences)[None], told_by_bounds(4)
    expected = model(row, **bounds).logits
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises((ValueError, Unsupported), match="compiled unless position_ids begin again"):
        compiled(row, **bounds, **also)
    y = compiled(row, **bounds, **told_by_positions(4), use_cache=False).logits
    torch.testing.assert_close(y, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["model", "base_model"])
@pytest.mark.parametrize("model_type", [*NOT_HANDED_ON, "qwen3_5_text"])
def test_a_model_compiled_in_pieces_keeps_them_apart(model_type, part, sequences):
    model = tiny_upstream(model_type)
    use_kernels(model)
    row = torch.cat(sequences)[None]
    expected = model(row, **told_by_bounds(4)).logits
    torch.compiler.reset()
    (model if part == "model" else model.base_model).compile(backend="eager")
    torch.testing.assert_close(model(row, **told_by_bounds(4)).logits, expected)
    alone = model(row[:, :4]).logits  # and forgets them
    torch.testing.assert_close(alone, expected[:, :4])


@pytest.mark.parametrize("model_type", ["mamba2", "falcon_mamba"])
def test_packed_sequences_may_hold_padding(model_type, sequences):
    model = tiny_upstream(model_type)
    use_kernels(model)
    row, bounds = torch.cat(sequences)[None], told_by_bounds(4)["cu_seq_lens_q"].tolist()
    mask = torch.ones_like(row)
    mask[0, [0, 3, 10, 11, 22]] = 0
    with torch.no_grad():
        y = model(row, attention_mask=mask, **told_by_bounds(4)).logits
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            real = mask[0, start:end].bool()
            want = model(row[:, start:end][:, real]).logits
            got = y[:, start:end][:, real]
            torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * want.abs().max().item())


@pytest.mark.parametrize("hidden", [[], [5, 6, 21, 22]])  # the last of sequences
def test_a_mask_does_not_keep_softmax_layers_from_bounds(model, sequences, hidden):
    """They would take it instead, and mix the sequences."""
    row = torch.cat(sequences)[None]
    mask = torch.ones_like(row)
    mask[0, hidden] = 0
    with torch.no_grad():
        y = model(row, attention_mask=mask, **told_by_bounds(4)).logits
        want = torch.cat([model(each[None]).logits for each in sequences], dim=1)
    real = mask.bool()
    assert (y[real] - want[real]).abs().max() < 2e-5 * want.abs().max()


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "jamba", "granitemoehybrid"])
def test_what_softmax_layers_can_not_be_told_is_refused(model_type, sequences):
    model = tiny_upstream(model_type)
    use_kernels(model)
    row, bounds = torch.cat(sequences)[None], told_by_bounds(4)
    mask = torch.ones_like(row)
    mask[0, 8] = 0  # the first token of the third sequence, which the next ones would see
    with pytest.raises(ValueError, match=r"an attention_mask that is not \(1, 23\) or hides"):
        model(row, attention_mask=mask, **bounds)
    with pytest.raises(ValueError, match="position_ids must begin again with each"):
        model(row, position_ids=torch.arange(23)[None], **bounds)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "jamba"])
def test_a_mask_for_each_query_stays(model_type, sequences):
    """One that keeps sequences apart itself."""
    model = tiny_upstream(model_type)
    use_kernels(model)
    row, numbers = torch.cat(sequences)[None], told_by_numbers(4)["seq_idx"]
    is_seen = (numbers[:, :, None] == numbers[:, None]).tril()[:, None]
    positions = told_by_positions(4) if model_type == "qwen3_5_text" else {}
    with torch.no_grad():
        want = model(row, **told_by_bounds(4)).logits
        y = model(row, attention_mask=is_seen, **told_by_bounds(4), **positions).logits
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)


def test_a_mask_for_each_query_stays_in_a_graph(sequences):
    model = tiny_upstream("qwen3_5_text")
    use_kernels(model)
    row, numbers = torch.cat(sequences)[None], told_by_numbers(4)["seq_idx"]
    is_seen = (numbers[:, :, None] == numbers[:, None]).tril()[:, None]
    told = {**told_by_bounds(4), **told_by_positions(4), "use_cache": False}
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        want = model(row, **told).logits
        y = compiled(row, attention_mask=is_seen, **told).logits
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba"])
def test_undone_nothing_is_left_on_a_base_model(model_type):
    model = tiny_upstream(model_type)
    before = set(vars(model.base_model))
    report = use_kernels(model)
    with torch.no_grad():
        model(torch.tensor([[5, 7, 9]]))
    report.undo()
    added = set(vars(model.base_model)) - before
    assert all(name.startswith("_output_capturing") for name in added)
