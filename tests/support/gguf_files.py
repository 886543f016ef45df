# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A Llama as a file of llama.cpp's, with weights of 8 bits and a tokenizer."""

import string
from pathlib import Path

import gguf
import numpy as np

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
VOCAB_SIZE, C, FEATURES, HEADS, KV_HEADS = 64, 32, 64, 4, 2
OF_LAYER = {
    "attn_q": (C, C),
    "attn_k": (C * KV_HEADS // HEADS, C),
    "attn_v": (C * KV_HEADS // HEADS, C),
    "attn_output": (C, C),
    "ffn_gate": (FEATURES, C),
    "ffn_up": (FEATURES, C),
    "ffn_down": (C, FEATURES),
    "attn_norm": (C,),
    "ffn_norm": (C,),
}


def write_gguf_llama(path: Path, num_layers: int = 3) -> None:
    """Weights are random, so large that a mistake changes the tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(num_layers)
    writer.add_embedding_length(C)
    writer.add_feed_forward_length(FEATURES)
    writer.add_context_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(C // HEADS)
    writer.add_vocab_size(VOCAB_SIZE)
    letters = [*string.ascii_letters, *string.digits][: VOCAB_SIZE - 4]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters, "th"])
    writer.add_token_types([3, 3, 3, *[1] * (len(letters) + 1)])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(0)
    shapes = {"token_embd": (VOCAB_SIZE, C), "output": (VOCAB_SIZE, C), "output_norm": (C,)}
    for i in range(num_layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in OF_LAYER.items()}
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else "Q8_0"]
        weight = generator.normal(scale=0.3, size=shape).astype(np.float32)
        weight = gguf.quantize(weight + (len(shape) == 1), kind)
        writer.add_tensor(f"{name}.weight", weight, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
