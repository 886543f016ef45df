# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What models multiply, norm and add with, faster than torch's own on the CPU."""
