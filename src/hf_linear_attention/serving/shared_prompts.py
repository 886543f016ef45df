# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Prompts that begin alike are read once: snapshots in Transformers' continuous batching.

Pieces of a prompt end where a snapshot is to be taken; a request whose prompt begins like one
before it starts at the longest snapshot of that, and reads the rest.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import Scheduler

from .admission import is_integer
from .allocators import LINEAR
from .request_memory import FULL, RequestMemory
from .snapshot_files import SnapshotFiles, fingerprint_of
from .snapshots import EVERY, Prompt, Snapshot, SnapshotStore, is_stop, next_stop, start_of

logger = logging.getLogger(__name__)

BYTES_VARIABLE = "HF_LINEAR_ATTENTION_PREFIX_CACHE_BYTES"
FOLDER_VARIABLE = "HF_LINEAR_ATTENTION_PREFIX_CACHE_DIR"
CPU_BYTES = 2**28


class SharedPromptCounts(NamedTuple):
    """Since the manager was made; the last two as it is now."""

    hits: int  # requests that began at a snapshot
    misses: int  # requests with more than EVERY tokens that did not
    tokens_shared: int  # of prompts, that were not read again
    tokens_read: int  # of prompts
    evictions: int
    snapshots: int
    nbytes: int


class SharedPrompts:
    """Of one manager. All but `counts` is called where nothing else of the engine runs.

    Args:
        max_bytes: that snapshots may take, on the CPU and in the folder; 0 for none at all.
        folder: where they outlast the process, if anywhere.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int, folder: Path | None):
        self.model, self.max_bytes, self.folder = model, max_bytes, folder
        self.memory: RequestMemory | None = None  # None: there are no snapshots
        self.hits = self.misses = self.tokens_shared = self.tokens_read = self.evictions = 0

    def attach(self, processor: Any) -> None:
        """To the engine's parts. Models without states share pages as Transformers has it."""
        processor.scheduler.prompts = self
        self.cache = processor.cache
        if self.max_bytes > 0 and LINEAR in self.cache.cache_allocators:
            self.memory = RequestMemory(processor)
        needs_all = FULL in self.cache.cache_allocators
        self.store = SnapshotStore(self.max_bytes, needs_all)
        self.forget()

    def forget(self, active: Iterable[str] = ()) -> None:
        """Begins anew, for the weights may be others from now on: with what the folder has for them
        then, and without anything of active requests, which both have read.
        """
        self.is_open = False
        self.files: SnapshotFiles | None = None
        self.not_kept = frozenset(active)
        if self.memory is not None:
            self.store.clear()

    def counts(self) -> SharedPromptCounts:
        held, nbytes = (0, 0) if self.memory is None else (len(self.store.held), self.store.nbytes)
        return SharedPromptCounts(
            self.hits,
            self.misses,
            self.tokens_shared,
            self.tokens_read,
            self.evictions,
            held,
            nbytes,
        )

    # ---- the scheduler's ----

    def begin(self, state: RequestState) -> int:
        """How many tokens of a waiting request's prompt need not be read: the request has memory
        then, with all that these tokens leave.
        """
        length = len(state.initial_tokens)
        if self.memory is None or length <= EVERY:
            return 0
        if not self.cache.can_store_request_tokens(state, 1, dry_run=True):
            return 0  # it waits on
        self._open()
        # At least one token is read, for its logits; and one before several sequences are made.
        found = self.store.longest(prompt_of(state), length - 1 - (state.num_children > 0))
        if not found or not self.cache.can_store_request_tokens(state, found[-1].stop):
            return 0
        stop = found[-1].stop
        self.memory.write(state.request_id, stop, [snapshot.tensors for snapshot in found])
        state.begins_at = stop
        self.hits += 1
        self.tokens_shared += stop
        logger.info("request %s begins at token %d of %d", state.request_id, stop, length)
        return stop

    def end_of_piece(self, state: RequestState, budget: int) -> int:
        """How many tokens of a prompt are read next, if it has as many left, and is no answer."""
        position, length = state.position_offset, len(state.initial_tokens)
        if self.memory is None or position >= length:
            return budget
        is_new = not hasattr(state, "begins_at")  # the rest of others is not cut up finely again
        return min(budget, next_stop(position, length, may_be_fine=is_new) - position)

    # ---- the manager's ----

    def after_step(self, batch: Iterable[Any]) -> None:
        """Counts what was read of prompts, and takes the snapshots that are due."""
        for request in batch:
            position, length = request.state.position_offset, len(request.state.initial_tokens)
            if position > length:
                continue  # of an answer
            self.tokens_read += request.query_length
            if self.memory is None or length <= EVERY:
                continue
            self.misses += position == request.query_length
            if is_stop(position, length) and request.state.request_id not in self.not_kept:
                self._keep(self.memory, request.state, position)

    def _keep(self, memory: RequestMemory, state: RequestState, stop: int) -> None:
        prompt, start = prompt_of(state), start_of(stop)
        if not self.store.wants(prompt, stop):
            return
        tensors = memory.read(state.request_id, start, stop)
        if memory.has_nan(tensors):
            return  # what went wrong once must not outlast this request
        new = Snapshot(prompt.key(stop), prompt.key(start), start, stop, tensors)
        gone = self.store.add([new])
        self._evicted(gone)
        if new not in gone:
            self._in_files(functools.partial(SnapshotFiles.save, snapshot=new))

    def _evicted(self, gone: list[Snapshot]) -> None:
        self.evictions += len(gone)
        for snapshot in gone:
            self._in_files(functools.partial(SnapshotFiles.remove, snapshot=snapshot))

    def _open(self) -> None:
        """Reads what the folder has for the model, as its weights are now."""
        if self.is_open or self.memory is None:
            return
        self.is_open = True
        if self.folder is None:
            return
        try:
            model = fingerprint_of(self.model, self.memory.slots.layout)
            files = SnapshotFiles(self.folder, model)
            loaded = files.load(self.memory)
        except Exception as error:  # whatever it is, as of weights without bytes: requests go on
            logger.warning("%s: %s", WITHOUT_FILES, error)
            return
        self.files = files
        self._evicted(self.store.add(loaded))

    def _in_files(self, change: Callable[[SnapshotFiles], None]) -> None:
        """Where that can't be, snapshots last as long as the engine."""
        if self.files is None:
            return
        try:
            change(self.files)
        except OSError as error:
            logger.warning("%s: %s", WITHOUT_FILES, error)
            self.files = None


WITHOUT_FILES = "Snapshots of prompts are not written to files any more"


def prompt_of(state: RequestState) -> Prompt:
    """Of a request that is read, made once."""
    if not hasattr(state, "prompt"):
        state.prompt = Prompt(state.initial_tokens)
    return state.prompt


class PromptScheduling(Scheduler):
    """Put before a scheduler: requests begin at snapshots, and pieces end where one is due."""

    prompts: SharedPrompts

    def _infer_request_tokens(self, state: RequestState, taken: set[str]) -> list[int]:
        """As in Transformers, which shares pages alone."""
        if state.status == RequestStatus.PENDING and not state.is_cpu_offloaded:
            position = self.prompts.begin(state)
            if position > 0:
                self.waiting_requests.pop(state.request_id, None)
                self.active_requests[state.request_id] = state
                taken.add(state.request_id)
                state.status = RequestStatus.PREFILLING
                state.remaining_prefill_tokens = state.initial_tokens[position:]
                state.position_offset = position
        return super()._infer_request_tokens(state, taken)

    def _schedule_request(
        self, state: RequestState, tokens: list[int], budget: int, taken: set[str]
    ) -> None:
        if state.status <= RequestStatus.PREFILLING:
            budget = self.prompts.end_of_piece(state, budget)
        super()._schedule_request(state, tokens, budget, taken)


class SharingManager(ContinuousBatchingManager):
    """A ContinuousBatchingManager whose requests share what their prompts have in common."""

    def share_prompts(
        self, max_bytes: int | None = None, folder: str | os.PathLike | None = None
    ) -> None:
        """Says how much of prompts is kept for others that begin alike, and where. Before `start`.

        Args:
            max_bytes: of memory for snapshots; 0 for none. Without it the environment's
                HF_LINEAR_ATTENTION_PREFIX_CACHE_BYTES, or else 256 MiB with a model on a CPU or a
                folder, and none otherwise.
            folder: where snapshots outlast the process, in as many bytes again. Without it the
                environment's HF_LINEAR_ATTENTION_PREFIX_CACHE_DIR, or else nowhere.

        Raises:
            RuntimeError: the manager runs.
            ValueError: `max_bytes`, or the variable, is no number of bytes.
            OSError: the folder can't be made.
        """
        if self.is_running():
            raise RuntimeError("share_prompts must be called before start")
        folder = folder or os.environ.get(FOLDER_VARIABLE) or None
        if folder is not None:
            folder = Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
        if max_bytes is None:
            max_bytes = bytes_of_environment()
        if max_bytes is None:
            on_cpu = self.model.device.type == "cpu"
            max_bytes = CPU_BYTES if on_cpu or folder is not None else 0
        if not is_integer(max_bytes) or max_bytes < 0:
            raise ValueError(f"max_bytes must be None or an integer from 0 on, got {max_bytes!r}")
        self.prompts = SharedPrompts(self.model, max_bytes, folder)
        if self.batch_processor is not None:
            self.prompts.attach(self.batch_processor)

    def shared_prompts(self) -> SharedPromptCounts:
        """What was shared so far. From any thread."""
        return self.prompts.counts()

    def start(self) -> None:
        if not self.is_running():
            self.prompts.forget()
        super().start()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        super().stop(*args, **kwargs)
        if not self.is_running():
            self.prompts.forget()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """As in Transformers; the weights may change, and so what was read before is not shared.
        Pages of models without states, of which Transformers knows only what tokens they hold, are
        shared no longer.
        """
        with super().pause():
            try:
                yield
            finally:
                self.batch_processor.cache.use_prefix_sharing = False
                self.prompts.forget(self.batch_processor.scheduler.active_requests)


def bytes_of_environment() -> int | None:
    text = os.environ.get(BYTES_VARIABLE)
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{BYTES_VARIABLE} must be a number of bytes, got {text!r}")
    return int(text)
