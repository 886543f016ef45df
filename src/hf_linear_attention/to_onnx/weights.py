# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A graph's weights in 8 or 4 bits, in blocks that share a scale, as ONNX Runtime multiplies them.

Shapes: N outputs, K inputs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import nn

from .operators import MICROSOFT

BLOCK = 32  # inputs that share a scale
FEW = 64  # outputs of a matrix that stays as it is: those that make decays and rates of heads


def quantize(model: Any, bits: int) -> list[str]:
    """Makes products with weights, and embeddings, of an onnx_ir.Model those of so many bits, in
    place. Returns the names of large matrices that stayed as they are.
    """
    left = []
    for node in list(model.graph):
        if node.op_type == "MatMul" and (weight := weight_of(node.inputs[1])) is not None:
            if weight.shape[1] > FEW:
                by_few_bits(model.graph, node, weight.T, bits)
        elif node.op_type == "Gather" and (weight := weight_of(node.inputs[0])) is not None:
            if weight.ndim != 2:
                continue
            if weight.shape[1] % BLOCK == 0:
                embed_few_bits(model.graph, node, weight, bits)
            else:
                left.append(f"{node.inputs[0].name}: {weight.shape[1]} is no multiple of {BLOCK}")
        elif node.op_type == "MoE":
            left.append(f"{node.inputs[4].name} and its like, of experts")
    model.opset_imports[MICROSOFT] = 1
    RemoveUnusedNodesPass()(model)
    return left


def weight_of(x: Any) -> Any:
    """A matrix of the graph's, or one that it transposes, which then does without; else None."""
    if x is None:
        return None
    made = x.producer()
    if made is not None and made.op_type == "Transpose" and made.inputs[0].is_initializer():
        return made.inputs[0].const_value.numpy().T
    return x.const_value.numpy() if x.is_initializer() and x.const_value is not None else None


def rounded(weight: Any, bits: int) -> tuple[Any, Any]:
    """A matrix (N, K) in blocks: uint8 (N, blocks, bytes), the earlier of two values in the lower
    half of a byte, and scales (N, blocks). Half of the values, 8 or 128, stands for 0, the least
    for the largest number of a block, whatever its sign.
    """
    N, K = weight.shape
    blocks = np.pad(weight, ((0, 0), (0, -K % BLOCK))).reshape(N, -1, BLOCK).astype(np.float32)
    half = 2 ** (bits - 1)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    scales = (largest / -half).astype(weight.dtype)
    divisors = np.where(scales == 0, 1, scales).astype(np.float32)
    values = np.clip(np.round(blocks / divisors) + half, 0, 2 * half - 1).astype(np.uint8)
    if bits == 4:
        values = values[..., ::2] | values[..., 1::2] << 4
    return values, scales[..., 0]


def has_few_bits(module: nn.Module) -> bool:
    """Whether `quantize` rounds this module's weight."""
    if isinstance(module, nn.Embedding):
        return module.embedding_dim % BLOCK == 0
    return isinstance(module, nn.Linear) and module.out_features > FEW


@torch.no_grad()
def round_weights(
    model: nn.Module, bits: int, chosen: Callable[[nn.Module], bool] = has_few_bits
) -> None:
    """Gives the chosen modules of a model the weights that its graph of so many bits has, in place,
    in their own dtype. What is left between the two is what the graph's products round of inputs.
    """
    for module in model.modules():
        if chosen(module):
            weight: Any = module.weight
            values, scales = rounded(weight.numpy(), bits)
            if bits == 4:
                values = np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:2], BLOCK)
            exact = (values.astype(np.float32) - 2 ** (bits - 1)) * scales[..., None]
            weight.copy_(torch.from_numpy(exact.reshape(len(exact), -1)[:, : weight.shape[1]]))


def by_few_bits(graph: Any, node: Any, weight: Any, bits: int) -> None:
    """Puts MatMulNBits for a MatMul with a weight (N, K)."""
    N, K = weight.shape
    attributes = {"N": N, "K": K, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
    data = named(graph, node.outputs[0].name, rounded(weight, bits))
    put(graph, node, "MatMulNBits", [node.inputs[0], *data], attributes)


def embed_few_bits(graph: Any, node: Any, weight: Any, bits: int) -> None:
    """Puts GatherBlockQuantized for a Gather of rows."""
    values, scales = rounded(weight, bits)
    attributes = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    rows, scales = named(graph, node.outputs[0].name, (values.reshape(len(values), -1), scales))
    put(graph, node, "GatherBlockQuantized", [rows, node.inputs[1], scales], attributes)


def named(graph: Any, name: str, arrays: tuple[Any, Any]) -> list[Any]:
    """Values and scales as initializers of the graph."""
    made = []
    for kind, array in zip(("values", "scales"), arrays, strict=True):
        tensor = ir.tensor(np.ascontiguousarray(array), name=f"{name}.{kind}")
        value = ir.Value(
            name=tensor.name,
            shape=tensor.shape,
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        graph.register_initializer(value)
        made.append(value)
    return made


def put(graph: Any, node: Any, kind: str, inputs: list[Any], attributes: dict[str, int]) -> None:
    """An operator of Microsoft's in the place of a node."""
    after = ir.node(kind, inputs, attributes, domain=MICROSOFT)
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], [after], node.outputs, after.outputs
    )
