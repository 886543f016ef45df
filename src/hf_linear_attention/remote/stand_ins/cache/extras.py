# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Files, pieces and exported graphs of caches need the package."""

from typing import Any

from ..needs_package import needs_package


class SavedCache:
    save: Any = needs_package("save()")
    crop: Any = needs_package("crop()")
    nbytes: Any = property(needs_package("nbytes"))
    __iter__: Any = needs_package("gathering the rows of caches")


class JoinedCache(SavedCache):
    load: Any = needs_package("load()")
    join: Any = needs_package("join()")
    _gather: Any = needs_package("gathering the rows of caches")


class ExportedCache(SavedCache):
    static_tensors: Any = needs_package("static_tensors()")
