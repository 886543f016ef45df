# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The genai_config.json by which onnxruntime-genai generates from a graph."""

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

# Its names for the states of a layer, one of each kind, by ours.
KINDS = {
    r"past_conv\.\d+": "conv",
    r"past_(recurrent|ssm)\.\d+": "recurrent",
    r"past_key_values\.\d+\.key": "key",
    r"past_key_values\.\d+\.value": "value",
}
OF_TOKENS = ("input_ids", "attention_mask", "position_ids")
# Of the types that it knows, one whose layers may have a convolution and a state, or keys.
TYPE = "qwen3_5_text"


def genai_config(model: PreTrainedModel, states: Sequence[Any], file: str) -> dict[str, Any] | None:
    """For a graph in `file` with these states (`states.State`); None where it takes them not: where
    layers have several convolutions, one of two kinds alone, or keys and values of other sizes.
    """
    inputs, outputs = {name: name for name in OF_TOKENS}, {"logits": "logits"}
    found: dict[str, set[str]] = {kind: set() for kind in KINDS.values()}
    sizes: dict[str, Any] = {}
    for state in states:
        kind = next((kind for x, kind in KINDS.items() if re.fullmatch(x, state.past)), None)
        if kind is None:
            return None
        layer = re.findall(r"\d+", state.past)[0]
        inputs[f"past_{kind}_names"] = state.past.replace(layer, "%d")
        outputs[f"present_{kind}_names"] = state.present.replace(layer, "%d")
        found[kind].add(layer)
        sizes[kind] = state.shape
    if not found["conv"] or found["conv"] != found["recurrent"]:
        return None
    if sizes.get("key") != sizes.get("value"):
        return None
    config: Any = model.config
    generation: Any = model.generation_config
    heads, _, head_size = sizes.get("key", (1, 0, 1))
    longest = config.max_position_embeddings if found["key"] else 2**20
    stop = generation.eos_token_id
    decoder = {
        "session_options": {"provider_options": []},
        "filename": file,
        "hidden_size": config.hidden_size,
        "num_attention_heads": getattr(config, "num_attention_heads", None) or 1,
        "num_key_value_heads": heads,
        "head_size": head_size,
        "num_hidden_layers": config.num_hidden_layers,
        "inputs": inputs,
        "outputs": outputs,
    }
    return {
        "model": {
            "type": TYPE,
            "bos_token_id": generation.bos_token_id or 0,
            "eos_token_id": stop if isinstance(stop, list) else [] if stop is None else [stop],
            "pad_token_id": generation.pad_token_id or 0,
            "vocab_size": config.vocab_size,
            "context_length": longest,
            "decoder": decoder,
        },
        "search": {"max_length": longest, "do_sample": False, "past_present_share_buffer": False},
    }
