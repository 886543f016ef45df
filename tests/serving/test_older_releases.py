# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching with a Transformers before 5.20, whose pages are cut in another way."""

import pytest
from transformers import GenerationConfig

from tiny import VARIANTS, tiny_model


@pytest.mark.parametrize("variant", ["hybrid", "default"])
def test_an_error_names_the_release(variant):
    model = tiny_model(**VARIANTS.get(variant, {}))
    with pytest.raises(NotImplementedError, match="a release of Transformers that it was made for"):
        model.generate_batch([[1, 2, 3]], GenerationConfig(max_new_tokens=2))
