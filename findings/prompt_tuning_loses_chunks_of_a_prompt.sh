#!/usr/bin/env bash
# generate() that reads a prompt in chunks (prefill_chunk_size) loses most of the prompt, without a
# word, where PEFT's prompt tuning is on: from the second chunk on the model is handed the last token
# of each chunk alone. Softmax models and hybrids with recurrent layers give other tokens than for the
# prompt in one piece; without the adapter, or in one piece, they are right.
#
# One would guess that a chunk is read whole, as it is without an adapter, or that the combination is
# refused. PEFT takes a cache that has read at least as many tokens as the input has for the sign that
# one token is generated; with virtual tokens in front, every later chunk looks like that.
#
# Versions: peft 0.21.2 with transformers 5.23.0 and 5.24.0, torch 2.13.0, Python 3.10 to 3.13.
# Seen on 2026-11-28, with both releases of transformers:
#   LlamaForCausalLM: chunks and one piece give the same tokens: alone True, with prompt tuning False
#   Qwen3NextForCausalLM: chunks and one piece give the same tokens: alone True, with prompt tuning False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python="$folder/venv/bin/python"

cat > "$folder/chunks.py" <<'PYTHON'
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

SIZES = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=48, tie_word_embeddings=False,
)
HYBRID = dict(
    layer_types=["linear_attention", "full_attention"], head_dim=16, linear_num_value_heads=4,
    linear_num_key_heads=2, linear_key_head_dim=12, linear_value_head_dim=16, num_experts=0,
)
OPTIONS = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
ids = torch.arange(1, 12)[None] * 7 % 50
for model_class, config in (
    (LlamaForCausalLM, LlamaConfig(**SIZES)),
    (Qwen3NextForCausalLM, Qwen3NextConfig(**SIZES, **HYBRID)),
):
    torch.manual_seed(0)
    model = model_class(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.5)
    same = []
    for tuned in (False, True):
        if tuned:
            tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
            model = get_peft_model(model, tuning).eval()
        whole = model.generate(input_ids=ids, **OPTIONS)
        pieces = model.generate(input_ids=ids, prefill_chunk_size=4, **OPTIONS)
        same.append(torch.equal(whole, pieces))
    claim = "chunks and one piece give the same tokens"
    print(f"{model_class.__name__}: {claim}: alone {same[0]}, with prompt tuning {same[1]}")
PYTHON

for version in 5.23.0 5.24.0; do
  "$python" -m pip install --quiet "torch==2.13.0" "transformers==$version" "peft==0.21.2"
  seen=$("$python" "$folder/chunks.py" 2> /dev/null)
  echo "transformers $version"
  echo "$seen"
  [ "$seen" = "LlamaForCausalLM: chunks and one piece give the same tokens: alone True, with prompt tuning False
Qwen3NextForCausalLM: chunks and one piece give the same tokens: alone True, with prompt tuning False" ]
done
