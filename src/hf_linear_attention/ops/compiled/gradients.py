# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""How torch is told the gradients of an op over sequences, which are there once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

BACKEND = 'pass backend="chunked", or set HF_LINEAR_ATTENTION_BACKEND=chunked'


def register_gradient(
    library: torch.library.Library,
    name: str,
    what: str,
    keep_for_backward: Callable[[Any, tuple, Any], None],
    differentiate: Callable[..., Sequence[Tensor | None]],
    instead: str = BACKEND,
) -> None:
    """Has the op of that name differentiated by its op NAME_backward.

    Args:
        library: where torch keeps that, until it goes.
        what: the op in an error's words, which says what to do `instead` for second derivatives.
        keep_for_backward: as `setup_context` of `torch.library.register_autograd`.
        differentiate: of (ctx, *gradients of the results), some of them None: the gradients of the
            first arguments; the others have none.
    """

    def keep(ctx: Any, inputs: tuple, output: Any) -> None:
        keep_for_backward(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    def gradients_needed(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        if all(gradient is None for gradient in upstream):
            return (None,) * len(needed)
        found = differentiate(ctx, *upstream)
        found = (*found, *(None,) * (len(needed) - len(found)))
        return tuple(x if is_needed else None for x, is_needed in zip(found, needed, strict=True))

    def refuse(ctx: Any, *upstream: Tensor | None) -> None:
        raise RuntimeError(
            f"the compiled {what} can be differentiated once only; for second derivatives {instead}"
        )

    op = f"hf_linear_attention::{name}"
    torch.library.register_autograd(op, gradients_needed, setup_context=keep, lib=library)
    torch.library.register_autograd(f"{op}_backward", refuse, lib=library)
