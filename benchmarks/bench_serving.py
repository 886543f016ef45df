# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Serving: what many clients get of a model together, and how long each waits for its first token.

    python benchmarks/bench_serving.py           # 1, 16 and 32 clients; in three minutes
    python benchmarks/bench_serving.py --full    # 1 to 64 clients, longer answers; in fifteen
    python benchmarks/bench_serving.py --full --vllm .venv-vllm/bin/python    # vLLM beside

Over HTTP on the loopback, `transformers serve` with --continuous-batching and without, where one
request waits for the other; and, where --vllm names the Python of an environment that has it
(`make test-vllm` sets one up), vLLM with a Llama of the same size. In one process,
`generate_batch`, and `generate()` for the prompts one by one and as a batch, which begins and ends
for all at once. There, too, the first token after a long prompt that is new, and after one that
only ends otherwise.

All prompts have as many tokens, and all answers. "per token" is the time in which all clients
together get one: 1000 / tokens per second. "first token" is the mean over the clients, which all
ask at the same moment. Clients are threads of this process and take processor time, too.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from harness import Report, Timing, parser
from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM
from models import Size, make_model

BATCHED, ALONE = "continuous batching", "one at a time"
HTTP = {BATCHED: ["--continuous-batching"], ALONE: []}
VLLM = "vLLM's Llama"
ENGINE, GENERATE_BATCH = "generate_batch's engine", "generate_batch"
ONE_BY_ONE, PADDED = "generate(), one by one", "generate(), batch"
NEW, SHARED = "a new prompt", "one that begins like it"
SERVE = """
import sys
from transformers.cli.transformers import main
sys.argv[0] = "transformers"
main()
"""
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
DEMO = Size(128, 344, 4, 4, 2048)


class Setting(NamedTuple):
    size: Size
    prompt: int  # tokens of each
    answer: int
    clients: tuple[int, ...]
    long_prompt: int  # tokens


SETTINGS = {
    "smallest": Setting(Size(64, 64, 2, 2, 100), 4, 3, (2,), 600),
    "short": Setting(DEMO, 16, 64, (1, 16, 32), 16_000),
    "full": Setting(DEMO, 16, 128, (1, 2, 4, 8, 16, 32, 64), 16_000),
}
QUESTION = 16  # tokens at the end of a long prompt


# ---- servers and clients ----


class Server(NamedTuple):
    url: str
    model: str
    process: subprocess.Popen

    def wait(self) -> None:
        """Until it answers."""
        while not self.is_up():
            if self.process.poll() is not None:
                sys.exit(f"a server has ended: {self.process.args}")
            time.sleep(0.1)

    def is_up(self) -> bool:
        try:
            with OPENER.open(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    def ask(self, prompt: str, tokens: int, stream: bool = False) -> str:
        """The answer; of a stream the first of it."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({**body, "stream": stream}).encode(),
            {"Content-Type": "application/json"},
        )
        with OPENER.open(request, timeout=600) as response:
            if not stream:
                return json.loads(response.read())["choices"][0]["text"]
            for line in response:
                if line.startswith(b"data: {"):
                    return json.loads(line[6:])["choices"][0]["text"]
        raise RuntimeError("a stream ended before its first token")


@contextmanager
def server(folder: Path, command: list[str], **environment: str) -> Iterator[Server]:
    """A server of the model in a folder, which takes seconds to begin; `command` lacks the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield Server(f"http://127.0.0.1:{port}", str(folder), process)
    finally:
        process.terminate()
        process.wait()


def transformers_serve(
    folder: Path, arguments: list[str], threads: int
) -> AbstractContextManager[Server]:
    own = ["serve", str(folder), "--trust-remote-code", "--device", "cpu"]
    return server(
        folder,
        [sys.executable, "-c", SERVE, *own, *arguments],
        OMP_NUM_THREADS=str(threads),
        HF_MODULES_CACHE=f"{folder}/modules",
    )


def vllm_serve(
    python: Path, folder: Path, setting: Setting, threads: int
) -> AbstractContextManager[Server]:
    longest = setting.prompt + setting.answer
    sizes = ["--max-num-seqs", str(max(setting.clients)), "--max-model-len", str(longest)]
    return server(
        folder,
        [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--dtype", "float32", *sizes),
        ],
        OMP_NUM_THREADS=str(threads),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_CPU_KVCACHE_SPACE="1",
    )


def all_at_once(tasks: list[Callable[[], object]]) -> list[float]:
    """Runs each in a thread of its own; the seconds until each was done."""
    seconds = [0.0] * len(tasks)
    start = time.perf_counter()

    def run(number: int) -> None:
        tasks[number]()
        seconds[number] = time.perf_counter() - start

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds


# ---- the model ----


def save_model(
    folder: Path, name: str, size: Size
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """One of `make_model`, with random weights, and a tokenizer of as many words."""
    words = {f"w{number}": number for number in range(size.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0")
    model = make_model(name, size=size)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return model, fast


def make_prompts(number: int, setting: Setting) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, setting.size.vocab_size, (number, setting.prompt), generator=generator)


def answers(model: PreTrainedModel, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
    output = model.generate(prompts, max_new_tokens=tokens, do_sample=False)
    return output[:, prompts.shape[1] :]


def engine_settings(
    tokens: int, requests: int
) -> tuple[GenerationConfig, ContinuousBatchingConfig]:
    greedy = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1)
    return greedy, ContinuousBatchingConfig(max_requests_per_batch=requests)


# ---- what is measured ----


def measure_http(report: Report, servers: dict[str, Server], texts: list[str], answer: int) -> None:
    clients, first = len(texts), {name: [] for name in servers}

    def sample_of(running: Server) -> Callable[[], float]:
        tasks = [lambda text=text: running.ask(text, answer) for text in texts]
        return lambda: max(all_at_once(tasks)) / (clients * answer)

    def first_of(name: str, running: Server) -> Callable[[], float]:
        tasks = [lambda text=text: running.ask(text, answer, stream=True) for text in texts]
        return lambda: statistics.mean(all_at_once(tasks))

    case = f"{clients} clients, answers of {answer} tokens"
    timings = report.time({name: sample_of(running) for name, running in servers.items()}, 30)
    report.add("HTTP, per token", case, clients, timings, {})
    first = {name: first_of(name, running) for name, running in servers.items()}
    report.add("HTTP, first token", case, clients, report.time(first, 10), {})


def measure_here(
    report: Report, model: PreTrainedModel, prompts: torch.Tensor, tokens: int
) -> None:
    lists, settings = prompts.tolist(), engine_settings(tokens, len(prompts))
    manager = model.init_continuous_batching(*settings)
    manager.start()

    def engine() -> None:
        waiting = set(manager.add_requests(lists))
        while waiting:
            waiting.discard(manager.get_result().request_id)

    def one_by_one() -> None:
        for prompt in prompts:
            answers(model, prompt[None], tokens)

    runs = {
        ENGINE: engine,
        GENERATE_BATCH: lambda: model.generate_batch(lists, *settings),
        ONE_BY_ONE: one_by_one,
        PADDED: lambda: answers(model, prompts, tokens),
    }

    def sample_of(run: Callable[[], object]) -> Callable[[], float]:
        def sample() -> float:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) / (len(prompts) * tokens)

        return sample

    timings: dict[str, Timing] = report.time({n: sample_of(run) for n, run in runs.items()}, 20)
    manager.stop()
    case = f"{len(prompts)} requests, answers of {tokens} tokens"
    reference = timings[ENGINE]
    report.add("one process, per token", case, len(prompts), timings, {}, reference=reference)


def long_prompt_model(size: Size, num_softmax: int) -> PreTrainedModel:
    """Its last layers have full attention."""
    torch.manual_seed(0)
    linear = ["linear_attention"] * (size.layers - num_softmax)
    config = LinearAttentionConfig.from_preset(
        "katharopoulos",
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        layer_types=[*linear, *["full_attention"] * num_softmax],
    )
    return LinearAttentionForCausalLM(config).eval()


def measure_long_prompt(report: Report, model: PreTrainedModel, name: str, length: int) -> None:
    """Until the first token of a prompt of which nothing is known, and then of one like it."""
    greedy, settings = engine_settings(tokens=1, requests=1)
    settings.num_blocks = length // settings.page_size + 2
    manager = model.init_continuous_batching(greedy, settings)
    manager.start()
    generator, last = torch.Generator().manual_seed(0), []

    def tokens(number: int) -> list[int]:
        return torch.randint(model.config.vocab_size, (number,), generator=generator).tolist()

    def first_token(prompt: list[int]) -> list[int]:
        last[:] = prompt
        manager.add_request(prompt)
        return manager.get_result().generated_tokens

    def seconds(prompt: list[int]) -> float:
        start = time.perf_counter()
        first_token(prompt)
        return time.perf_counter() - start

    samples = {
        NEW: lambda: seconds(tokens(length)),
        SHARED: lambda: seconds(last[:-QUESTION] + tokens(QUESTION)),
    }
    timings = report.time(samples, 10)
    again = first_token(last)
    manager.stop()
    if again != answers(model, torch.tensor([last]), 1)[0].tolist():
        sys.exit(f"{name}: a prompt that begins like another gets another token than generate()'s")
    case = f"{name}, {length} tokens"
    reference = timings[SHARED]
    report.add("long prompt, first token", case, length, timings, {}, reference=reference)


def verify(running: Server, texts: list[str], expected: list[str], answer: int) -> None:
    got = [running.ask(text, answer) for text in texts]
    if [text.split() for text in got] != [text.split() for text in expected]:
        sys.exit(f"{running.process.args} answers other tokens than generate()")


def run(flags: argparse.Namespace, folder: Path) -> None:
    report = Report("serving", "clients", BATCHED, flags)
    setting, threads = SETTINGS[flags.setting], flags.threads
    model, tokenizer = save_model(folder / "ours", "ours", setting.size)
    models = dict.fromkeys(HTTP, model)
    servers = {
        name: transformers_serve(folder / "ours", arguments, threads)
        for name, arguments in HTTP.items()
    }
    if flags.vllm is None:
        report.notes.append("without vLLM: --vllm was not given")
    else:
        models[VLLM], _ = save_model(folder / "llama", "Llama", setting.size)
        servers[VLLM] = vllm_serve(flags.vllm, folder / "llama", setting, threads)
    prompts = make_prompts(max(setting.clients), setting)
    texts = tokenizer.batch_decode(prompts)
    with ExitStack() as stack:
        running = {name: stack.enter_context(server) for name, server in servers.items()}
        for name, each in running.items():
            each.wait()
            expected = tokenizer.batch_decode(answers(models[name], prompts[:2], setting.answer))
            verify(each, texts[:2], expected, setting.answer)
        for clients in setting.clients:
            measure_http(report, running, texts[:clients], setting.answer)
    for clients in setting.clients:
        measure_here(report, model, prompts[:clients], setting.answer)
    for name, num_softmax in {"pure": 0, "hybrid": 1}.items():
        model = long_prompt_model(setting.size, num_softmax)
        measure_long_prompt(report, model, name, setting.long_prompt)
    report.save()


def main() -> None:
    assert __doc__ is not None
    arguments = parser(__doc__)
    arguments.add_argument("--vllm", type=Path, help="a Python with vLLM, a contender")
    flags = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(flags, Path(folder))


if __name__ == "__main__":
    main()
