# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RMS norms of a graph in the form that ONNX Runtime knows: six nodes, of which it makes one."""

from typing import Any

import onnx_ir as ir


def divide_by_roots(graph: Any) -> None:
    """x (1 / sqrt(y)), which is made of PyTorch's rsqrt, becomes x / sqrt(y) in an ir.Graph."""
    for inverse in [node for node in graph if node.op_type == "Reciprocal"]:
        root, (made,) = inverse.inputs[0], inverse.outputs
        users = [node for node, _ in made.uses()]
        of_root = root.producer()
        is_root = of_root is not None and of_root.op_type == "Sqrt"
        if not is_root or [node.op_type for node in users] != ["Mul"]:
            continue
        (product,) = users
        (x,) = (value for value in product.inputs if value is not made)
        quotient = ir.node("Div", [x, root])
        ir.convenience.replace_nodes_and_values(
            graph, product, [product], [quotient], product.outputs, quotient.outputs
        )
        graph.remove(inverse, safe=True)
