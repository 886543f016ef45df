# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""New Python processes for the tests that begin where PyTorch and Transformers are imported.

To import these takes most of the time of a short program. So one process, the server, imports them
and nothing else, and every program runs in a fork of it: our package, whatever it registers, and
the compiled library are as new there as in any new process. Where a process has to be new in all,
since it is Transformers' import that counts, say, tests start one with `subprocess`.

Run as a program, this is the server. It reads a request on each line of stdin, as JSON, and answers
with the program's exit status, or null if that took too long.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

# Read when PyTorch and Transformers are imported, so the same for all programs.
FIXED = {
    "HF_HUB_OFFLINE": "1",
    "HF_ENDPOINT": "http://127.0.0.1:9",  # which refuses every connection
    "OMP_NUM_THREADS": "1",  # in programs so small, several would only wait for each other
}
READ_AT_IMPORT = ("HF_H", "HF_ENDPOINT", "HF_MODULES", "HF_TOKEN", "OMP_", "TRANSFORMERS_")


def run_python(
    *arguments: object, cwd: str | Path | None = None, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess:
    """What `python *arguments` printed, as text, and how it ended: `-c program`, `-m module` or a
    script, each with arguments of its own, and with `variables` added to the environment.
    """
    early = [name for name in variables if name.startswith(READ_AT_IMPORT)]
    if early:
        raise ValueError(f"{', '.join(early)} is read before the program begins: use subprocess")
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        request = {
            "arguments": words,
            "cwd": str(cwd or os.getcwd()),
            "environment": os.environ | fixed_variables() | variables,
            "streams": [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)],
            "timeout": timeout,
        }
        server = the_server()
        print(json.dumps(request), file=server.stdin, flush=True)
        reply = server.stdout.readline()
        if not reply:
            raise RuntimeError(f"the server of new Pythons ended with status {server.wait()}")
        status = json.loads(reply)
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))
    if status is None:
        raise subprocess.TimeoutExpired(words, timeout, *printed)
    return subprocess.CompletedProcess(words, status, *printed)


# Runs a script until a file holds JSON, and kills itself then.
KILLED = """
import json, os, runpy, signal, sys, threading, time
def is_whole(file):
    try:
        return bool(json.load(open(file)))
    except (OSError, ValueError):
        return False
def kill(file=sys.argv[1]):
    while not is_whole(file):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
_, _, script, *arguments = sys.argv
sys.path[0] = os.path.dirname(script)
sys.argv[:] = [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


def kill_when_whole(file: Path, script: Path, *arguments: object) -> None:
    """Runs a script, and kills it as soon as `file` is there and whole, which it must come to be:
    `file` is JSON, a checkpoint's last one say.
    """
    killed = run_python("-c", KILLED, file, script, *arguments, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def launch(config: str, script: Path, *arguments: object) -> None:
    """Runs a script by Accelerate's launcher, with a config of the examples. The launcher is a
    fork, its processes are new in all.
    """
    file = EXAMPLES / "configs" / f"{config}.yaml"
    words = ("-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", file)
    launched = run_python(*words, script, *arguments, CUDA_VISIBLE_DEVICES="")
    assert launched.returncode == 0, launched.stderr[-6000:]


@functools.cache
def fixed_variables() -> dict[str, str]:
    """FIXED, and a folder of this session's for the code of models."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return {**FIXED, "HF_MODULES_CACHE": folder.name}


@functools.cache
def the_server() -> subprocess.Popen:
    # Without the caller's PYTHONPATH, which programs may change.
    environment = {n: x for n, x in os.environ.items() if n != "PYTHONPATH"} | fixed_variables()
    server = subprocess.Popen(
        [sys.executable, __file__],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def stop():
        server.stdin.close()
        server.wait()
        server.stdout.close()

    atexit.register(stop)
    return server


def serve() -> dict | None:
    """Returns in every child, with the request that it is to run, and in the server at its end."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed while modules are imported is no reply
    import torch  # noqa: F401
    import transformers.generation
    import transformers.models.llama.modeling_llama  # noqa: F401
    import transformers.pipelines  # noqa: F401

    gc.freeze()  # lest every child copy the memory of these modules when it ends

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            replies.close()
            return request
        print(json.dumps(exit_status(child, request["timeout"])), file=replies, flush=True)
    return None


def exit_status(child: int, timeout: float) -> int | None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def become(request: dict) -> None:
    """Runs the program of a request as a Python that was started for it would."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, path in enumerate(request["streams"], 1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    first, *others = request["arguments"]
    sys.path[0] = str(Path(first).resolve().parent) if not first.startswith("-") else os.getcwd()
    sys.path[1:1] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if first == "-c":
        program, *others = others
        sys.argv = ["-c", *others]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first.startswith("-"):
        raise ValueError(f"a program must be -c, -m or a script, got {first}")
    else:
        sys.argv = [first, *others]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    todo = serve()
    if todo is not None:
        become(todo)
