# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""llama.cpp in a process of its own: runs models of Transformers that llama_cpp_files.py knows.

Started by the Python of an environment that has llama-cpp-python (which compiles llama.cpp for
the machine), gguf and safetensors; torch is not needed there. Answers lines of JSON.
"""

import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np

from llama_cpp_files import write_gguf

BATCH = 512  # tokens that are read at once, llama.cpp's default
SPARE = 64  # tokens that a sequence has room for beyond its context


class Decoder(NamedTuple):
    """Sequences of one model that have read their contexts."""

    llama: Any  # ctypes' pointer to llama.cpp's context
    batch: Any
    vocab_size: int
    contexts: np.ndarray  # (rows, tokens)
    states: list[Any]  # of each row after its context, as bytes

    def read(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """tokens (rows, n), at the positions from start on: logits (rows, vocab_size) after the
        last of each row.
        """
        rows, n = tokens.shape
        last = []
        places = [(row, i) for row in range(rows) for i in range(n)]
        for begin in range(0, len(places), BATCH):
            batch = self.batch
            batch.n_tokens = len(places[begin : begin + BATCH])
            asked = []
            for at, (row, i) in enumerate(places[begin : begin + BATCH]):
                batch.token[at] = int(tokens[row, i])
                batch.pos[at] = start + i
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = row
                batch.logits[at] = i == n - 1
                if i == n - 1:
                    asked.append(at)
            status = llama_cpp.llama_decode(self.llama, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status}")
            for at in asked:
                logits = llama_cpp.llama_get_logits_ith(self.llama, at)
                last.append(np.ctypeslib.as_array(logits, (self.vocab_size,)).copy())
        return np.stack(last)

    def save(self) -> None:
        for row in range(len(self.contexts)):
            size = llama_cpp.llama_state_seq_get_size(self.llama, row)
            state = (ctypes.c_uint8 * size)()
            llama_cpp.llama_state_seq_get_data(self.llama, state, size, row)
            self.states.append(state)

    def forget(self) -> None:
        """All of all rows."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.llama), False)

    def rewind(self) -> None:
        """Back to the contexts. Recurrent states can't be rid of tokens, so all come anew."""
        self.forget()
        for row, state in enumerate(self.states):
            if not llama_cpp.llama_state_seq_set_data(self.llama, state, len(state), row):
                raise RuntimeError(f"llama.cpp could not go back to the context of row {row}")

    def read_one_by_one(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """As `read`, each token of the rows by itself."""
        for i, token in enumerate(np.split(tokens, tokens.shape[1], axis=1)):
            logits = self.read(token, start + i)
        return logits


class Worker:
    def __init__(self, threads: int):
        self.threads = threads
        self.models: dict[str, tuple[Any, int]] = {}
        self.decoders: dict[str, Decoder] = {}
        llama_cpp.llama_backend_init()

    def load(self, folder: str, kind: str) -> dict:
        """Makes a model of a saved one. kind: of its weights, as "F32", "BF16", "Q8_0"."""
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "model.gguf"
            write_gguf(Path(folder), kind, path)
            settings = llama_cpp.llama_model_default_params()
            settings.use_mmap = False
            model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not model:
            raise RuntimeError(f"llama.cpp could not load the {kind} model")
        vocab = llama_cpp.llama_model_get_vocab(model)
        self.models[kind] = model, llama_cpp.llama_vocab_n_tokens(vocab)
        return {"version": llama_cpp.__version__}

    def prepare(self, kind: str, tokens: list[list[int]], context: int) -> dict:
        """Reads tokens (rows, n) from a random context on that is made of the first of them, again
        and again; the logits after the last token of each row.
        """
        model, vocab_size = self.models[kind]
        given = np.array(tokens)
        rows, n = given.shape
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = rows * (context + SPARE)
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_seq_max = rows
        settings.n_threads = settings.n_threads_batch = self.threads
        llama = llama_cpp.llama_init_from_model(model, settings)
        if not llama:
            raise RuntimeError(f"llama.cpp could not make a context of {settings.n_ctx} tokens")
        batch = llama_cpp.llama_batch_init(BATCH, 0, rows)
        contexts = given[:, np.arange(context) % n]
        decoder = Decoder(llama, batch, vocab_size, contexts, [])
        self.decoders[kind] = decoder
        logits = decoder.read(given, 0)
        if context > n:
            decoder.read(contexts[:, n:], n)
        decoder.save()
        return {"logits": logits.tolist()}

    def follow(self, kind: str, tokens: list[list[int]]) -> dict:
        """The logits after tokens (rows, n) that follow the contexts, read one by one."""
        decoder = self.decoders[kind]
        decoder.rewind()
        logits = decoder.read_one_by_one(np.array(tokens), decoder.contexts.shape[1])
        return {"logits": logits.tolist()}

    def sample(self, kind: str, steps: int, untimed: int = 0) -> dict:
        """Seconds for each of so many tokens after the contexts, all rows at once. untimed: how
        many are read before, so that caches of the processor hold what they may.
        """
        decoder = self.decoders[kind]
        rows, start = decoder.contexts.shape
        decoder.rewind()
        if untimed:
            decoder.read_one_by_one(np.zeros((rows, untimed), dtype=np.int64), start)
        tokens = np.zeros((rows, steps), dtype=np.int64)
        begin = time.perf_counter()
        decoder.read_one_by_one(tokens, start + untimed)
        return {"seconds": (time.perf_counter() - begin) / steps}

    def sample_prompt(self, kind: str) -> dict:
        """Seconds to read the contexts."""
        decoder = self.decoders[kind]
        decoder.forget()
        begin = time.perf_counter()
        decoder.read(decoder.contexts, 0)
        return {"seconds": time.perf_counter() - begin}

    def release(self, kind: str) -> dict:
        """Frees what `prepare` made."""
        decoder = self.decoders.pop(kind)
        llama_cpp.llama_batch_free(decoder.batch)
        llama_cpp.llama_free(decoder.llama)
        return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what libraries print must not get between them
    os.dup2(2, 1)
    worker = Worker(int(sys.argv[1]))
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(worker, request.pop("do"))(**request)), file=answers, flush=True)


if __name__ == "__main__":
    main()
