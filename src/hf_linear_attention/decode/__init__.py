# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""One token's operations, traced once and replayed without the modules around them."""
