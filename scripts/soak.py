# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A soak: `transformers serve --continuous-batching` for 20 minutes with 64 clients over HTTP, some
of which hang up or ask for what can't be, and a server that is killed and stopped in between.

    make soak
    python scripts/soak.py --minutes 5
    python scripts/soak.py --hybrid         # a model with a layer of full attention
    python scripts/soak.py --smallest       # in a few seconds: one server, stopped at its end

A small model with random weights is served, and asked for the greedy continuations of prompts of 1
to 3,000 tokens, which generate() has made before. It ends with an error, and says why, where

- an answer, or the part of one that was heard before a client hung up, has a wrong token;
- a request fails that should not, or a bad one isn't refused with the status that it should have;
- SIGTERM cuts an answer short, or the server ends with another status than 0 then;
- fewer streams run at a time at the end than at the start, or a hybrid has no place then for a
  prompt that needs all pages: memory was lost;
- memory or open files of the server grow with the number of requests.

Beside hang-ups and bad requests there are more clients than slots, so that requests wait, and more
than may wait, so that some are refused with 503. Prompts are left out where the two best tokens of
a step are so close that the order of a sum would decide. The report goes to benchmarks/results.
"""

import argparse
import http.client
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(Path(__file__).parent)]

from soak_server import (  # noqa: E402
    ANSWER_SECONDS,
    Client,
    Question,
    RefusedError,
    Server,
    make_questions,
    save_model,
)

import harness  # noqa: E402

GROWTH_MIB, GROWTH_REQUESTS = 8, 10_000  # of memory that are allowed in so many requests
SETTLED = 0.4  # of a server's life, after which its memory is looked at
SPARE_FILES = 8
TRIES = 5  # to find all slots free
SAMPLES = 200  # of memory, in the report
PATIENCE = 2.0  # seconds before a SIGTERM in which a request may not have been heard yet
WAIT_AFTER_503 = 1.0  # seconds, on average
UNIT = {False: "streams_at_a_time", True: "tokens_of_one_prompt"}  # of memory; by is_hybrid


class Setting(NamedTuple):
    minutes: float
    clients: int
    blocks: int  # of the server's memory, each about 15 slots of the pure model
    waiting: int  # requests that may wait
    prompts: int
    longest_prompt: int
    longest_answer: int
    ends: tuple[tuple[float, str], ...]  # of servers before the last, and when, of all the time
    is_hybrid: bool = False


FULL = Setting(20, 64, 3, 8, 240, 3000, 150, ((0.1, "SIGKILL"), (0.25, "SIGTERM")))
SMALLEST = Setting(0.03, 8, 1, 2, 24, 100, 12, ())
SETTINGS = {
    "full": FULL,
    "hybrid": FULL._replace(blocks=8, is_hybrid=True),
    "smallest": SMALLEST,
    "smallest-hybrid": SMALLEST._replace(blocks=2, is_hybrid=True),
}


class Soak:
    """What the clients share."""

    def __init__(self, setting: Setting, questions: list[Question], server: Server):
        self.setting, self.questions, self.server = setting, questions, server
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)  # by kind of request
        self.tokens = 0  # that were compared
        self.problems: list[str] = []
        self.lives: list[dict] = []
        self.samples: list[tuple[float, int, float]] = []  # seconds, requests, MiB
        self.start = time.monotonic()
        self.is_over = False
        self.lock = threading.Lock()

    def requests(self) -> int:
        """But those that came too many."""
        counters = list(self.outcomes.values())
        return sum(counter.total() - counter["503"] for counter in counters)

    def note(self, kind: str, outcome: str, tokens: int = 0) -> None:
        with self.lock:
            self.outcomes[kind][outcome] += 1
            self.tokens += tokens

    def problem(self, kind: str, text: str) -> None:
        self.note(kind, "wrong")
        self.complain(f"{kind}: {text}")

    def complain(self, text: str) -> None:
        with self.lock:
            self.problems.append(text)
        print(f"PROBLEM: {text}", flush=True)

    # ---- clients ----

    def be_client(self, seed: int) -> None:
        client = Client(self.server, random.Random(seed))
        kinds = [kind for kind, (share, _) in KINDS.items() for _ in range(share)]
        while not self.is_over:
            self.server.is_up.wait(1)
            if not self.server.is_up.is_set():
                continue
            kind = client.random.choice(kinds)
            began, life = time.monotonic(), self.server.life
            try:
                self.note(kind, *KINDS[kind][1](client, client.random.choice(self.questions)))
            except RefusedError as refusal:
                if refusal.status == 503:
                    self.note(kind, "503")
                else:
                    self.problem(kind, str(refusal))
                time.sleep(2 * WAIT_AFTER_503 * client.random.random())
            except Exception as error:
                is_of_network = isinstance(error, (OSError, http.client.HTTPException))
                if is_of_network and self.server.excuses(began, life, PATIENCE):
                    self.note(kind, "server ended")
                else:
                    self.problem(kind, f"{type(error).__name__}: {error}")

    # ---- the server's life ----

    def run(self) -> None:
        threads = [
            threading.Thread(target=self.be_client, args=(seed,), daemon=True)
            for seed in range(self.setting.clients)
        ]
        for thread in threads:
            thread.start()
        seconds = 60 * self.setting.minutes
        for share, how in self.setting.ends:
            self._watch(self.start + share * seconds)
            self.end_server(how)
            self.server.begin()
            self._wait_for_an_answer()
        self._watch(self.start + seconds)
        self.is_over = True
        deadline = time.monotonic() + ANSWER_SECONDS
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        if any(thread.is_alive() for thread in threads):
            self.complain("a client still waits for its answer")

    def _wait_for_an_answer(self) -> None:
        """From a server that has just begun, and all clients ask at once."""
        client = Client(self.server, random.Random(0))
        while True:
            try:
                client.ask(self.questions[0], 1)
                return
            except RefusedError as refusal:
                if refusal.status != 503:
                    raise
                time.sleep(WAIT_AFTER_503)

    def _watch(self, end: float) -> None:
        """Samples memory until then."""
        told = time.monotonic()
        while time.monotonic() < end:
            time.sleep(min(1.0, max(end - time.monotonic(), 0)))
            seconds = time.monotonic() - self.start
            self.samples.append((seconds, self.requests(), self.server.memory_mib()))
            if time.monotonic() - told > 30:
                told = time.monotonic()
                self._tell()

    def _tell(self) -> None:
        seconds, requests, mib = self.samples[-1]
        print(
            f"{seconds / 60:.1f} min: {requests} requests, {self.tokens} tokens, "
            f"{len(self.problems)} problems, the server has {mib:.0f} MiB",
            flush=True,
        )

    def end_server(self, how: str) -> None:
        requests = self.requests() - sum(life["requests"] for life in self.lives)
        samples = len(self.samples) - sum(life["samples"] for life in self.lives)
        seconds, status = self.server.end(how)
        self.lives.append(
            {
                "ended_by": how,
                "status": status,
                "seconds_to_end": round(seconds, 2),
                "requests": requests,
                "samples": samples,
                "tracebacks": self.server.count_in_log("Traceback"),
            }
        )
        if how == "SIGTERM" and status != 0:
            self.complain(f"after SIGTERM the status was {status}: {self.server.log_end()}")
        print(f"{how}: ended after {seconds:.1f} s with {status}", flush=True)

    # ---- memory ----

    def growth(self) -> float | None:
        """MiB in GROWTH_REQUESTS requests, by a line through the last life's samples; None where
        it had too few.
        """
        begin = sum(life["samples"] for life in self.lives[:-1])
        samples = self.samples[begin + int(SETTLED * self.lives[-1]["samples"]) :]
        requests, mib = [r for _, r, _ in samples], [m for _, _, m in samples]
        if not samples or requests[-1] - requests[0] < GROWTH_REQUESTS / 10:
            return None
        return GROWTH_REQUESTS * statistics.linear_regression(requests, mib).slope


def whole(client: Client, question: Question) -> tuple[str, int]:
    length = client.answer_length(question)
    answer = client.ask(question, length)
    return same(answer, question.answer[:length])


def stream(client: Client, question: Question) -> tuple[str, int]:
    length = client.answer_length(question)
    with client.stream(question, length) as words:
        return same(list(words), question.answer[:length])


def leave_stream(client: Client, question: Question) -> tuple[str, int]:
    """After some of its tokens."""
    length = client.answer_length(question)
    heard = client.random.randint(1, length)
    with client.stream(question, length) as words:
        begun = list(itertools.islice(words, heard))
    same(begun, question.answer[:heard])
    return "hung up", heard


def leave(client: Client, question: Question) -> tuple[str, int]:
    """After some time, that of a short answer."""
    client.leave(question, len(question.answer), client.random.uniform(0, 0.3))
    return "hung up", 0


def bad(client: Client, question: Question) -> tuple[str, int]:
    name, status = client.ask_badly(question)
    assert status in (client.BAD[name][1], 503), f"{name}: status {status}"
    return f"{status}", 0


def same(words: list[str], expected: list[str]) -> tuple[str, int]:
    assert words == expected, f"expected {' '.join(expected)}, got {' '.join(words)}"
    return "right", len(words)


Kind = Callable[[Client, Question], tuple[str, int]]
KINDS: dict[str, tuple[int, Kind]] = {  # how many of 20 requests
    "whole": (7, whole),
    "stream": (6, stream),
    "stream, hang up": (3, leave_stream),
    "whole, hang up": (2, leave),
    "bad": (2, bad),
}


def memory_for(client: Client, setting: Setting) -> int:
    """The tokens of one prompt, or streams at a time, that the server has memory for."""
    return client.longest_prompt() if setting.is_hybrid else client.count_streams(setting.waiting)


def again(count: Callable[[], int], is_as_before: Callable[[int], bool]) -> int:
    """What is counted when those that have just hung up are gone."""
    for _ in range(TRIES):
        time.sleep(1)
        now = count()
        if is_as_before(now):
            break
    return now


def judge(soak: Soak, memory: list[int], files: list[int]) -> None:
    """Of what was counted at the start and at the end."""
    growth = soak.growth()
    if memory[1] < memory[0]:
        what = UNIT[soak.setting.is_hybrid].replace("_", " ")
        soak.complain(f"memory is for {memory[0]} {what} at the start, for {memory[1]} at the end")
    if files[1] > files[0] + SPARE_FILES:
        soak.complain(f"the server had {files[0]} open files at the start, {files[1]} at the end")
    if growth is not None and growth > GROWTH_MIB:
        soak.complain(f"memory grows by {growth:.1f} MiB in {GROWTH_REQUESTS} requests")


def report(soak: Soak, name: str, memory: list[int], files: list[int]) -> dict:
    growth = soak.growth()
    step = 1 + len(soak.samples) // SAMPLES
    return {
        "bench": "soak",
        "is_complete": True,
        "is_full": not name.startswith("smallest"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": harness.commit(),
        "machine": harness.describe_machine(),
        "setting": soak.setting._asdict(),
        "minutes": round((time.monotonic() - soak.start) / 60, 2),
        "requests": soak.requests(),
        "tokens_compared": soak.tokens,
        "outcomes": {kind: dict(outcomes) for kind, outcomes in sorted(soak.outcomes.items())},
        "wrong": len(soak.problems),
        "problems": soak.problems[:20],
        "servers": soak.lives,
        UNIT[soak.setting.is_hybrid]: memory,
        "open_files": files,
        "mib_per_10000_requests": None if growth is None else round(growth, 2),
        "largest_mib": round(max((mib for *_, mib in soak.samples), default=0), 1),
        "samples": [[round(s, 1), r, round(mib, 1)] for s, r, mib in soak.samples[::step]],
        "columns_of_samples": ["seconds", "requests", "MiB"],
    }


def plot(path: Path, document: dict) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    seconds, _, mib = zip(*document["samples"], strict=True)
    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    axes.plot([s / 60 for s in seconds], mib)
    axes.set(xlabel="minutes", ylabel="memory of the server, MiB", ylim=(0, 1.2 * max(mib)))
    axes.set_title(f"{document['requests']} requests, {document['wrong']} wrong", fontsize=10)
    figure.savefig(path.with_suffix(".png"), dpi=80)


def run(flags: argparse.Namespace, folder: Path) -> int:
    name = "-".join(name for name in ("smallest", "hybrid") if getattr(flags, name)) or "full"
    setting = SETTINGS[name]
    if flags.minutes is not None:
        setting = setting._replace(minutes=flags.minutes)
    model = save_model(folder, setting.is_hybrid)
    variables = {"HF_LINEAR_ATTENTION_MAX_WAITING": str(setting.waiting)}
    server = Server(folder, ["--cb-num-blocks", str(setting.blocks)], variables)
    try:
        sizes = setting.prompts, setting.longest_prompt, setting.longest_answer
        questions = make_questions(model, *sizes)
        print(f"asked are {len(questions)} of {setting.prompts} prompts", flush=True)
        server.wait()
        client = Client(server, random.Random(0))
        memory, files = [memory_for(client, setting)], [server.open_files()]
        soak = Soak(setting, questions, server)
        soak.run()
        memory.append(again(lambda: memory_for(client, setting), lambda now: now >= memory[0]))
        files.append(again(server.open_files, lambda now: now <= files[0] + SPARE_FILES))
        soak.end_server("SIGTERM")
    finally:
        server.end("SIGKILL")
    judge(soak, memory, files)
    document = report(soak, name, memory, files)
    date = datetime.now(timezone.utc)
    path = harness.result_path(flags.results, date, document["machine"], "soak", name)
    path.write_text(json.dumps(document) + "\n")
    plot(path, document)
    print(
        f"{soak.requests()} requests, {soak.tokens} tokens compared, {len(soak.problems)} problems"
    )
    print(f"wrote {path} and .png")
    return 1 if soak.problems else 0


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="how long the clients ask")
    parser.add_argument("--hybrid", action="store_true", help="with a layer of full attention")
    parser.add_argument("--smallest", action="store_true", help="only see that all of it runs")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder to write to")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return run(flags, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
