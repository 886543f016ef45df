# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The code in a model's folder: what it holds, how it is made, and how it finds the package."""
