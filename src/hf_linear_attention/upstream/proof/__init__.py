# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""How it is decided whether a replacement answers as the class that it stands in for."""
