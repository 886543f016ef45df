# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`transformers serve` and `transformers chat`, with a saved model."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from needs import HAS_ENGINE
from saved_models import WITHOUT_PACKAGE, new_process, word_tokenizer
from tiny import VARIANTS, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TRANSFORMERS = """
import sys
from transformers.cli.transformers import main
sys.argv[0] = "transformers"
main()
"""
NEW_TOKENS = 8
PROMPTS = ["w7 w7 w31 w4 w12", "w5 w6 w7 w8 w9 w10", "w7 w7 w31 w4 w12 w12"]
GREEDY = {"max_tokens": NEW_TOKENS, "temperature": 0}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model, and what it answers to PROMPTS as texts and as chats."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = word_tokenizer(eos_token="w40")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} w2 {% endfor %}"
    tokenizer.save_pretrained(folder)
    model = tiny_model(dtype=torch.float32, seed=2, pad_token_id=0, **VARIANTS["hybrid"])
    model.save_pretrained(folder)

    def answer(prompt: str) -> str:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        return tokenizer.decode(tokens[0, ids.shape[1] :])

    texts = {prompt: answer(prompt) for prompt in PROMPTS}
    chats = {prompt: answer(f"{prompt} w2") for prompt in PROMPTS}
    assert len({*texts.values(), *chats.values()}) == 2 * len(PROMPTS)
    answers = [*texts.values(), *chats.values()]
    assert not any("w0" in answer.split() for answer in answers)  # it would be left out
    return SimpleNamespace(folder=folder, texts=texts, chats=chats)


@pytest.fixture(scope="module", params=["with", "without"] + ["batched"] * HAS_ENGINE)
def server(request, saved, tmp_path_factory):
    """The URL of a running `transformers serve`, with the package and without, one request at a
    time or all together.
    """
    modules, port = tmp_path_factory.mktemp("modules"), free_port()
    preamble = WITHOUT_PACKAGE if request.param == "without" else ""
    arguments = [saved.folder, "--trust-remote-code", "--device", "cpu", "--port", port]
    if request.param == "batched":
        arguments += ["--continuous-batching"]
    log = modules / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", preamble + TRANSFORMERS, "serve", *map(str, arguments)],
            **new_process(modules, NO_PROXY="127.0.0.1,localhost"),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://localhost:{port}"
        deadline = time.monotonic() + 300
        while not is_up(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_up(url: str) -> bool:
    try:
        with OPENER.open(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(url: str, **body) -> str:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with OPENER.open(request, timeout=60) as response:
        return response.read().decode()


def events(stream: str) -> list[dict]:
    """The JSON of server-sent events."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.sample(1)
def test_completions(server, saved):
    def ask(prompt: str) -> str:
        answer = post(f"{server}/v1/completions", model=str(saved.folder), prompt=prompt, **GREEDY)
        return json.loads(answer)["choices"][0]["text"]

    assert {prompt: ask(prompt) for prompt in PROMPTS} == saved.texts
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        assert dict(zip(PROMPTS, threads.map(ask, PROMPTS), strict=True)) == saved.texts


@pytest.mark.thorough
@pytest.mark.parametrize("stream", [False, True], ids=["at_once", "streamed"])
def test_chat_completions(stream, server, saved):
    for prompt in PROMPTS:
        reply = post(
            f"{server}/v1/chat/completions",
            model=str(saved.folder),
            messages=[{"role": "user", "content": prompt}],
            stream=stream,
            **GREEDY,
        )
        if stream:
            pieces = [event["choices"][0]["delta"].get("content") for event in events(reply)]
            assert sum(piece is not None for piece in pieces) == NEW_TOKENS
            text = "".join(filter(None, pieces))
        else:
            text = json.loads(reply)["choices"][0]["message"]["content"]
        assert text == saved.chats[prompt]


@pytest.mark.sample(1)
def test_responses(server, saved):
    stream = post(
        f"{server}/v1/responses",
        model=str(saved.folder),
        input=PROMPTS[0],
        max_output_tokens=NEW_TOKENS,
        temperature=0,
        stream=True,
    )
    response = events(stream)[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == saved.chats[PROMPTS[0]]


@pytest.mark.thorough
@pytest.mark.parametrize("server", ["with"], indirect=True)
def test_chat(server, saved, tmp_path):
    arguments = [saved.folder, server, f"max_new_tokens={NEW_TOKENS}", "do_sample=False"]
    options = new_process(
        tmp_path,
        HF_HUB_OFFLINE="0",  # else it would not talk to our server either
        HF_HUB_DISABLE_UPDATE_CHECK="1",
        NO_PROXY="127.0.0.1,localhost",
        COLUMNS="200",
    )
    del options["stdin"]
    result = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS, "chat", *map(str, arguments)],
        **options,
        input=f"{PROMPTS[0]}\nn\n!exit\n",  # n: don't continue an answer cut at its limit
        capture_output=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert saved.chats[PROMPTS[0]] in result.stdout
