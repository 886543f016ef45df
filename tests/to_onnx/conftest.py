# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Tests of graphs run where the extra `onnx` is installed. To write one down takes seconds:
`make test` has one by the command, one of a preset and one of Transformers'.
"""

from importlib.util import find_spec

missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if missing else []
