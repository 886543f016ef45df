# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' own models on our kernels: `use_kernels` and the classes that it puts into them."""
