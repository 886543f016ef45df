# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Writes reference.json: what flash-linear-attention 0.6.0's layer of Gated DeltaNet-2 answers, in
float64 on a CPU. The layer runs as it is, with the package's naive loop in the place of its kernel;
weights are given by a formula, so that answers alone are stored.

    PYTHONPATH=FOLDER_WITH_FLA_TRITON_AND_EINOPS:tests/support:tests/data/rwkv7_of_fla \
        python tests/data/gdn2_of_fla/make.py
"""

import json
from pathlib import Path

import fla.layers.gdn2 as layers
import torch
from fla.ops.gdn2.naive import naive_recurrent_gdn2
from fla_folders import InFloat64, l2, use_loops
from formulas import probe, weight

SIZES = {"hidden_size": 16, "num_heads": 2, "head_dim": 6, "expand_v": 1.5}
T = 11


def recurrence(q, k, v, g, b, w, **others):
    return naive_recurrent_gdn2(l2(q), l2(k), v, g, b, w)


def main() -> None:
    use_loops()
    layers.chunk_gdn2 = layers.fused_recurrent_gdn2 = recurrence
    reference = {"made_by": "flash-linear-attention 0.6.0", "sizes": SIZES, "outputs": {}}
    for allow_neg_eigval in (False, True):
        layer = layers.GatedDeltaNet2(**SIZES, layer_idx=0, allow_neg_eigval=allow_neg_eigval)
        layer = layer.double().eval()
        names = sorted(name for name, _ in layer.named_parameters())
        with torch.no_grad():
            for number, name in enumerate(names):
                parameter = layer.get_parameter(name)
                parameter.copy_(weight(number, parameter, name))
            x = torch.stack([probe(i, torch.empty(T, 16)) for i in range(2)])
            with InFloat64():
                y, *_ = layer(x)
        reference["outputs"][str(allow_neg_eigval)] = y.tolist()
        reference["shapes"] = {name: list(layer.get_parameter(name).shape) for name in names}
    path = Path(__file__).with_name("reference.json")
    path.write_text(json.dumps(reference) + "\n")


if __name__ == "__main__":
    main()
