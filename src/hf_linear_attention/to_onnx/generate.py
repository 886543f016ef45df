# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Generates with onnxruntime and numpy alone: python generate.py 17 4 99, the numbers of tokens."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def nothing(session, rows):
    """States that have read nothing. States are arrays by name: a copy of them is a fork, or what
    one goes back to; np.savez(file, **states) keeps them; x[i : i + 1] of each is a row's.
    """
    inputs = [x for x in session.get_inputs() if x.name.startswith("past")]
    shapes = {x.name: [n if isinstance(n, int) else 0 for n in x.shape[1:]] for x in inputs}
    return {x.name: np.zeros((rows, *shapes[x.name]), DTYPES[x.type]) for x in inputs}


def read(session, states, ids, mask, keep=0):
    """Reads tokens (rows, T > 0), a whole prompt, a piece or one: logits of the last `keep`, for 0
    of all, and the states then. mask (rows, all so far): 0 for padding, which may stand anywhere.
    """
    if not ids.size:
        raise ValueError(f"ids must be (rows, tokens), one of each at least, got {ids.shape}")
    positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :]
    feed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **states}
    feed["num_logits_to_keep"] = np.array(keep)
    names = [x.name for x in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, feed), strict=True))
    after = [x.replace("past_key_values", "present").replace("past", "present") for x in states]
    return outputs["logits"], {x: outputs[name] for x, name in zip(states, after, strict=True)}


def generate(session, ids, mask, new_tokens, stop=()):
    """The likeliest tokens after prompts (rows, T), until all rows have a `stop`: (rows, n)."""
    logits, states = read(session, nothing(session, len(ids)), ids, mask, keep=1)
    made = np.zeros((len(ids), 0), np.int64)
    while made.shape[1] < new_tokens and not np.isin(made, stop).any(1).all():
        made = np.concatenate([made, logits[:, -1:].argmax(-1)], 1)
        mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
        logits, states = read(session, states, made[:, -1:], mask, keep=1)
    return made


if __name__ == "__main__":
    folder = Path(__file__).parent
    session = onnxruntime.InferenceSession(next(folder.glob("onnx/*.onnx")))
    stop = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
    words, known = sys.argv[1:], session.get_outputs()[0].shape[-1]
    if not words or not all(word.isdecimal() and int(word) < known for word in words):
        sys.exit(f"give the numbers of tokens, 0 to {known - 1}: python generate.py 17 4 99")
    prompt = np.array([[int(word) for word in words]])
    print(*generate(session, prompt, np.ones_like(prompt), 50, [] if stop is None else stop)[0])
