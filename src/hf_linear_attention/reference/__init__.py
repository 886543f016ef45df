# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A plain loop over time for each recurrence: the yardstick of every other backend's tests."""

from .linear import reference_linear_attention

# By name and version, as in `native`, whose loops these are.
OPS = {("linear_attention", 1): reference_linear_attention}
