# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What some tests can't do without."""

import pytest
import transformers
from packaging.version import Version

from hf_linear_attention.ops.backends import backend_report

needs_kernels = pytest.mark.skipif(
    backend_report()["cpu"] is not None, reason="no compiled kernels here"
)

# Transformers' continuous batching has a place for states since then.
HAS_ENGINE = Version(transformers.__version__) >= Version("5.20")
