# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The files of a checkpoint, in a folder or on the Hub: its config.json, and its weights, which are
mapped into memory and read from the disk at their first use.
"""

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils.hub import cached_file

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # by preference; shards have an index


def check_place(argument: str, value: Any) -> None:
    """Raises a ValueError where an argument is neither a path nor a name."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ValueError(f"{argument} must be a path or a name, got {value!r}")


def read_config(name: str, hub: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a folder or of a model on the Hub.

    Raises:
        OSError: there is no such file. ValueError: it is no JSON object.
    """
    path = find(name, CONFIG, hub, is_needed=True)
    if path is None:
        raise OSError(f"{name} must have a {CONFIG}, and has none")
    return read_object(path)


def read_generation_config(name: str, hub: dict[str, Any]) -> GenerationConfig | None:
    """The generation_config.json of a folder or of a model on the Hub, if it has one.

    Raises:
        ValueError: it is no JSON object, or has wrong values.
    """
    path = find(name, GENERATION_CONFIG, hub)
    return None if path is None else GenerationConfig.from_dict(read_object(path))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        config = json.loads(path.read_text("utf-8"), object_hook=_read_object)
    except (TypeError, ValueError) as error:  # the former of an object that is no infinity
        raise ValueError(f"{path} must be JSON, got {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object, got a {type(config).__name__}")
    return config


def _read_object(value: dict[str, Any]) -> Any:
    """Transformers writes infinity and NaN, which JSON has not, as objects with one key."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def find(name: str, file: str, hub: dict[str, Any], is_needed: bool = False) -> Path | None:
    """A file of a folder or of a model on the Hub; None where it has none of that name.

    Raises:
        OSError: there is no such folder, nor such a model; nobody can be asked; or, of the Hub, a
            file that is needed is not there.
    """
    folder = Path(name)
    if folder.is_dir():
        folder = folder / hub.get("subfolder", "")
        return folder / file if (folder / file).is_file() else None
    if folder.exists():
        raise OSError(f"{name} must be a folder, got a file")
    if folder.is_absolute() or name.startswith("."):
        raise OSError(f"{name} must be a folder, and is not there")
    try:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=is_needed, **hub)
    except OSError as error:
        raise OSError(f"there is no folder {name} here, and of the Hub: {error}") from error
    return None if found is None else Path(found)


def read_torch_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that torch.save wrote, mapped into memory if it is a zip file, as
    today's are.

    Raises:
        ValueError: it can't be read, or holds anything but tensors by name.
    """
    try:
        tensors = torch.load(
            path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True
        )
    except Exception as error:  # a broken file may lead to any
        raise ValueError(f"{path} can't be read: {error}") from error
    if not isinstance(tensors, dict):
        raise ValueError(f"{path} must hold tensors by name, got a {type(tensors).__name__}")
    for name, x in tensors.items():
        if not isinstance(name, str) or not isinstance(x, Tensor):
            got = f"a {type(x).__name__} by the name {name!r}"
            raise ValueError(f"{path} must hold tensors by name, got {got}")
    return tensors


class Weights(Mapping[str, Tensor]):
    """Tensors by name, of one file or of shards."""

    def __init__(self, name: str, hub: dict[str, Any]):
        self.name = name
        self.opened: dict[Path, Any] = {}
        self.files: dict[str, Path] = {}  # of each tensor
        for file in WEIGHTS:
            path = find(name, file, hub)
            if path is not None:
                self.files = dict.fromkeys(self._open(path).keys(), path)
                return
            index = find(name, f"{file}.index.json", hub)
            if index is not None:
                self._read_index(index, hub)
                return
        raise OSError(f"{name} must have {' or '.join(WEIGHTS)}, or shards of it, and has neither")

    def _read_index(self, index: Path, hub: dict[str, Any]) -> None:
        try:
            of_tensors = json.loads(index.read_text("utf-8"))["weight_map"]
            are_names = all(isinstance(file, str) for file in of_tensors.values())
        except (AttributeError, KeyError, TypeError, ValueError):
            are_names = False
        if not are_names:
            raise ValueError(f"{index} must map tensors to files by its weight_map")
        found = {file: find(self.name, file, hub) for file in {*of_tensors.values()}}
        missing = sorted(file for file, path in found.items() if path is None)
        if missing:
            raise OSError(f"{self.name} must have {', '.join(missing)}, which {index.name} names")
        self.files = {tensor: found[file] for tensor, file in of_tensors.items()}  # type: ignore
        for tensor, path in self.files.items():
            if tensor not in self._open(path).keys():
                raise ValueError(f"{path} must hold {tensor}, as {index.name} says, and does not")

    def _open(self, path: Path) -> Any:
        if path not in self.opened:
            try:
                self.opened[path] = self._reader(path)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} can't be read: {error}") from error
        return self.opened[path]

    def _reader(self, path: Path) -> Any:
        if path.suffix == ".bin":
            return read_torch_file(path)
        return safe_open(path, framework="pt")

    def __getitem__(self, tensor: str) -> Tensor:
        reader = self._open(self.files[tensor])
        return reader[tensor] if isinstance(reader, dict) else reader.get_tensor(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)
