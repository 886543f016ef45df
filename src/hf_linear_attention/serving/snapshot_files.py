# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Snapshots of prompts in files, so that an engine that starts again has them.

Each is a file of its own, of the kind that caches are saved in, in a folder for one model. A file
holds no tokens, but hashes of them.
"""

import contextlib
import hashlib
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.files import NOT_IN_THE_STATE, UNFINISHED, read_file, write_file
from .request_memory import RequestMemory
from .slot_layout import SlotLayout
from .snapshots import Snapshot

logger = logging.getLogger(__name__)

FILE_FORMAT = "hf-linear-attention prompt 1"
FIELDS = ("model", "key", "parent", "start", "stop")
WRITING_TAKES = 3600  # seconds at the very most
# fields of a config that say where a model is from, or what is known of it otherwise
ORIGIN = {"_name_or_path", "architectures", "auto_map", "dtype", "transformers_version"}


class SnapshotFiles:
    """Those of one model, in `folder`/<its fingerprint>.

    Raises:
        OSError: the folder can't be made, read, or written to. From all methods.
    """

    def __init__(self, folder: Path, model: str):
        self.model = model
        self.folder = folder / model
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, snapshot: Snapshot) -> None:
        metadata = {
            "format": FILE_FORMAT,
            "model": self.model,
            "key": snapshot.key.hex(),
            "parent": snapshot.parent.hex(),
            "start": str(snapshot.start),
            "stop": str(snapshot.stop),
        }
        try:
            write_file(self._path(snapshot), snapshot.tensors, metadata)
        except SafetensorError as error:  # such as a full disk
            raise OSError(f"{self._path(snapshot)} can't be written: {error}") from error

    def remove(self, snapshot: Snapshot) -> None:
        self._path(snapshot).unlink(missing_ok=True)

    def load(self, memory: RequestMemory) -> list[Snapshot]:
        """All that are whole and this model's, in the order in which they were written. Of others a
        warning says why they are not used. What a process was writing when it was killed goes.
        """
        self._remove_unfinished()
        found = []
        for path in self.folder.glob("*.safetensors"):
            try:
                found.append((path.stat().st_mtime_ns, self._read(path, memory)))
            except (OSError, ValueError) as error:
                logger.warning("A snapshot of a prompt is not used: %s", error)
        return [snapshot for _, snapshot in sorted(found, key=lambda pair: pair[0])]

    def _remove_unfinished(self) -> None:
        for path in self.folder.glob(f"*{UNFINISHED}"):
            with contextlib.suppress(FileNotFoundError):  # by another process that was writing it
                if time.time() - path.stat().st_mtime > WRITING_TAKES:
                    path.unlink()

    def _path(self, snapshot: Snapshot) -> Path:
        return self.folder / f"{snapshot.key.hex()}.safetensors"

    def _read(self, path: Path, memory: RequestMemory) -> Snapshot:
        tensors, metadata = read_file(path, [FILE_FORMAT], "continuous batching")
        missing = [name for name in FIELDS if name not in metadata]
        if missing:
            raise ValueError(f"{path} has no {missing}, which continuous batching writes")
        if (metadata["model"], metadata["key"]) != (self.model, path.stem):
            raise ValueError(f"{path} is of another model or prompt than its place says")
        key, parent = (bytes.fromhex(metadata[name]) for name in ("key", "parent"))
        start, stop = int(metadata["start"]), int(metadata["stop"])
        if not 0 <= start < stop:
            raise ValueError(
                f"{path} must be of some tokens, and is of those from {start} to {stop}"
            )
        if not memory.fits(start, stop, tensors):
            raise ValueError(f"{path} has other tensors than this model keeps of a prompt")
        if memory.has_nan(tensors):  # written before that was looked for
            raise ValueError(f"{path} has states that are not numbers")
        return Snapshot(key, parent, start, stop, tensors)


def fingerprint_of(model: PreTrainedModel, layout: SlotLayout) -> str:
    """A hash of the config, of every weight and buffer, bit by bit, of how adapters add to them,
    and of what the bytes of a slot mean: no other model has it. Takes about a second for each
    gigabyte and core.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        hashes = dict(zip(tensors, pool.map(hash_of, tensors.values()), strict=True))
    config = model.config.to_dict().items()
    config = {name: x for name, x in config if name not in ORIGIN | NOT_IN_THE_STATE}
    parts = [config, hashes, adapters_of(model), repr(layout)]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def adapters_of(model: PreTrainedModel) -> dict[str, list[str]]:
    """Of each layer with PEFT's adapters what its weights don't say: which count, and how much."""
    names = ("active_adapters", "disable_adapters", "scaling")
    return {
        where: [str(getattr(layer, name, None)) for name in names]
        for where, layer in model.named_modules()
        if isinstance(getattr(layer, "active_adapters", None), list)
    }


def hash_of(x: Tensor) -> str:
    """Of a tensor's dtype, shape and bytes; of a subclass's, those of all that it consists of."""
    if hasattr(x, "__tensor_flatten__"):
        names, context = x.__tensor_flatten__()
        parts = [str(context), *(hash_of(getattr(x, name)) for name in names)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    made = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
    made.update(x.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return made.hexdigest()
