#!/usr/bin/env bash
# A model that torch.onnx exports loses an epsilon of 1e-8 or less, and a factor within 1e-5 of 1: the
# graph divides by zero where the model does not, and multiplies where a decay of 1 - 2^-17 was by nothing.
#
# One would guess that the exporter's optimiser, which torch.onnx.export runs by default, removes "x + 0"
# and "x * 1" where the constants are 0 and 1. onnxscript compares constants by math.isclose with a
# relative tolerance of 1e-5 and an absolute one of 1e-8, so that small constants are 0 to it. Recurrent
# layers have such: the l2 norm of keys with its epsilon, 1e-6, under a mean over 128 features is one of
# 7.8e-9, and slow decays are close to 1. With optimize=False both stay.
#
# Versions: torch 2.13.0, onnx 1.23.2, onnx-ir 1.1.0, onnxscript 0.7.2, onnxruntime 1.32.0, Python 3.11.
# Seen on 2026-11-30: norm of zeros with an epsilon of 7.8e-9, torch 0, graph nan, not optimised 0; with
# 1e-6 all 0. 100,000 times (1 - 2^-17), torch and not optimised 99999.23, graph 100000.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet "torch==2.13.0" "onnx==1.23.2" "onnx-ir==1.1.0" \
    "onnxscript==0.7.2" "onnxruntime==1.32.0"

cat > "$folder/export.py" <<'PYTHON'
import sys
import tempfile

import onnxruntime
import torch


class Norm(torch.nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Decay(torch.nn.Module):
    def forward(self, x):
        return x * (1 - 2**-17)


def values(model, x):
    found = [model(x).flatten()[0].item()]
    for optimize in (True, False):
        with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
            torch.onnx.export(model, (x,), file.name, dynamo=True, optimize=optimize, verbose=False)
            session = onnxruntime.InferenceSession(file.name)
        name = session.get_inputs()[0].name
        found.append(session.run(None, {name: x.numpy()})[0].flatten()[0].item())
    return " ".join(f"{value:.2f}" for value in found)


zeros = torch.zeros(1, 128)
print(values(Norm(7.8e-9), zeros), "|", values(Norm(1e-6), zeros), "|", values(Decay(), torch.full((1, 2), 1e5)), file=sys.stderr)
PYTHON

seen=$("$folder/venv/bin/python" "$folder/export.py" 2>&1 >/dev/null | tail -n 1)
echo "$seen"
[ "$seen" = "0.00 nan 0.00 | 0.00 0.00 0.00 | 99999.23 100000.00 99999.23" ]
