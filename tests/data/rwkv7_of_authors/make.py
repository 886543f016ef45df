# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Writes reference.json: what the package rwkv, of RWKV-7's authors, answers on a CPU in float32.

Weights are given by a formula under the authors' names, so only logits are stored.

    RWKV_V7_ON=1 PYTHONPATH=FOLDER_WITH_RWKV python tests/data/rwkv7_of_authors/make.py
"""

import json
import tempfile
from pathlib import Path

import torch
from rwkv.model import RWKV
from weights import IDS, weights


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        torch.save(weights(), path.with_suffix(".pth"))
        model = RWKV(str(path), "cpu fp32")
        logits, _ = model.forward(IDS, None, full_output=True)
    reference = {"made_by": "rwkv 0.8.32", "logits": logits.tolist()}
    Path(__file__).with_name("reference.json").write_text(json.dumps(reference) + "\n")


if __name__ == "__main__":
    main()
