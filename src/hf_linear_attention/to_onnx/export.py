# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A folder with a model as an ONNX graph, and all that generates with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..conversion.writing import whole_folder
from .genai import genai_config
from .graph import check_exports, graph_of
from .operators import MICROSOFT

STANDARD_OPSET, STANDARD_IR = 27, 12  # the first with LinearAttention
LARGE = 2**30  # bytes of weights that have a file of their own; one of 2 GiB and more can't be
# Names of files by transformers.js' names for what is in them.
SUFFIXES = {
    (torch.float32, None): "",
    (torch.float16, None): "_fp16",
    (torch.float32, 8): "_quantized",
    (torch.float16, 8): "_q8f16",
    (torch.float32, 4): "_q4",
    (torch.float16, 4): "_q4f16",
}


class Comparison(NamedTuple):
    """What a folder computes on ONNX Runtime, against the model itself, in a batch with padding.

    difference: the largest of logits. largest: the largest logit.
    same: of `generated` tokens, the likeliest by both.
    """

    difference: float
    largest: float
    same: int
    generated: int

    def __str__(self) -> str:
        return (
            f"logits differ by {self.difference:.1e} at most (the largest is {self.largest:.3g}); "
            f"{self.same} of {self.generated} generated tokens are the model's"
        )


def export_onnx(
    model: Any,
    folder: Path | str,
    *,
    bits: int | None = None,
    standard: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Writes a model as a graph onnx/model….onnx, its config and generation config, and
    generate.py, which needs onnxruntime and numpy alone, and where onnxruntime-genai takes the
    model's states its genai_config.json; then runs it, and compares.

    The graph takes input_ids and position_ids (B, T), attention_mask (B, all tokens so far), int64,
    and states "past_…"; it gives logits (B, T, vocab_size) in the model's dtype and states
    "present_…". Of any B and T, also in pieces; tokens that the mask hides leave no trace.

    Args:
        model: in eval mode, in float32 or float16, on the CPU: one of ours, or a causal language
            model of Transformers whose type is in `to_onnx.stock.STOCK`, as it was loaded.
        folder: where these files are written, a new or an empty one. It is there when it is
            complete.
        bits: 8 or 4, of weights and embeddings; None: those of the model's dtype.
        standard: whether the graph has the operators of ONNX 27 alone, in place of ONNX Runtime's
            own, which other runtimes may not have, but which are faster there.
        progress: told what goes on.

    Returns:
        How near the graph is to the model.

    Raises:
        OSError: the folder can't be written, or is not empty.
        ValueError: there is no such graph of this model; the message names the field. Or the model,
            or its graph, gives logits that are not finite.
        ImportError: onnx, onnxscript or onnxruntime is missing (the extra "onnx").
    """
    check_exports(model)
    model.generation_config.validate(strict=True)  # as when it is saved
    if bits is not None and (type(bits) is not int or bits not in (8, 4)):
        raise ValueError(f"bits must be 8, 4 or None, got {bits!r}")
    if standard and bits is not None:
        raise ValueError(
            f"bits must be None with standard=True, got {bits}: ONNX has no operator for products "
            "with such weights"
        )
    with whole_folder(Path(folder)) as made:
        compared = write(model, made, bits, standard, progress)
    return compared


def write(
    model: Any, folder: Path, bits: int | None, standard: bool, progress: Callable[[str], None]
) -> Comparison:
    """What `export_onnx` does, in an empty folder."""
    import onnx_ir

    file = folder / "onnx" / f"model{SUFFIXES[model.dtype, bits]}.onnx"
    file.parent.mkdir()

    progress(f"writing {model.config.num_hidden_layers} layers down as a graph")
    graph, states = graph_of(model)
    if standard:
        make_standard(graph)
    else:
        from .fusions import fuse

        fuse(graph)
    if bits is not None:
        from .weights import quantize

        progress(f"rounding weights to {bits} bits")
        for left in quantize(graph, bits):
            progress(f"left as it is: {left}")
    size = sum(x.const_value.nbytes for x in graph.graph.initializers.values())
    progress(f"writing {size / 1e6:.0f} MB")
    onnx_ir.save(graph, file, external_data=f"{file.name}_data" if size > LARGE else None)
    if standard:
        import onnx

        onnx.checker.check_model(str(file), full_check=True)
    (folder / "config.json").write_text(described(model))
    model.generation_config.save_pretrained(folder)
    genai = genai_config(model, states, file.relative_to(folder).as_posix())
    if genai is not None and not standard:
        (folder / "genai_config.json").write_text(json.dumps(genai, indent=2) + "\n")
    shutil.copy(Path(__file__).with_name("generate.py"), folder)
    progress("comparing the folder's answers with the model's")
    return compare(model, file)


def described(model: PreTrainedModel) -> str:
    """A config.json without the code that models' folders have."""
    fields = json.loads(model.config.to_json_string())
    fields.pop("auto_map", None)
    fields["architectures"] = [type(model).__name__]
    fields["dtype"] = str(model.dtype).removeprefix("torch.")
    return json.dumps(fields, indent=2) + "\n"


def make_standard(graph: Any) -> None:
    """Operators of Microsoft's become ONNX's, which are alike (an onnx_ir.Model, in place)."""
    for node in graph.graph:
        if node.op_type == "MoE":
            raise ValueError("standard must be False for mixtures of experts: ONNX has none")
        if node.domain == MICROSOFT:
            node.domain = ""
    del graph.opset_imports[MICROSOFT]
    graph.opset_imports[""] = STANDARD_OPSET
    graph.ir_version = STANDARD_IR


@torch.no_grad()
def compare(model: Any, file: Path, new_tokens: int = 32) -> Comparison:
    """Generates from two prompts, one with padding to the left, and has the model read all that."""
    import numpy as np
    import onnxruntime

    from .generate import nothing, read

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    ids = random.integers(model.config.get_text_config().vocab_size, size=(2, 24))
    mask = np.ones_like(ids)
    mask[1, :9] = 0
    states, got = nothing(session, 2), []
    for start in (0, *range(ids.shape[1], ids.shape[1] + new_tokens)):
        logits, states = read(session, states, ids[:, start:], mask)
        got.append(logits.astype(np.float32))
        ids = np.concatenate([ids, logits[:, -1:].argmax(-1)], 1)
        mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
    ids, mask = ids[:, :-1], mask[:, :-1]  # the last is not read
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    expected = model(**inputs, use_cache=False).logits.float().numpy()
    for what, found in (("model", expected), ("graph", np.concatenate(got, 1))):
        if not np.isfinite(found[mask == 1]).all():
            raise ValueError(f"model must give finite logits, got others of the {what}")
    likeliest = expected[:, -new_tokens - 1 : -1].argmax(-1)
    return Comparison(
        difference=float(np.abs(np.concatenate(got, 1) - expected)[mask == 1].max()),
        largest=float(np.abs(expected[mask == 1]).max()),
        same=int((likeliest == ids[:, -new_tokens:]).sum()),
        generated=2 * new_tokens,
    )
