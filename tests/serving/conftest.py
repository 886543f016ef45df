# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' continuous batching has a place for states since 5.20: before,
test_older_releases.py holds the refusal, and the other files have nothing to test.
"""

from pathlib import Path

from needs import HAS_ENGINE

FILES = {path.name for path in Path(__file__).parent.glob("test_*.py")}
OLDER = {"test_older_releases.py"}
collect_ignore = sorted(OLDER if HAS_ENGINE else FILES - OLDER)
