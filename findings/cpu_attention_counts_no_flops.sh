#!/usr/bin/env bash
# PyTorch's FLOP counter counts softmax attention on the CPU as nothing, forward and backward: the two
# products of queries, keys and values are missing from what a model is said to cost there.
#
# One would guess that `scaled_dot_product_attention` counts alike wherever it runs, as matrix products
# do. The counter has formulas for the fused kernels of GPUs and for attention made of products (the
# "math" backend, and tensors on "meta"), but none for the fused kernel that the CPU takes by default,
# and an operation without a formula counts as 0. So softmax attention looks cheaper than any linear
# one that is made of counted products, the more so the longer the text is.
#
# Versions: torch 2.13.0, Python 3.10 to 3.13.
# Seen on 2026-11-29, of 2 heads of 64 queries, 64 keys and 16 features, 2*2*64*64*16*2 = 524288:
#   the default on the CPU 0, backward 0; math 524288; meta 524288; two products 524288
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet "torch==2.13.0"

cat > "$folder/count.py" <<'PYTHON'
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode


def count(call, backend=None):
    with FlopCounterMode(display=False) as counter:
        if backend is None:
            call()
        else:
            with sdpa_kernel(backend):
                call()
    return counter.get_total_flops()


x = torch.rand(1, 2, 64, 16)
leaf, on_meta = x.clone().requires_grad_(), x.to("meta")
counts = [
    count(lambda: scaled_dot_product_attention(x, x, x)),
    count(lambda: scaled_dot_product_attention(leaf, x, x).sum().backward()),
    count(lambda: scaled_dot_product_attention(x, x, x), SDPBackend.MATH),
    count(lambda: scaled_dot_product_attention(on_meta, on_meta, on_meta)),
    count(lambda: (x @ x.mT / 4).softmax(-1) @ x),
]
print("torch", torch.__version__.split("+")[0], *counts)
PYTHON

seen=$("$folder/venv/bin/python" "$folder/count.py" | tail -n 1)
echo "$seen"
[ "$seen" = "torch 2.13.0 0 0 524288 524288 524288" ]
