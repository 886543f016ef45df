# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Many users at once: the package's models in engines that batch requests as they come."""
