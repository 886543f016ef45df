# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Models that see, hear or decide by one of Transformers' recurrent models answer as without us."""

import copy
import functools

import pytest
import torch

from hf_linear_attention import use_kernels
from upstream_models import close
from wrapper_models import GENERATING, WRAPPERS, WRAPPERS_HERE, prompt, tiny_wrapper, words

T = 19  # more than two chunks of upstream's


@functools.cache
def models(name):
    """Upstream's model, and a copy of it on our kernels."""
    theirs = tiny_wrapper(name)
    ours = copy.deepcopy(theirs)
    use_kernels(ours)
    return theirs, ours


def answers(model, **inputs):
    with torch.no_grad():
        output = model(**inputs)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("name", WRAPPERS_HERE)
def test_recurrent_layers_change_and_undo_brings_them_back(name):
    model, inputs = tiny_wrapper(name), prompt(name, T)
    before = {where: type(part) for where, part in model.named_modules()}
    want = answers(model, **inputs)
    report = use_kernels(model)
    changed = {one.name: one for one in report.changed}
    layers = [where for where, cls in before.items() if cls.__name__ == WRAPPERS[name].layer]
    assert layers
    for where in layers:
        assert type(model.get_submodule(where)) is changed[where].now is not before[where]
        assert "by function" not in changed[where].gist and "proved" not in changed[where].gist
    report.undo()
    assert {where: type(part) for where, part in model.named_modules()} == before
    assert torch.equal(answers(model, **inputs), want)


@pytest.mark.parametrize("name", WRAPPERS_HERE)
def test_answers_are_upstreams(name):
    theirs, ours = models(name)
    inputs = prompt(name, T)
    close(answers(ours, **inputs), answers(theirs, **inputs))


@pytest.mark.parametrize("name", GENERATING)
def test_answers_to_words_are_upstreams_and_others_than_with_what_is_seen(name):
    theirs, ours = models(name)
    ids, inputs = words(T), prompt(name, T)
    close(answers(ours, input_ids=ids), answers(theirs, input_ids=ids))
    token, _ = WRAPPERS[name].places
    unseen = inputs["input_ids"].masked_fill(inputs["input_ids"] == token, 2)
    assert (answers(ours, **inputs) - answers(ours, input_ids=unseen))[:, -1].abs().max() > 1e-3


@pytest.mark.parametrize("name", GENERATING)
def test_generated_tokens_are_upstreams(name):
    theirs, ours = models(name)
    inputs = prompt(name, T)
    for options in ({}, {"num_beams": 2}):
        options = dict(options, max_new_tokens=6, do_sample=False)
        want = theirs.generate(**inputs, **options)
        assert torch.equal(ours.generate(**inputs, **options), want)
    ids = words(T)
    want = theirs.generate(ids, max_new_tokens=9, do_sample=False)
    drafted = ours.generate(ids, max_new_tokens=9, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(drafted, want)


def told_by_positions(*lengths):
    return {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}


def told_by_bounds(*lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}


PLACES_IN_IMAGES = "minicpmv4_7"  # counts along images, too, unless it is given positions


def packed(name, *lengths):
    """A prompt and words behind it, and both alone."""
    rows = prompt(name, lengths[0]), {"input_ids": words(lengths[1])}
    ids = torch.cat([row["input_ids"] for row in rows], 1)
    row = {**rows[0], "input_ids": ids}
    if "mm_token_type_ids" in row:
        row["mm_token_type_ids"] = (ids == WRAPPERS[name].places[0]).int()
    return row, rows


@pytest.mark.parametrize("name", GENERATING)
def test_packed_is_separate(name):
    theirs, ours = models(name)
    row, rows = packed(name, T, 9)
    alone = [answers(theirs, **x, **told_by_positions(x["input_ids"].shape[1])) for x in rows]
    for told in (told_by_positions, told_by_bounds):
        if name != PLACES_IN_IMAGES or told is told_by_positions:
            got = answers(ours, **row, **told(T, 9), use_cache=False)
            close(got, torch.cat(alone, 1))


@pytest.mark.parametrize("name", [name for name in GENERATING if name == PLACES_IN_IMAGES])
def test_packed_positions_along_images_are_refused(name):
    row, _ = packed(name, T, 9)
    with pytest.raises(ValueError, match="position_ids must begin again with each packed sequence"):
        answers(models(name)[1], **row, **told_by_bounds(T, 9), use_cache=False)
