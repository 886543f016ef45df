# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Nodes of a graph that ONNX Runtime computes as one, norms and what is added before them, and
some that change nothing.
"""

from typing import Any

import onnx_ir
from onnxscript.rewriter.ort_fusions.skip_normalization import skip_rms_normalization_ruleset
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet

RESHAPED_TWICE = RewriteRule(
    lambda op, x, once, twice: op.Reshape(op.Reshape(x, once), twice, allowzero=1),
    lambda op, x, once, twice: op.Reshape(x, twice, allowzero=1),
)


def is_of_shape(x: Any, shape: Any) -> bool:
    """Whether that is known of an onnx_ir.Value; dimensions are numbers, or have names."""
    return shape is not None and x.shape == shape and not shape.has_unknown_dim()


def norms_in_one_dtype(model: Any) -> None:
    """Has norms of an onnx_ir.Model read numbers of their weight's dtype, in place: float16 beside
    a weight in float32 is allowed by ONNX, and an error in ONNX Runtime.
    """
    for norm in [node for node in model.graph if node.op_type == "RMSNormalization"]:
        x, weight = norm.inputs
        if x.dtype != weight.dtype:
            cast = onnx_ir.node("Cast", [x], {"to": int(weight.dtype)})
            cast.outputs[0].dtype, cast.outputs[0].shape = weight.dtype, x.shape
            model.graph.insert_before(norm, cast)
            norm.replace_input_with(0, cast.outputs[0])


def fuse(model: Any) -> None:
    """Has such nodes become one, or none, in an onnx_ir.Model, in place."""
    RewriteRuleSet([RESHAPED_TWICE]).apply_to_model(model)
    for node in list(model.graph):
        if node.op_type == "Reshape" and is_of_shape(node.inputs[0], node.outputs[0].shape):
            node.outputs[0].replace_all_uses_with(node.inputs[0])
            model.graph.remove(node, safe=True)
        if node.op_type == "RMSNormalization":  # the next rules know it by its older name
            node.op_type = "SimplifiedLayerNormalization"
    skip_rms_normalization_ruleset.apply_to_model(model)
