#!/usr/bin/env bash
# A model from outside Transformers' tree, whose forward takes `past_key_values` and **kwargs as such
# models do, loses its cache in generate() from Transformers 5.24 on: every token after the prompt is
# read as if it were the first. Nothing raises, and the tokens are others.
#
# One would guess that generate() keeps to the argument's old name, or refuses, where a forward has no
# argument of the new one: 5.24 renamed `past_key_values` to `cache`, and its own models, mask functions
# and outputs translate the old name until 5.40. It does neither: the check of generate()'s arguments
# lets a forward with **kwargs take anything.
#
# Versions: transformers 5.23.0 and 5.24.0, torch 2.13.0, Python 3.10 to 3.13.
# Seen on 2026-11-28:
#   transformers 5.23.0: the same tokens with a cache as without: True
#   transformers 5.24.0: the same tokens with a cache as without: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python="$folder/venv/bin/python"

cat > "$folder/model.py" <<'PYTHON'
import torch
import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast


class DecayingSumConfig(PreTrainedConfig):
    model_type = "decaying_sum"
    num_hidden_layers = num_attention_heads = 1
    hidden_size = 16


class DecayingSum(PreTrainedModel, GenerationMixin):
    """The sum of all embeddings read so far, each weighted by 0.9 to the power of its age."""

    config_class = DecayingSumConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.post_init()

    def forward(self, input_ids=None, past_key_values=None, use_cache=None, **kwargs):
        new = read = self.embed(input_ids)[:, None]
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if past_key_values is not None:
            read, _ = past_key_values.update(new, new, 0)
        T, S = new.shape[2], read.shape[2]
        ages = torch.arange(S - T, S)[:, None] - torch.arange(S)
        weights = (0.9 ** ages.clamp(min=0)) * (ages >= 0)
        return CausalLMOutputWithPast(
            logits=self.head(weights @ read[:, 0]), past_key_values=past_key_values
        )


torch.manual_seed(0)
model = DecayingSum(DecayingSumConfig()).eval()
nn.init.normal_(model.embed.weight)
nn.init.normal_(model.head.weight)
options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
prompt = torch.randint(50, (1, 12))
cached = model.generate(prompt, **options)
whole = model.generate(prompt, use_cache=False, **options)
is_same = torch.equal(cached, whole)
print(f"transformers {transformers.__version__}: the same tokens with a cache as without: {is_same}")
PYTHON

check() { # version, expected
  "$python" -m pip install --quiet "torch==2.13.0" "transformers==$1"
  seen=$("$python" "$folder/model.py" | tail -n 1)
  echo "$seen"
  [ "$seen" = "transformers $1: the same tokens with a cache as without: $2" ]
}
check 5.23.0 True
check 5.24.0 False
