# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The second stage after a conversion: the whole model learns to predict as the original does.

Hinton et al., "Distilling the Knowledge in a Neural Network", arXiv 1503.02531.

Shapes: B batch, T time, C hidden size, N tokens, V words.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..model.loss import row_chunks
from ..model.modeling import LinearAttentionForCausalLM
from ..ops.numerics import accumulation_dtype
from .attention_transfer import check_one_device, new_parameters, relative_error
from .softmax_form import PROJECTIONS

IGNORED = -100  # a label that is none
# What marks packed sequences for our models; Transformers' softmax models read `position_ids`.
BOUNDS = ("seq_idx", "cu_seq_lens_q")


class DistillationLoss(torch.autograd.Function):
    """(student's logits (N, V), teacher's (N, V), labels (N,) int64, temperature, weight w) ->
    losses (N,), (1 - w) temperature^2 KL + w CE, 0 where the label is -100.

    KL is that of the teacher's words from the student's, both at that temperature, and CE the
    cross-entropy with the label. All is done a few rows at a time, in float32 or better, the
    gradient too: it takes the teacher's logits' place, so that what is kept for the backward pass
    is one table.
    """

    @staticmethod
    def forward(
        ctx, student: Tensor, teacher: Tensor, labels: Tensor, temperature: float, weight: float
    ) -> Tensor:
        dtype = accumulation_dtype(student.dtype)
        losses = student.new_zeros(student.shape[0], dtype=dtype)
        gradient = teacher if teacher.dtype == student.dtype else torch.empty_like(student)
        is_counted = (labels != IGNORED)[:, None]
        index = labels.clamp(min=0)[:, None]
        for rows in row_chunks(student):
            scores, right = student[rows].to(dtype), index[rows]
            log_p = (scores / temperature).log_softmax(-1)
            log_q = (teacher[rows].to(dtype) / temperature).log_softmax(-1)
            q = log_q.exp()
            gaps = (q * (log_q - log_p)).masked_fill_(q == 0, 0)  # words that the teacher rules out
            loss = (1 - weight) * temperature**2 * gaps.sum(-1, keepdim=True)
            dscores = log_p.exp().sub_(q).mul_((1 - weight) * temperature)
            if weight != 0:
                log_words = scores.log_softmax(-1)
                loss -= weight * log_words.gather(1, right)
                dscores.add_(log_words.exp(), alpha=weight)
                dscores.scatter_add_(1, right, torch.full_like(loss, -weight))
            losses[rows] = torch.where(is_counted[rows], loss, 0)[:, 0]
            gradient[rows] = torch.where(is_counted[rows], dscores, 0).to(student.dtype)
        ctx.gradient, ctx.is_counted = gradient, is_counted
        return losses

    @staticmethod
    def backward(ctx, dlosses: Tensor):
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("the gradients of a distillation's loss can be taken once only")
        # A mean over no labels has an infinite gradient.
        gradient.mul_(torch.where(ctx.is_counted, dlosses[:, None], 0))
        return gradient, None, None, None, None


def labels_of_next_tokens(inputs: dict[str, Any]) -> Tensor:
    """For every token the one that follows, (B, T), -100 where none is to be predicted: as labels
    say, or without them where there is a real one; and never behind padding.
    """
    labels, mask = inputs.get("labels"), inputs.get("attention_mask")
    if labels is None:
        labels = inputs["input_ids"]
        if mask is not None:
            labels = labels.masked_fill(mask == 0, IGNORED)
    labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return labels if mask is None else labels.masked_fill(mask == 0, IGNORED)


class Distillation:
    """Makes of a Trainer's class, behind it among the bases, one that distils: of TRL's SFTTrainer,
    say, whose labels leave out prompts. `DistillationTrainer` is that of Trainer.

    The loss is the mean over labels of (1 - w) temperature^2 KL(teacher | student) + w CE, and
    `hidden_states` times the mean over layers of |h - h'|^2 / |h'|^2, h' the teacher's hidden
    states. Without labels all tokens that the attention mask shows count.

    Args:
        teacher: the model that was converted, or one with its vocabulary. It is put into eval mode
            and on the Trainer's device.
        temperature: by which the logits of both are divided.
        cross_entropy: w, from 0 to 1.
        hidden_states: weight of the hidden states' error; they need the teacher's layers and sizes.
        others: as of the Trainer.

    Raises:
        ValueError: one of these is wrong, or the Trainer's arguments have what distillation has no
            place for: DataParallel or smoothed labels.
    """

    def __init__(
        self,
        *others: Any,
        teacher: PreTrainedModel,
        temperature: float = 1.0,
        cross_entropy: float = 0.0,
        hidden_states: float = 0.0,
        **kwargs: Any,
    ):
        if not temperature > 0:
            raise ValueError(f"temperature must be more than 0, got {temperature}")
        if not 0 <= cross_entropy <= 1:
            raise ValueError(f"cross_entropy must be from 0 to 1, got {cross_entropy}")
        if not hidden_states >= 0:
            raise ValueError(f"hidden_states must be at least 0, got {hidden_states}")
        super().__init__(*others, **kwargs)
        trainer: Any = self
        check_one_device(trainer.args)
        if trainer.args.label_smoothing_factor != 0:
            raise ValueError(
                "args.label_smoothing_factor must be 0, for the teacher's words take the place of "
                f"smoothed labels, got {trainer.args.label_smoothing_factor}"
            )
        words = trainer.model.config.vocab_size
        if teacher.config.vocab_size != words:
            raise ValueError(
                f"teacher must have the model's {words} words, got {teacher.config.vocab_size}"
            )
        self.teacher = teacher.eval().to(trainer.args.device)
        self.temperature = temperature
        self.cross_entropy = cross_entropy
        self.hidden_states = hidden_states

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        labels = labels_of_next_tokens(inputs)
        inputs = {name: x for name, x in inputs.items() if name != "labels"}
        inputs |= {"use_cache": False, "output_hidden_states": self.hidden_states > 0}
        outputs = model(**inputs)
        check_packing(self.teacher, inputs)
        with torch.no_grad():
            expected = self.teacher(**inputs)
        losses = DistillationLoss.apply(
            outputs.logits.flatten(0, 1),
            expected.logits.flatten(0, 1),
            labels.flatten(),
            self.temperature,
            self.cross_entropy,
        )
        count = (labels != IGNORED).sum()
        loss = losses.sum()
        if self.hidden_states > 0:
            error = hidden_states_error(outputs, expected, inputs.get("attention_mask"))
            error = torch.where(count > 0, error, 0)  # has no gradient then, were it divided by 0
            loss = loss + self.hidden_states * count * error
        loss = loss / (count if num_items_in_batch is None else num_items_in_batch)
        trainer: Any = self
        if trainer.args.average_tokens_across_devices and num_items_in_batch is not None:
            # of processes that have batches of their own, the mean is taken of gradients
            loss = loss * (trainer.accelerator.num_processes // trainer.get_tp_size())
        return (loss, CausalLMOutputWithPast(logits=outputs.logits)) if return_outputs else loss


def check_packing(teacher: PreTrainedModel, inputs: dict[str, Any]) -> None:
    """Raises a ValueError where a teacher of Transformers would read packed sequences as one."""
    is_ours = isinstance(teacher, LinearAttentionForCausalLM)
    marks = [name for name in BOUNDS if inputs.get(name) is not None]
    if marks and not is_ours and inputs.get("position_ids") is None:
        raise ValueError(
            f"position_ids must be given beside {', '.join(marks)} for sequences packed into a "
            f"row, or {type(teacher).__name__}, the teacher, reads them as one"
        )


def hidden_states_error(outputs: Any, expected: Any, attention_mask: Tensor | None) -> Tensor:
    """The mean of `relative_error` over what layers give; the embeddings are not counted."""
    key_mask = None if attention_mask is None else attention_mask != 0
    pairs = list(zip(outputs.hidden_states[1:], expected.hidden_states[1:], strict=True))
    return torch.stack([relative_error(x, y, key_mask) for x, y in pairs]).mean()


class DistillationTrainer(Distillation, Trainer):
    """A Trainer whose loss is how far the model's words are from a teacher's. As of `Distillation`;
    the other arguments are Trainer's.
    """


def lora_config(model: LinearAttentionForCausalLM, rank: int = 8, **fields: Any) -> Any:
    """PEFT's LoraConfig for a converted model: adapters on the projections of every layer's
    attention, as in LoLCATs; and what linear layers have beside them is trained as it is.

    Args:
        fields: others of LoraConfig; they win.
    """
    from peft import LoraConfig

    # with a prefix, since PEFT takes all that ends so: b_proj, and decay.f_b_proj too
    new = {".".join(name.split(".")[3:5]) for name in new_parameters(model)}
    defaults = {
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(PROJECTIONS),
        "modules_to_save": sorted(new) or None,
        "task_type": "CAUSAL_LM",
    }
    return LoraConfig(**{**defaults, **fields})
