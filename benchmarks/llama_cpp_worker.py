# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""llama.cpp in a process of its own, for bench_decode.py: runs one of Transformers' Llamas.

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

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

BATCH = 512  # tokens that are read at once, llama.cpp's default
NAMES = {  # of weights in Transformers: in llama.cpp's files
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def new_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        layer, name = name.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{NAMES[name]}.weight"
    return f"{NAMES[name]}.weight"


def pairs_side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary positions turn the numbers i and i + D / 2 of a head in Transformers, and 2 i and
    2 i + 1 in llama.cpp.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder: Path, kind: str, path: Path) -> None:
    """A saved Llama in float32 as a file of llama.cpp's. kind: of all matrices but the embeddings',
    of which a token reads one row.
    """
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, weight in load_file(folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            weight = pairs_side_by_side(weight, heads)
        as_it_is = weight.ndim == 1 or "embed_tokens" in name
        dtype = GGMLQuantizationType["F32" if as_it_is else kind]
        writer.add_tensor(new_name(name), gguf.quantize(weight, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Decoder(NamedTuple):
    """Sequences of one model that have read `context` tokens each."""

    llama: Any  # ctypes' pointer to llama.cpp's context
    batch: Any
    vocab_size: int
    rows: int
    context: int

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

    def forget(self, start: int) -> None:
        """All from the position start on, in all rows."""
        memory = llama_cpp.llama_get_memory(self.llama)
        for row in range(self.rows):
            llama_cpp.llama_memory_seq_rm(memory, row, start, -1)


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
        settings.n_ctx = rows * (context + n + 64)
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_seq_max = rows
        settings.n_threads = settings.n_threads_batch = self.threads
        llama = llama_cpp.llama_init_from_model(model, settings)
        if not llama:
            raise RuntimeError(f"llama.cpp could not make a context of {settings.n_ctx} tokens")
        batch = llama_cpp.llama_batch_init(BATCH, 0, rows)
        decoder = Decoder(llama, batch, vocab_size, rows, context)
        self.decoders[kind] = decoder
        logits = decoder.read(given, 0)
        if context > n:
            decoder.read(np.resize(given, (rows, context - n)), n)
        else:
            decoder.forget(context)
        return {"logits": logits.tolist()}

    def sample(self, kind: str, steps: int) -> dict:
        """Seconds for each of so many tokens after the context, all rows at once."""
        decoder = self.decoders[kind]
        token = np.zeros((decoder.rows, 1), dtype=np.int64)
        start = time.perf_counter()
        for i in range(steps):
            decoder.read(token, decoder.context + i)
        seconds = (time.perf_counter() - start) / steps
        decoder.forget(decoder.context)
        return {"seconds": seconds}

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
