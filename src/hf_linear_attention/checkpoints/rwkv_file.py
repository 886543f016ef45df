# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The files (.pth) of RWKV-7's authors, as folders of flash-linear-attention would hold them: the
config.json that follows from the shapes, and the weights under its names.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .files import read_torch_file
from .kinds import Keys

HEAD_DIM = 64  # of all that is published; their norm of heads has an epsilon for this alone
END_OF_TEXT = 0  # in their vocabulary
# Their names, as patterns, by flash-linear-attention's: of the model, and of a layer.
OF_MODEL = {
    r"emb\.weight": "model.embeddings.weight",
    r"ln_out\.(weight|bias)": r"model.norm.\1",
    r"head\.weight": "lm_head.weight",
}
OF_LAYER = {
    r"ln0\.(weight|bias)": r"pre_norm.\1",
    r"ln1\.(weight|bias)": r"attn_norm.\1",
    r"ln2\.(weight|bias)": r"ffn_norm.\1",
    r"att\.(x_[rwkvag]|r_k|k_k|k_a)": r"attn.\1",
    r"att\.receptance\.weight": "attn.r_proj.weight",
    r"att\.(k)ey\.weight|att\.(v)alue\.weight|att\.(o)utput\.weight": r"attn.\1\2\3_proj.weight",
    r"att\.ln_x\.(weight|bias)": r"attn.g_norm.\1",
    r"att\.([wavg])0": r"attn.\1_lora.lora.2.bias",
    r"att\.([wavg])1": r"attn.\1_lora.lora.0.weight",
    r"att\.([wavg])2": r"attn.\1_lora.lora.2.weight",
    r"ffn\.(x_k|key\.weight|value\.weight)": r"ffn.\1",
}
LAYER = r"blocks\.(\d+)\."
MATRICES = rf"emb\.weight|{LAYER}(att\.[wavg][12]|ffn\.key\.weight)"  # which give sizes
# How tensors differ in form, by patterns of their names.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    r"att\.[wavg][12]$": Tensor.t,
    r"att\.([wav]0|k_k|k_a)$|ffn\.x_k$": Tensor.flatten,
}


class RwkvFile(Mapping[str, Tensor]):
    """Tensors by flash-linear-attention's names, or their own where it has none."""

    def __init__(self, path: Path):
        self.tensors = read_torch_file(path)
        if "blocks.0.att.r_k" not in self.tensors:
            raise ValueError(f"{path} must hold RWKV-7's weights, and has no blocks.0.att.r_k")
        for own, x in self.tensors.items():
            if x.dim() != 2 and re.fullmatch(MATRICES, own):
                raise ValueError(f"{own} must have two dimensions, got the shape {tuple(x.shape)}")
        self.own = {name_of(name): name for name in self.tensors}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.own:
            raise ValueError(
                f"it must have the weights {name}, under the authors' name, and has not"
            )
        own = self.own[name]
        x = self.tensors[own]
        form = next((form for ends, form in FORMS.items() if re.search(ends, own)), None)
        return x if form is None else form(x)

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)

    def config(self) -> Keys:
        """Raises a ValueError where heads have another size than all published ones, or weights
        are missing that say how large a model is.
        """
        shape = tuple(self.tensors["blocks.0.att.r_k"].shape)
        if len(shape) != 2 or shape[1] != HEAD_DIM:
            expected = f"(heads, {HEAD_DIM})"
            raise ValueError(f"blocks.0.att.r_k must have the shape {expected}, got {shape}")
        H, K = shape
        vocab_size, C = self["model.embeddings.weight"].shape
        layers = [re.match(LAYER, own) for own in self.tensors]
        of_second = "model.layers.1.attn.v_lora.lora.0.weight"  # the first has none
        of_first = "model.layers.0.attn.{}_lora.lora.0.weight"
        ranks = {
            "decay_low_rank_dim": len(self[of_first.format("w")]),
            "a_low_rank_dim": len(self[of_first.format("a")]),
            "gate_low_rank_dim": len(self[of_first.format("g")]),
            "v_low_rank_dim": len(self[of_second]) if of_second in self else 1,
        }
        return {
            "model_type": "rwkv7",
            "vocab_size": vocab_size,
            "hidden_size": C,
            "num_hidden_layers": 1 + max(int(layer[1]) for layer in layers if layer),
            "num_heads": H,
            "head_dim": K,
            "attention_hidden_size": H * K,
            "intermediate_size": len(self["model.layers.0.ffn.key.weight"]),
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END_OF_TEXT),
            **ranks,
        }


def name_of(own: str) -> str:
    """Of a tensor; its own where flash-linear-attention has none."""
    layer = re.match(LAYER, own)
    prefix = "" if layer is None else f"model.layers.{layer[1]}."
    rest = own if layer is None else own[layer.end() :]
    for pattern, theirs in (OF_MODEL if layer is None else OF_LAYER).items():
        if re.fullmatch(pattern, rest):
            return prefix + re.sub(pattern, theirs, rest)
    return own


def is_file(name: Any) -> bool:
    """Whether that is such a file. Raises a FileNotFoundError where it should be, and is not."""
    path = Path(name)
    if path.suffix.lower() != ".pth" or path.is_dir():
        return False
    if not path.is_file():
        raise FileNotFoundError(f"{name} must be a file, and is not there")
    return True
