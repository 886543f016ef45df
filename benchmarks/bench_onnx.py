# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Models as ONNX graphs on ONNX Runtime, beside the same models in PyTorch: prompts and tokens.

    python benchmarks/bench_onnx.py           # four layers, two minutes, most of it exporting
    python benchmarks/bench_onnx.py --full    # three presets of 12 layers, half an hour

"ours" is the model with `generate()`; all others are what `export_onnx` writes of it, with the loop
of generate.py. A prompt is one row, of which the last logits are asked; graphs compute all logits.
A token is a share of those that are generated behind a short prompt, the likeliest ones. Sums are
of float32 everywhere; the standard's operators are computed by a loop. Weights are random: those of
few bits are compared with the model only loosely. Needs the extra "onnx".
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from harness import Report, Work, check_close, parser, sample_of
from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM, export_onnx
from hf_linear_attention.to_onnx.generate import generate, nothing, read
from models import NO_SPECIAL_TOKENS, SIZE, SMALLEST, Size, weight_bytes

OURS = "ours"
# Graphs by the arguments of export_onnx, and how far their logits may be from the model's.
GRAPHS = {
    "ONNX Runtime": ({}, 1e-4),
    "standard operators": ({"standard": True}, 1e-4),
    "8 bits": ({"bits": 8}, 0.1),
    "4 bits": ({"bits": 4}, 0.7),
}
NAMES = (OURS, *GRAPHS)
PROMPT, TOKEN = "prompt", "token"
SHORT_PROMPT = 16

Session = onnxruntime.InferenceSession


class Setting(NamedTuple):
    presets: tuple[str, ...]
    size: Size
    T: int  # tokens of a prompt
    new_tokens: int


SETTINGS = {
    "smallest": Setting(("gated_deltanet",), SMALLEST, 16, 4),
    "short": Setting(("gated_deltanet",), Size(256, 704, 4, 4, 8000), 512, 32),
    "full": Setting(("gated_deltanet", "gla", "katharopoulos"), SIZE, 1024, 64),
}


def make_model(preset: str, size: Size) -> LinearAttentionForCausalLM:
    torch.manual_seed(0)
    config = LinearAttentionConfig.from_preset(
        preset,
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        **NO_SPECIAL_TOKENS,
    )
    return LinearAttentionForCausalLM(config).eval()


def make_session(model: LinearAttentionForCausalLM, folder: Path, **how) -> Session:
    export_onnx(model, folder, **how)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    (file,) = folder.glob("onnx/*.onnx")
    return Session(file, options, providers=["CPUExecutionProvider"])


def logits_of(session: Session, ids: Tensor, keep: int = 0) -> Tensor:
    mask = np.ones(ids.shape, np.int64)
    logits, _ = read(session, nothing(session, 1), ids.numpy(), mask, keep)
    return torch.from_numpy(logits)


def tokens_of(session: Session, ids: Tensor, new_tokens: int) -> Tensor:
    made = generate(session, ids.numpy(), np.ones(ids.shape, np.int64), new_tokens)
    return torch.from_numpy(made)


def ours_tokens(model: LinearAttentionForCausalLM, ids: Tensor, new_tokens: int) -> Tensor:
    made = model.generate(
        ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
    )
    return made[:, ids.shape[1] :]


@torch.no_grad()
def measure(report: Report, preset: str, setting: Setting, folder: Path) -> None:
    model = make_model(preset, setting.size)
    ids = torch.randint(setting.size.vocab_size, (1, setting.T))
    start = ids[:, :SHORT_PROMPT]
    n = setting.new_tokens
    sessions = {
        name: make_session(model, folder / preset / name, **how)
        for name, (how, _) in GRAPHS.items()
    }
    expected, made = model(ids).logits, ours_tokens(model, start, n)
    for name, (how, tolerance) in GRAPHS.items():
        case = f"{preset}, {name}"
        logits = logits_of(sessions[name], ids)
        report.errors[case] = check_close(case, logits, expected, tolerance)
        if "bits" not in how and not torch.equal(tokens_of(sessions[name], start, n), made):
            raise SystemExit(f"{case}: its tokens are not the model's")

    prompts: dict[str, Callable[[], object]] = {
        OURS: lambda: model(ids, use_cache=True, logits_to_keep=1)
    }
    tokens: dict[str, Callable[[], object]] = {OURS: lambda: ours_tokens(model, start, n)}
    for name, session in sessions.items():
        prompts[name] = lambda session=session: logits_of(session, ids, keep=1)
        tokens[name] = lambda session=session: tokens_of(session, start, n)
    weights = weight_bytes(model)
    for panel, runs, work in (
        (PROMPT, prompts, Work(2 * setting.T * weights / 4, None)),
        (TOKEN, tokens, Work(None, n * weights, "read")),
    ):
        samples = {name: sample_of(run) for name, run in runs.items()}
        timings = report.time(samples, 60)
        title = f"{preset}, {setting.T} tokens" if panel == PROMPT else f"{preset}, {n} tokens"
        of_float32 = dict.fromkeys((OURS, "ONNX Runtime", "standard operators"), work)
        report.add(panel, title, setting.T if panel == PROMPT else n, timings, of_float32)


def main() -> None:
    assert __doc__ is not None
    report = Report("onnx", "tokens", OURS, parser(__doc__).parse_args())
    setting = SETTINGS[report.flags.setting]
    with tempfile.TemporaryDirectory() as folder:
        for preset in setting.presets:
            measure(report, preset, setting, Path(folder))
    report.save()


if __name__ == "__main__":
    main()
