# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What releases of vLLM import, when the model is asked for, that the plugin was not made for."""

import vllm

from . import MADE_FOR

raise RuntimeError(
    f"hf-linear-attention's plugin was made for vLLM {MADE_FOR}, and this is {vllm.__version__}: "
    f"install vllm=={MADE_FOR}.*"
)
