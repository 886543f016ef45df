# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""TRL's trainers take the same steps where prompts are read once."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from hf_linear_attention import LinearAttentionForSequenceClassification, SharedPrompts
from hf_linear_attention.serving.shared_prompts import SharingManager
from saved_models import word_tokenizer
from sft import words
from tiny import VARIANTS, shallow, tiny_model
from upstream_models import tiny_upstream

PROMPTS = words(23, 30)
ANSWERS = [" " + text for text in words(5, 9, 3, 7)]
PAIRS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt in PROMPTS
    for chosen, rejected in (ANSWERS[:2], ANSWERS[2:])
]


def reward_of_even_words(prompts, completions, **kwargs):
    return [sum(int(word[1:]) % 2 == 0 for word in text.split()) / 10 for text in completions]


ONLINE = {"num_generations": 4, "max_completion_length": 8, "per_device_train_batch_size": 8}
TRAINERS = {
    "grpo": (GRPOTrainer, GRPOConfig, {**ONLINE, "num_iterations": 2, "beta": 0.1}),
    "rloo": (RLOOTrainer, RLOOConfig, {**ONLINE, "beta": 0.1}),
    "dpo": (DPOTrainer, DPOConfig, {"per_device_train_batch_size": 4, "max_length": None}),
    "reward": (RewardTrainer, RewardConfig, {"per_device_train_batch_size": 4}),
}
MODELS = {
    "gated_deltanet": lambda **options: tiny_model(
        dtype=torch.float32, **options, **{**VARIANTS["preset_gated_deltanet"], "vocab_size": 41}
    ),
    "hybrid": lambda **options: tiny_model(dtype=torch.float32, **options, **shallow("hybrid")),
    "qwen3_5": lambda: tiny_upstream("qwen3_5_text"),
}


def trained(kind, model, folder, is_shared, **others):
    """The weights after two steps, and the trainer."""
    trainer_class, config_class, options = TRAINERS[kind]
    options = {**options, **others}
    if is_shared:
        trainer_class = type("Shared", (SharedPrompts, trainer_class), {})
    config = config_class(
        str(folder),
        max_steps=2,
        optim="sgd",
        learning_rate=0.05,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        gradient_checkpointing=True,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    data = [{"prompt": prompt} for prompt in PROMPTS * 2] if kind in ("grpo", "rloo") else PAIRS
    more = {"reward_funcs": reward_of_even_words} if kind in ("grpo", "rloo") else {}
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(data),
        processing_class=word_tokenizer(eos_token="w40"),
        **more,
    )
    torch.manual_seed(0)
    trainer.train()
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}, trainer


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("grpo", name) for name in MODELS),
        *(("dpo", name) for name in MODELS),
        *((kind, "gated_deltanet") for kind in ("rloo", "reward")),
    ],
)
def test_steps_are_those_of_rows(kind, name, tmp_path):
    found = []
    for is_shared in (False, True):
        options = {}
        if kind == "reward":
            options = {"model_class": LinearAttentionForSequenceClassification, "num_labels": 1}
        model = MODELS[name](**options)
        model.save_pretrained(tmp_path / "model")  # of which a reference is loaded
        model = type(model).from_pretrained(tmp_path / "model")
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        weights, trainer = trained(kind, model, tmp_path, is_shared)
        found.append(weights)
    for shared in trainer.shared_prompts:
        assert 0 < shared.tokens_read < 0.7 * shared.tokens_given
    assert any(not torch.equal(weights[n], before[n]) for n in before)
    for n, want in found[0].items():
        moved = (want - before[n]).abs().max()
        assert (found[1][n] - want).abs().max() <= 1e-3 * moved + 1e-6, n


def grpo(model, folder, is_shared=True, **options):
    torch.manual_seed(0)
    trainer_class = type("Shared", (SharedPrompts, GRPOTrainer), {}) if is_shared else GRPOTrainer
    config = GRPOConfig(
        str(folder),
        max_steps=2,
        optim="sgd",
        learning_rate=0.5,
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return trainer_class(
        model=model,
        reward_funcs=reward_of_even_words,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 2]),
        processing_class=word_tokenizer(eos_token="w40"),
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gated_deltanet", "qwen3_5"])
def test_answers_are_forks_of_their_prompts(name, tmp_path, monkeypatch):
    """The engine sees weights at once: what it says of its tokens is what a forward does."""
    monkeypatch.setitem(globals(), "PROMPTS", words(140, 150))
    options = {**ONLINE, "use_transformers_continuous_batching": True}
    trainer = grpo(MODELS[name](), tmp_path, **options)
    seen = []
    of_rows = trainer._get_per_token_logps_and_entropies

    def watched(*args, **kwargs):
        found = of_rows(*args, **kwargs)
        seen.append(found[0].detach())
        return found

    generated = []
    score = trainer._generate_and_score_completions

    def kept(*args, **kwargs):
        generated.append(score(*args, **kwargs))
        return generated[-1]

    counts = []
    stop = SharingManager.stop

    def counted(manager, *args, **kwargs):
        counts.append(manager.shared_prompts())
        stop(manager, *args, **kwargs)

    monkeypatch.setattr(SharingManager, "stop", counted)
    trainer._get_per_token_logps_and_entropies = watched
    trainer._generate_and_score_completions = kept
    trainer.train()
    assert len(generated) == len(counts) == 2
    # Once each, but for the last token, from which each answer is drawn by itself.
    assert [count.tokens_read for count in counts] == [140 + 150 + 6] * 2
    firsts = [rows for batch in generated for rows in batch["completion_ids"][:, 0].split(4)]
    assert any(len(rows.unique()) > 1 for rows in firsts)
    for batch, forward in zip(generated, seen, strict=True):
        mask, logps = batch["completion_mask"].bool(), batch["sampling_per_token_logps"]
        order = [  # TRL shuffles rows in between
            min(range(len(logps)), key=lambda i: (logps[i] - row).abs().max()) for row in forward
        ]
        assert sorted(order) == list(range(len(logps)))
        assert ((logps[order] - forward) * mask[order]).abs().max() < 1e-3


@pytest.mark.thorough
def test_answers_of_rloo_are_forks_too(tmp_path):
    model = MODELS["gated_deltanet"]()
    model.save_pretrained(tmp_path / "model")  # of which a reference is loaded
    model = type(model).from_pretrained(tmp_path / "model")
    options = {"use_transformers_continuous_batching": True}
    _, trainer = trained("rloo", model, tmp_path, True, **options)
    for shared in trainer.shared_prompts:
        assert 0 < shared.tokens_read < 0.7 * shared.tokens_given


def test_batches_have_whole_groups(tmp_path):
    options = {**ONLINE, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = grpo(MODELS["gated_deltanet"](), tmp_path, **options)
    trainer.train()
    assert len(trainer._buffered_inputs) == 2
    for batch in trainer._buffered_inputs:
        assert len(batch["prompt_ids"]) == 4
        assert len(batch["prompt_ids"].unique(dim=0)) == 1
    (shared,) = trainer.shared_prompts
    assert shared.tokens_read < 0.5 * shared.tokens_given


@pytest.mark.thorough
def test_adapters_train_as_they_do_on_rows(tmp_path):
    found = []
    for is_shared in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(MODELS["hybrid"](), LoraConfig(target_modules="all-linear"))
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        weights, trainer = trained("dpo", model, tmp_path, is_shared)
        found.append(weights)
    (shared,) = trainer.shared_prompts
    assert shared.tokens_read < 0.7 * shared.tokens_given
    moved = {n: (found[0][n] - x).abs().max() for n, x in before.items()}
    assert {"lora" in n for n, size in moved.items() if size > 0} == {True}
    for n, size in moved.items():
        assert (found[1][n] - found[0][n]).abs().max() <= 1e-3 * size + 1e-6, n
