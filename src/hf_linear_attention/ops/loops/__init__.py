# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A plain loop over time for each recurrence: the yardstick of every other backend's tests."""

from collections.abc import Callable
from typing import Any

from .convolution import reference_short_convolution
from .delta_rule import reference_delta_rule
from .elementwise_scan import reference_elementwise_scan
from .linear_attention import reference_linear_attention
from .selective_scan import reference_selective_scan

# By name and version, as in `native`, whose loops these are.
OPS: dict[tuple[str, int], Callable[..., Any]] = {
    ("delta_rule", 1): reference_delta_rule,
    ("elementwise_scan", 1): reference_elementwise_scan,
    ("linear_attention", 1): reference_linear_attention,
    ("selective_scan", 1): reference_selective_scan,
    ("short_convolution", 1): reference_short_convolution,
}
