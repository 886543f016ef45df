# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The loss of a language model, without needless tables of a whole vocabulary.

For T tokens and V words, `torch.nn.functional.cross_entropy` makes the log-probabilities, their
gradient and that of the logits, (T, V) each: on long sequences these, not the model, are what fills
the memory. Here only the last one is made: on the CPU by compiled ops, elsewhere a few rows at a
time. `linear_causal_lm_loss` makes none, nor the logits themselves.

Shapes: B batch, T time, N tokens, C hidden size, V words.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from ..fast.linear import plain_product
from ..ops.backends import has_compiled, native_op
from ..ops.numerics import accumulation_dtype, is_transformed
from ..recurrences.sequence_parallel import shift_labels_across, sum_over_ranks
from ..recurrences.tree import check_labels_of_tree

compiled_cross_entropy = native_op("cross_entropy")
compiled_backward = native_op("cross_entropy_backward")
IS_COMPILED = has_compiled()

# Elements of the logits to work on at a time: few enough for a CPU's cache, and on other devices
# enough to keep them busy.
CHUNK_ELEMENTS = {"cpu": 2**19}
CHUNK_ELEMENTS_ELSEWHERE = 2**26
# Of logits that are not kept, at least.
LINEAR_CHUNK_ELEMENTS = 2**24


def row_chunks(logits: Tensor) -> list[slice]:
    N, V = logits.shape
    elements = CHUNK_ELEMENTS.get(logits.device.type, CHUNK_ELEMENTS_ELSEWHERE)
    return slices_of(N, elements // max(1, V))


def linear_chunks(N: int, weight: Tensor) -> list[slice]:
    """Of rows whose logits are made at a time: as many as features, or more. So these are about as
    large as the gradient of the weight, to which each chunk adds, and cost more than that does.
    """
    V, C = weight.shape
    return slices_of(N, max(C, LINEAR_CHUNK_ELEMENTS // max(1, V)))


def slices_of(N: int, rows: int) -> list[slice]:
    """Of N rows, so many at a time."""
    rows = max(1, rows)
    return [slice(start, start + rows) for start in range(0, N, rows)]


def is_for_compiled(logits: Tensor) -> bool:
    """Whether the compiled ops take them; not if they are distributed, or a subclass else."""
    return IS_COMPILED and logits.is_cpu and type(logits) in (Tensor, torch.nn.Parameter)


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """What `CrossEntropy` gives."""
    if is_for_compiled(logits):
        return compiled_cross_entropy(logits, labels, ignore_index)
    dtype = accumulation_dtype(logits.dtype)
    normalizers = logits.new_empty(logits.shape[0], dtype=dtype)
    for rows in row_chunks(logits):
        torch.logsumexp(logits[rows].to(dtype), dim=1, out=normalizers[rows])
    is_counted = labels != ignore_index
    index = labels.masked_fill(~is_counted, 0)
    chosen = logits.gather(1, index[:, None])[:, 0]
    return torch.where(is_counted, normalizers - chosen, 0), normalizers


def cross_entropy_backward(
    dlosses: Tensor, logits: Tensor, labels: Tensor, normalizers: Tensor, ignore_index: int
) -> Tensor:
    """softmax(logits) - one_hot(label), times the gradient of the loss."""
    if is_for_compiled(logits):
        return compiled_backward(dlosses, logits, labels, normalizers, ignore_index)
    is_counted = labels != ignore_index
    scale = torch.where(is_counted, dlosses, 0)
    index = labels.masked_fill(~is_counted, 0)
    dlogits = torch.empty_like(logits)
    for rows in row_chunks(logits):
        probabilities = (logits[rows] - normalizers[rows, None]).exp_()
        # Before rounding: what a confident model has left to learn is the small difference.
        minus_one = torch.full_like(probabilities[:, :1], -1)
        probabilities.scatter_add_(1, index[rows, None], minus_one)
        torch.mul(probabilities, scale[rows, None], out=dlogits[rows])
    return dlogits


class CrossEntropy(torch.autograd.Function):
    """(logits (N, V), labels (N,) int64) -> (losses (N,), log-normalisers (N,)).

    -log softmax(logits)[label] for every row, 0 where the label is `ignore_index`. Both results are
    in float32, or float64 for float64 logits; only the losses can be differentiated.
    """

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        return cross_entropy(logits, labels, ignore_index)

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, labels, ctx.ignore_index = inputs
        _, normalizers = output
        ctx.mark_non_differentiable(normalizers)
        ctx.save_for_backward(logits, labels, normalizers)

    @staticmethod
    def backward(ctx, dlosses: Tensor, _):
        logits, labels, normalizers = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again, which what follows can't be
            losses = F.cross_entropy(
                logits.to(normalizers.dtype),
                labels,
                ignore_index=ctx.ignore_index,
                reduction="none",
            )
            (dlogits,) = torch.autograd.grad(losses, logits, dlosses, create_graph=True)
        else:
            found = logits, labels, normalizers
            dlogits = cross_entropy_backward(dlosses, *found, ctx.ignore_index)
        return dlogits, None, None


class LinearCrossEntropy(torch.autograd.Function):
    """(hidden_states (N, C), weight (V, C), labels (N,) int64) -> () the sum of the losses that
    `CrossEntropy` has for the logits hidden_states weightᵀ, in the dtype of its losses.

    The logits of a few rows are made at a time, and their gradient at once, so that neither is ever
    there for all: after Hsu et al., "Liger Kernel", arXiv 2410.10989. Rows without a label have no
    logits at all. Under autocast products are in its dtype.
    """

    @staticmethod
    def forward(
        ctx, hidden_states: Tensor, weight: Tensor, labels: Tensor, ignore_index: int
    ) -> Tensor:
        device = hidden_states.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(device) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(device)
        counted = (labels != ignore_index).nonzero()[:, 0]
        x, w, labels = hidden_states[counted].to(dtype), weight.to(dtype), labels[counted]
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x) if needs_x else None
        dweight = torch.zeros_like(w, dtype=accumulation_dtype(dtype)) if needs_weight else None
        total = x.new_zeros((), dtype=accumulation_dtype(dtype))
        for rows in linear_chunks(len(x), w):
            logits = plain_product(x[rows], w)
            losses, normalizers = cross_entropy(logits, labels[rows], ignore_index)
            total += losses.sum()
            if not (needs_x or needs_weight):
                continue
            dlosses = torch.ones_like(losses)
            found = logits, labels[rows], normalizers
            dlogits = cross_entropy_backward(dlosses, *found, ignore_index)
            if dx is not None:
                dx[rows] = plain_product(dlogits, w.t())
            if dweight is not None:
                dweight += plain_product(dlogits.t(), x[rows].t())
        ctx.save_for_backward(counted, dx, dweight)
        ctx.shape, ctx.dtypes = hidden_states.shape, (hidden_states.dtype, weight.dtype)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dtotal: Tensor):
        counted, dx, dweight = ctx.saved_tensors
        dtype, weight_dtype = ctx.dtypes
        if len(counted) == 0:  # a mean over no labels has an infinite gradient
            dtotal = torch.zeros_like(dtotal)
        if dx is not None:
            dx = (dx * dtotal).to(dtype)
            dx = dx.new_zeros(ctx.shape).index_copy_(0, counted, dx)
        if dweight is not None:
            dweight = (dweight * dtotal).to(weight_dtype)
        return dx, dweight, None, None


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    sequence_group: Any = None,
    tree: Any = None,
    **kwargs,
) -> Tensor:
    """Transformers' loss of a causal language model (`ForCausalLMLoss`): same arguments and result.

    logits (B, T, V); labels (B, T), of which token t + 1 is what logits t predict; or shift_labels
    (B, T), shifted already. The mean over labels that are not `ignore_index`, or their sum over
    num_items_in_batch.

    With sequence_group, whose ranks hold pieces of the sequences, labels t + 1 may be another
    rank's, and the mean is that of all ranks; num_items_in_batch still divides the sum of this
    one's alone.

    Raises:
        ValueError: there are no labels, or not as many as tokens, or they are of a tree, and not
            shifted.
    """
    check_labels_of_tree(tree, labels, shift_labels)
    # The compiler fuses the plain form, which torch.func and forward mode can differentiate, too.
    if is_left_to_torch() and sequence_group is None:
        return ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    which = labels, shift_labels, ignore_index, sequence_group
    labels = labels_of_tokens(logits, vocab_size, *which)
    losses, _ = CrossEntropy.apply(logits.view(-1, vocab_size), labels, ignore_index)
    return reduced(losses.sum(), labels, num_items_in_batch, ignore_index, sequence_group)


def linear_causal_lm_loss(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    sequence_group: Any = None,
    tree: Any = None,
    **kwargs,
) -> Tensor:
    """`causal_lm_loss` of the logits hidden_states (B, T, C) weightᵀ (C, V), which are not made.

    It can be differentiated once. Where torch.compile or torch.func is at work, and of meta
    tensors, they are made.

    Raises:
        ValueError: as there.
    """
    check_labels_of_tree(tree, labels, shift_labels)
    if (is_left_to_torch() or hidden_states.is_meta) and sequence_group is None:
        which = labels, len(weight), num_items_in_batch, ignore_index, shift_labels
        return causal_lm_loss(F.linear(hidden_states, weight), *which, **kwargs)
    C = hidden_states.shape[-1]
    labels = labels_of_tokens(hidden_states, C, labels, shift_labels, ignore_index, sequence_group)
    total = LinearCrossEntropy.apply(hidden_states.reshape(-1, C), weight, labels, ignore_index)
    return reduced(total, labels, num_items_in_batch, ignore_index, sequence_group)


def is_left_to_torch() -> bool:
    return torch.compiler.is_compiling() or is_transformed()


def labels_of_tokens(
    tokens: Tensor,
    size: int,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    ignore_index: int,
    sequence_group: Any,
) -> Tensor:
    """What each of the tokens (B, T, size) predicts, (B T,)."""
    name = "labels" if shift_labels is None else "shift_labels"
    if shift_labels is None:
        if labels is None:
            raise ValueError("give either labels or shift_labels, got neither")
        if not isinstance(labels, Tensor):
            raise ValueError(f"labels must be a tensor, got {type(labels).__name__}")
        if sequence_group is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        else:
            shift_labels = shift_labels_across(labels, ignore_index, sequence_group)
    if shift_labels.numel() * size != tokens.numel():  # one label would be that of all tokens
        raise ValueError(
            f"{name} must have one label for each token, got shape {tuple(shift_labels.shape)} "
            f"for tokens of {tuple(tokens.shape)}"
        )
    return shift_labels.to(tokens.device).flatten()


def reduced(
    total: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None,
    ignore_index: int,
    sequence_group: Any,
) -> Tensor:
    """The loss from the sum over all labels."""
    if num_items_in_batch is None:
        count = (labels != ignore_index).sum()
        if sequence_group is not None:
            total, count = (sum_over_ranks(x, sequence_group) for x in (total, count))
        return total / count
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
