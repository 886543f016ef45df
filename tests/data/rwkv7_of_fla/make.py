# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Writes reference.json: what flash-linear-attention 0.6.0's RWKV-7 answers, in float64 on a CPU.

Its model, block and layers run as they are; the Triton kernels below them are replaced by the forms
in PyTorch that the same package has beside them. Weights are given by a formula, so only answers
are stored: logits, the loss, and of each gradient its size and one product. So are first values.

    PYTHONPATH=FOLDER_WITH_FLA_TRITON_AND_EINOPS python tests/data/rwkv7_of_fla/make.py
"""

import json
import re
from pathlib import Path

import fla.layers.rwkv7 as layers
import fla.models.rwkv7.modeling_rwkv7 as models
import torch
from fla.models.rwkv7 import RWKV7Config, RWKV7ForCausalLM
from fla.models.utils import Cache
from fla.modules.token_shift import token_shift_ref
from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
from fla.ops.rwkv7.fused_k_update import k_update_ref
from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref
from formulas import probe, weight

SIZES = {
    "vocab_size": 13,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "intermediate_size": 24,
    "decay_low_rank_dim": 4,
    "gate_low_rank_dim": 5,
    "a_low_rank_dim": 3,
    "v_low_rank_dim": 2,
}
OUT = "model.layers.1.attn.o_proj.weight"
IDS = [[1, 5, 9, 2, 12, 7, 7, 3, 0, 11, 4, 6], [8, 3, 3, 10, 1, 0, 12, 5, 2, 9, 9, 4]]


def shift(x, cu_seqlens, cache=None, output_cache=False):
    """Its plain form, with a cache of the last token, (B, C)."""
    delta = token_shift_ref(x, cu_seqlens)
    if cache is not None:
        delta = torch.cat([delta[:, :1] + cache[:, None], delta[:, 1:]], dim=1)
    return delta, x[:, -1]


def mix(x, delta, *shares):
    return tuple(x.addcmul(delta, share) for share in shares)


def recurrence(r, w, k, v, a, b, initial_state=None, output_final_state=True, **others):
    """Its naive loop, of float64: it scales queries by 1 / sqrt(K), and takes all as float32."""
    single, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double
    try:
        by_head = [x.transpose(1, 2) for x in (r * r.shape[-1] ** 0.5, k, v, a, b, w)]
        y, state = dplr_recurrence(*by_head, initial_state=initial_state)
    finally:
        torch.Tensor.float = single
    return y.transpose(1, 2), state


def recurrence_of_steps(r, w, k, v, kk, a, **others):
    return recurrence(r, w, k, v, -kk, kk * a, **others)


def squared_relu(x):
    """Of float64, where theirs, as TorchScript, computes in float32."""
    return torch.relu(x).square()


layers.token_shift = models.token_shift = shift
layers.fused_addcmul_rwkv7 = mix
layers.fused_k_rwkv7 = k_update_ref
layers.gate_output_correction = gate_output_correction_ref
layers.chunk_rwkv7 = recurrence
models.ACT2FN["sqrelu"] = squared_relu
layers.fused_mul_recurrent_rwkv7 = recurrence_of_steps


def main() -> None:
    config = RWKV7Config(**SIZES, fuse_norm=False, fuse_cross_entropy=False, use_l2warp=False)
    model = RWKV7ForCausalLM(config).double()
    names = sorted(name for name, _ in model.named_parameters())
    print("o_proj is 0 at first:", not model.get_parameter(OUT).any())
    first_values = {  # of what is not drawn at random
        name: (model.get_parameter(name) * probe(number, model.get_parameter(name))).sum().item()
        for number, name in enumerate(names)
        if re.search(r"\.([xkr]_.|bias)$|norm\.weight|lora\.0", name)
    }
    with torch.no_grad():
        for number, name in enumerate(names):
            parameter = model.get_parameter(name)
            parameter.copy_(weight(number, parameter, name))
    ids = torch.tensor(IDS)
    logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    gradients = {}
    for number, name in enumerate(names):
        gradient = model.get_parameter(name).grad
        size, product = gradient.norm(), (gradient * probe(number, gradient)).sum()
        gradients[name] = [size.item(), product.item()]
    steps, cache = [], Cache()
    with torch.no_grad():
        for piece in [ids[:, :5], *ids[:, 5:].split(1, 1)]:
            out = model(piece, past_key_values=cache, use_cache=True)
            steps.append(out.logits)
            cache = out.past_key_values
    print("cached and whole differ by", (torch.cat(steps, 1) - logits).abs().max().item())
    reference = {
        "made_by": "flash-linear-attention 0.6.0",
        "sizes": SIZES,
        "ids": IDS,
        "loss": loss.item(),
        "logits": logits.tolist(),
        "gradients": gradients,
        "first_values": first_values,
    }
    path = Path(__file__).with_name("reference.json")
    path.write_text(json.dumps(reference) + "\n")


if __name__ == "__main__":
    main()
