# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A plain loop over time for each recurrence: the yardstick of every other backend's tests."""

from .convolution import reference_short_convolution
from .delta_rule import reference_delta_rule
from .elementwise_scan import reference_elementwise_scan
from .linear_attention import reference_linear_attention
from .selective_scan import reference_selective_scan

__all__ = [
    "reference_delta_rule",
    "reference_elementwise_scan",
    "reference_linear_attention",
    "reference_selective_scan",
    "reference_short_convolution",
]
