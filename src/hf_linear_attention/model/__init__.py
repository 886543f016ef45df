# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The config, the models and their heads, and their side of `generate()` and training."""
