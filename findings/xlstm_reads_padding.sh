#!/usr/bin/env bash
# Transformers' xLSTM reads padding as if it were text: its forward and generate() take attention_mask, use
# it nowhere, and say nothing. Prompts of different lengths in one batch, padded on the left as generate()
# wants them, are continued as if the tokens of padding were their first words.
#
# One would guess that a mask is honoured, as in Mamba, Mamba-2, Qwen3.5 and the other recurrent models
# there, or that it warns, as RWKV does: a call with a mask and a call without answer the same here.
#
# Versions: transformers 5.24.0, torch 2.13.0, Python 3.10 to 3.13.
# Seen on 2026-11-29:
#   transformers 5.24.0: padded as alone: xlstm False, mamba True; warned: False; the mask changes: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python="$folder/venv/bin/python"

cat > "$folder/model.py" <<'PYTHON'
import io
import logging
import warnings

import torch
import transformers
from transformers import MambaConfig, MambaForCausalLM, xLSTMConfig, xLSTMForCausalLM

said = io.StringIO()
logging.getLogger("transformers").addHandler(logging.StreamHandler(said))
sizes = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2}
models = {
    "xlstm": xLSTMForCausalLM(xLSTMConfig(**sizes, num_heads=2, qk_dim_factor=1.0)),
    "mamba": MambaForCausalLM(MambaConfig(**sizes)),
}
torch.manual_seed(0)
prompt = torch.randint(1, 50, (1, 8))
padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt], dim=1)
mask = (torch.arange(12) >= 4).long()[None]
is_same = {}
with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
    for name, model in models.items():
        for weight in model.eval().parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.3)

        alone, behind, unmasked = model(prompt), model(padded, attention_mask=mask), model(padded)
        last = [x.logits[:, -1] for x in (alone, behind, unmasked)]
        is_same[name] = torch.allclose(last[0], last[1], atol=1e-3)
        if name == "xlstm":
            changes, is_warned = not last[1].equal(last[2]), "mask" in said.getvalue()
is_warned |= any("mask" in str(x.message) for x in warned)
print(
    f"transformers {transformers.__version__}: padded as alone: xlstm {is_same['xlstm']}, "
    f"mamba {is_same['mamba']}; warned: {is_warned}; the mask changes: {changes}"
)
PYTHON

"$python" -m pip install --quiet --disable-pip-version-check \
    torch==2.13.0 transformers==5.24.0 numpy==2.3.5
seen=$("$python" "$folder/model.py" 2> /dev/null | tail -n 1)
echo "$seen"
expected="padded as alone: xlstm False, mamba True; warned: False; the mask changes: False"
[ "$seen" = "transformers 5.24.0: $expected" ]
