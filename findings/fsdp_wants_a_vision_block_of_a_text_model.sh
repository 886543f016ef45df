#!/usr/bin/env bash
# FSDP's wrapping by layers, as Accelerate and Trainer have it by default, does not take Qwen3.5 and
# Qwen3.5-MoE as language models: they say that their layers are those of the vision tower, too, of
# which a model without images has none.
#
# One would guess that a class that AutoModelForCausalLM returns names layers that it has: Qwen3-Next,
# whose layers are nearly the same, does. `--fsdp_transformer_layer_cls_to_wrap Qwen3_5DecoderLayer`
# is a way out.
#
# Versions: transformers 5.24.0, accelerate 1.15.0, torch 2.13.0, Python 3.10 to 3.13.
# Seen on 2026-11-30:
#   qwen3_next: wrapped
#   qwen3_5_text: ValueError: Could not find the transformer layer class Qwen3_5VisionBlock in the model.
#   qwen3_5_moe_text: ValueError: Could not find the transformer layer class Qwen3_5MoeVisionBlock in the model.
#   qwen3_5_text, its layer named: wrapped
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet \
    "torch==2.13.0" "transformers==5.24.0" "accelerate==1.15.0"

cat > "$folder/wrap.py" <<'PYTHON'
import torch
from accelerate import FullyShardedDataParallelPlugin
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16,
    num_attention_heads=2, num_key_value_heads=1, linear_num_key_heads=2, linear_num_value_heads=2,
    linear_key_head_dim=8, linear_value_head_dim=8,
)
EXPERTS = dict(
    num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8
)


def wrap(model_type, **how):
    sizes = SIZES if model_type == "qwen3_5_text" else SIZES | EXPERTS
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **how
    )
    try:
        plugin.set_auto_wrap_policy(model)
    except ValueError as error:
        return f"ValueError: {error}"
    return "wrapped"


found = {name: wrap(name) for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")}
named = wrap("qwen3_5_text", transformer_cls_names_to_wrap=["Qwen3_5DecoderLayer"])
for name, outcome in {**found, "qwen3_5_text, its layer named": named}.items():
    print(f"{name}: {outcome}")
assert found["qwen3_next"] == named == "wrapped"
assert all("VisionBlock" in found[name] for name in ("qwen3_5_text", "qwen3_5_moe_text"))
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/wrap.py"
