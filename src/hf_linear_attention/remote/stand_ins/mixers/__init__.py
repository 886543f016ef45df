# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""These travel in the place of the package's modules of the same path."""
