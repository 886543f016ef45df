# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The loss of a language model: Transformers' own. The package's needs less memory."""

from transformers.loss.loss_utils import ForCausalLMLoss

causal_lm_loss = ForCausalLMLoss
