#!/usr/bin/env bash
# flash-linear-attention has two reference loops of Comba in PyTorch, and they compute two rules: the
# one token by token asks the state for what is stored under p after it has decayed, the one in chunks
# before, as its kernels do.
#
# One would guess that a naive loop is what a kernel is tested against. Whoever ports the layer from the
# loop that is named "recurrent" gets other logits than checkpoints were trained with, and no error:
# where decays are near 1 the two are close.
#
# Versions: fla-core 0.6.0 (flash-linear-attention), einops 0.8.1, torch 2.13.0, Python 3.10 to 3.13.
# Seen on 2026-11-29: after 64 tokens, 2 heads of 16, decays of e^-U(0, 1)
#   recurrent, chunks: 0.22 apart, of a largest of 1.6
#   recurrent with p divided by its decay, chunks: 8e-07 apart
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet "torch==2.13.0" "einops==0.8.1" numpy
"$folder/venv/bin/python" -m pip install --quiet --no-deps "fla-core==0.6.0"

cat > "$folder/two_rules.py" <<'PYTHON'
import importlib.util
from importlib.metadata import files

import torch

# The file alone: the package around it wants Triton.
(path,) = (x.locate() for x in files("fla-core") if str(x) == "fla/ops/comba/naive.py")
spec = importlib.util.spec_from_file_location("naive", path)
naive = importlib.util.module_from_spec(spec)
spec.loader.exec_module(naive)

torch.manual_seed(0)
B, T, H, K = 1, 64, 2, 16
q, k, v, p = (torch.randn(B, T, H, K) for _ in range(4))
k, p = (x / x.norm(dim=-1, keepdim=True) for x in (k, p))
beta, g = torch.rand(B, T, H), -torch.rand(B, T, H)

in_chunks, _ = naive.naive_chunk_comba(q, k, v, p, g=g, beta=beta)
by_token, _ = naive.naive_recurrent_comba(q, k, v, p, beta=beta, g=g)
before, _ = naive.naive_recurrent_comba(q, k, v, p / g.exp()[..., None], beta=beta, g=g)

apart = (by_token - in_chunks).abs().max().item()
mended = (before - in_chunks).abs().max().item()
print(f"recurrent, chunks: {apart:.2g} apart, of a largest of {in_chunks.abs().max().item():.2g}")
print(f"recurrent with p divided by its decay, chunks: {mended:.2g} apart")
assert apart > 0.1 and mended < 1e-4
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/two_rules.py"
