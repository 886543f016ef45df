# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Products, norms and sinusoids of models, faster than torch's own on the CPU."""
