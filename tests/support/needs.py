# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What some tests can't do without."""

import pytest

from hf_linear_attention.ops.backends import backend_report

needs_kernels = pytest.mark.skipif(
    backend_report()["cpu"] is not None, reason="no compiled kernels here"
)
