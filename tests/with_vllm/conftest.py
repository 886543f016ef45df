# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What vLLM reads from its environment when it is imported.

`make test-vllm` runs these tests in an environment of their own; other runs don't collect them.
"""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines in this process: to import vLLM takes longer
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "KMP_BLOCKTIME": "0",
    "OMP_WAIT_POLICY": "passive",
}
