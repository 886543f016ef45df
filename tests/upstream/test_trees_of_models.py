# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' models on our kernels read trees of texts as the texts, in every family."""

import pytest
import torch

from hf_linear_attention import TokenTree, use_kernels
from upstream_models import CONFIGS, VOCAB_SIZE, family_for, tiny_upstream

TREE = TokenTree(lengths=(9, 4, 6, 1, 5, 7, 3, 2), parents=(-1, -1, 0, 0, 1, 2, 2, 4))


def of_tree(model, ids):
    model.zero_grad()
    logits = model(input_ids=ids, tree=TREE).logits[0]
    (logits.double() * weights_of(logits)).sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def weights_of(logits):
    return torch.linspace(-1, 1, logits.numel()).view_as(logits).double()


def of_texts(model, ids):
    """The same loss, a segment's tokens in one text with those that lead to it."""
    model.zero_grad()
    parts, logits = ids[0].split(TREE.lengths), []
    for segment, length in enumerate(TREE.lengths):
        text = torch.cat([parts[i] for i in TREE.path(segment)])[None]
        logits.append(model(input_ids=text, use_cache=False).logits[0, -length:])
    logits = torch.cat(logits)
    (logits.double() * weights_of(logits)).sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_tree_is_its_texts(name):
    model = tiny_upstream(name).to(torch.float64).train()
    use_kernels(model)
    ids = torch.randint(2, VOCAB_SIZE - 4, (1, TREE.num_tokens))
    if family_for(name).why_no_trees is not None:
        with pytest.raises(ValueError, match="can't read a tree: its (softmax|recurrent) layers"):
            model(input_ids=ids, tree=TREE)
        return
    with pytest.raises(ValueError, match="labels need shift_labels beside them with a tree"):
        model(input_ids=ids, tree=TREE, labels=ids)
    y, gradients = of_tree(model, ids)
    want, wanted = of_texts(model, ids)
    assert (y - want).abs().max() < 1e-5 * want.abs().max()
    for mine, their in zip(gradients, wanted, strict=True):
        assert (mine - their).abs().max() <= 1e-4 * their.abs().max() + 1e-9
