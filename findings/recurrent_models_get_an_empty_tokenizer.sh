#!/usr/bin/env bash
# A folder of a recurrent model without a tokenizer gets one from AutoTokenizer in Transformers, with
# no word in it: every text becomes no tokens at all, without an error or a warning.
#
# One would guess that loading a tokenizer that is not there fails, as it does for Llama, LFM2, Jamba or
# Bamba. For Mamba, Mamba-2, Falcon-Mamba, RWKV, Qwen3.5 and Qwen3-Next a config.json is enough.
# Checkpoints of these families are often weights alone (research code saves no tokenizer, and its users
# take another model's); what converts, quantises or evaluates them then saves or uses the empty one.
#
# Versions: transformers 5.24.0, torch 2.13.0, Python 3.10 to 3.13.
# Seen on 2026-11-29:
#   mamba2: GPTNeoXTokenizer of 2 entries, a sentence is []   (mamba, falcon_mamba, rwkv alike)
#   qwen3_5: Qwen3_5Tokenizer of 1 entry, a sentence is []    (qwen3_next alike, by Qwen2Tokenizer)
#   lfm2, jamba, bamba, llama: ValueError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet "torch==2.13.0" "transformers==5.24.0"

cat > "$folder/tokenizers_of_nothing.py" <<'PYTHON'
import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

EMPTY = ("mamba", "mamba2", "falcon_mamba", "rwkv", "qwen3_5", "qwen3_next")
REFUSED = ("lfm2", "jamba", "bamba", "llama")

for model_type in (*EMPTY, *REFUSED):
    folder = Path(sys.argv[1]) / model_type
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except ValueError:
        print(f"{model_type}: ValueError")
        assert model_type in REFUSED
        continue
    ids = tokenizer("The state of a recurrent model").input_ids
    print(f"{model_type}: {type(tokenizer).__name__} of {len(tokenizer)} entries, a sentence is {ids}")
    assert model_type in EMPTY and ids == [] and len(tokenizer) <= 2
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/tokenizers_of_nothing.py" "$folder"
