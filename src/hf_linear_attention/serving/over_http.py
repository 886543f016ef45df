# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The HTTP side of `transformers serve`, as far as a manager of continuous batching needs it.

Transformers' server gives a manager tokens and takes tokens from it: it says nothing of the request
over HTTP, of a client that hangs up, or of the end of the server.
So its handlers let `checked` see each request's body, and its app has a middleware, Connection.
Both leave what they know in context variables, which the manager reads in the call that adds tokens
to it; an error raised there is answered with its status. The signals that end the server are heard
before uvicorn, which is told of them.
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
from transformers.utils.import_utils import is_serve_available

from ..model.auto import observe_server
from .admission import is_integer
from .allocators import LINEAR
from .sampling import BY_HISTORY, WARPERS

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
    "frequency_penalty": Number(float, "a number from -2 to 2", lambda x: -2 <= x <= 2),
    "presence_penalty": Number(float, "a number from -2 to 2", lambda x: -2 <= x <= 2),
}
# What nothing heeds, with the values at which there is nothing to heed.
UNHEEDED: dict[str, tuple] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}
# And what is heeded for models with states alone, whose requests are sampled one by one.
OF_STATES: dict[str, tuple] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "stop": ([], ""),
}
# What may be in a request's `generation_config`.
SETTINGS = {
    *WARPERS,
    *("do_sample", "max_new_tokens", "eos_token_id"),
    *("bos_token_id", "pad_token_id", "use_cache", "transformers_version", "_from_model_config"),
}
SETTINGS_OF_STATES = {*BY_HISTORY, "stop_strings"}


class Requested(NamedTuple):
    """A request over HTTP.

    config: made of its body; what the server still writes to it after `checked` is another API's
    reading of penalties.
    settings: those of SETTINGS_OF_STATES, before that.
    """

    config: GenerationConfig
    settings: dict[str, Any]
    body: dict[str, Any]
    processor: Any

    @property
    def stop_strings(self) -> list[str]:
        given = self.body.get("stop"), self.settings["stop_strings"]
        return [x for some in given for x in ([some] if isinstance(some, str) else some or []) if x]

    @property
    def tokenizer(self) -> Any:
        """Of the library tokenizers, as the server takes it."""
        return getattr(self.processor, "tokenizer", self.processor)._tokenizer


class Arrivals:
    """Requests that the server reads, and has not handed to an engine yet. Of its event loop's
    thread, but for `wait`.
    """

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task | None] = set()
        self.are_none = threading.Event()
        self.are_none.set()

    def begin(self) -> None:
        self.tasks.add(asyncio.current_task())
        self.are_none.clear()

    def end(self) -> None:
        """Of this task's."""
        self.tasks.discard(asyncio.current_task())
        if not self.tasks:
            self.are_none.set()

    def wait(self, seconds: float) -> None:
        """Until there are none, but no longer."""
        self.are_none.wait(seconds)


ARRIVALS = Arrivals()
# The request that is answered, and where its client is heard.
REQUESTED: ContextVar[Requested | None] = ContextVar("REQUESTED", default=None)
RECEIVE: ContextVar[Callable | None] = ContextVar("RECEIVE", default=None)


def prepare_server() -> None:
    """Prepares this process's `transformers serve --continuous-batching` for requests. One that has
    begun is known by its first request (`finish_on_signals`).
    """
    if is_serve_available():
        observe_server(checked, Connection)


class Connection:
    """ASGI middleware: lets managers know which requests come, and when a client hangs up, and
    hears the signals that end the server from its start.
    """

    def __init__(self, app: Callable):
        self.app = app

    async def __call__(self, scope: Any, receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            hear_signals()
        RECEIVE.set(receive)
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        ARRIVALS.begin()
        try:
            await self.app(scope, receive, send)
        finally:
            ARRIVALS.end()


def checked(
    body: dict[str, Any], make: Callable[[], GenerationConfig], model: Any, processor: Any
) -> GenerationConfig:
    """What is made of a request's body; or the error that is answered with 400."""
    has_states = LINEAR in getattr(model.config, "active_layer_types", ())
    vocab_size = model.config.get_text_config().vocab_size
    if not has_states:  # no engine here waits for it
        ARRIVALS.end()
    try:
        check_numbers(body)
        check_unheeded(body, has_states)
        check_settings(settings_of(body), has_states, vocab_size)
        check_stop("stop", body.get("stop"))
        check_bias(body.get("logit_bias"), vocab_size)
    except ValueError as error:
        raise http_error(error) from None
    config = make()
    settings = {name: getattr(config, name, None) for name in SETTINGS_OF_STATES}
    if settings["repetition_penalty"] is not None:
        settings["repetition_penalty"] = float(settings["repetition_penalty"])  # as it has to be
    REQUESTED.set(Requested(config, settings, body, processor))
    return config


def check_numbers(body: dict[str, Any]) -> None:
    """Raises a ValueError for an argument that is no number, or out of its range."""
    for name, number in NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        try:
            made = number.make(value)
            is_cut = isinstance(value, bool) or (isinstance(value, float) and made != value)
            is_right = number.is_right(made) and not is_cut
        except (TypeError, ValueError, OverflowError):
            is_right = False
        if not is_right:
            raise ValueError(f"{name} must be {number.kind}, got {value!r}")


def check_stop(name: str, stop: Any) -> None:
    """Raises a ValueError for what is no string, nor a list of some."""
    strings = stop if isinstance(stop, list) else [stop]
    are_right = all(isinstance(x, str) and x for x in strings)
    if not (stop is None or stop == "" or are_right):
        raise ValueError(f"{name} must be a string or a list of strings, none empty, got {stop!r}")


def check_bias(bias: Any, vocab_size: int) -> None:
    """Raises a ValueError for what is no table of numbers by tokens."""
    if bias is None:
        return
    is_right = isinstance(bias, dict) and all(
        str(token).isdecimal()
        and int(token) < vocab_size
        and is_number(number)
        and -100 <= number <= 100
        for token, number in bias.items()
    )
    if not is_right:
        raise ValueError(
            f"logit_bias must have numbers from -100 to 100 by tokens from 0 to {vocab_size - 1}, "
            f"got {bias!r}"
        )


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def check_unheeded(body: dict[str, Any], has_states: bool) -> None:
    """Raises a ValueError for an argument that would change an answer, and is not heeded."""
    unheeded = UNHEEDED if has_states else {**UNHEEDED, **OF_STATES}
    for name, neutral in unheeded.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise ValueError(
                f"{name} must be {neutral[0]!r} or left out with continuous batching, got {value!r}"
            )


def settings_of(body: dict[str, Any]) -> dict[str, Any]:
    """What a body's `generation_config` has; a ValueError if that is none."""
    given = body.get("generation_config")
    if given is None:
        return {}
    try:
        settings = json.loads(given)
    except (TypeError, ValueError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"generation_config must be JSON of settings, got {given!r}")
    return settings


def check_settings(settings: dict[str, Any], has_states: bool, vocab_size: int) -> None:
    """Raises a ValueError for one that is not heeded, or is none of its values."""
    heeded = SETTINGS | SETTINGS_OF_STATES if has_states else SETTINGS
    defaults = GenerationConfig._get_default_generation_params()
    for name, value in settings.items():
        if name not in heeded and value is not None and value != defaults.get(name):
            raise ValueError(
                f"generation_config must be without {name} with continuous batching, got {value!r}"
            )
    check_stop("stop_strings", settings.get("stop_strings"))

    def is_token(x: Any) -> bool:
        return is_integer(x) and 0 <= x < vocab_size

    def are_tokens(x: Any) -> bool:
        return isinstance(x, list) and all(map(is_token, x))

    def is_end(x: Any) -> bool:  # -1: none
        return all(map(is_integer, x)) if isinstance(x, list) else is_integer(x)

    tokens = f"tokens from 0 to {vocab_size - 1}"
    kinds: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "do_sample": ("true or false", lambda x: isinstance(x, bool)),
        "max_new_tokens": (COUNT.kind, lambda x: is_integer(x) and x >= 1),
        "eos_token_id": ("a token or a list of some", is_end),
        "pad_token_id": ("a token", is_integer),
        "bos_token_id": ("a token", is_integer),
        "no_repeat_ngram_size": (
            "a whole number from 0 on",
            lambda x: is_integer(x) and x >= 0,
        ),
        "repetition_penalty": ("a number above 0", lambda x: is_number(x) and x > 0),
        "suppress_tokens": (f"a list of {tokens}", are_tokens),
        "bad_words_ids": (
            f"lists of {tokens}",
            lambda x: isinstance(x, list) and all(are_tokens(y) and y for y in x),
        ),
    }
    for name, (kind, is_right) in kinds.items():
        value = settings.get(name)
        if value is not None and not is_right(value):
            raise ValueError(f"generation_config's {name} must be {kind}, got {value!r}")


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


def http_error(error: Exception) -> Exception:
    """The same, for Starlette to answer: {"detail": its text}, with the status that fits."""
    from starlette.exceptions import HTTPException

    status = STATUS[type(error)]
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 503 else None
    return HTTPException(status, str(error), headers)


async def has_left(receive: Callable) -> None:
    """Waits until the client has hung up, or has its answer, which to Starlette is the same."""
    while (await receive())["type"] != "http.disconnect":
        pass


def finish_on_signals(manager: ContinuousBatchingManager) -> None:
    """Where Transformers' server starts a manager for a request, SIGTERM lets the manager end what
    it has begun, for STOP_SECONDS at most, and then the process, with 0. Elsewhere this does
    nothing.
    """
    handler = None if REQUESTED.get() is None else hear_signals()
    if handler is None:
        return
    handler.managers.add(manager)
    if RECEIVE.get() is None:  # the app was made before it could be given the middleware
        app = handler.server.config.app
        app.middleware_stack = Connection(app.middleware_stack)


def hear_signals() -> "StopSignals | None":
    """What hears the signals of the uvicorn server that runs in this thread, from now on at least;
    None where uvicorn hears none.

    uvicorn waits for its clients without limit, and ends by the signal itself. Transformers leaves
    the manager's thread running, for which the process waits for ever after SIGINT.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, StopSignals):
        return handler
    uvicorn = sys.modules.get("uvicorn.server")
    server = getattr(handler, "__self__", None)  # of the method that hears the signal
    if uvicorn is None or not isinstance(server, uvicorn.Server):
        return None
    handler = StopSignals(server, asyncio.get_running_loop())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
    return handler


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
