# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Texts that begin alike, read as a tree, are the texts: logits, losses and gradients."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy

from hf_linear_attention import LinearAttentionModel, TokenTree, use_kernels
from tiny import VARIANTS, random_ids, shallow, tiny_model
from upstream_models import tiny_upstream

# Two prompts, of which the first forks into a turn that forks again, and two answers.
TREE = TokenTree(lengths=(9, 4, 6, 1, 5, 7, 3, 2), parents=(-1, -1, 0, 0, 1, 2, 2, 4))


def texts_of(tree: TokenTree, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """From each segment that nobody goes on, back to the first: its tokens (1, T)."""
    parts = ids[0].split(tree.lengths)
    leaves = set(range(len(tree.lengths))) - set(tree.parents)
    return {leaf: torch.cat([parts[i] for i in tree.path(leaf)])[None] for leaf in leaves}


def losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels, reduction="sum")


def of_tree(model, ids, tree=TREE, **options):
    """Logits (T, V) of the row; and gradients of the sum over the losses of all texts, in which a
    shared token counts as often as texts share it.
    """
    model.zero_grad()
    logits = model(ids, tree=tree, **options).logits[0]
    places = torch.arange(tree.num_tokens).split(tree.lengths)
    total = 0
    for leaf in texts_of(tree, ids):
        path = torch.cat([places[i] for i in tree.path(leaf)])
        total = total + losses(logits[path[:-1]], ids[0, path[1:]])
    total.backward()
    return logits.detach(), total.detach(), gradients(model)


def of_texts(model, ids, tree=TREE):
    """The same, of texts read one by one."""
    model.zero_grad()
    logits = [None] * len(tree.lengths)
    total = 0
    for leaf, text in texts_of(tree, ids).items():
        y = model(text, use_cache=False).logits[0]
        path = tree.path(leaf)
        for segment, part in zip(path, y.split([tree.lengths[i] for i in path]), strict=True):
            logits[segment] = part.detach()
        total = total + losses(y[:-1], text[0, 1:])
    total.backward()
    return torch.cat(logits), total.detach(), gradients(model)


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found, wanted, tolerance=1e-10):
    for mine, want in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(mine, want, rtol=tolerance, atol=tolerance)
    assert found[2].keys() == wanted[2].keys()
    for name, want in wanted[2].items():
        size = max(1.0, want.abs().max().item())
        assert (found[2][name] - want).abs().max() <= tolerance * size, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tree_is_its_texts(variant):
    model = tiny_model(**shallow(variant)).train()
    ids = random_ids(1, TREE.num_tokens)
    assert_same(of_tree(model, ids), of_texts(model, ids))


SOME = ("preset_gated_deltanet", "hybrid", "preset_rwkv7", "window")


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("variant", SOME)
def test_with_gradients_recomputed(variant, use_reentrant):
    model = tiny_model(**shallow(variant)).train()
    ids = random_ids(1, TREE.num_tokens)
    want = of_texts(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same(of_tree(model, ids), want)


@pytest.mark.parametrize("variant", SOME[:2])
def test_with_adapters(variant):
    model = tiny_model(**shallow(variant)).train()
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    model = model.double()
    ids = random_ids(1, TREE.num_tokens)
    found = of_tree(model, ids)
    assert all("lora" in name for name in found[2])
    assert_same(found, of_texts(model, ids))


def test_eager_attention():
    """Transformers' function computes weights in float32."""
    model = tiny_model(**shallow("hybrid"))
    ids = random_ids(1, TREE.num_tokens)
    want = of_tree(model, ids)
    model.set_attn_implementation("eager")
    assert_same(of_tree(model, ids), want, 1e-3)


def test_a_tree_of_one_text_is_the_text():
    model, ids, tree = tiny_model(), random_ids(1, 7), TokenTree((7,), (-1,))
    assert_same(of_tree(model, ids, tree), of_texts(model, ids, tree))


def test_labels_are_predicted_by_the_tokens_before():
    tree = TokenTree((3, 2, 1, 2), (-1, 0, 0, 1))
    assert tree.tokens_before("cpu").tolist() == [-1, 0, 1, 2, 3, 2, 4, 6]
    assert tree.position_ids("cpu").tolist() == [[0, 1, 2, 3, 4, 3, 5, 6]]


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ((), (), r"lengths must be of segments of 1 token or more, got \(\)"),
        ((3, 0), (-1, 0), r"lengths must be of segments of 1 token or more, got \(3, 0\)"),
        ((3, 2), (-1,), "parents must be one for each of 2 segments, got 1"),
        ((3, 2), (-1, 1), "parents must be numbers of earlier .* got 1 for segment 1"),
        ((3.5, 2), (-1, 0), r"lengths and parents must be whole numbers, .* got \(3.5, 2\) and"),
        ((3, 2), (None, 0), "lengths and parents must be whole numbers"),
        ((3, 2, 4), (-1, 0, -1), r"segments must stand level by level, .* got depths \(0, 1, 0\)"),
    ],
)
def test_what_is_no_tree(lengths, parents, message):
    with pytest.raises(ValueError, match=message):
        TokenTree(lengths, parents)


@pytest.mark.parametrize("model_type", [None, "qwen3_5_text", "mamba2"])
def test_another_thing_is_no_tree(model_type):
    model = tiny_model() if model_type is None else tiny_upstream(model_type)
    if model_type is not None:
        use_kernels(model)
    with pytest.raises(ValueError, match=r"tree must be a TokenTree, got tuple"):
        model(random_ids(1, 5), tree=(3, 2))


def test_what_does_not_go_with_a_tree():
    model, ids, tree = tiny_model(), random_ids(1, 5), TokenTree((3, 2), (-1, 0))
    with pytest.raises(ValueError, match=r"tree must be of all .*, got tokens of \(1, 4\)"):
        model(ids[:, :4], tree=tree)
    for name, given in {
        "attention_mask": torch.ones(1, 5),
        "position_ids": torch.arange(5)[None],
        "seq_idx": torch.zeros(1, 5, dtype=torch.int32),
        "past_key_values": model(ids, use_cache=True).past_key_values,
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be None with a tree"):
            model(ids, tree=tree, **{name: given})
    for other in (model, tiny_model(fuse_linear_cross_entropy=True).train()):
        with pytest.raises(ValueError, match="labels need shift_labels beside them with a tree"):
            other(ids, tree=tree, labels=ids)
    both_ways = tiny_model(LinearAttentionModel, is_causal=False)
    with pytest.raises(ValueError, match="tree must be None where is_causal=False"):
        both_ways(ids, tree=tree)
