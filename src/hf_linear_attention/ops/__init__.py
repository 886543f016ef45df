# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The ops: functions of tensors, with a table of backends each. They know no module of a model."""
