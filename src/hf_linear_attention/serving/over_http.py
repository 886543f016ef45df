# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What of HTTP a manager of continuous batching can know, and say, in `transformers serve`.

Transformers' server gives a manager tokens and takes tokens from it: it says nothing of the request
over HTTP, of a client that hangs up, or of the end of the server.
The request is found where the server's own function has it, in the call that adds tokens to the
manager; an error raised there is answered with its status; and the signals that end the server are
heard before uvicorn, which is told of them. Two things can't wait for a request, and are prepared
when the server loads a model: numbers that can't be, with how a request's tokens are to be chosen;
and SIGTERM before the first request.
"""

import asyncio
import json
import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

from transformers import GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus

from ..registration import check_requests
from .sampling import WARPERS

SERVER = "transformers.cli.serving.server"  # Transformers' module that answers requests
STATUS = {ValueError: 400, queue.Full: 503}  # of errors
RETRY_SECONDS = 1
STOP_VARIABLE, STOP_SECONDS = "HF_LINEAR_ATTENTION_STOP_SECONDS", 30
CLOSE_SECONDS = 5  # beyond these, for clients that don't read what they were sent


class Number(NamedTuple):
    """What Transformers' server makes of an argument of a request, and what that must be."""

    make: Callable[[Any], float]
    kind: str
    is_right: Callable[[float], bool]


COUNT = Number(int, "a whole number from 1 on", lambda x: x >= 1)
NUMBERS = {
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "max_output_tokens": COUNT,
    "seed": Number(int, "a whole number of 64 bits", lambda x: -(2**63) <= x < 2**64),
    "temperature": Number(float, "a number from 0 on", lambda x: x >= 0),  # 0: the likeliest
    "top_p": Number(float, "a number in (0, 1]", lambda x: 0 < x <= 1),
}
# What nothing in the engine heeds, with the values at which there is nothing to heed.
UNHEEDED: dict[str, tuple] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "n": (1,),
    "presence_penalty": (0,),
    "stop": ([], ""),
}
# What may be in a request's `generation_config`.
HEEDED_SETTINGS = {
    *WARPERS,
    *("do_sample", "max_new_tokens", "eos_token_id"),
    *("bos_token_id", "pad_token_id", "use_cache", "transformers_version", "_from_model_config"),
}
# The GenerationConfig of the request that is answered.
REQUESTED: ContextVar[GenerationConfig | None] = ContextVar("REQUESTED", default=None)


def prepare_server() -> None:
    """Of a `transformers serve --continuous-batching` that is loading a model in this call: it will
    answer 400 to numbers that can't be, and end with 0 on a SIGTERM that comes before any request.
    In any other process this does nothing.
    """
    flags = flags_of_server()
    if not flags.get("continuous_batching"):
        return
    check_requests(checked)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and not flags.get("non_blocking"):  # else the process is somebody else's
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            # uvicorn puts this back when it ends, and sends the signal again.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))


def flags_of_server() -> dict[str, Any]:
    """The command line's, of a `transformers serve` from which this is called; {} without one."""
    module = sys.modules.get("transformers.cli.serve")
    frame = None if module is None else sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), module.Serve):  # type: ignore[union-attr]
            if frame.f_code.co_name == "__init__":
                return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def checked(body: dict[str, Any], make: Callable[[], GenerationConfig]) -> GenerationConfig:
    """What is made of a request's body; or the error that is answered with 400."""
    try:
        check_numbers(body)
        check_unheeded(body)
    except ValueError as error:
        raise http_error(error) from None
    config = make()
    REQUESTED.set(config)
    return config


def check_numbers(body: dict[str, Any]) -> None:
    """Raises a ValueError for an argument that is no number, or out of its range."""
    for name, number in NUMBERS.items():
        if body.get(name) is None:
            continue
        try:
            is_right = number.is_right(number.make(body[name]))
        except (TypeError, ValueError, OverflowError):
            is_right = False
        if not is_right:
            raise ValueError(f"{name} must be {number.kind}, got {body[name]!r}")


def check_unheeded(body: dict[str, Any]) -> None:
    """Raises a ValueError for an argument that would change an answer, and is not heeded."""
    for name, neutral in UNHEEDED.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise ValueError(
                f"{name} must be {neutral[0]!r} or left out with continuous batching, got {value!r}"
            )
    if body.get("generation_config") is None:
        return
    try:
        settings = dict(json.loads(body["generation_config"]))
    except (TypeError, ValueError):
        message = f"generation_config must be JSON of settings, got {body['generation_config']!r}"
        raise ValueError(message) from None
    defaults = GenerationConfig._get_default_generation_params()
    for name, value in settings.items():
        if name not in HEEDED_SETTINGS and value is not None and value != defaults.get(name):
            raise ValueError(
                f"generation_config must be without {name} with continuous batching, got {value!r}"
            )


def whole_number(variable: str) -> int | None:
    """Of an environment variable; None where it is not set.

    Raises:
        ValueError: it is no such number.
    """
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"{variable} must be a whole number from 0 on, got {text!r}")
    return int(text)


def http_request() -> Any | None:
    """The HTTP request, Starlette's, that this call is to answer in Transformers' server; or None.

    That is a variable of the server's function that the call comes from, and nowhere else.
    """
    requests = sys.modules.get("starlette.requests")
    frame = None if requests is None else sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == SERVER:
            for value in frame.f_locals.values():
                if isinstance(value, requests.Request):  # type: ignore[union-attr]
                    return value
        frame = frame.f_back
    return None


def http_error(error: Exception) -> Exception:
    """The same, for Starlette to answer: {"detail": its text}, with the status that fits."""
    from starlette.exceptions import HTTPException

    status = STATUS[type(error)]
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 503 else None
    return HTTPException(status, str(error), headers)


async def has_left(request: Any) -> None:
    """Waits until the client has hung up, or has its answer, which to Starlette is the same."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def finish_on_signals(manager: ContinuousBatchingManager) -> None:
    """Where Transformers' server starts a manager for a request, SIGTERM lets the manager end what
    it has begun, for STOP_SECONDS at most, and then the process, with 0. Elsewhere this does
    nothing.

    uvicorn waits for its clients without limit, and ends by the signal itself. Transformers leaves
    the manager's thread running, for which the process waits for ever after SIGINT.
    """
    if threading.current_thread() is not threading.main_thread() or http_request() is None:
        return
    handler = signal.getsignal(signal.SIGTERM)
    if not isinstance(handler, StopSignals):
        uvicorn = sys.modules.get("uvicorn.server")
        server = getattr(handler, "__self__", None)  # of the method that hears the signal
        if uvicorn is None or not isinstance(server, uvicorn.Server):
            return
        handler = StopSignals(server, asyncio.get_running_loop())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handler)
    handler.managers.add(manager)


class StopSignals:
    """Hears the signals that end a uvicorn server."""

    def __init__(self, server: Any, loop: asyncio.AbstractEventLoop):
        self.server, self.loop = server, loop
        seconds = whole_number(STOP_VARIABLE)
        self.seconds = STOP_SECONDS if seconds is None else seconds
        self.managers: weakref.WeakSet[ContinuousBatchingManager] = weakref.WeakSet()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.server.handle_exit(number, frame)
        else:
            self.server.should_exit = True  # and no more: it would raise the signal again
        if self.server.config.timeout_graceful_shutdown is None:
            self.server.config.timeout_graceful_shutdown = self.seconds + CLOSE_SECONDS
        self.loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        self._stop(BackgroundThreadStatus.FLUSH_AND_STOP)
        self.loop.call_later(self.seconds, self._stop, BackgroundThreadStatus.HARD_STOP)

    def _stop(self, how: int) -> None:
        for manager in list(self.managers):
            manager.background_thread_status.request_stop(
                how, manager.distributed_helper.global_rank
            )
            manager._wake_up_loop.set()
