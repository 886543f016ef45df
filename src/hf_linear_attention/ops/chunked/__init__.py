# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The ops in pure PyTorch, in chunks of tokens, on any device."""
