# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Caches in safetensors files: the format, and the checks when a file is read."""

import json
import operator
import os
import uuid
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..ops.checks import DTYPES
from ..releases import CACHE
from .rows import dtype_of_layer, fill, named_tensors

# The second is that of joined caches, which the first version of the package could not read.
FILE_FORMATS = ("hf-linear-attention cache 1", "hf-linear-attention cache 2")
NOT_IN_THE_STATE = {  # fields of a config that change nothing in what a cache holds
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "fuse_linear_cross_entropy",
    "initializer_range",
    "pad_token_id",
    *("time_step_min", "time_step_max", "time_step_floor"),  # of first weights
    "use_cache",
}
# And some that, with a mixer's own, decide on what a layer remembers, and on how it reads that.
OF_THE_STATE = (
    *("mixer", "decay", "feature_map", "feature_map_kwargs", "conv_kernel_size"),
    *("sliding_window", "state_in_fp64"),
    *("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"),
    *("head_dim", "linear_key_head_dim", "linear_value_head_dim"),
)
LEFT_PADDING = "left_padding"
DTYPE_CALLED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
UNFINISHED = ".unfinished"  # how names of files end while they are written


def save_cache(cache: Cache, path: str | os.PathLike) -> None:
    """Writes a cache of this package's models to a file, all of it or nothing."""
    tensors: dict[str, Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        named = named_tensors(layer, cache.config.sliding_window)
        layers.append({"num_tokens": int(layer.get_seq_length()), "dtype": dtype_of_layer(layer)})
        tensors |= {f"layers.{index}.{name}": x.contiguous() for name, x in named.items()}
    is_joined = cache.left_padding is not None
    if is_joined:
        tensors[LEFT_PADDING] = cache.left_padding
    metadata = {
        "format": FILE_FORMATS[is_joined],
        "config": json.dumps(fingerprint(cache.config), sort_keys=True),
        "layers": json.dumps(layers),
    }
    write_file(path, tensors, metadata)


def load_into(
    cache: Cache, path: str | os.PathLike, device: torch.device | str, dtype: torch.dtype | None
) -> None:
    """Fills an empty cache from a file that `save_cache` wrote, for a model that computes in dtype;
    None is not checked.

    Raises:
        FileNotFoundError, ValueError: as `LinearAttentionCache.load`.
    """
    tensors, metadata = read_file(path, FILE_FORMATS, "LinearAttentionCache.save")
    tensors = {name: x.to(device) for name, x in tensors.items()}
    cache.left_padding = tensors.pop(LEFT_PADDING, None)
    try:
        config = dict(json.loads(metadata["config"]))
        layers = _saved_layers(json.loads(metadata["layers"]), tensors)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _not_ours(path, error) from error
    _check_config(path, config, cache.config)
    if len(layers) != len(cache.layers):
        raise _not_ours(path, f"{len(layers)} layers instead of {len(cache.layers)}")
    for layer, saved in zip(cache.layers, layers, strict=True):
        if saved.num_tokens > 0:
            _check_dtype(path, saved.dtype, dtype)
            try:
                fill(layer, saved.tensors, saved.num_tokens, DTYPE_CALLED[saved.dtype])
            except LookupError as error:
                raise _not_ours(path, error) from error


class _SavedLayer(NamedTuple):
    num_tokens: int
    dtype: str
    tensors: dict[str, Tensor]


def _saved_layers(saved: list[dict[str, Any]], tensors: dict[str, Tensor]) -> list[_SavedLayer]:
    layers = [_SavedLayer(operator.index(x["num_tokens"]), str(x["dtype"]), {}) for x in saved]
    for full_name, x in tensors.items():
        _, index, name = full_name.split(".", 2)
        layers[int(index)].tensors[name] = x
    return layers


def _not_ours(path: str | os.PathLike, why: object) -> ValueError:
    """Of a file that is whole, but holds something else than `save_cache` writes."""
    return ValueError(
        f"{path} must hold what LinearAttentionCache.save writes, and holds something else: {why!r}"
    )


def fingerprint(config: PreTrainedConfig) -> dict[str, Any]:
    """What decides whether a model can use a cache, as it comes back from JSON."""
    fields = {*type(config).__annotations__, *config.mixer_fields} - NOT_IN_THE_STATE
    return json.loads(json.dumps({name: getattr(config, name) for name in fields}))


def check_same_state(made_for: PreTrainedConfig, config: PreTrainedConfig) -> None:
    """Raises a ValueError where a cache was made for a model whose states are others than those of
    one with `config`. Whether its layers are those is seen by themselves.
    """
    theirs, ours = fingerprint(made_for), fingerprint(config)
    fields = (*OF_THE_STATE, *config.mixer_fields)
    other = [name for name in fields if theirs.get(name) != ours.get(name)]
    if other:
        raise ValueError(
            f"{CACHE} must be made for this model, with "
            + ", ".join(f"{name}={ours[name]!r}" for name in other)
            + ", got a cache of one with "
            + ", ".join(f"{name}={theirs[name]!r}" for name in other)
        )


def _check_config(
    path: str | os.PathLike, written: dict[str, Any], config: PreTrainedConfig
) -> None:
    """Raises a ValueError where a file is from a model with another config."""
    # as this version of the package says it: fields may have been added or replaced since
    ours = fingerprint(config)
    unknown = {name: value for name, value in written.items() if name not in ours}  # added later
    try:
        theirs = {**fingerprint(type(config)(**written)), **unknown}
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise _not_ours(path, error) from error
    other = sorted(name for name in theirs if name in unknown or theirs[name] != ours[name])
    if other:
        raise ValueError(
            f"{path} must be from a model with "
            + ", ".join(f"{name}={ours.get(name)!r}" for name in other)
            + ", as config has it, and is from one with "
            + ", ".join(f"{name}={theirs[name]!r}" for name in other)
        )


def _check_dtype(path: str | os.PathLike, saved: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and saved != str(dtype).removeprefix("torch."):
        raise ValueError(
            f"{path} must be from a model that computes in {dtype}, and is from one in {saved}; "
            "`dtype` says what the model computes in if config.dtype does not"
        )


def write_file(
    path: str | os.PathLike, tensors: dict[str, Tensor], metadata: dict[str, str]
) -> None:
    """Writes a safetensors file with a checksum of everything in it, all of it or nothing."""
    metadata = {**metadata, "checksum": _checksum(tensors, metadata)}
    # of this process alone, and beside the file, so that it can take its place at once
    unfinished = f"{os.fspath(path)}.{uuid.uuid4().hex}{UNFINISHED}"
    try:
        save_file(tensors, unfinished, metadata=metadata)
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)


def read_file(
    path: str | os.PathLike, formats: Sequence[str], writer: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of what `write_file` has written, on the CPU.

    Args:
        formats: of which the metadata's "format" must be one.
        writer: who writes such files, for the error.

    Raises:
        FileNotFoundError; ValueError: the file is damaged, or another.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    if metadata.get("format") not in formats:
        raise ValueError(
            f"{path} must be a file that {writer} wrote, of format "
            f"{' or '.join(map(repr, formats))}, got format {metadata.get('format')!r}"
        )
    checksum = metadata.pop("checksum", None)
    if checksum != _checksum(tensors, metadata):
        raise ValueError(f"{path} is damaged: its checksum does not fit what it holds")
    # copies: memory of their own, which may change in place
    return {name: x.clone() for name, x in tensors.items()}, metadata


def _checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Of everything in a file, in an order of its own."""
    checksum = zlib.crc32(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        x = tensors[name].detach().cpu()
        checksum = zlib.crc32(f"{name} {x.dtype} {tuple(x.shape)}".encode(), checksum)
        checksum = zlib.crc32(x.flatten().view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"
