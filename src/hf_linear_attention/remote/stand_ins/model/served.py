# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Speculative decoding, continuous batching and new random features need the package."""

from typing import Any

from ..needs_package import needs_package


class ServedMixin:
    _assisted_decoding: Any = needs_package("speculative decoding")
    init_continuous_batching: Any = needs_package("continuous batching")
    redraw_features: Any = needs_package("redraw_features()")
