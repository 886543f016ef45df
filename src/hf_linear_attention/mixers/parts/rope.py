# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The values of `rope_parameters`: the kinds of rotary positions that Transformers' Llama has.

Transformers computes them; of many a wrong value it only warns, or it fails in the first forward.
"""

import math
from typing import Any

# By kind, the fields that it can't do without.
NEEDED_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
POSITIVE = (
    *("rope_theta", "attention_factor", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "partial_rotary_factor"),
)
AT_LEAST_1 = ("factor", "original_max_position_embeddings")
ANY_NUMBER = ("mscale", "mscale_all_dim")
# By kind, the field whose logarithm it divides by, which 1 has none of but 0.
DIVIDES_BY_LOG = {"yarn": "rope_theta", "longrope": "original_max_position_embeddings"}
PER_PAIR = ("short_factor", "long_factor")  # a number for each pair of features


def check_rope(
    rope_parameters: dict[str, Any] | None, head_dim: int, field: str = "rope_parameters"
) -> None:
    """Raises a ValueError where `rope_parameters` say nothing that Llama's rotary positions can be.

    Args:
        rope_parameters: the field of a config; None and {} are the default.
        head_dim: features of a head, which are turned in pairs.
        field: its name, for the errors.
    """
    fields = rope_parameters or {}
    if any(str(name).endswith("_attention") for name in fields):
        raise ValueError(
            f"{field} must be one dict for all layers, got one per type: {sorted(fields)}"
        )
    kind = fields.get("rope_type", fields.get("type", "default"))
    if not isinstance(kind, str) or kind not in NEEDED_FIELDS:
        kinds = ", ".join(map(repr, NEEDED_FIELDS))
        raise ValueError(f"{field}['rope_type'] must be one of {kinds}, got {kind!r}")
    missing = [name for name in NEEDED_FIELDS[kind] if fields.get(name) is None]
    if missing:
        raise ValueError(f"{field} must have {missing} with rope_type={kind!r}")
    for name in (*POSITIVE, *AT_LEAST_1):
        value: Any = fields.get(name)
        needed = "at least 1" if name in AT_LEAST_1 else "more than 0"
        is_valid = _is_number(value) and (value >= 1 if name in AT_LEAST_1 else value > 0)
        if value is not None and not is_valid:
            raise ValueError(f"{field}[{name!r}] must be a number of {needed}, got {value!r}")
        if value == math.inf:
            raise ValueError(f"{field}[{name!r}] must be finite, got {value!r}")
    for name in ANY_NUMBER:
        value = fields.get(name)
        if value is not None and not (_is_number(value) and math.isfinite(value)):
            raise ValueError(f"{field}[{name!r}] must be a finite number, got {value!r}")
    divisor = DIVIDES_BY_LOG.get(kind)
    if divisor is not None and fields.get(divisor) == 1:
        raise ValueError(
            f"{field}[{divisor!r}] must not be 1 with rope_type={kind!r}, which divides by "
            f"its logarithm, got {fields[divisor]!r}"
        )
    if kind == "llama3" and fields["high_freq_factor"] <= fields["low_freq_factor"]:
        raise ValueError(
            f"{field}['high_freq_factor'] must be more than low_freq_factor="
            f"{fields['low_freq_factor']}, got {fields['high_freq_factor']}"
        )
    partial = fields.get("partial_rotary_factor") or 1
    turned = head_dim if kind == "proportional" else int(head_dim * partial)
    if partial > 1 or (partial != 1 and (turned < 2 or turned % 2 != 0)):
        raise ValueError(
            f"{field}['partial_rotary_factor'] must be at most 1 and leave an even number "
            f"of head_dim={head_dim} features, got {partial}"
        )
    if kind == "dynamic" and turned == 2:
        raise ValueError(
            f"{field}['rope_type'] must not be \"dynamic\" where head_dim and "
            "partial_rotary_factor leave one pair of features, whose frequency is always 1"
        )
    for name in PER_PAIR if kind == "longrope" else ():
        values = fields[name]
        is_list = isinstance(values, (list, tuple)) and all(map(_is_number, values))
        if not is_list or len(values) != turned // 2:
            raise ValueError(
                f"{field}[{name!r}] must be a list of head_dim / 2 = {turned // 2} "
                f"numbers, got {values!r}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
