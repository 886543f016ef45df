# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Texts that begin alike, read as a tree, are the texts: logits, losses and gradients."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_linear_attention import TokenTree
from tiny import VARIANTS, random_ids, shallow, tiny_model

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
