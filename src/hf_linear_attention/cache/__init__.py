# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The caches: one layer's state, the caches of all layers, their files and slots."""
