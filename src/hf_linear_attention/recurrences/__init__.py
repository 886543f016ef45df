# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The recurrences: what each keeps of the past, and how tokens, pieces and ranks change it."""
