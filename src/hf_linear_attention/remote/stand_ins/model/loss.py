# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The loss of a language model, a few rows of logits at a time: of tables of a whole vocabulary
only the gradient is made.

Shapes: B batch, T time, N tokens, V words.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from ....ops.numerics import accumulation_dtype, is_transformed

# Elements of the logits at a time: few enough for a CPU's cache, elsewhere enough to be busy.
CHUNK_ELEMENTS = {"cpu": 2**19}
CHUNK_ELEMENTS_ELSEWHERE = 2**26


def row_chunks(logits: Tensor) -> Iterator[slice]:
    N, V = logits.shape
    elements = CHUNK_ELEMENTS.get(logits.device.type, CHUNK_ELEMENTS_ELSEWHERE)
    rows = max(1, elements // max(1, V))
    return (slice(start, start + rows) for start in range(0, N, rows))


class CrossEntropy(torch.autograd.Function):
    """(logits (N, V), labels (N,) int64) -> losses (N,), -log softmax(logits)[label], and the
    log-normalisers (N,); 0 where the label is `ignore_index`. In float32, or float64 for float64.
    """

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(logits.dtype)
        normalizers = logits.new_empty(logits.shape[0], dtype=dtype)
        for rows in row_chunks(logits):
            torch.logsumexp(logits[rows].to(dtype), dim=1, out=normalizers[rows])
        is_counted = labels != ignore_index
        index = labels.masked_fill(~is_counted, 0)
        chosen = logits.gather(1, index[:, None])[:, 0]
        return torch.where(is_counted, normalizers - chosen, 0), normalizers

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, labels, ctx.ignore_index = inputs
        _, normalizers = output
        ctx.mark_non_differentiable(normalizers)
        ctx.save_for_backward(logits, labels, normalizers)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dlosses: Tensor, _):
        """softmax(logits) - one_hot(label), times the gradient of the loss."""
        logits, labels, normalizers = ctx.saved_tensors
        is_counted = labels != ctx.ignore_index
        scale = torch.where(is_counted, dlosses, 0)
        index = labels.masked_fill(~is_counted, 0)
        dlogits = torch.empty_like(logits)
        for rows in row_chunks(logits):
            probabilities = (logits[rows] - normalizers[rows, None]).exp_()
            # Before rounding: what a confident model has left to learn is the small difference.
            minus_one = torch.full_like(probabilities[:, :1], -1)
            probabilities.scatter_add_(1, index[rows, None], minus_one)
            torch.mul(probabilities, scale[rows, None], out=dlogits[rows])
        return dlogits, None, None


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """Transformers' loss of a causal language model (`ForCausalLMLoss`): same arguments and result.

    Raises:
        ValueError: there are no labels, or not as many as tokens.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    name = "labels" if shift_labels is None else "shift_labels"
    if shift_labels is None:
        if labels is None:
            raise ValueError("give either labels or shift_labels, got neither")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if shift_labels.numel() * vocab_size != logits.numel():  # else one label would be all tokens'
        raise ValueError(
            f"{name} must have one label for each token, got shape {tuple(shift_labels.shape)} "
            f"for tokens of {tuple(logits.shape)}"
        )
    labels = shift_labels.to(logits.device).flatten()
    losses, _ = CrossEntropy.apply(logits.view(-1, vocab_size), labels, ignore_index)
    if num_items_in_batch is None:
        return losses.sum() / (labels != ignore_index).sum()
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    return losses.sum() / num_items_in_batch
