# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""For soak.py: a `transformers serve` that can be ended and begun again, its clients, and what they
ask with the answers that are right.
"""

import http.client
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM

logging.set_verbosity_error()

SERVE = """
import sys
from transformers.cli.transformers import main
sys.argv[0] = "transformers"
main()
"""
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
START_SECONDS = 300
END_SECONDS = 60  # more than a server may take to end
ANSWER_SECONDS = 120
SLOT_SECONDS = 30.0  # a stream that has no token then has no slot
ENDLESS = 10**9
VOCAB_SIZE = 200
SAME_LENGTH = 12  # prompts that generate() gets at a time
MARGIN = 1e-4  # standard deviations of the logits between the two best tokens


class Question(NamedTuple):
    prompt: str
    answer: list[str]  # generate()'s words


class RefusedError(Exception):
    def __init__(self, status: int, text: str):
        super().__init__(f"status {status}: {text}")
        self.status = status


def save_model(folder: Path, is_hybrid: bool = False) -> PreTrainedModel:
    """With weights so large that a wrong state changes tokens; its tokenizer knows a word more.

    is_hybrid: its second layer has full attention.
    """
    torch.manual_seed(0)
    second = "full_attention" if is_hybrid else "linear_attention"
    config = LinearAttentionConfig.from_preset(
        "katharopoulos",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        layer_types=["linear_attention", second, "linear_attention"],
        num_attention_heads=2,
        feature_map="silu",
        decay="per_token",
        normalizer="gated_rms_norm",
        conv_kernel_size=4,
        position_embedding_type="none",
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LinearAttentionForCausalLM(config).eval()
    words = {f"w{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel({**words, "unknown": VOCAB_SIZE}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    fast.save_pretrained(folder)
    return model


def make_questions(
    model: PreTrainedModel, number: int, longest_prompt: int, longest_answer: int
) -> list[Question]:
    """Of 1 to `longest_prompt` words, more short ones than long; but those in which rounding might
    choose another word.
    """
    generator = torch.Generator().manual_seed(0)
    groups = number // SAME_LENGTH
    questions = []
    for group in range(groups):
        length = round(longest_prompt ** (group / (groups - 1)))
        prompts = torch.randint(VOCAB_SIZE, (SAME_LENGTH, length), generator=generator)
        output = model.generate(
            prompts,
            max_new_tokens=longest_answer,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.stack(output.logits, dim=1)
        best, second = logits.topk(2).values.unbind(-1)
        is_sure = (best - second).amin(1) > MARGIN * logits.std()
        for prompt, sequence in zip(prompts[is_sure], output.sequences[is_sure], strict=True):
            questions.append(Question(" ".join(words_of(prompt)), words_of(sequence[length:])))
    return questions


def words_of(tokens: torch.Tensor) -> list[str]:
    return [f"w{token}" for token in tokens.tolist()]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """One at a time, always at the same port.

    loads: whether it begins with the model, and not when the first request names it.
    """

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        variables: dict[str, str],
        program: str = SERVE,
        loads: bool = True,
    ):
        self.folder, self.log, self.port = folder, folder / "log", free_port()
        options = ["--trust-remote-code", "--device", "cpu", "--port", str(self.port)]
        self.command = [sys.executable, "-c", program, "serve", *[str(folder)] * loads]
        self.command += ["--continuous-batching", "--host", "127.0.0.1", *options, *arguments]
        self.variables = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": f"{folder}/modules",
            **variables,
        }
        self.is_up = threading.Event()
        self.life = 0  # how many there were before
        self.ends: dict[int, tuple[str, float]] = {}  # of those, the signal and when it was sent
        self._start()

    def _start(self) -> None:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                env=os.environ | self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        """Until it answers.

        Raises:
            RuntimeError: it does not.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not start: {self.log_end()}")
            time.sleep(0.1)
        self.is_up.set()

    def begin(self) -> None:
        """The next, at the same port."""
        self.life += 1
        self._start()
        self.wait()

    def end(self, how: str) -> tuple[float, int]:
        """Sends a signal. Returns the seconds until the process has ended, and its exit status."""
        start = time.monotonic()
        if self.process.poll() is None:
            self.ends[self.life] = how, start
            self.is_up.clear()
            self.process.send_signal(getattr(signal, how))
        try:
            status = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        return time.monotonic() - start, status

    def excuses(self, began: float, life: int, patience: float) -> bool:
        """Whether a request to that server that began then may fail: it was killed, or had been
        told to stop before the request, or `patience` seconds after it at most.
        """
        how, when = self.ends.get(life, ("", math.inf))
        return how == "SIGKILL" or began > when - patience

    def _answers(self) -> bool:
        try:
            with OPENER.open(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    def memory_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def count_in_log(self, text: str) -> int:
        return self.log.read_text(errors="replace").count(text)

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


class Client:
    """Asks one thing after the other, each in a connection of its own.

    Its methods raise RefusedError, an OSError where the server is gone, and AssertionError for a
    stream that ends with an error.
    """

    # what is changed of a request that is right, and the status that it should get
    BAD: dict[str, tuple[dict[str, Any] | str, int]] = {
        "no tokens": ({"prompt": ""}, 400),
        "a token that the model lacks": ({"prompt": "w1 unknown"}, 400),
        "no new tokens": ({"max_tokens": 0}, 400),
        "fewer than none": ({"max_tokens": -3}, 400),
        "no new tokens, streamed": ({"max_tokens": 0, "stream": True}, 400),
        "text for a number": ({"max_tokens": "many"}, 400),
        "a list for a number": ({"temperature": [1]}, 400),
        "a temperature below 0": ({"temperature": -1}, 400),
        "a number to stop at": ({"stop": [3]}, 400),
        "a format that is not kept": ({"logprobs": 2}, 400),
        "a list of prompts": ({"prompt": ["w1", "w2"]}, 400),
        "an unknown field": ({"colour": "red"}, 422),
        "another model": ({"model": "another"}, 400),
        "no JSON": ("{", 422),
    }

    def __init__(self, server: Server, numbers: random.Random):
        self.server, self.random = server, numbers

    def answer_length(self, question: Question) -> int:
        """From 1 to all, more often few."""
        return int(len(question.answer) ** self.random.random())

    def ask(self, question: Question, tokens: int) -> list[str]:
        with closing(self._send(self._body(question, tokens))) as connection:
            return self._choice(json.loads(self._response(connection).read()))["text"].split()

    @contextmanager
    def stream(
        self, question: Question, tokens: int, seconds: float = ANSWER_SECONDS
    ) -> Iterator[Iterator[str]]:
        """Its words as they come. Behind the `with` the client has hung up."""
        body = {**self._body(question, tokens), "stream": True}
        with closing(self._send(body, seconds)) as connection:
            yield self._words(self._response(connection))

    def leave(self, question: Question, tokens: int, seconds: float) -> None:
        """Asks, and hangs up after some seconds."""
        with closing(self._send(self._body(question, tokens))):
            time.sleep(seconds)

    def ask_badly(self, question: Question) -> tuple[str, int]:
        """The name of what was wrong, and the status of the answer."""
        name = self.random.choice(list(self.BAD))
        wrong = self.BAD[name][0]
        body = wrong if isinstance(wrong, str) else {**self._body(question, 1), **wrong}
        with closing(self._send(body)) as connection:
            try:
                self._response(connection)
            except RefusedError as refused:
                return name, refused.status
            return name, 200

    def count_streams(self, waiting: int) -> int:
        """How many get tokens at a time, while nobody else asks, if so many more may wait: the
        server's slots, but those that were lost.
        """
        question, words, number = Question("w1", []), [], 0
        with ExitStack() as streams:
            try:
                while True:
                    stream = self.stream(question, ENDLESS, SLOT_SECONDS)
                    words.append(streams.enter_context(stream))
            except RefusedError as refused:
                assert refused.status == 503, refused
            try:
                for heard in words[: len(words) - waiting]:
                    next(heard)
                    number += 1
            except TimeoutError:
                pass
        return number

    def longest_prompt(self) -> int:
        """How many tokens a prompt may have that needs all pages of a hybrid; 0 if it gets no
        answer, while nobody else asks: pages, or slots among them, were lost.
        """
        try:
            self.ask(Question("w1", []), ENDLESS)
        except RefusedError as refused:
            allowed = re.search(r"must have at most (\d+) tokens", str(refused))
            assert allowed is not None, refused
        length = int(allowed[1]) - 1
        try:
            self.ask(Question(" ".join(["w1"] * length), []), 1)
        except (RefusedError, OSError):
            return 0
        return length

    def _body(self, question: Question, tokens: int) -> dict[str, Any]:
        return {
            "model": str(self.server.folder),
            "prompt": question.prompt,
            "max_tokens": tokens,
            "temperature": 0,
        }

    def _send(
        self, body: dict[str, Any] | str, seconds: float = ANSWER_SECONDS
    ) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=seconds)
        text = body if isinstance(body, str) else json.dumps(body)
        try:
            connection.request(
                "POST", "/v1/completions", text, {"Content-Type": "application/json"}
            )
        except BaseException:
            connection.close()
            raise
        return connection

    @staticmethod
    def _response(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        response = connection.getresponse()
        if response.status != 200:
            raise RefusedError(response.status, response.read().decode(errors="replace"))
        return response

    @staticmethod
    def _choice(event: dict[str, Any]) -> dict[str, Any]:
        assert "choices" in event, f"an error: {event}"
        return event["choices"][0]

    def _words(self, response: http.client.HTTPResponse) -> Iterator[str]:
        for line in response:
            if not (line.startswith(b"data: {") and line.endswith(b"\n")):
                continue
            choice = self._choice(json.loads(line[6:]))
            if choice.get("finish_reason"):
                return
            yield from choice["text"].split()
        raise ConnectionError("the stream ended before its answer")
