# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Where the models compute: one thread for all of them, whoever looks at the page."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

Snapshot = TypeVar("Snapshot")
OVER = object()  # comes after a job's last snapshot


class Engine:
    """Runs jobs one after another, so that none disturbs what another measures."""

    def __init__(self):
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="models")

    def stream(
        self, job: Callable[[threading.Event], Iterator[Snapshot]], stop: threading.Event
    ) -> Iterator[Snapshot]:
        """The job's snapshots but those that newer ones have overtaken, then its error if it has
        one. The job ends soon after `stop` is set, as it is when nobody looks any further.
        """
        shown: SimpleQueue[Any] = SimpleQueue()

        def run() -> None:
            try:
                for snapshot in job(stop):
                    shown.put(snapshot)
            finally:
                shown.put(OVER)

        future = self._thread.submit(run)
        is_over = False
        try:
            while not is_over:
                waiting = [shown.get()]
                while not shown.empty():
                    waiting.append(shown.get())
                is_over = waiting[-1] is OVER
                snapshots = waiting[:-1] if is_over else waiting
                if snapshots:
                    yield snapshots[-1]
            future.result()
        finally:
            stop.set()
