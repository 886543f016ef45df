# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Distillation: the loss, what counts for it, and runs of it: whole, resumed, by LoRA, by TRL."""

import pytest
import torch
from datasets import Dataset
from peft import PeftModel, get_peft_model
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening, Trainer
from trl import SFTConfig, SFTTrainer

from hf_linear_attention import LinearAttentionForCausalLM, convert
from hf_linear_attention.conversion.attention_transfer import new_parameters
from hf_linear_attention.conversion.distillation import (
    Distillation,
    DistillationLoss,
    DistillationTrainer,
    lora_config,
)
from hf_linear_attention.model import loss as loss_module
from saved_models import word_tokenizer
from softmax_models import softmax_model, some_ids
from trainer_runs import arguments

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = {"window_size": 3, "window_sinks": 1}


# ---- the loss ----


def plain_loss(student, teacher, labels, temperature, weight):
    """Of each row, by PyTorch's own functions."""
    p, q = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    kl = F.kl_div(p, q, log_target=True, reduction="none").sum(-1)
    entropy = F.cross_entropy(student, labels, reduction="none", ignore_index=-100)
    losses = (1 - weight) * temperature**2 * kl + weight * entropy
    return losses.where(labels != -100, 0)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_loss_and_its_gradient_are_the_definitions_in_pieces_too(
    temperature, weight, monkeypatch
):
    student, teacher = torch.randn(2, 7, 11, dtype=torch.float64)
    student.requires_grad_(True)
    labels = torch.tensor([3, -100, 0, 10, 5, 5, -100])
    expected = plain_loss(student, teacher, labels, temperature, weight)
    scale = torch.randn(7, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(expected @ scale, student)
    for elements in (2**19, 30):  # in one piece, and two rows at a time
        monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", elements)
        losses = DistillationLoss.apply(student, teacher.clone(), labels, temperature, weight)
        torch.testing.assert_close(losses, expected)
        found = torch.autograd.grad(losses @ scale, student)[0]
        torch.testing.assert_close(found, gradient)


def test_rows_without_a_label_have_no_gradient_where_a_mean_over_none_is_taken():
    student = torch.randn(3, 11, requires_grad=True)
    losses = DistillationLoss.apply(student, torch.randn(3, 11), torch.full((3,), -100), 1.0, 0.5)
    (losses.sum() / 0).backward()
    assert not student.grad.any()


def test_words_that_the_teacher_rules_out_count_nothing():
    student = torch.randn(4, 11, requires_grad=True)
    labels, masked = torch.arange(4), torch.randn(4, 11)
    masked[:, 7:] = -torch.inf
    for weight in (0.0, 0.5):
        losses = DistillationLoss.apply(student, masked.clone(), labels, 1.0, weight)
        kl = F.kl_div(student.log_softmax(-1), masked.softmax(-1), reduction="none").sum(-1)
        entropy = F.cross_entropy(student, labels, reduction="none")
        expected = (1 - weight) * kl + weight * entropy
        torch.testing.assert_close(losses, expected)
        gradients = [torch.autograd.grad(x.sum(), student)[0] for x in (losses, expected)]
        torch.testing.assert_close(*gradients)


def test_the_gradient_of_bfloat16_takes_the_place_of_the_teachers_logits():
    student = torch.randn(5, 11, dtype=torch.bfloat16, requires_grad=True)
    teacher = torch.randn(5, 11, dtype=torch.bfloat16)
    labels = torch.arange(5)
    expected = plain_loss(student.float(), teacher.float(), labels, 1.0, 0.5)
    losses = DistillationLoss.apply(student, teacher, labels, 1.0, 0.5)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected)
    losses.sum().backward(retain_graph=True)
    assert torch.equal(student.grad, teacher)
    with pytest.raises(RuntimeError, match="once only"):
        losses.sum().backward()


# ---- the Trainer ----


def student_and_teacher(name="llama", mixer="window", **options):
    original = softmax_model(name)
    return convert(original, mixer, **{**WINDOW, **options}).model, original


def rows(count: int = 24) -> list[dict]:
    return [{"input_ids": ids, "labels": ids} for ids in some_ids(count, 12)]


def trainer_of(folder, model=None, distil=None, dataset=None, **options) -> DistillationTrainer:
    student, teacher = student_and_teacher()
    args = arguments(
        folder,
        **{
            "max_steps": 6,
            "optim": "adamw_torch",
            "learning_rate": 3e-3,
            "save_steps": 3,
            **options,
        },
    )
    dataset = dataset or rows()
    return DistillationTrainer(
        student if model is None else model,
        args,
        teacher=teacher,
        train_dataset=dataset,
        eval_dataset=dataset,
        **(distil or {}),
    )


def losses_of(trainer) -> list[float]:
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


@pytest.mark.parametrize(
    "distil",
    [{}, {"cross_entropy": 0.5, "temperature": 2.0}, {"hidden_states": 1.0}],
    ids=["kl", "mixed", "hidden"],
)
def test_it_comes_nearer_to_the_teacher(distil, tmp_path):
    trainer = trainer_of(tmp_path, distil=distil)
    before = trainer.evaluate()["eval_loss"]
    frozen = {name: x.clone() for name, x in trainer.teacher.named_parameters()}
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.95 * before
    for name, x in trainer.teacher.named_parameters():
        assert torch.equal(x, frozen[name]) and x.grad is None


def test_a_model_that_is_its_own_teacher_has_no_loss(tmp_path):
    model, teacher = student_and_teacher(softmax_layers="all")
    trainer = trainer_of(tmp_path, model, {"hidden_states": 1.0, "temperature": 3.0})
    assert trainer.evaluate()["eval_loss"] == pytest.approx(0, abs=1e-5)


def test_a_run_that_goes_on_from_a_checkpoint_ends_as_one_that_was_not_interrupted(tmp_path):
    whole, again = trainer_of(tmp_path, save_strategy="steps"), trainer_of(tmp_path)
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, x in whole.model.named_parameters():
        torch.testing.assert_close(again.model.get_parameter(name), x, rtol=1e-5, atol=1e-6)


def masked_rows() -> list[dict]:
    """Of one length, of which some have many labels and some few."""
    return [
        {"input_ids": ids, "labels": ids.where(torch.arange(12) > 1 + row % 10, -100)}
        for row, ids in enumerate(some_ids(24, 12))
    ]


@pytest.mark.parametrize("distil", [{"cross_entropy": 0.3}, {"hidden_states": 0.0}])
def test_accumulated_steps_are_those_of_whole_batches(distil, tmp_path):
    """As the mean over all labels, however many each piece of a batch has."""
    options = {"dataset": masked_rows(), "optim": "sgd", "learning_rate": 0.01}
    steps = []
    for accumulated in (1, 2):
        trainer = trainer_of(
            tmp_path, distil=distil, gradient_accumulation_steps=accumulated, **options
        )
        trainer.train()
        steps.append(losses_of(trainer))
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)


def compute(trainer, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return trainer.compute_loss(trainer.model, inputs)


def test_what_has_no_label_or_is_padding_does_not_count(tmp_path):
    trainer = trainer_of(tmp_path, distil={"hidden_states": 0.5})
    trainer.model.eval()
    ids, padded = some_ids(1, 10), torch.zeros(2, 12, dtype=torch.long)
    mask = torch.zeros_like(padded)
    padded[:, 2:], mask[:, 2:] = ids, 1
    expected = compute(trainer, input_ids=ids)
    torch.testing.assert_close(
        compute(trainer, input_ids=padded, attention_mask=mask), expected, rtol=1e-4, atol=1e-5
    )
    labels = padded.masked_fill(mask == 0, -100)
    torch.testing.assert_close(
        compute(trainer, input_ids=padded, attention_mask=mask, labels=labels),
        expected,
        rtol=1e-4,
        atol=1e-5,
    )
    trainer.hidden_states = 0.0
    ends = ids.clone()
    ends[:, :6] = -100
    with torch.no_grad():
        student, teacher = (x(ids).logits[0, 5:-1] for x in (trainer.model, trainer.teacher))
    torch.testing.assert_close(
        compute(trainer, input_ids=ids, labels=ends),
        plain_loss(student, teacher, ids[0, 6:], 1.0, 0.0).mean(),
    )


@pytest.mark.parametrize("distil", [{}, {"hidden_states": 1.0}])
def test_a_batch_without_labels_changes_nothing(distil, tmp_path):
    """As with Transformers' own loss: prompts may be cut before what was to be learned."""
    unlabelled = [
        {"input_ids": ids, "labels": torch.full_like(ids, -100)} for ids in some_ids(4, 9)
    ]
    options = {"dataset": unlabelled, "optim": "sgd", "max_steps": 1}
    trainer = trainer_of(tmp_path, distil=distil, **options)
    before = {name: x.clone() for name, x in trainer.model.named_parameters()}
    trainer.train()
    for name, x in trainer.model.named_parameters():
        assert torch.equal(x, before[name]), name


def test_ranks_that_share_heads_count_once(tmp_path, monkeypatch):
    """A loss by the labels of all processes is as many times as large as batches are apart, since
    the mean of their gradients is taken: as Trainer's.
    """
    trainer = trainer_of(tmp_path)
    trainer.model.eval()
    ids = some_ids(2, 9)

    def losses() -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                kind.compute_loss(
                    trainer, trainer.model, {"input_ids": ids, "labels": ids}, num_items_in_batch=16
                )
                for kind in (Trainer, DistillationTrainer)
            ]

    alone = losses()
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 6)
    monkeypatch.setattr(trainer, "get_tp_size", lambda: 2)
    for loss, of_one in zip(losses(), alone, strict=True):
        torch.testing.assert_close(loss, 3 * of_one)


def test_packed_sequences_count_as_if_alone(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.model.eval()
    alone = [some_ids(length, seed=length).tolist() for length in (9, 5, 13)]
    collate = DataCollatorWithFlattening(return_tensors="pt")
    packed = compute(trainer, **collate([{"input_ids": ids, "labels": ids} for ids in alone]))
    each = [compute(trainer, input_ids=torch.tensor([ids])) * (len(ids) - 1) for ids in alone]
    torch.testing.assert_close(packed, sum(each) / (9 + 5 + 13 - 3), rtol=1e-4, atol=1e-5)


# ---- LoRA, TRL ----


@pytest.mark.sample(2)
@pytest.mark.parametrize("mixer", ["window", "t2r", "gated_linear", "gated_deltanet", "kda"])
def test_lora_trains_what_is_new_and_comes_back_merged(mixer, tmp_path):
    def unadapted():
        torch.manual_seed(0)
        options = {"softmax_layers": [1], "conv_kernel_size": 2}
        return student_and_teacher("smollm3", mixer, **options)[0]

    def adapted():
        model = unadapted()
        return get_peft_model(model, lora_config(model, 2, lora_alpha=4))

    whole, model = adapted(), unadapted()
    new = {name.split("self_attn.")[1] for name in new_parameters(model)}
    before = dict(model.named_parameters())
    teacher = softmax_model("smollm3")
    options = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-2, "save_steps": 2}

    def trainer_for(adapter, **more):
        args = arguments(tmp_path, **{**options, **more})
        return DistillationTrainer(adapter, args, teacher=teacher, train_dataset=rows())

    trainer_for(whole, save_strategy="steps").train()
    again = adapted()
    trainer_for(again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    ids = some_ids(2, 12)
    with torch.no_grad():
        logits = whole.eval()(ids).logits
        torch.testing.assert_close(again.eval()(ids).logits, logits, rtol=1e-4, atol=1e-4)
        merged = whole.merge_and_unload()
        assert type(merged) is LinearAttentionForCausalLM
        torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-4, atol=1e-4)
    changed = {name for name, x in merged.named_parameters() if not torch.equal(x, before[name])}
    attention = {name for name in before if ".self_attn." in name}
    assert changed <= attention
    assert {name.split("self_attn.")[1] for name in changed} >= new - {"mixing.log_factor"}
    saved = PeftModel.from_pretrained(unadapted(), tmp_path / "checkpoint-4").eval()
    torch.testing.assert_close(saved(ids).logits, logits, rtol=1e-4, atol=1e-4)


class SFTDistillationTrainer(Distillation, SFTTrainer):
    pass


def test_trls_trainer_distils_on_completions_alone(tmp_path):
    texts = Dataset.from_dict(
        {"prompt": ["w3 w4 w5", "w9"] * 4, "completion": [" w6 w7", " w8 w3 w4 w5"] * 4}
    )
    model, teacher = student_and_teacher()
    args = SFTConfig(
        str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTDistillationTrainer(
        model,
        args,
        teacher=teacher,
        train_dataset=texts,
        processing_class=word_tokenizer(eos_token="w40"),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert {(row == -100).sum().item() for row in batch["labels"]} & {1, 3}
    with torch.no_grad():
        loss = trainer.compute_loss(model.eval(), dict(batch))
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        student, expected = (x(**inputs).logits[:, :-1] for x in (model, teacher))
        labels = batch["labels"][:, 1:]
        plain = plain_loss(
            student.flatten(0, 1), expected.flatten(0, 1), labels.flatten(), 1.0, 0.0
        )
    torch.testing.assert_close(loss, plain.sum() / (labels != -100).sum(), rtol=1e-4, atol=1e-5)
    trainer.train()
    with torch.no_grad():
        assert trainer.compute_loss(model.eval(), dict(batch)) < 0.98 * loss


# ---- refusals ----


@pytest.mark.parametrize(
    ("distil", "message"),
    [
        ({"temperature": 0}, "temperature must be more than 0, got 0"),
        ({"cross_entropy": 1.5}, "cross_entropy must be from 0 to 1, got 1.5"),
        ({"hidden_states": -1.0}, "hidden_states must be at least 0, got -1.0"),
    ],
)
def test_wrong_weights_are_refused(distil, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, distil=distil)


def test_smoothed_labels_and_other_vocabularies_are_refused(tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor must be 0.*got 0.1"):
        trainer_of(tmp_path, label_smoothing_factor=0.1)
    model = convert(softmax_model("llama", vocab_size=70)).model
    with pytest.raises(ValueError, match="teacher must have the model's 70 words, got 64"):
        trainer_of(tmp_path, model)


def test_packed_sequences_that_the_teacher_would_read_as_one_are_refused(tmp_path):
    """Transformers' softmax attention tells them by their positions alone."""
    trainer = trainer_of(tmp_path)
    ids, seq_idx = torch.arange(2, 10)[None], torch.tensor([[0] * 5 + [1] * 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="position_ids must be given beside seq_idx .* Llama"):
        trainer.compute_loss(trainer.model, {"input_ids": ids, "seq_idx": seq_idx})
