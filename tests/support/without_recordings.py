# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What models answer where no generated token is recorded."""

import pytest

from hf_linear_attention.decode import conditions


def without_recordings(compute):
    """The function, whose models run by their modules."""

    def by_modules(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conditions, "ARE_TOKENS_RECORDED", False)
            return compute(*args, **kwargs)

    return by_modules
