# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Context parallelism by Accelerate's own switches: `ParallelismConfig(cp_size=n)`.

Accelerate enters a context around each step, in which it shards batches in place and PyTorch's
softmax attention is another, and refuses models with other layers. For models whose layers share
sequences themselves the context is ours, and shards batches alone.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..recurrences.sequence_parallel import (
    HeadTail,
    SequenceGroup,
    check_lengths,
    part_of,
    sum_over_ranks,
)

# What a model is asked for: the order in which it wants pieces, one of `ORDERS`, or None where it
# can't share sequences. A method of this package's models, and of those that `use_kernels` changed.
ORDER = "order_of_pieces"

_shared: ContextVar[SequenceGroup] = ContextVar("who shares the batch of this step", default=None)


def prepare(accelerator: Any, objects: tuple[Any, ...]) -> bool:
    """Whether the models among what an Accelerator prepares share sequences themselves. They are
    then told who shares a step's batch. Without models, as Trainer prepares an evaluation's data,
    the context stays what it was.

    Raises:
        ValueError: some don't, or can't.
    """
    models = [x for x in objects if isinstance(x, nn.Module)]
    if not models and is_ours(getattr(accelerator, "_cp_context", None)):
        return True
    found = [sharing_model(model) for model in models]
    sharing = [model for model in found if model is not None]
    if not sharing:
        return False
    orders = [getattr(model, ORDER)() for model in sharing]
    if None in orders or len(sharing) < len(models):
        raise ValueError(
            "cp_size > 1 needs models that can share sequences, got "
            f"{[type(model).__name__ for model in models]}"
        )
    group = accelerator.torch_device_mesh["cp"].get_group()
    shared = HeadTail(group) if "head_tail" in orders else group
    accelerator._cp_context = functools.partial(share_buffers, shared)
    for model in sharing:
        if not any(hook is tell_group for hook in model._forward_pre_hooks.values()):
            # before the model's own hooks, which look for it
            model.register_forward_pre_hook(tell_group, with_kwargs=True, prepend=True)
        if "head_tail" not in orders:  # Trainer wants this also where no layer asks for it
            config: Any = model.config
            config._attn_implementation = "sdpa"
    return True


def refuse_ulysses(accelerator: Any, objects: tuple[Any, ...]) -> None:
    """Raises a ValueError for models that share sequences themselves where DeepSpeed would."""
    sp_size = getattr(accelerator.parallelism_config, "sp_size", 1)
    models = [sharing_model(x) for x in objects if isinstance(x, nn.Module)]
    names = [type(model).__name__ for model in models if model is not None]
    if sp_size > 1 and names:
        raise ValueError(
            f"sp_size must be 1 for {names}, whose layers pass states on, got {sp_size}: "
            "cp_size shares their sequences"
        )


@contextmanager
def gathering_copies(accelerator: Any, data: Any) -> Iterator[Any]:
    """While an evaluation's losses (rows,) are gathered, each that of a rank's tokens: ranks that
    share sequences then all have the mean, and so Accelerate, which cuts what the last batch has
    of more than is left of the data, is told that all is there several times.
    """
    if not is_ours(getattr(accelerator, "_cp_context", None)):
        yield data
        return
    if isinstance(data, Tensor) and data.dim() == 1 and data.is_floating_point():
        group = accelerator.torch_device_mesh["cp"].get_group()
        data = sum_over_ranks(data, group) / dist.get_world_size(group)
    state, copies = accelerator.gradient_state, 1
    if state.remainder > 0:
        copies = accelerator.parallelism_config.non_data_parallel_size
        state.active_dataloader.remainder *= copies
    try:
        yield data
    finally:
        if copies > 1:
            state.active_dataloader.remainder //= copies


def is_ours(context: Any) -> bool:
    """Whether a step's context is that of `prepare`."""
    return getattr(context, "func", None) is share_buffers


def sharing_model(model: nn.Module) -> nn.Module | None:
    """The outermost one that says whether it shares sequences, perhaps inside of what wraps it."""
    return next((x for x in model.modules() if hasattr(x, ORDER)), None)


@contextmanager
def share_buffers(
    sequence_group: SequenceGroup,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Cuts tensors in place to this rank's tokens, and puts back at the end what was there, but
    for `no_restore_buffers`: as torch's `context_parallel` does. Models know it meanwhile.

    Raises:
        ValueError: they can't be shared by the ranks.
    """
    buffers, dims = buffers or [], buffer_seq_dims or []
    kept = no_restore_buffers or set()
    if len(buffers) != len(dims):
        raise ValueError(
            f"buffer_seq_dims must have a dimension for each of {len(buffers)} buffers, got {dims}"
        )
    with_dims = list(zip(buffers, dims, strict=True))
    for dim in set(dims):
        of_dim = [x for x, other in with_dims if other == dim]
        named = {f"tensor {i} of the batch": x for i, x in enumerate(of_dim)}
        check_lengths(named, sequence_group, dim)
    whole = [None if any(x is other for other in kept) else x.clone() for x in buffers]
    parts = [part_of(x, sequence_group, dim).clone() for x, dim in with_dims]
    for x, part in zip(buffers, parts, strict=True):  # of which two may be the same tensor
        _put(x, part)
    token = _shared.set(sequence_group)
    try:
        yield
    finally:
        _shared.reset(token)
        for x, before in zip(buffers, whole, strict=True):
            if before is not None:
                _put(x, before)


@torch.no_grad()
def _put(x: Tensor, other: Tensor) -> None:
    x.resize_(other.shape).copy_(other)


def tell_group(
    model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Before the forward of a model.

    Raises:
        ValueError: it is not the model that makes the loss, which would not be the one of the whole
            sequences.
    """
    group = _shared.get()
    if group is None:
        return None
    if kwargs.get("shift_labels") is not None and kwargs.get("labels") is None:
        raise ValueError(
            "cp_size > 1 needs the loss of the model itself: leave out label_smoothing_factor and "
            "compute_loss_func, whose labels are those of this rank's tokens alone"
        )
    return args, {**kwargs, "sequence_group": group}
