# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Rows that begin alike train as if each were read by itself, also in TRL's trainers."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

from hf_linear_attention import (
    DataCollatorWithTrees,
    LinearAttentionForSequenceClassification,
    share_prompts,
    use_kernels,
)
from hf_linear_attention.recurrences.folding import fold_texts
from tiny import random_ids, tiny_model
from upstream_models import tiny_upstream

HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}


def rows(seed=0):
    """Two prompts, with three answers each, of which two begin alike; and a text alone."""
    ids = random_ids(200, seed=seed).split([20, 24, 5, 9, 18, 3, 12, 18, 31, 60])
    a, b, *answers = ids
    texts = [torch.cat([a, answer]) for answer in answers[:3]]
    texts += [torch.cat([b, answers[5], answer]) for answer in answers[3:5]]
    return [*texts, torch.cat([b, answers[6]]), answers[7]]


def padded(texts, side="left"):
    mask = pad_sequence([torch.ones_like(text) for text in texts], True, padding_side=side)
    return {"input_ids": pad_sequence(texts, True, padding_side=side), "attention_mask": mask}


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def near(found, wanted, tolerance=1e-10):
    for name, want in wanted.items():
        size = max(1.0, want.abs().max().item())
        assert (found[name] - want).abs().max() <= tolerance * size, name


def test_texts_are_the_paths_of_their_tree():
    texts = rows()
    for shortest, segments, depth in ((1, 10, 3), (16, 10, 3), (19, 9, 2), (100, 7, 1)):
        tree, ids, places = fold_texts(texts, shortest)
        assert (len(tree.lengths), max(tree.depths) + 1) == (segments, depth), shortest
        for text, at in zip(texts, places, strict=True):
            assert ids[0, at].equal(text)
            assert tree.tokens_before("cpu")[at][1:].equal(at[:-1])


def test_texts_that_end_where_others_go_on_and_equal_ones():
    a, b = random_ids(40), random_ids(7, seed=1)
    texts = [a, torch.cat([a, b]), a, a[:30], torch.cat([a, b])]
    tree, ids, places = fold_texts(texts, 8)
    assert tree.num_tokens == 40 + 7
    for text, at in zip(texts, places, strict=True):
        assert ids[0, at].equal(text)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_train_as_if_each_were_read(side):
    model = tiny_model(**HYBRID, mixer="delta_rule", feature_map="identity", normalizer="rms_norm")
    batch = padded(rows(), side)
    mask = batch["attention_mask"]
    is_first = mask.diff(dim=1, prepend=torch.zeros_like(mask[:, :1])) > 0  # which nothing predicts
    labels = batch["input_ids"].masked_fill((mask == 0) | is_first, -100)
    found = []
    for share in (False, True):
        shared = share_prompts(model) if share else None
        model.zero_grad()
        outputs = model(**batch, labels=labels)
        outputs.loss.backward()
        is_real = batch["attention_mask"].bool()
        found.append((outputs.loss.detach(), outputs.logits[is_real].detach(), gradients(model)))
    assert shared.tokens_given == batch["attention_mask"].sum()
    assert shared.tokens_read == sum(batch["attention_mask"].sum(1)) - 2 * 20 - 2 * 24 - 18
    (loss, logits, wanted), (other_loss, other_logits, grads) = found
    torch.testing.assert_close(other_loss, loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(other_logits, logits, rtol=1e-10, atol=1e-10)
    near(grads, wanted)
    shared.undo()
    assert not model.model._forward_pre_hooks


def test_what_is_not_plain_rows_is_read_as_ever():
    model = tiny_model(**HYBRID)
    batch = padded(rows())
    with share_prompts(model) as shared, torch.no_grad():
        ids, mask = batch["input_ids"], batch["attention_mask"]
        want = model(**batch)
        holes = mask.clone()
        holes[:, -3] = 0
        for arguments in (
            {**batch, "output_hidden_states": True},
            {**batch, "position_ids": torch.arange(ids.shape[1])[None]},
            {"inputs_embeds": model.model.embed_tokens(ids), "attention_mask": mask},
            {"input_ids": ids, "attention_mask": holes},
            {"input_ids": ids[:1]},
        ):
            model(**arguments, use_cache=False)
        model.generate(**batch, max_new_tokens=2)
        assert shared.tokens_given == 0
        y = model(**batch, use_cache=False)
        assert shared.tokens_read < shared.tokens_given
        torch.testing.assert_close(y.logits[mask > 0], want.logits[mask > 0])


def test_a_model_that_reads_no_trees_is_named():
    with pytest.raises(ValueError, match="after use_kernels.model., got Qwen3_5ForCausalLM"):
        share_prompts(tiny_upstream("qwen3_5_text"))
    for shortest in (0, 1.5, "a"):
        with pytest.raises(ValueError, match="shortest must be a whole number of 1 token"):
            share_prompts(tiny_model(), shortest=shortest)
        with pytest.raises(ValueError, match="shortest must be a whole number of 1 token"):
            DataCollatorWithTrees(shortest)


def test_a_second_call_ends_what_the_first_began():
    model, batch = tiny_model(**HYBRID), padded(rows())
    with torch.no_grad():
        real = batch["attention_mask"] > 0
        want = model(**batch, use_cache=False).logits[real]
        first, second = share_prompts(model), share_prompts(model)
        torch.testing.assert_close(model(**batch, use_cache=False).logits[real], want)
    assert (first.hooks, first.tokens_given) == ([], 0)
    assert second.tokens_read < second.tokens_given
    second.undo()
    assert not model.model._forward_pre_hooks


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon_mamba", "granitemoehybrid"])
def test_heads_that_hand_on_settings_share_too(name):
    """And where `use_kernels` was undone, they read as ever."""
    model, batch = tiny_upstream(name), padded(rows(), "right")
    report = use_kernels(model)
    ids, mask = batch["input_ids"] % 30 + 2, batch["attention_mask"]
    with torch.no_grad():
        want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        shared = share_prompts(model)
        found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        assert 0 < shared.tokens_read < shared.tokens_given
        torch.testing.assert_close(found[mask > 0], want[mask > 0], rtol=1e-4, atol=1e-4)
        report.undo()
        given = shared.tokens_given
        found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        assert shared.tokens_given == given
        torch.testing.assert_close(found[mask > 0], want[mask > 0], rtol=1e-3, atol=1e-3)


def test_texts_of_a_collator_have_as_many_labels_and_no_padding():
    for text, message in (
        ({"input_ids": [1, 2], "labels": [1]}, "as many numbers, got shapes .2,. and .1,."),
        ({"input_ids": [[1, 2]]}, "must be lists of as many numbers"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "attention_mask of a text must hide"),
    ):
        with pytest.raises(ValueError, match=message):
            DataCollatorWithTrees()([text])


@pytest.mark.parametrize("name", ["ours", "qwen3_5_text"])
def test_a_collators_trees_train_as_rows_do(name, tmp_path):
    """Also with gradients recomputed."""
    found = []
    for collate in (DataCollatorWithTrees(), None):
        if name == "ours":
            model = tiny_model(**HYBRID)
        else:
            model = tiny_upstream(name).double()
            use_kernels(model)
        texts = [{"input_ids": text.tolist()} for text in rows()]

        def pad(examples):
            batch = padded([torch.tensor(one["input_ids"]) for one in examples], "right")
            hidden = batch["attention_mask"] == 0
            return {**batch, "labels": batch["input_ids"].masked_fill(hidden, -100)}

        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=len(texts),
            max_steps=2,
            optim="sgd",
            learning_rate=0.01,
            gradient_checkpointing=True,
            report_to=[],
            save_strategy="no",
            remove_unused_columns=False,
            use_cpu=True,
        )
        trainer = Trainer(model, arguments, train_dataset=texts, data_collator=collate or pad)
        loss = trainer.train().training_loss
        found.append((loss, {n: p.detach() for n, p in model.named_parameters()}))
    (loss, weights), (other_loss, other_weights) = found
    assert loss == pytest.approx(other_loss, rel=1e-6)
    near(weights, other_weights, 1e-6)


def test_rewards_train_as_if_each_row_were_read():
    model = tiny_model(LinearAttentionForSequenceClassification, num_labels=1, pad_token_id=0)
    batch, found = padded(rows(), "right"), []
    for share in (False, True):
        shared = share_prompts(model) if share else None
        model.zero_grad()
        logits = model(**batch, use_cache=False).logits
        logits.square().sum().backward()
        found.append((logits.detach(), gradients(model)))
    assert shared.tokens_read < shared.tokens_given
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-10, atol=1e-10)
    near(found[1][1], found[0][1])
