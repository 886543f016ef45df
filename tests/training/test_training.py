# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Trainer: whatever it does to save time or memory, the same loss, gradients and weights."""

from pathlib import Path

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer

from tiny import NEWER, VARIANTS, random_ids, tiny_model
from trainer_runs import SEQUENCES_PER_STEP, arguments, train

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_same_steps(actual: list[dict], expected: list[dict], tolerance: float = 1e-4) -> None:
    for name in expected[0]:
        values, wanted = ([step[name] for step in steps] for steps in (actual, expected))
        assert values == pytest.approx(wanted, rel=tolerance)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[dict[str, float]]:
    return train("plain", tmp_path_factory.mktemp("plain"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "run", ["accumulated", "checkpointed", "checkpointed_reentrant", "compiled"]
)
def test_the_same_steps(run, plain, tmp_path):
    assert_same_steps(train(run, tmp_path), plain)


def test_bfloat16_takes_nearly_the_same_step(plain, tmp_path):
    steps = train("bfloat16", tmp_path)
    assert_same_steps(steps[:1], plain[:1], 0.03)
    assert steps[0] != plain[0]


def tokens_and_labels(count: int = 8) -> list[dict[str, list[int]]]:
    """Sequences of 2 to 12 tokens, without labels at their beginning."""
    rows = []
    for row in range(count):
        ids = random_ids(2 + 7 * row % 11, seed=row).tolist()
        labels = [-100] * min(row % 3, len(ids) - 2) + ids[min(row % 3, len(ids) - 2) :]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    ones = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    mask = [row["attention_mask"] + [0] * (longest - len(row["attention_mask"])) for row in ones]
    return {
        "input_ids": padded("input_ids", 0),
        "labels": padded("labels", -100),
        "attention_mask": torch.tensor(mask),
    }


class Recorded:
    """A collator that remembers what it has put together."""

    def __init__(self, collate):
        self.collate = collate
        self.batches = []

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        self.batches.append([{**row} for row in rows])
        return self.collate(rows)


def losses_of_a_constant_model(
    collate, folder: Path, variant: str, **kwargs
) -> tuple[list[float], list[list[dict]]]:
    """Of each step over `tokens_and_labels`, and the rows that were in it."""
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant])
    args = arguments(folder, learning_rate=0.0, max_steps=2, **kwargs)
    recorded = Recorded(collate)
    trainer = Trainer(
        model=model, args=args, train_dataset=tokens_and_labels(), data_collator=recorded
    )
    trainer.train()
    return [x["loss"] for x in trainer.state.log_history if "loss" in x], recorded.batches


def loss_by_hand(rows: list[dict[str, list[int]]], variant: str, smoothing: float = 0.0) -> float:
    """The mean over all labels of sequences that are read alone."""
    model = tiny_model(dtype=torch.float32, **VARIANTS[variant])
    total, count = 0.0, 0
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"]])).logits[0]
        log_probabilities = logits.log_softmax(-1)
        for position, label in enumerate(row["labels"][1:]):
            if label != -100:
                right, all_words = log_probabilities[position, label], log_probabilities[position]
                total -= (1 - smoothing) * right + smoothing * all_words.mean()
                count += 1
    return float(total / count)


@pytest.mark.parametrize("variant", ["gated", "hybrid"])
def test_smoothed_labels_are_those_of_the_next_token(variant, tmp_path):
    losses, batches = losses_of_a_constant_model(pad, tmp_path, variant, label_smoothing_factor=0.2)
    expected = [loss_by_hand(rows, variant, 0.2) for rows in batches]
    assert losses == pytest.approx(expected, rel=1e-4)


def test_sequences_are_grouped_by_length(tmp_path):
    losses, batches = losses_of_a_constant_model(
        pad, tmp_path, "gated", train_sampling_strategy="group_by_length"
    )
    lengths = [[len(row["input_ids"]) for row in rows] for rows in batches]
    assert lengths == [sorted(batch, reverse=True) for batch in lengths]
    assert losses == pytest.approx([loss_by_hand(rows, "gated") for rows in batches], rel=1e-4)


SIGNALS = ["return_position_ids", "return_flash_attn_kwargs", "return_seq_idx"]


@pytest.mark.parametrize(
    ("variant", "signal"),
    [
        *((variant, SIGNALS[0]) for variant in ("aaren", "gated", "hybrid", *NEWER)),
        *((variant, signal) for variant in ("gated", "hybrid") for signal in SIGNALS[1:]),
    ],
)
def test_sequences_without_padding_are_read_as_if_alone(variant, signal, tmp_path):
    signals = {"return_position_ids": False, signal: True}
    collate = DataCollatorWithFlattening(return_tensors="pt", **signals)
    losses, batches = losses_of_a_constant_model(collate, tmp_path, variant)
    assert all(len(rows) == SEQUENCES_PER_STEP for rows in batches)
    assert losses == pytest.approx([loss_by_hand(rows, variant) for rows in batches], rel=1e-4)
