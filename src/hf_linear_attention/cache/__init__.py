# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What layers keep of the past: one layer's state, caches of all layers, their files and slots."""
