# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The mixers, which are what a layer does to its tokens, and the tables and facts of them."""
