# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Bounded caches, weights of 4 bits, large pages, and the commands that check and time a model."""
