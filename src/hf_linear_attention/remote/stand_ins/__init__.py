# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What travels in the place of modules of the package that have the same names."""
