#!/usr/bin/env bash
# Bamba in Transformers gives a token that follows a cache the position 0, unless it is told one: keys
# and queries of its softmax layers are turned as if each token were the first of its text.
#
# One would guess that positions go on from the tokens in the cache where none are given, as in all
# other hybrids of recurrent and softmax layers (Qwen3.5, Granite 4, LFM2, Jamba ...). `generate()`
# gives positions, so only loops and servers that call the model themselves meet it. The answers look
# sane, for the recurrent layers are right and positions are a part of softmax attention only.
#
# Versions: transformers 5.24.0, torch 2.13.0, Python 3.10 to 3.13.
# Seen on 2026-11-29, the error of a token's logits against a forward of the whole text:
#   without positions 0.0491 of the largest logit, with them 0.0000; the Granite hybrid 0.0000 both
# (random weights, so that the second digit may differ elsewhere)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet "torch==2.13.0" "transformers==5.24.0"

cat > "$folder/positions.py" <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

FIELDS = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, pad_token_id=0,
    num_attention_heads=2, num_key_value_heads=2, mamba_n_heads=4, mamba_d_head=16,
    mamba_d_state=8, mamba_n_groups=1, mamba_expand=2,
)
OWN = {
    "bamba": dict(attn_layer_indices=[1]),
    "granitemoehybrid": dict(
        layer_types=["mamba", "attention"], position_embedding_type="rope", num_local_experts=0,
        shared_intermediate_size=64,
    ),
}


def error(model, ids, **given):
    with torch.no_grad():
        whole = model(ids).logits[:, -1]
        cache = model(ids[:, :-1], use_cache=True).cache
        last = model(ids[:, -1:], cache=cache, **given).logits[:, -1]
    return ((last - whole).abs().max() / whole.abs().max()).item()


torch.manual_seed(0)
ids = torch.randint(1, 64, (1, 24))
for family, own in OWN.items():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FIELDS, **own)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(5)
    without = error(model, ids)
    told = error(model, ids, position_ids=torch.tensor([[ids.shape[1] - 1]]))
    print(f"{family}: without positions {without:.4f}, with them {told:.4f}")
    assert told < 1e-4
    assert (without > 1e-3) if family == "bamba" else (without < 1e-4), without
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/positions.py"
