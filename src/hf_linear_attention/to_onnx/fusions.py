# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Nodes of a graph that ONNX Runtime computes as one, norms and what is added before them, and
some that change nothing.
"""

from typing import Any

from onnxscript.rewriter.ort_fusions.skip_normalization import skip_rms_normalization_ruleset
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet

RESHAPED_TWICE = RewriteRule(
    lambda op, x, once, twice: op.Reshape(op.Reshape(x, once), twice, allowzero=1),
    lambda op, x, once, twice: op.Reshape(x, twice, allowzero=1),
)


def is_of_shape(x: Any, shape: Any) -> bool:
    """Whether that is known of an onnx_ir.Value; dimensions are numbers, or have names."""
    return shape is not None and x.shape == shape and not shape.has_unknown_dim()


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
