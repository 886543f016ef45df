# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What is known of flash-linear-attention's models, a file for those of one recurrence."""
