# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The loss of a language model, without the tables of a whole vocabulary that are not needed.

For T tokens and V words, `torch.nn.functional.cross_entropy` makes the log-probabilities, their
gradient and that of the logits, (T, V) each: on long sequences these, not the model, are what fills
the memory. Here only the last one is made: on the CPU by compiled ops, elsewhere a few rows at a
time.

Shapes: N tokens, V words.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from .backends import has_compiled, native_op
from .numerics import accumulation_dtype, is_transformed
from .sequence_parallel import shift_labels_across, sum_over_ranks

compiled_cross_entropy = native_op("cross_entropy", version=1)
compiled_backward = native_op("cross_entropy_backward", version=1)
IS_COMPILED = has_compiled(compiled_cross_entropy, compiled_backward)

# Elements of the logits to work on at a time: few enough for a CPU's cache, and on other devices
# enough to keep them busy.
CHUNK_ELEMENTS = {"cpu": 2**19}
CHUNK_ELEMENTS_ELSEWHERE = 2**26


def row_chunks(logits: Tensor) -> list[slice]:
    N, V = logits.shape
    elements = CHUNK_ELEMENTS.get(logits.device.type, CHUNK_ELEMENTS_ELSEWHERE)
    rows = max(1, elements // max(1, V))
    return [slice(start, start + rows) for start in range(0, N, rows)]


class CrossEntropy(torch.autograd.Function):
    """(logits (N, V), labels (N,) int64) -> (losses (N,), log-normalisers (N,)).

    -log softmax(logits)[label] for every row, 0 where the label is `ignore_index`. Both results are
    in float32, or float64 for float64 logits; only the losses can be differentiated.
    """

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        if IS_COMPILED and logits.is_cpu:
            return compiled_cross_entropy(logits, labels, ignore_index)
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
    def backward(ctx, dlosses: Tensor, _):
        """softmax(logits) - one_hot(label), times the gradient of the loss."""
        logits, labels, normalizers = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again, which what follows can't be
            losses = F.cross_entropy(
                logits.to(normalizers.dtype),
                labels,
                ignore_index=ctx.ignore_index,
                reduction="none",
            )
            (dlogits,) = torch.autograd.grad(losses, logits, dlosses, create_graph=True)
            return dlogits, None, None
        if IS_COMPILED and logits.is_cpu:
            found = logits, labels, normalizers
            return compiled_backward(dlosses, *found, ctx.ignore_index), None, None
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
    sequence_group: Any = None,
    **kwargs,
) -> Tensor:
    """Transformers' loss of a causal language model (`ForCausalLMLoss`): same arguments and result.

    logits (B, T, V); labels (B, T), of which token t + 1 is what logits t predict; or shift_labels
    (B, T), shifted already. The mean over labels that are not `ignore_index`, or their sum over
    num_items_in_batch.

    With sequence_group, whose ranks hold consecutive pieces of the sequences, labels t + 1 may be
    another rank's, and the mean is that of all ranks; num_items_in_batch still divides the sum of
    this one's alone.

    Raises:
        ValueError: there are no labels, or not as many as tokens.
    """
    # The compiler fuses the plain form, which torch.func and forward mode can differentiate, too.
    if (torch.compiler.is_compiling() or is_transformed()) and sequence_group is None:
        return ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    name = "labels" if shift_labels is None else "shift_labels"
    if shift_labels is None:
        if labels is None:
            raise ValueError("give either labels or shift_labels, got neither")
        if sequence_group is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        else:
            shift_labels = shift_labels_across(labels, ignore_index, sequence_group)
    if shift_labels.numel() * vocab_size != logits.numel():  # one label would be that of all tokens
        raise ValueError(
            f"{name} must have one label for each token of logits, got shape "
            f"{tuple(shift_labels.shape)} for logits of {tuple(logits.shape)}"
        )
    shift_labels = shift_labels.to(logits.device).flatten()
    losses, _ = CrossEntropy.apply(logits.view(-1, vocab_size), shift_labels, ignore_index)
    if num_items_in_batch is None:
        total, count = losses.sum(), (shift_labels != ignore_index).sum()
        if sequence_group is not None:
            total, count = (sum_over_ranks(x, sequence_group) for x in (total, count))
        return total / count
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    return losses.sum() / num_items_in_batch
