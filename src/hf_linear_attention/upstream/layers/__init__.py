# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The layers that stand in for those of Transformers' recurrent models."""
