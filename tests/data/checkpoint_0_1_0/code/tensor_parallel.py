# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tensor parallelism: what belongs to heads, where each rank has some of them.

Transformers shards the projections, by the config's `base_model_tp_plan`. What else a head has is
small; every rank keeps it whole, and uses what belongs to its own heads.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call


class HeadShard(NamedTuple):
    """The heads of this rank."""

    mesh: Any  # torch.distributed's DeviceMesh of the ranks that share the heads

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of dimension `dim`, which counts heads, of an x that all ranks have.

        Each gets the gradient of all of x.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(dim)]).to_local()

    def share(self, x: Tensor) -> Tensor:
        """x, which the heads of all ranks use alike: its gradient is the sum over the ranks."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])


def call(module: nn.Module, shard: HeadShard | None, *args: Any) -> Any:
    """module(*args), with the parameters of this rank's heads.

    Raises:
        ValueError: the module doesn't say whether its parameters belong to heads.
    """
    if shard is None:
        return module(*args)
    own = {}
    for name, parameter in module.named_parameters():
        if module.has_parameters_per_head is None:
            raise ValueError(
                f"{type(module).__name__}.has_parameters_per_head must be True (the first "
                "dimension of every parameter counts heads, or channels head by head) or False "
                "(all heads share them) for tensor parallelism, got None"
            )
        per_head = module.has_parameters_per_head
        own[name] = shard.take(parameter, 0) if per_head else shard.share(parameter)
    return functional_call(module, own, args)


def find_head_shard(x: Tensor, weight: Tensor, num_heads: int, head_dim: int) -> HeadShard | None:
    """Which of num_heads heads this rank has, x (..., heads * head_dim) being the product with
    `weight`; None where that is all of them.

    Raises:
        ValueError: the ranks can't have equally many. RuntimeError: it can't be known.
    """
    if x.shape[-1] == num_heads * head_dim:
        return None
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        raise RuntimeError(
            f"a projection has {x.shape[-1]} features in place of {num_heads} heads of {head_dim}, "
            "and its weight is no DTensor that says which"
        )
    if num_heads % mesh.size() != 0:
        raise ValueError(
            f"num_key_value_heads={num_heads} must be a multiple of the {mesh.size()} ranks of "
            "tensor parallelism"
        )
    return HeadShard(mesh)
