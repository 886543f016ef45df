# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' schedulers, extended for states in slots and for unattended servers."""

from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import Scheduler

from ..cache.slots import is_step
from .shared_prompts import PromptScheduling


class SlotScheduling(PromptScheduling):
    """Put before the scheduler that a config names."""

    admit: Callable[[Any], None]  # raises an error for a request that can't be
    forget: Callable[[str], None]  # called with the id of a request that was cancelled
    batch: list[Any]  # what was scheduled last

    def add_waiting_request(self, state: RequestState) -> None:
        """As in Transformers, which fails a request alone if this raises an error."""
        if not state._true_initial_tokens:  # else it had been admitted, and lost its memory
            self.admit(state)
        # Several sequences of a prompt are copied before its last token, and so from nothing here.
        if len(state.initial_tokens) == 1:
            children, state.num_children = state.num_children, 0
            for number in range(children):
                child = state.fork(child_id(state.request_id, number))
                super().add_waiting_request(child)
        super().add_waiting_request(state)

    def schedule_batch(self, *budgets: int) -> tuple[list[Any] | None, bool, int, int]:
        """As in Transformers; sequences that go on by one token come first."""
        if not self.active_requests:
            self.block_new_requests = False  # until one of those ends, and there is none
        self.batch = []
        requests, *others = super().schedule_batch(*budgets)
        if requests:
            requests.sort(key=lambda r: not is_step(r.query_length, r.state.position_offset == 0))
            self.batch = requests
        return requests, *others

    def clear_cancelled_requests(self) -> list[RequestState]:
        cancelled = super().clear_cancelled_requests()
        for state in cancelled:
            self.forget(state.request_id)
        return cancelled


def child_id(request_id: str, number: int) -> str:
    """As Transformers names a prompt's sequences but the first."""
    return f"{request_id}__child#{number}"


def give_slots(
    scheduler: Scheduler, admit: Callable[[Any], None], forget: Callable[[str], None]
) -> None:
    """Makes a scheduler, which has scheduled nothing yet, one with SlotScheduling."""
    kind = type(scheduler)
    scheduler.__class__ = type(f"Slot{kind.__name__}", (SlotScheduling, kind), {})
    scheduler.admit, scheduler.forget, scheduler.batch = admit, forget, []
