# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What releases of vLLM import, when the model is asked for, that lack what the plugin uses."""

import vllm

from . import KNOWN
from .probe import missing

raise RuntimeError(
    f"hf-linear-attention's plugin was made for vLLM {' and '.join(KNOWN)}, and this is "
    f"{vllm.__version__}, without {', '.join(missing())}: install vllm=={KNOWN[-1]}.*"
)
