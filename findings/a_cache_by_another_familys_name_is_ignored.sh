#!/usr/bin/env bash
# Transformers' recurrent models ignore a cache that is given by the name which another family has
# for it, without a word: a token is then computed as if nothing had been read before it.
#
# One would guess that a forward which does not know an argument refuses it, or that the old names
# mean the same everywhere. Since 5.24 every model calls the argument `cache`, and takes the name that
# it had itself before, with a warning: `past_key_values` in hybrids as Qwen3.5, `cache_params` in
# Mamba-2. The other family's name ends among the keyword arguments that are handed on, where nobody
# reads it. A decoding loop that was written for Qwen3.5 and past_key_values writes nonsense with
# Mamba-2, of the right shapes and at the usual speed, and so the other way around.
#
# Versions: transformers 5.24.0, torch 2.13.0, Python 3.10 to 3.13.
# Seen on 2026-11-29, the error of a token's logits against a forward of the whole text:
#   mamba2: cache 0.0000, cache_params 0.0000, past_key_values 1.1932
#   qwen3_5_text: cache 0.0000, cache_params 0.4586, past_key_values 0.0000
# (relative to the largest logit; random weights, so that the second digit may differ elsewhere)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet "torch==2.13.0" "transformers==5.24.0"

cat > "$folder/names.py" <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, pad_token_id=0)
CONFIGS = {
    "mamba2": dict(num_heads=4, head_dim=16, state_size=8, n_groups=1, expand=2),
    "qwen3_5_text": dict(
        intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        linear_num_value_heads=2, linear_num_key_heads=2, linear_value_head_dim=16,
        linear_key_head_dim=16, layer_types=["linear_attention", "full_attention"],
    ),
}
OWN = {"mamba2": "cache_params", "qwen3_5_text": "past_key_values"}
NAMES = ("cache", "cache_params", "past_key_values")


def error(model, ids, name):
    with torch.no_grad():
        whole = model(ids).logits[:, -1]
        cache = model(ids[:, :-1], use_cache=True).cache
        last = model(ids[:, -1:], **{name: cache}).logits[:, -1]
    return ((last - whole).abs().max() / whole.abs().max()).item()


torch.manual_seed(0)
for family, fields in CONFIGS.items():
    config = AutoConfig.for_model(family, **SIZES, **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(5)
    ids = torch.randint(1, 64, (1, 24))
    errors = {name: error(model, ids, name) for name in NAMES}
    print(f"{family}:", ", ".join(f"{name} {value:.4f}" for name, value in errors.items()))
    for name, value in errors.items():
        is_known = name in ("cache", OWN[family])
        assert (value < 1e-4) if is_known else (value > 0.1), (family, name, value)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/names.py"
