# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tensor parallelism: the parameters that belong to heads, where each rank has some of the heads.

Transformers shards the projections, by the config's `base_model_tp_plan`, which is made here. What
else a head has is small; every rank keeps it whole, and uses what belongs to its own heads.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedConfig

from ..facts import QKV, SOFTMAX_MIXERS, facts_of

TENSOR_PARALLEL_STYLES = {  # of the modules of a layer that Transformers may shard
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.g_proj": "colwise",
    "self_attn.g_b_proj": "colwise",
    "self_attn.kv_b_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "cross_attn.q_proj": "colwise",
    "cross_attn.k_proj": "colwise",
    "cross_attn.v_proj": "colwise",
    "cross_attn.g_proj": "colwise",
    "cross_attn.g_b_proj": "colwise",
    "cross_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


def style_of(name: str) -> str:
    """Of a module that `modules_of_layers` names: a user's mixer may have other projections."""
    return TENSOR_PARALLEL_STYLES.get(name, "colwise")


def modules_of_layers(config: PreTrainedConfig) -> set[str]:
    """Those of a layer that Transformers may shard, in layers of the model."""
    layer_types = set(config.active_layer_types)
    gate = set()  # of linear attention
    if config.is_gated:
        gate = {"g_b_proj" if config.low_rank_gate else "g_proj"}
    self_attn = {"o_proj"}
    if "linear_attention" in layer_types:
        self_attn |= {*gate, *facts_of(config.mixer).projections}
    if layer_types - {"linear_attention"}:
        self_attn |= {"g_proj"} if config.attn_output_gate else set()
        self_attn |= {*SOFTMAX_MIXERS[config.softmax_mixer].projections}
    names = set()
    if config.intermediate_size > 0:
        names |= {"mlp.up_proj", "mlp.down_proj"}
        names |= {"mlp.gate_proj"} if facts_of(config.mixer).block == "llama" else set()
    names |= {f"self_attn.{name}" for name in self_attn}
    if config.add_cross_attention:
        names |= {f"cross_attn.{name}" for name in {*QKV, *gate, "o_proj"}}
    return names


class TensorParallelPlan:
    """`base_model_tp_plan`, which Transformers reads from a config as it is when a model is made:
    it warns where a plan has modules that the model has not. One set on a config wins over this.
    """

    def __get__(self, config: PreTrainedConfig | None, owner: type) -> dict[str, str]:
        present = TENSOR_PARALLEL_STYLES if config is None else sorted(modules_of_layers(config))
        layers = {f"layers.*.{name}": style_of(name) for name in present}
        return {"embed_tokens": "embedding_rowwise", **layers}


class HeadShard(NamedTuple):
    """The heads of this rank."""

    mesh: Any  # torch.distributed's DeviceMesh of the ranks that share the heads

    @property
    def num_ranks(self) -> int:
        return self.mesh.size()

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of dimension `dim`, which counts heads, of an x that all ranks have.

        Each gets the gradient of all of x.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(dim)]).to_local()

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' parts of dimension `dim`, which counts heads, as every rank computes with them
        alike: each part gets the gradient that its own rank has of it.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        part = DTensor.from_local(x, self.mesh, [Shard(dim)], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local()

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


def keep_meshes(model: nn.Module) -> None:
    """Notes on each module whose weight is sharded the mesh of its ranks: a weight that is
    quantised while it is loaded, by torchao for one, is no DTensor any more, which would know.
    """
    for module in model.modules():
        mesh = getattr(getattr(module, "weight", None), "device_mesh", None)
        if mesh is not None:
            module.mesh_of_weight = mesh


def find_head_shard(
    x: Tensor, projection: nn.Module, num_heads: int, field: str = "num_key_value_heads"
) -> HeadShard | None:
    """Which of num_heads heads, as the config's `field` has it, this rank has, x (..., features)
    being what `projection` gave here; None where that is all of them.

    Raises:
        ValueError: the ranks can't have equally many. RuntimeError: it can't be known.
    """
    if x.shape[-1] == projection.out_features:
        return None
    shard = getattr(projection, "head_shard", None)  # where an engine has sharded it
    mesh = getattr(projection.weight, "device_mesh", None)
    mesh = getattr(projection, "mesh_of_weight", None) if mesh is None else mesh
    if shard is None and mesh is not None:
        shard = HeadShard(mesh)
    if shard is None:
        raise RuntimeError(
            f"a projection to {num_heads} heads has given {x.shape[-1]} of its "
            f"{projection.out_features} features, and neither its weight, as a DTensor would, nor "
            "from_pretrained has said on which ranks the others are"
        )
    if num_heads % shard.num_ranks != 0:
        raise ValueError(
            f"{field}={num_heads} must be a multiple of the {shard.num_ranks} ranks of "
            "tensor parallelism"
        )
    return shard
