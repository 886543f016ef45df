# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The stub that a release of vLLM imports when it lacks something that the plugin uses."""

import vllm

from . import KNOWN
from .probe import missing

raise RuntimeError(
    f"hf-linear-attention's plugin was made for vLLM {' and '.join(KNOWN)}, and this is "
    f"{vllm.__version__}, without {', '.join(missing())}: install vllm=={KNOWN[-1]}.*"
)
