# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The proof that a replacement answers as the class that it replaces."""
