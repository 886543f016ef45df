# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Softmax models of Transformers as models of this package."""
