# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What describes types alone."""

from typing import Any

CacheLayer = Any
