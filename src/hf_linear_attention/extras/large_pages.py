# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A model's weights in memory of large pages."""

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.utils import logging

logger = logging.get_logger(__name__)

ALIGNMENT = 64  # bytes, as torch aligns what it allocates
PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def use_large_pages(model: nn.Module) -> int:
    """Moves a model's weights to memory that Linux may keep in pages of 2 MiB instead of 4 KiB.

    A generated token is mostly the reading of weights, and finding where 4 KiB lie takes much of
    that: with large pages a token took 3 to 10 % less time (docs/LOG.md). No number changes, nor
    how the model is used, saved or moved. Call it when the weights are what they shall be: loaded,
    quantised, on the CPU.

        model = AutoModelForCausalLM.from_pretrained(name)
        use_large_pages(model)

    Weights that `from_pretrained` leaves in their file, mapped into memory, are read from it. What
    each one had before is freed as it is moved, so no more memory is needed than for one of them.

    Args:
        model: any; its parameters and buffers on the CPU are moved, also those inside of torchao's
            tensors. What other processes or several tensors share stays where it is.

    Returns:
        How many bytes were moved: none, with a warning, where this is not Linux, or its transparent
        huge pages are off.
    """
    missing = _why_not()
    if missing:
        logger.warning(f"Weights stay in small pages: large ones need {missing}.")
        return 0
    page = int(PAGE_SIZE.read_text())
    tensors = _plain_tensors(model)
    room = _Room(sum(map(_bytes_needed, tensors)), page)
    for tensor in logging.tqdm(tensors, desc="Moving weights"):
        tensor.data = room.copy_of(tensor)
    return sum(tensor.nbytes for tensor in tensors)


def _why_not() -> str | None:
    """What is missing, if anything."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or not PAGE_SIZE.exists():
        return "Linux with transparent huge pages"
    setting = PAGE_SIZE.parent / "enabled"
    is_off = "[never]" in setting.read_text()
    return f"'madvise' or 'always' in {setting}, which has 'never'" if is_off else None


def _plain_tensors(model: nn.Module) -> list[Tensor]:
    """That can be moved; of several that are the same, one."""
    parts = [part for x in (*model.parameters(), *model.buffers()) for part in _parts(x)]
    movable = {id(x): x for x in parts if x.is_cpu and x.nbytes > 0 and not x.is_shared()}
    tied = _ids_of_tied(movable.values())
    return [x for x in movable.values() if id(x) not in tied]


def _ids_of_tied(tensors: Iterable[Tensor]) -> set[int]:
    """Of those that have memory in common with others, from which their copies would be apart.
    Tensors in one storage need not: all of a file that is mapped into memory are.
    """
    tied: set[int] = set()
    end, last = 0, None  # of those before, the one that ends last
    for tensor in sorted(tensors, key=Tensor.data_ptr):
        if tensor.data_ptr() < end:
            tied |= {id(last), id(tensor)}
        if _end_of(tensor) > end:
            end, last = _end_of(tensor), tensor
    return tied


def _end_of(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + elements * tensor.itemsize


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The tensor, or what it is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _parts(getattr(tensor, name))


def _bytes_needed(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


class _Room:
    """Memory for so many bytes in large pages, which lives as long as a tensor in it."""

    def __init__(self, num_bytes: int, page: int):
        # Private: what several processes share has other settings, by which its pages are small.
        self.memory = mmap.mmap(-1, num_bytes + page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.used = -torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr() % page

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Each has a storage of its own, by which Transformers knows which weights are tied."""
        place = torch.frombuffer(
            self.memory, dtype=torch.uint8, count=tensor.nbytes, offset=self.used
        )
        self.used += _bytes_needed(tensor)
        strides = torch.empty_like(tensor, device="meta").stride()  # its own, where it has no gaps
        return place.view(tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor.detach())
