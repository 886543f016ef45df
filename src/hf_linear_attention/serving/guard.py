# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A manager of continuous batching that is left alone with its clients: it refuses requests at the
door, and forgets those whose clients have hung up.
"""

import asyncio
import copy
import ctypes
import functools
import gc
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState

from .over_http import (
    ARRIVALS,
    RECEIVE,
    REQUESTED,
    finish_on_signals,
    has_left,
    http_error,
    whole_number,
)
from .sampling import KEY, Sampling
from .stop_strings import UntilStop

WAITING_VARIABLE = "HF_LINEAR_ATTENTION_MAX_WAITING"
# Seconds to wait for requests that come together; and how much of the time while some always come.
MOST_PATIENCE, PATIENCE_SHARE = 0.2, 0.25
WAITING_PER_SLOT = 4  # that may wait, unless the variable says how many


class GuardedManager(ContinuousBatchingManager):
    """A ContinuousBatchingManager whose queue is a Door, for a server's sake.

    max_waiting: how many requests may wait for memory. None, the default: as many as come; over
    HTTP as many as the environment says, or else WAITING_PER_SLOT for each that has memory.
    sampling: where requests have settings of their own, that of the ones that have none.
    """

    max_waiting: int | None = None
    sampling: Sampling | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        continuous_batching_config: Any,
        workload_hints: Any = None,
    ):
        super().__init__(model, generation_config, continuous_batching_config, workload_hints)
        self.max_waiting_over_http = whole_number(WAITING_VARIABLE)
        self.input_queue: queue.Queue = Door(self, continuous_batching_config.max_queue_size)
        self._has_begun = threading.Event()
        self._patience, self._last_step = 0.0, time.monotonic()
        self._watchers: set[asyncio.Task] = set()

    def start(self) -> None:
        """As in Transformers; returns when memory is there, by which requests are judged."""
        is_running = self.is_running()
        if not is_running:
            self._has_begun.clear()
            release_threads()
            gc.freeze()  # else each collection looks at all that the process has imported
        super().start()
        if not is_running:
            self._has_begun.wait()
            finish_on_signals(self)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        super().stop(*args, **kwargs)
        if not self.is_running():
            gc.unfreeze()

    def join(self, *args: Any, **kwargs: Any) -> None:
        """As in Transformers, where an idle loop looks for the end ten times a second."""
        self._wake_up_loop.set()
        super().join(*args, **kwargs)

    def _run_generation_loop(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._run_generation_loop(*args, **kwargs)
        finally:
            self._has_begun.set()  # and has ended, if there was no memory

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        if not self._has_begun.is_set():
            self._has_begun.set()
        self._wait_for_arrivals()
        return super()._generation_loop_body(batch_processor, bootstrapping)

    def _wait_for_arrivals(self) -> None:
        """Lets the server read the requests that come at one moment before those that came first
        are gone on with: in one process, either would slow the other down.
        """
        begun = time.monotonic()
        self._patience += PATIENCE_SHARE * (begun - self._last_step)
        self._patience = min(self._patience, MOST_PATIENCE)
        ARRIVALS.wait(self._patience)
        self._last_step = time.monotonic()
        self._patience -= self._last_step - begun

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, *others: Any, **options: Any
    ) -> str | None:
        """As in Transformers, which returns None where the manager is stopping.

        Raises:
            ValueError: a request with this id is under way.
            queue.Full: more than `max_waiting` requests would wait.
            starlette.exceptions.HTTPException: over HTTP, whatever is wrong with the request.
        """
        if hasattr(input_ids, "tolist"):  # of numpy or torch, whose numbers are no ints
            input_ids = input_ids.tolist()
        added = super().add_request(input_ids, request_id, *others, **options)
        if added is None and request_id is not None and REQUESTED.get() is not None:
            self._forget(request_id)
            raise http_error(queue.Full("the server is stopping"))
        return added

    def give_sampling(self, state: RequestState) -> None:
        """Over HTTP: as its body says, where requests have settings of their own.

        Raises:
            ValueError: one is out of its range.
        """
        requested = REQUESTED.get()
        if self.sampling is None or requested is None:
            return
        config, body = copy.copy(requested.config), requested.body
        for name, value in requested.settings.items():
            setattr(config, name, value)
        if body.get("logit_bias"):
            config.sequence_bias = [[[int(k)], float(x)] for k, x in body["logit_bias"].items()]
        penalties = (
            float(body.get("frequency_penalty") or 0),
            float(body.get("presence_penalty") or 0),
        )
        seed = None if body.get("seed") is None else int(body["seed"])
        sampling = Sampling(self.model, config, penalties, seed)
        state.logit_processor_kwargs[KEY] = sampling

    def heeds_stop_strings(self) -> bool:
        """Of the request over HTTP that is answered: where requests have settings of their own."""
        requested = REQUESTED.get()
        return self.sampling is not None and requested is not None and bool(requested.stop_strings)

    def register_result_handler(self, request_id: str, callback: Any) -> None:
        """As in Transformers, where two clients that use one id get each other's answers."""
        requested = REQUESTED.get()
        if request_id in self.output_router.result_handlers and requested is not None:
            raise http_error(already_there(request_id))
        if requested is not None and self.heeds_stop_strings():
            callback = UntilStop(
                callback,
                requested.stop_strings,
                requested.tokenizer,
                bool(requested.body.get("stream")),
                functools.partial(self.cancel_request, request_id),
            )
        super().register_result_handler(request_id, callback)

    def end_with_client(self, request_id: str) -> None:
        """Has a request that is not streamed cancelled when its client hangs up."""
        listener, receive = self.output_router.result_handlers.get(request_id), RECEIVE.get()
        if listener is not None and receive is not None:
            watcher = asyncio.get_running_loop().create_task(
                self._wait_for_end(receive, request_id, listener)
            )
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)

    async def _wait_for_end(self, receive: Callable, request_id: str, listener: tuple) -> None:
        await has_left(receive)
        if self.output_router.result_handlers.get(request_id) is listener:  # not answered yet
            self.cancel_request(request_id)
            # The server's function waits for an answer, even if only to end; and the listener stays
            # for what the engine may still say.
            listener[0](GenerationOutput(request_id))

    def _forget(self, request_id: str) -> None:
        """Of a request that gets no last output, who waits for it."""
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)


class Door(queue.Queue):
    """The queue of a manager's new requests, which refuses some.

    Over HTTP all that can't be, with the status that fits. Elsewhere only those that are too many,
    or have an id that is in use: what else is wrong with a request, its output says.
    """

    def __init__(self, manager: GuardedManager, maxsize: int):
        super().__init__(maxsize)
        self.manager = manager
        self.ids: set[str] = set()  # of requests in it

    def _put(self, item: RequestState) -> None:
        super()._put(item)
        self.ids.add(item.request_id)

    def _get(self) -> RequestState:
        item = super()._get()
        self.ids.discard(item.request_id)
        return item

    def put(self, item: RequestState, block: bool = True, timeout: float | None = None) -> None:
        manager, is_http = self.manager, REQUESTED.get() is not None
        if self._has(item.request_id):  # whose memory and answers both would share
            error = already_there(item.request_id)
            raise http_error(error) if is_http else error
        if not is_http:
            self._check_room(manager.max_waiting)
            super().put(item, block, timeout)
            return
        try:
            manager.give_sampling(item)
            if manager.batch_processor is not None:
                manager.batch_processor.scheduler.admit(item)
            self._check_room(self._limit_over_http())
        except Exception as error:  # whatever it is, the id is free again
            manager._forget(item.request_id)
            if isinstance(error, (ValueError, queue.Full)):
                raise http_error(error) from None
            raise
        ARRIVALS.end()
        is_stream = item.streaming
        if manager.heeds_stop_strings():
            item.streaming = True  # to be seen token by token
        super().put(item, block, timeout)
        if not is_stream:  # the server itself listens to clients of streams
            manager.end_with_client(item.request_id)

    def _limit_over_http(self) -> int:
        for limit in (self.manager.max_waiting, self.manager.max_waiting_over_http):
            if limit is not None:
                return limit
        return WAITING_PER_SLOT * self._seats()

    def _seats(self) -> int:
        """How many requests can have memory at a time."""
        processor = self.manager.batch_processor
        if processor is None:
            return 0
        allocators = processor.cache.cache_allocators.values()
        return min(
            processor.scheduler.max_requests_per_batch, *(each.num_blocks for each in allocators)
        )

    def _check_room(self, limit: int | None) -> None:
        if limit is None:
            return
        waiting = self.qsize() - self._seats()
        processor = self.manager.batch_processor
        if processor is not None:
            scheduler = processor.scheduler
            waiting += len(scheduler.active_requests) + len(scheduler.waiting_requests)
        if waiting >= limit:
            raise queue.Full(f"{limit} requests are waiting already, and no more may")

    def _has(self, request_id: str) -> bool:
        """Whether a request with this id is under way."""
        processor = self.manager.batch_processor
        if request_id in self.ids or processor is None:
            return request_id in self.ids
        scheduler = processor.scheduler
        return request_id in scheduler.active_requests or request_id in scheduler.waiting_requests


def already_there(request_id: str) -> ValueError:
    return ValueError(f"a request with the id {request_id!r} is under way: choose another")


def release_threads() -> None:
    """Ends the OpenMP threads of the thread that calls, which are made anew when it next computes.

    Where there are more of them than cores, those of all threads sleep between two parallel loops
    instead of spinning; an engine's step has dozens, and pays for waking them in each.
    """
    pause = getattr(ctypes.CDLL(torch._C.__file__), "omp_pause_resource_all", None)
    if pause is not None:  # of OpenMP 5.0; other pools are not OpenMP's
        omp_pause_soft = 1
        pause(omp_pause_soft)
