# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The kinds of values that keys of a config.json take. They follow from the keys' defaults, and for
some keys from their names.
"""

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Keys = dict[str, Any]  # the entries of a config.json, with defaults for missing ones


class Kind(NamedTuple):
    expected: str
    fits: Callable[[Any], bool]


def is_number(x: Any) -> bool:
    """Whether that is a finite number."""
    return type(x) in (int, float) and abs(x) <= sys.float_info.max


def is_whole(x: Any, least: int) -> bool:
    """Whether that is an integer of at least `least`."""
    return type(x) is int and x >= least


def is_pair(x: Any) -> bool:
    """Whether that is a list of two numbers, of which infinity may be one."""
    is_list = isinstance(x, (list, tuple)) and len(x) == 2
    return is_list and all(is_number(y) or y == math.inf for y in x)


SWITCH = Kind("true or false", lambda x: isinstance(x, bool))
COUNT = Kind("a whole number of at least 0", lambda x: is_whole(x, 0))
SIZE = Kind("a whole number of at least 1", lambda x: is_whole(x, 1))
NUMBER = Kind("a number of at least 0", lambda x: is_number(x) and x >= 0)
POSITIVE = Kind("a positive number", lambda x: is_number(x) and x > 0)
NEGATIVE = Kind("a negative number", lambda x: is_number(x) and x < 0)
PAIR = Kind("a list of two numbers", is_pair)

FRACTIONS = ("expand", "expand_k", "expand_v", "expand_ratio", "hidden_ratio")
SIZES = (  # whose default may be None
    *("intermediate_size", "num_heads", "num_kv_heads", "num_v_heads", "window_size"),
    *("attention_hidden_size", "d_ssm"),
)
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
OF_NAMES: dict[str, Kind | None] = {  # None: of any kind
    **dict.fromkeys((*FRACTIONS, "rope_theta"), POSITIVE),
    **dict.fromkeys(SIZES, SIZE),
    **dict.fromkeys(TOKENS, None),
    "lower_bound": NEGATIVE,
    "dt_limit": PAIR,
}


def kind_of(name: str, default: Any) -> Kind | None:
    """The kind of a key; None: of any, or one that is checked elsewhere."""
    of_types = {bool: SWITCH, int: SIZE if default else COUNT, float: NUMBER}
    return OF_NAMES.get(name, of_types.get(type(default)))


def check_kinds(
    values: Keys, defaults: Keys, nullable: Iterable[str] = (), shown: str = "{}"
) -> None:
    """Raises a ValueError where a value is not of its key's kind. Keys may be null whose default is
    None, and those in nullable; shown is how an error writes a key.
    """
    for name, default in defaults.items():
        kind, value = kind_of(name, default), values[name]
        may_be_null = default is None or name in nullable
        if kind is None or kind.fits(value) or (value is None and may_be_null):
            continue
        null = " or null" if may_be_null else ""
        raise refusal(shown.format(name), kind.expected + null, value)


def refusal(key: str, expected: str, got: Any) -> ValueError:
    """The error for a value of a config.json that we do not compute."""
    return ValueError(f"{key} of its config.json must be {expected}, got {got!r}")
