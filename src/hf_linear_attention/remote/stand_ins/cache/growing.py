# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Keys and values of softmax layers, which Transformers copies for each token."""

from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """Transformers' own."""
