#!/usr/bin/env bash
# flash-linear-attention's CombaConfig has use_output_correction, use_inner_decay and correction_factor,
# stores them and writes them to config.json, and its model gives none of them to its layers: all three
# are what the layer has by default, whatever a config says.
#
# One would guess that a model without output correction has none, and that 0.02, which the layer's own
# log message recommends for small models, is where D starts. A checkpoint's config.json may so say
# what its weights were never trained with; who reads it elsewhere builds another model.
#
# Versions: flash-linear-attention 0.6.0, triton 3.9.0, einops 0.8.2, transformers 5.24.0, torch 2.13.0.
# Seen on 2026-11-29:
#   asked: output correction False, inner decay False, factor 0.02
#   built: output correction True, inner decay True, D 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet "torch==2.13.0" "transformers==5.24.0" \
    "einops==0.8.2" "triton==3.9.0"
"$folder/venv/bin/python" -m pip install --quiet --no-deps "fla-core==0.6.0" \
    "flash-linear-attention==0.6.0"

cat > "$folder/fields.py" <<'PYTHON'
from fla.models import CombaConfig, CombaForCausalLM

asked = {"use_output_correction": False, "use_inner_decay": False, "correction_factor": 0.02}
config = CombaConfig(
    hidden_size=32, num_hidden_layers=1, num_heads=2, head_dim=16, vocab_size=16, **asked
)
assert {name: config.to_dict()[name] for name in asked} == asked
print("asked: output correction False, inner decay False, factor 0.02")

(layer,) = (block.attn for block in CombaForCausalLM(config).model.layers)
D = layer.D.unique().tolist()
print(
    f"built: output correction {layer.use_output_correction}, inner decay {layer.use_inner_decay}, "
    f"D {D[0]}"
)
assert layer.use_output_correction and layer.use_inner_decay and D == [1.0]
PYTHON
TRITON_INTERPRET=1 "$folder/venv/bin/python" -W ignore "$folder/fields.py"
