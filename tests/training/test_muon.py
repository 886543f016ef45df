# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The optimizer of examples/muon.py: what steps which parameter, schedules, resumed runs."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from muon import MuonWithAdamW  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def model(**fields) -> LinearAttentionForCausalLM:
    torch.manual_seed(0)
    config = LinearAttentionConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        **fields,
    )
    return LinearAttentionForCausalLM(config)


def optimizer(of: LinearAttentionForCausalLM, lr: float = 1e-2) -> MuonWithAdamW:
    return MuonWithAdamW(of, lr, betas=(0.9, 0.95), weight_decay=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_muon_has_the_matrices_of_layers_and_no_other_parameter_is_left_out(tied):
    trained = model(tie_word_embeddings=tied)
    by_muon, by_adamw = (
        {id(x) for group in part.param_groups for x in group["params"]}
        for part in optimizer(trained).parts
    )
    names = {id(x): name for name, x in trained.named_parameters()}
    assert by_muon | by_adamw == set(names) and not by_muon & by_adamw
    in_layers = {i for i, name in names.items() if "layers" in name and "norm" not in name}
    assert by_muon == {i for i in in_layers if trained.get_parameter(names[i]).ndim == 2}


def test_steps_are_those_of_torchs_optimizers():
    trained, expected = model(), model()
    matrices = [x for n, x in expected.named_parameters() if "_proj.weight" in n]
    others = [x for x in expected.parameters() if all(x is not y for y in matrices)]
    ours = optimizer(trained)
    theirs = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    tokens = torch.arange(40)[None]
    for _ in range(3):
        for steps, one in (([ours], trained), (theirs, expected)):
            one(tokens, labels=tokens).loss.backward()
            for x in steps:
                x.step()
                x.zero_grad()
    for x, y in zip(trained.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(x, y)


def test_a_closure_is_called_with_gradients():
    trained = model()
    before = copy.deepcopy(trained.state_dict())
    tokens = torch.arange(40)[None]

    def closure():
        loss = trained(tokens, labels=tokens).loss
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer(trained).step(closure).item() > 0
    assert all((before[name] != x).any() for name, x in trained.named_parameters())


def train(folder: Path, resume_from: str | None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after six steps, and the learning rates of both parts."""
    trained = model()
    both = optimizer(trained)
    args = TrainingArguments(
        str(folder), max_steps=6, save_steps=3, learning_rate=1e-2, warmup_steps=2, use_cpu=True,
        per_device_train_batch_size=2, report_to=[], lr_scheduler_type="cosine", logging_steps=1,
    )  # fmt: skip
    rows = [{"input_ids": x, "labels": x} for x in torch.randint(40, (12, 10))]
    trainer = Trainer(trained, args, train_dataset=rows, optimizers=(both, None))
    rates = []
    step = both.parts[1].step
    both.parts[1].step = lambda: (
        rates.append([part.param_groups[0]["lr"] for part in both.parts]),
        step(),
    )
    trainer.train(resume_from_checkpoint=resume_from)
    return trained.state_dict(), rates


def test_a_resumed_run_goes_on_with_both_states_and_the_schedule(tmp_path):
    torch.manual_seed(1)
    whole, rates = train(tmp_path, None)
    assert all(muon == adamw for muon, adamw in rates)
    assert len({muon for muon, _ in rates}) > 3
    torch.manual_seed(1)
    resumed, later = train(tmp_path, str(tmp_path / "checkpoint-3"))
    assert later == rates[3:]
    for name, x in whole.items():
        torch.testing.assert_close(resumed[name], x)
