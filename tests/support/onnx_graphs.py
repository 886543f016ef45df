# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Graphs of models at work, for the tests."""

import numpy as np
import onnx_ir
import onnxruntime

from hf_linear_attention.to_onnx.generate import nothing, read
from hf_linear_attention.to_onnx.graph import graph_of


def session_of(model, folder):
    onnx_ir.save(graph_of(model).graph, folder / "model.onnx")
    return onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])


def read_pieces(session, ids, mask, bounds):
    """Logits of all, and the states then."""
    states, logits = nothing(session, len(ids)), []
    for start, stop in zip([0, *bounds], [*bounds, ids.shape[1]], strict=True):
        piece, states = read(session, states, ids[:, start:stop], mask[:, :stop])
        logits.append(piece)
    return np.concatenate(logits, 1), states


def all_real(ids):
    return np.ones_like(ids)


def distance(x, y):
    return np.abs(x - y).max()


def check_padding(session, ids):
    """A row of five alone, and in a batch with padding before, behind and among its tokens."""
    T, S, more = 14, 20, 6
    random = np.random.default_rng(0)
    real, padding = np.ones(T, int), np.zeros(S - T, int)
    either = np.concatenate([padding, real])
    mask = np.stack([either, either[::-1], *(random.permutation(either) for _ in range(3))])
    ids = ids.numpy()
    padded = np.full((len(mask), S), ids[0, 0])
    padded[mask == 1] = ids[:, :T].ravel()
    padded = np.concatenate([padded, ids[:, T:]], 1)
    mask = np.pad(mask, ((0, 0), (0, more)), constant_values=1)
    bounds = [9, 10, *range(S, S + more)]
    together, states = read_pieces(session, padded, mask, bounds)
    for row in range(len(mask)):
        own = ids[row : row + 1]
        alone, its_states = read_pieces(session, own, all_real(own), [])
        assert distance(together[row, mask[row] == 1], alone[0]) < 3e-4
        for name, state in its_states.items():
            if not name.startswith("past_key_values"):
                assert np.abs(states[name][row] - state[0]).max() < 1e-4 * (1 + abs(state).max())
