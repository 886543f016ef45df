# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What `transformers serve --continuous-batching` answers when requests are wrong or too many, when
clients hang up, and when it is told to stop. And the smallest soak.
"""

import http.client
import json
import math
import queue
import random
import signal
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import starlette.requests
import transformers
from transformers.cli.serve import Serve

from engines import PROMPTS, engine, results, tokens_of, wait_until
from hf_linear_attention import LinearAttentionForCausalLM
from hf_linear_attention.serving import over_http
from new_python import run_python
from saved_models import word_tokenizer
from tiny import VARIANTS, tiny_model
from upstream_models import tiny_upstream

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import soak  # noqa: E402
import soak_server  # noqa: E402
from soak_server import ENDLESS, SERVE, Client, Question, RefusedError, Server  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

JSON = {"Content-Type": "application/json"}
MAX_WAITING = 2
STOP_SECONDS = 4
ANSWER = 60  # words


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model = soak_server.save_model(folder)
    # It takes seconds to begin; others are tested meanwhile.
    server = Server(folder, [], {"HF_LINEAR_ATTENTION_STOP_SECONDS": str(STOP_SECONDS)})
    try:
        questions = soak_server.make_questions(model, 24, 50, ANSWER)
        yield SimpleNamespace(folder=folder, questions=questions, server=server)
    finally:
        server.end("SIGKILL")


@pytest.fixture(scope="module")
def running(saved):
    """A server in this process, with few slots, and a client of it."""
    model_class = LinearAttentionForCausalLM
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_LINEAR_ATTENTION_MAX_WAITING", str(MAX_WAITING))
        # It looks for the class there, where it is not to run the code that is saved with a model.
        patch.setattr(transformers, model_class.__name__, model_class, raising=False)
        address = SimpleNamespace(folder=saved.folder, port=soak_server.free_port())
        serve = Serve(
            str(saved.folder),
            continuous_batching=True,
            device="cpu",
            host="127.0.0.1",
            port=address.port,
            cb_num_blocks=1,
            non_blocking=True,
        )
        wait_until(lambda: serve.server.started)
        client = Client(address, random.Random(0))
        client.ask(saved.questions[0], 1)
        manager = serve._generation_state._cb_manager._cb
        try:
            yield SimpleNamespace(client=client, manager=manager, server=serve.server)
        finally:
            serve.kill_server()


def is_idle(running) -> bool:
    """Nobody has a slot, and no function of the server waits for an answer, nor one for it."""
    manager = running.manager
    router = manager.output_router
    return router.output_queue.empty() and not (
        manager.batch_processor.has_pending_requests()
        or router.result_handlers
        or manager._watchers
        or running.server.server_state.tasks
    )


@pytest.fixture(autouse=True)
def idle_at_the_end(request):
    yield
    if "running" in request.fixturenames:
        running = request.getfixturevalue("running")
        wait_until(lambda: is_idle(running))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", Client.BAD)
def test_a_bad_request_gets_the_status_that_fits(name, running, saved, monkeypatch):
    monkeypatch.setattr(Client, "BAD", {name: Client.BAD[name]})
    assert running.client.ask_badly(saved.questions[0]) == (name, Client.BAD[name][1])


def test_the_answer_says_what_was_wrong(running):
    with pytest.raises(RefusedError, match="tokens must be integers from 0 to 199, got 200"):
        running.client.ask(Question("w1 unknown", []), 1)


def test_a_full_queue_answers_503(running, saved):
    client, seats = running.client, running.manager.input_queue._seats()
    with ExitStack() as streams:
        for _ in range(seats):
            next(streams.enter_context(client.stream(Question("w1", []), ENDLESS)))
        waiting = [client._send(client._body(saved.questions[0], 1)) for _ in range(MAX_WAITING)]
        wait_until(lambda: len(running.manager.batch_processor.scheduler.waiting_requests) == 2)
        connection = client._send(client._body(saved.questions[0], 1))
        response = connection.getresponse()
        assert response.status == 503
        assert response.getheader("Retry-After") == "1"
        assert json.loads(response.read())["detail"].startswith("2 requests are waiting already")
        connection.close()
    for connection in waiting:  # their turn has come
        assert connection.getresponse().status == 200
        connection.close()
    assert client.ask(saved.questions[0], 10) == saved.questions[0].answer[:10]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_client_that_hangs_up_before_its_answer_frees_its_slot(path, running):
    active = running.manager.batch_processor.scheduler.active_requests
    body = {"model": str(running.client.server.folder), "max_tokens": ENDLESS}
    text = {"completions": {"prompt": "w1"}}
    text["chat/completions"] = {"messages": [{"role": "user", "content": "w1"}]}
    connection = http.client.HTTPConnection("127.0.0.1", running.client.server.port)
    connection.request("POST", f"/v1/{path}", json.dumps({**body, **text[path]}), JSON)
    wait_until(lambda: len(active) == 1)
    connection.close()
    wait_until(lambda: is_idle(running))


@pytest.mark.parametrize("streams", [(True, True), (True, False), (False, True), (False, False)])
def test_an_id_that_is_in_use_is_refused(streams, running, saved):
    client, active = running.client, running.manager.batch_processor.scheduler.active_requests
    headers = {**JSON, "X-Request-ID": "mine"}
    first, second = (
        http.client.HTTPConnection("127.0.0.1", client.server.port, timeout=60) for _ in range(2)
    )
    question = saved.questions[0]
    for connection, stream in zip((first, second), streams, strict=True):
        body = {**client._body(question, ANSWER), "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        wait_until(lambda: "mine" in active)
    response = second.getresponse()
    assert response.status == 400
    assert "a request with the id 'mine' is under way" in response.read().decode()
    response = first.getresponse()
    words = list(client._words(response)) if streams[0] else None
    words = words or json.loads(response.read())["choices"][0]["text"].split()
    assert words == question.answer
    first.close(), second.close()


@pytest.mark.thorough
def test_sigterm_finishes_what_runs(saved):
    """For a time; what is not done then fails, and the process ends as if all had been."""
    server, question = saved.server, saved.questions[0]
    client, ended, answers = Client(server, random.Random(0)), [], []
    server.wait()
    with ExitStack() as streams:
        endless = streams.enter_context(client.stream(Question("w1", []), ENDLESS))
        stream = streams.enter_context(client.stream(question, len(question.answer)))
        asked = client._send(client._body(question, len(question.answer)))
        begun = [next(endless), next(stream)]
        stopping = threading.Thread(target=lambda: ended.append(server.end("SIGTERM")))
        stopping.start()
        assert [begun[1], *stream] == question.answer
        answer = json.loads(asked.getresponse().read())["choices"][0]["text"]
        assert answer.split() == question.answer
        with pytest.raises((OSError, RefusedError)):
            client.ask(question, 1)
        with pytest.raises(AssertionError, match="an error: .*before this request completed"):
            answers.extend(endless)
        assert answers
        stopping.join()
    ((seconds, status),) = ended
    assert status == 0, server.log_end()
    assert STOP_SECONDS <= seconds < STOP_SECONDS + soak_server.END_SECONDS / 2


STOPPED = """
import os, signal, sys, threading, time, urllib.request
from transformers.cli.transformers import main

def stop():
    port = sys.argv[sys.argv.index("--port") + 1]
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            ask.open(f"http://127.0.0.1:{port}/health")
            return os.kill(os.getpid(), signal.SIGTERM)
        except OSError:
            time.sleep(0.05)

threading.Thread(target=stop, daemon=True).start()
main()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "flags, status", [(["--continuous-batching"], 0), ([], -signal.SIGTERM)], ids=str
)
def test_sigterm_before_the_first_request_ends_the_process_as_behind_it(flags, status, saved):
    """But not where Transformers serves one request at a time: that is its own."""
    options = ["--trust-remote-code", "--device", "cpu", "--port", soak_server.free_port()]
    ended = run_python("-c", STOPPED, "serve", saved.folder, *options, *flags)
    assert ended.returncode == status, ended.stderr


EVERYWHERE = """
from hf_linear_attention import use_kernels_everywhere
use_kernels_everywhere()
"""


def behaves(server: Server) -> None:
    """Its first request is a bad one, and the next are sampled as they say; who hangs up has no
    slot any more, for which the server would wait when it is to end.
    """
    server.wait()
    client, question = Client(server, random.Random(0)), Question("w1", [])
    draws = json.dumps({"do_sample": True, "max_new_tokens": 20})
    hot = {**client._body(question, 20), "generation_config": draws, "temperature": 1e6}
    with closing(client._send({**hot, "max_tokens": "many"})) as connection:
        with pytest.raises(RefusedError, match="max_tokens must be a whole number"):
            client._response(connection)
    answer = client.ask(question, 20)
    with closing(client._send(hot)) as connection:
        assert json.loads(client._response(connection).read())["choices"][0]["text"] != answer
    assert client.ask(question, 20) == answer
    client.leave(question, ENDLESS, 1)
    seconds, status = server.end("SIGTERM")
    assert status == 0, server.log_end()
    assert seconds < over_http.STOP_SECONDS


@pytest.mark.thorough
def test_a_server_that_begins_without_a_model(tmp_path):
    soak_server.save_model(tmp_path)
    server = Server(tmp_path, [], {}, loads=False)
    try:
        behaves(server)
    finally:
        server.end("SIGKILL")


@pytest.mark.thorough
def test_a_server_of_a_model_of_transformers(tmp_path):
    tiny_upstream("mamba2", eos_token_id=None).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    server = Server(
        tmp_path, [], {}, program=EVERYWHERE.join(["import transformers.cli.serve\n", SERVE])
    )
    try:
        behaves(server)
    finally:
        server.end("SIGKILL")


def test_what_can_not_be_is_named(running, saved):
    count, heat, share = "a whole number from 1 on", "a number from 0 on", r"a number in \(0, 1\]"
    unheeded = "or left out with continuous batching"
    for name, wrong, message in (
        ("max_tokens", "many", f"max_tokens must be {count}, got 'many'"),
        ("max_tokens", [1], rf"max_tokens must be {count}, got \[1\]"),
        ("max_tokens", math.inf, f"max_tokens must be {count}, got inf"),
        ("max_tokens", 2.5, f"max_tokens must be {count}, got 2.5"),
        ("max_tokens", True, f"max_tokens must be {count}, got True"),
        ("max_tokens", 0, f"max_tokens must be {count}, got 0"),
        ("seed", "x", "seed must be a whole number of 64 bits, got 'x'"),
        ("seed", 2**64, "seed must be a whole number of 64 bits, got 18446744073709551616"),
        ("temperature", {}, f"temperature must be {heat}, got {{}}"),
        ("temperature", -1, f"temperature must be {heat}, got -1"),
        ("temperature", math.nan, f"temperature must be {heat}, got nan"),
        ("top_p", 7, f"top_p must be {share}, got 7"),
        ("top_p", 0, f"top_p must be {share}, got 0"),
        ("stop", [3], r"stop must be a string or a list of strings, none empty, got \[3\]"),
        ("stop", [""], r"stop must be a string or a list of strings, none empty, got \[''\]"),
        ("frequency_penalty", 3, "frequency_penalty must be a number from -2 to 2, got 3"),
        ("frequency_penalty", "x", "frequency_penalty must be a number from -2 to 2, got 'x'"),
        ("stop", False, "stop must be a string or a list of strings, none empty, got False"),
        *(
            ("logit_bias", bias, "logit_bias must have numbers from -100 to 100 by tokens from 0")
            for bias in ({"3": 200}, {"x": 1}, {"200": 1}, {"1_0": 3}, {"5": True}, [5])
        ),
        *(
            ("generation_config", json.dumps({name: wrong}), f"generation_config's {name} must be")
            for name, wrong in (
                *(("no_repeat_ngram_size", x) for x in ("3", True, [1], -1)),
                *(("suppress_tokens", x) for x in (5, [[1]], [200], [-1], [1.5], "x")),
                *(("bad_words_ids", x) for x in ([], [5], [[]], [[200]])[1:]),
                *(("max_new_tokens", x) for x in ("5", 0, 2.5, True, [2])),
                *(("eos_token_id", x) for x in ("x", 1.5, ["x"])),
                *(("repetition_penalty", x) for x in (0, "x", True)),
                ("pad_token_id", "x"),
                ("do_sample", "no"),
            )
        ),
        ("generation_config", '[["max_new_tokens", 5]]', "must be JSON of settings"),
        ("n", 2, f"n must be 1 {unheeded}, got 2"),
        ("best_of", 2, f"best_of must be 1 {unheeded}, got 2"),
        ("echo", True, f"echo must be False {unheeded}, got True"),
        ("generation_config", "{", "generation_config must be JSON of settings, got '{'"),
        ("generation_config", "[1]", r"generation_config must be JSON of settings, got '\[1\]'"),
        ("logprobs", 2, f"logprobs must be False {unheeded}, got 2"),
        ("generation_config", '{"stop_strings": [2]}', r"stop_strings must be .*, got \[2\]"),
        ("generation_config", '{"num_beams": 2}', "must be without num_beams with .*, got 2"),
        ("generation_config", '{"max_length": 9}', "must be without max_length with .*, got 9"),
        (
            "generation_config",
            '{"do_sample": true, "eta_cutoff": "x"}',
            r"eta_cutoff must be in \[0, 1\), got 'x'",
        ),
        (
            "generation_config",
            '{"do_sample": true, "temperature": -1}',
            "temperature must be greater than 0, got -1",
        ),
        (
            "generation_config",
            '{"do_sample": true, "min_p": "x"}',
            r"min_p must be in \[0, 1\], got 'x'",
        ),
    ):
        body = {**running.client._body(saved.questions[0], 1), "temperature": None, name: wrong}
        connection = running.client._send(json.dumps(body))
        with pytest.raises(RefusedError, match=message) as refused:
            running.client._response(connection)
        assert refused.value.status == 400
        connection.close()


def test_a_format_that_is_not_kept_is_refused(running):
    body = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 1}
    for kind, status in (("text", 200), ("json_object", 400)):
        connection = http.client.HTTPConnection("127.0.0.1", running.client.server.port)
        body["response_format"] = {"type": kind}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
        with closing(connection):
            response = connection.getresponse()
            assert response.status == status
            text = response.read().decode()
    assert "response_format must be {'type': 'text'} or left out" in text


def test_each_request_is_sampled_as_it_says(running, saved):
    """All at once, in one batch; in Transformers as the first one said."""
    client, question, tokens = running.client, saved.questions[0], 20
    draws = {"generation_config": json.dumps({"do_sample": True, "max_new_tokens": tokens})}
    draws["temperature"] = 1
    alike = [{}, {"temperature": 5}, {**draws, "temperature": 0}, {**draws, "top_p": 1e-6}]
    hot = {**draws, "temperature": 1e6}
    # what changes nothing is taken
    alike[0] = {"stop": [], "frequency_penalty": 0.0, "n": 1, "logit_bias": None, "top_p": 1}

    def answer(connection) -> list[str]:
        with closing(connection):
            response = client._response(connection)
            return client._choice(json.loads(response.read()))["text"].split()

    asked = [client._send({**client._body(question, tokens), **x}) for x in (*alike, hot)]
    *answers, other = map(answer, asked)
    assert answers == [question.answer[:tokens]] * len(alike)
    assert len(other) > 1 and other != question.answer[: len(other)]


def text_of(running, saved, **asked) -> str:
    """Of the first question's answer; streamed and not, which are to be alike."""
    client, question = running.client, saved.questions[0]
    body = {**client._body(question, 20), **asked}
    with closing(client._send(body)) as connection:
        text = client._choice(json.loads(client._response(connection).read()))["text"]
    with closing(client._send({**body, "stream": True})) as connection:
        assert list(client._words(client._response(connection))) == text.split()
    return text


def test_an_answer_ends_before_a_stop_string(running, saved):
    answer = saved.questions[0].answer[:20]
    last = next(i for i, word in enumerate(answer) if word not in answer[:i] and i > 3)
    across = f"{answer[last - 1]} {answer[last]}"
    assert text_of(running, saved).split() == answer
    assert text_of(running, saved, stop=answer[last]).split() == answer[:last]
    assert text_of(running, saved, stop=["no", across]).split() == answer[: last - 1]
    assert text_of(running, saved, stop="none of these").split() == answer
    settings = json.dumps({"stop_strings": answer[last], "max_new_tokens": 20})
    assert text_of(running, saved, generation_config=settings).split() == answer[:last]
    both = text_of(running, saved, generation_config=settings, stop=[f"{answer[1]} "])
    assert both.split() == answer[:1]
    wait_until(lambda: is_idle(running))  # the rest of the answers was not made


def test_penalties_and_biases_are_each_request_s_own(running, saved):
    answer = saved.questions[0].answer[:20]
    biased = text_of(running, saved, logit_bias={"7": 100}).split()
    assert len(set(biased)) == 1
    assert len(set(text_of(running, saved, logit_bias={"7": 100}, presence_penalty=2).split())) == 1
    # 20 times at most: where a token's logit is ahead by less, another one's turn comes
    bodies = {"logit_bias": {"7": 30}}, {"logit_bias": {"7": 30}, "frequency_penalty": 2}
    alike, others = (text_of(running, saved, **body).split() for body in bodies)
    assert len(set(alike)) == 1 < len(set(others))
    settings = {"no_repeat_ngram_size": 1, "max_new_tokens": 20}
    different = text_of(running, saved, generation_config=json.dumps(settings)).split()
    assert len(set(different)) == len(different) == 20
    words = sorted(int(word[1:]) for word in set(answer))
    for name, without in ("suppress_tokens", words), ("bad_words_ids", [[x] for x in words]):
        settings = json.dumps({name: without, "repetition_penalty": 2, "max_new_tokens": 20})
        others = text_of(running, saved, generation_config=settings).split()
        assert len(others) == 20 and not {*others} & {*answer}
    assert text_of(running, saved).split() == answer


def test_a_seed_gives_the_same_answer_again(running, saved):
    """Whatever else is in the batch."""
    client, question = running.client, saved.questions[0]
    draws = {"generation_config": json.dumps({"do_sample": True, "max_new_tokens": 20})}
    body = {**client._body(question, 20), **draws, "temperature": 3}

    def answer(connection) -> str:
        with closing(connection):
            return client._choice(json.loads(client._response(connection).read()))["text"]

    seeds = (1, 2, 1, None, 1)
    answers = [answer(c) for c in [client._send({**body, "seed": seed}) for seed in seeds]]
    assert answers[0] == answers[2] == answers[4] == answer(client._send({**body, "seed": 1}))
    assert len(set(answers)) == 3


def test_a_seeded_request_without_a_token_fails_alone(running, saved):
    client, question = running.client, saved.questions[0]
    settings = {"do_sample": True, "max_new_tokens": 9, "suppress_tokens": [*range(200)]}
    wrong = {"generation_config": json.dumps(settings), "seed": 1, "temperature": 1}
    with closing(client._send(client._body(question, ANSWER))) as other:
        with closing(client._send({**client._body(question, 9), **wrong})) as connection:
            assert connection.getresponse().status == 500
        text = client._choice(json.loads(client._response(other).read()))["text"]
    assert text.split() == question.answer[:ANSWER]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_waits_for_a_stop_string_may_hang_up(stream, running):
    active = running.manager.batch_processor.scheduler.active_requests
    body = {**running.client._body(Question("w1", []), ENDLESS), "stop": "never", "stream": stream}
    connection = running.client._send(body)
    if stream:  # whoever does not wait for the answer to begin is heard when it does
        connection.getresponse().readline()
    wait_until(lambda: len(active) == 1)
    connection.close()
    wait_until(lambda: is_idle(running))  # its task, too, and no output is left


def test_other_servers_are_left_alone():
    """Signals stay where no `transformers serve` runs in this thread."""
    before = signal.getsignal(signal.SIGTERM)
    over_http.prepare_server()
    assert over_http.hear_signals() is None
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_server_of_one_s_own_has_the_engine_as_from_python():
    """It has requests of Starlette's on its stack, too, and answers them itself."""
    model = tiny_model(**VARIANTS["gated"])

    def answer(request):
        return manager.add_request([10**6])

    with engine(model) as manager:
        [output] = results(manager, [answer(starlette.requests.Request({"type": "http"}))])
    assert output.error.startswith("tokens must be integers from 0")


def test_from_python_a_full_queue_is_an_error_where_it_has_a_limit():
    model = tiny_model(**VARIANTS["gated"])
    with engine(model, {"num_blocks": 1}, max_new_tokens=50) as manager:
        manager.max_waiting = 1
        seats = manager.input_queue._seats()
        ids = [manager.add_request(PROMPTS[0]) for _ in range(seats + 1)]
        with pytest.raises(queue.Full, match="1 requests are waiting already"):
            manager.add_request(PROMPTS[0])
        manager.max_waiting = None
        ids.append(manager.add_request(PROMPTS[0]))
        assert len(set(map(tuple, tokens_of(results(manager, ids))))) == 1


@pytest.mark.parametrize("text", ["-1", "many", ""])
def test_a_limit_that_is_no_number_is_refused(text, monkeypatch):
    monkeypatch.setenv("HF_LINEAR_ATTENTION_MAX_WAITING", text)
    with pytest.raises(ValueError, match="HF_LINEAR_ATTENTION_MAX_WAITING must be a whole number"):
        with engine(tiny_model()):
            pass


@pytest.mark.thorough
@pytest.mark.parametrize("flags, name", [([], "smallest"), (["--hybrid"], "smallest-hybrid")])
def test_the_smallest_soak(flags, name, tmp_path, monkeypatch):
    arguments = ["--smallest", *flags, "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["soak.py", *arguments])
    assert soak.main() == 0
    (path,) = tmp_path.glob(f"*-soak-{name}.json")
    document = json.loads(path.read_text())
    assert document["wrong"] == 0 and document["tokens_compared"] > 0
    start, end = document[soak.UNIT[bool(flags)]]
    assert start == end > 1
    assert [life["status"] for life in document["servers"]] == [0]
    assert set(document["outcomes"]) <= set(soak.KINDS)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
