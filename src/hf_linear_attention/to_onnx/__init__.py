# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Models as ONNX graphs: one for prompts and tokens, whose states are inputs and outputs."""
