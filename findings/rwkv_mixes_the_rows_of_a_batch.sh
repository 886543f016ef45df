#!/usr/bin/env bash
# Transformers' RWKV (the fourth, RwkvForCausalLM) mixes the rows of a batch when it generates: from the
# second token on each row's logits depend on the other rows, and greedy tokens are others than those of
# the same prompts one by one. One row alone is right, and so is a forward over whole prompts.
#
# One would guess that rows are independent, as in every model of Transformers, and generate() with several
# prompts of one length, without padding, is its plainest use. For a single token the layers add the token
# before, kept without an axis of time (B, C), to hidden states (B, 1, C): for one row that is a sum, for
# B rows it broadcasts to (B, B, C), which the recurrence then reads as B tokens.
#
# Versions: transformers 5.17.0 and 5.24.0, torch 2.13.0, Python 3.10 to 3.13.
# Seen on 2026-11-29:
#   transformers 5.17.0: a token of one row is right: True, of three rows: False
#   transformers 5.24.0: a token of one row is right: True, of three rows: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python="$folder/venv/bin/python"

cat > "$folder/model.py" <<'PYTHON'
import torch
import transformers
from transformers import RwkvConfig, RwkvForCausalLM

torch.manual_seed(0)
model = RwkvForCausalLM(RwkvConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2)).eval()
for weight in model.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=0.3)
prompts = torch.randint(1, 50, (3, 8))


@torch.no_grad()
def last_logits(ids):
    """After a prompt, and one token more that goes on from its state."""
    state = model(ids[:, :-1], use_cache=True).state
    return model(ids[:, -1:], state=state, use_cache=True).logits[:, -1]


with torch.no_grad():
    whole = model(prompts).logits[:, -1]
alone = torch.cat([last_logits(row[None]) for row in prompts])
of_one = torch.allclose(alone, whole, atol=1e-4)
of_three = torch.allclose(last_logits(prompts), whole, atol=1e-4)
print(
    f"transformers {transformers.__version__}: a token of one row is right: {of_one}, "
    f"of three rows: {of_three}"
)
PYTHON

"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.3.5
for version in 5.17.0 5.24.0; do
    "$python" -m pip install --quiet --disable-pip-version-check "transformers==$version"
    seen=$("$python" "$folder/model.py" 2> /dev/null)
    echo "$seen"
    [ "$seen" = "transformers $version: a token of one row is right: True, of three rows: False" ] || {
        echo "this has changed" >&2
        exit 1
    }
done
