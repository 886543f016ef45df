# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of other packages as models of ours, and back."""
