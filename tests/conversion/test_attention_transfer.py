# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Attention transfer: the model computes what the original did, and what is new in each layer
learns to give the same.
"""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from hf_linear_attention import LinearAttentionForCausalLM, convert
from hf_linear_attention.conversion.attention_transfer import (
    AttentionTransfer,
    AttentionTransferTrainer,
    new_parameters,
    relative_error,
)
from hf_linear_attention.conversion.convert import forms
from hf_linear_attention.conversion.softmax_form import restore_softmax
from softmax_models import softmax_model, some_ids
from trainer_runs import arguments

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = {"rtol": 1e-4, "atol": 3e-5}
WINDOW = {"window_size": 3, "window_sinks": 1}  # of texts so short
TRAINED = [name for name in forms() if name != "elu+1"]


def converted(name="llama", mixer="window", **options):
    """A softmax model, what is made of it, and its parameters that are new."""
    original = softmax_model(name)
    model, report = convert(original, mixer, **{**WINDOW, **options})
    return original, model, report.new


def one_loss(transfer, **inputs) -> torch.Tensor:
    """The loss; its gradients are the new parameters'."""
    transfer.model.zero_grad()
    with transfer.only_new_parameters(), transfer.running():
        loss = transfer.model(**inputs).loss
        loss.backward()
    return loss.detach()


def gradients(transfer) -> dict[str, torch.Tensor]:
    return {name: x.grad.clone() for name, x in transfer.new.items()}


@pytest.mark.parametrize(
    ("name", "mixer"),
    [
        *(("llama", mixer) for mixer in TRAINED),
        *((name, "window") for name in ("mistral", "qwen3", "smollm3_sliding", "gemma")),
        *((name, "gated_deltanet") for name in ("llama_with_biases", "qwen3_sliding", "smollm")),
        ("qwen2_sliding", "hedgehog"),
    ],
)
@torch.no_grad()
def test_what_is_passed_on_gives_the_logits_of_the_original(name, mixer):
    original, model, _ = converted(name, mixer, softmax_layers=[1])
    ids = some_ids(2, 20)
    logits = original(ids).logits
    assert not torch.allclose(model(ids).logits, logits, atol=1e-2)
    transfer = AttentionTransfer(model, original)
    with transfer.running():
        outputs = model(ids)
    torch.testing.assert_close(outputs.logits, logits, **EXACT)
    assert outputs.loss > 0.01
    assert not torch.allclose(model(ids).logits, logits, atol=1e-2)  # as before


@pytest.mark.parametrize("mixer", TRAINED)
def test_the_loss_goes_down_and_only_what_is_new_changes(mixer):
    original, model, new = converted(mixer=mixer, softmax_layers=[2])
    before = {name: x.clone() for name, x in model.named_parameters()}
    transfer = AttentionTransfer(model)
    assert set(transfer.new) == set(new)
    optimizer = torch.optim.Adam(transfer.new.values(), lr=1e-2)
    losses = []
    for _ in range(12):
        losses.append(one_loss(transfer, input_ids=some_ids(2, 20)).item())
        assert {name for name, x in model.named_parameters() if x.grad is not None} == set(new)
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0]
    for name, x in model.named_parameters():
        assert torch.equal(x, before[name]) == (name not in new), name
    assert all(x.requires_grad for x in model.parameters())


@pytest.mark.parametrize("mixer", ["window", "kda"])
def test_gradients_taken_at_once_are_those_of_layers_that_are_linear_alone(mixer):
    """For each layer a model in which it alone is linear, and the error that a hook sees there."""
    original, model, _ = converted(mixer=mixer)
    ids = some_ids(2, 20)
    transfer = AttentionTransfer(model)
    loss, found = one_loss(transfer, input_ids=ids), gradients(transfer)
    expected = {}

    def keep(module, args, kwargs, output):
        expected[module.layer_idx] = output[0]

    for layer in original.model.layers:
        layer.self_attn.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        original(ids)
    total = 0.0
    for i in range(3):
        types = ["linear_attention" if i == j else "full_attention" for j in range(3)]
        alone = LinearAttentionForCausalLM(
            convert(original, mixer, layer_types=types, **WINDOW).model.config
        )
        own = {
            name: x
            for name, x in model.state_dict().items()
            if name in alone.state_dict() and x.shape == alone.state_dict()[name].shape
        }
        alone.load_state_dict({**original.state_dict(), **own}, strict=True)
        seen = []
        alone.model.layers[i].self_attn.register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(output[0])
        )
        alone(ids)
        error = relative_error(seen[0], expected[i], None) / 3
        error.backward()
        total += error.item()
        for name in new_parameters(alone):
            torch.testing.assert_close(
                found[name], alone.get_parameter(name).grad, rtol=1e-3, atol=1e-5
            )
    assert loss.item() == pytest.approx(total, rel=1e-4)


def test_nothing_of_a_layer_is_kept_for_the_backward_pass():
    _, model, _ = converted()
    transfer = AttentionTransfer(model)
    kept = weakref.WeakSet()

    class Kept:
        def __init__(self, x):
            self.x = x
            kept.add(self)

    with transfer.only_new_parameters(), transfer.running():
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.x):
            loss = model(some_ids(2, 20)).loss
        gc.collect()
        assert not kept
        loss.backward()
    assert all(x.grad.abs().sum() > 0 for x in transfer.new.values())


@pytest.mark.parametrize("mixer", ["window", "t2r", "gated_deltanet"])
def test_padding_changes_nothing_and_packed_sequences_are_separate(mixer):
    original, model, _ = converted("qwen3", mixer, softmax_layers=[1])
    transfer = AttentionTransfer(model, original)
    lengths = (13, 7)
    rows = [some_ids(1, length, seed=length) for length in lengths]
    left = torch.zeros(2, 16, dtype=torch.long)
    mask = torch.zeros_like(left)
    for row, ids in enumerate(rows):
        left[row, -ids.shape[1] :], mask[row, -ids.shape[1] :] = ids, 1
    loss = one_loss(transfer, input_ids=left, attention_mask=mask)
    expected = gradients(transfer)
    packed = {
        "input_ids": torch.cat(rows, dim=1),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }
    right = {"input_ids": left.roll(-3, 1), "attention_mask": mask.roll(-3, 1)}
    for inputs in (packed, right):
        torch.testing.assert_close(one_loss(transfer, **inputs), loss, rtol=1e-4, atol=1e-5)
        for name, x in gradients(transfer).items():
            torch.testing.assert_close(x, expected[name], rtol=1e-3, atol=1e-5, msg=name)


# ---- the Trainer ----


def trainer_of(folder, **options) -> AttentionTransferTrainer:
    _, model, _ = converted()
    rows = [{"input_ids": ids, "labels": ids} for ids in some_ids(24, 12)]
    steps = {"max_steps": 6, "optim": "adamw_torch", "learning_rate": 1e-2, "save_steps": 3}
    args = arguments(folder, **{**steps, **options})
    return AttentionTransferTrainer(model, args, train_dataset=rows, eval_dataset=rows[:6])


def test_a_run_that_goes_on_from_a_checkpoint_ends_as_one_that_was_not_interrupted(tmp_path):
    whole = trainer_of(tmp_path, save_strategy="steps")
    before = whole.evaluate()["eval_loss"]
    whole.train()
    after = whole.evaluate()["eval_loss"]
    assert after < 0.98 * before
    again = trainer_of(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, x in whole.model.named_parameters():
        torch.testing.assert_close(again.model.get_parameter(name), x, rtol=1e-5, atol=1e-6)
        assert x.requires_grad
    losses = [[x["loss"] for x in run.state.log_history if "loss" in x] for run in (whole, again)]
    assert losses[0][3:] == pytest.approx(losses[1][3:], rel=1e-5)
    # a checkpoint is the linear model
    saved = LinearAttentionForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    ids = some_ids(1, 9)
    torch.testing.assert_close(saved(ids).logits, whole.model(ids).logits)


def test_accumulated_steps_have_the_mean_of_their_losses(tmp_path):
    losses = []
    for steps in (1, 2):
        trainer = trainer_of(tmp_path, gradient_accumulation_steps=steps)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.2)


def test_bfloat16_has_nearly_the_same_loss(tmp_path):
    losses = []
    for bf16 in (False, True):
        trainer = trainer_of(tmp_path, max_steps=2, bf16=bf16)
        trainer.train()
        losses.append([x["loss"] for x in trainer.state.log_history if "loss" in x])
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0]


# ---- refusals ----


def test_a_model_with_nothing_to_train_is_refused():
    for options in ({"mixer": "elu+1"}, {"softmax_layers": "all"}):
        _, model, _ = converted(**options)
        with pytest.raises(ValueError, match="parameters that softmax attention has not.*nothing"):
            AttentionTransfer(model)


def test_what_is_not_converted_or_lies_in_another_model_is_refused():
    """Of PEFT's models, say, nothing is said by a missing attribute of one of their parts."""
    original, model, _ = converted()
    around = torch.nn.Module()
    around.model, around.config = model, model.config
    with pytest.raises(ValueError, match="model must be a LinearAttentionForCausalLM.*got Llama"):
        AttentionTransfer(original)
    with pytest.raises(ValueError, match="model must be a LinearAttentionForCausalLM.*got Module"):
        AttentionTransfer(around)
    with pytest.raises(ValueError, match="model must be a LinearAttentionForCausalLM.*got Module"):
        restore_softmax(around, [0])


def test_the_original_is_asked_for_where_the_converted_model_does_not_say_all():
    _, model, _ = converted("mistral")
    with pytest.raises(ValueError, match="original must be given.*sliding window"):
        AttentionTransfer(model)
    _, model, _ = converted("qwen3", "hedgehog")
    with pytest.raises(ValueError, match="original must be given.*0.self_attn.q_norm.weight"):
        AttentionTransfer(model)
    with pytest.raises(ValueError, match="original must have the model's 3 layers, got 1"):
        AttentionTransfer(model, softmax_model("llama", num_hidden_layers=1))


def test_gradient_checkpointing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gradient_checkpointing must be off"):
        trainer_of(tmp_path, gradient_checkpointing=True).train()


def test_weights_that_ranks_share_are_refused():
    """A sharded layer computes with parameters that are made when it begins, so the gradients of
    those that the model had would all be 0.
    """
    _, model, _ = converted()
    transfer = AttentionTransfer(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model.model.layers[0], mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="model must have its weights whole.*FSDP"):
            one_loss(transfer, input_ids=some_ids(2, 9))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("of", ["layer", "model"])
def test_weights_that_the_first_fsdp_shares_are_refused(of, tmp_path):
    """It puts modules of its own around layers, or around the model, which the Trainer hands on."""
    trainer = trainer_of(tmp_path)
    model, cpu = trainer.model, torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = FullyShardedDataParallel(
            model.model.layers[0] if of == "layer" else model, device_id=cpu, use_orig_params=True
        )
        if of == "layer":
            model.model.layers[0], wrapped = wrapped, model
        with pytest.raises(ValueError, match="model must have its weights whole.*FSDP"):
            trainer.compute_loss(wrapped, {"input_ids": some_ids(2, 9)})
    finally:
        dist.destroy_process_group()
