# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What mixers are made of: decays, norms, positions, and their share on each rank."""
