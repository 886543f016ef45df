# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The mixers of a decoder layer, their table, and facts about them for other rooms."""
