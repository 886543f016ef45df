# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Models as ONNX graphs on ONNX Runtime, beside the same models in PyTorch: prompts and tokens.

    python benchmarks/bench_onnx.py           # four layers, two minutes, most of it exporting
    python benchmarks/bench_onnx.py --full    # three presets of 12 layers, half an hour

"ours" is the model with `generate()`; all others are what `export_onnx` writes of it, with the loop
of generate.py. A prompt is one row, of which the last logits are asked.
A token is a share of those that are generated behind a short prompt, the likeliest ones. Sums are
of float32 everywhere; the standard's operators are computed by a loop. Graphs of few bits are
compared with the model of the same rounded weights. Needs the extra "onnx".

Transformers' Qwen3.5, with use_kernels and as graphs, stands beside the graphs that
onnxruntime-genai makes of it, by its own loop, where that package is installed.
"""

import copy
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
)

from bench_upstream import fields_of
from harness import Report, Work, check_close, parser, sample_of
from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    export_onnx,
    use_kernels,
)
from hf_linear_attention.to_onnx.generate import generate, nothing, read
from hf_linear_attention.to_onnx.weights import has_few_bits, round_weights
from models import NO_SPECIAL_TOKENS, SIZE, SMALLEST, Size, weight_bytes

OURS = "ours"
ROUNDED_INPUTS = 0.1
# Graphs by the arguments of export_onnx, and how far their logits may be from the model's, or from
# those with rounded weights: another model's would be 1.4. Products of few bits round inputs, too.
GRAPHS = {
    "ONNX Runtime": ({}, 1e-4),
    "standard operators": ({"standard": True}, 1e-4),
    "8 bits": ({"bits": 8}, ROUNDED_INPUTS),
    "4 bits": ({"bits": 4}, ROUNDED_INPUTS),
}
NAMES = (OURS, *GRAPHS)
# The precision that genai's builder is told, its bits, and how far its logits may be from the
# model's. Its embeddings keep their bits. It norms queries and keys without an epsilon, which
# matters here.
GENAI = {"genai": ("fp32", None, 3e-2), "genai, 4 bits": ("int4", 4, ROUNDED_INPUTS)}
PROMPT, TOKEN = "prompt", "token"
SHORT_PROMPT = 16

Session = onnxruntime.InferenceSession


class Setting(NamedTuple):
    presets: tuple[str, ...]
    size: Size
    qwen_layers: int
    T: int  # tokens of a prompt
    new_tokens: int


SETTINGS = {
    "smallest": Setting(("gated_deltanet",), SMALLEST, 4, 16, 4),
    "short": Setting(("gated_deltanet",), Size(256, 704, 4, 4, 8000), 4, 512, 32),
    "full": Setting(("gated_deltanet", "gla", "katharopoulos"), SIZE, 12, 1024, 64),
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


def make_session(model: PreTrainedModel, folder: Path, **how) -> Session:
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


def ours_tokens(model: Any, ids: Tensor, new_tokens: int) -> Tensor:
    made = model.generate(
        ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
    )
    return made[:, ids.shape[1] :]


def of_rounded(model: PreTrainedModel, ids: Tensor, bits: int, chosen=has_few_bits) -> Tensor:
    """Logits of a model with rounded weights."""
    model = copy.deepcopy(model)
    round_weights(model, bits, chosen)
    return model(ids).logits


def is_rounded_product(module: torch.nn.Module) -> bool:
    return has_few_bits(module) and not isinstance(module, torch.nn.Embedding)


@torch.no_grad()
def measure(
    report: Report,
    title: str,
    model: PreTrainedModel,
    setting: Setting,
    folder: Path,
    rivals: Mapping[str, tuple[Any, int | None, float]],
) -> None:
    """rivals: others that compute the same model, the bits of their products' weights, and how far
    their logits may be, by name.
    """
    ids = torch.randint(model.config.vocab_size, (1, setting.T))
    start = ids[:, :SHORT_PROMPT]
    n = setting.new_tokens
    sessions = {
        name: make_session(model, folder / title / name, **how) for name, (how, _) in GRAPHS.items()
    }
    expected, made = model(ids).logits, ours_tokens(model, start, n)
    for name, (how, tolerance) in GRAPHS.items():
        case = f"{title}, {name}"
        logits = logits_of(sessions[name], ids)
        exact = of_rounded(model, ids, how["bits"]) if "bits" in how else expected
        report.errors[case] = check_close(case, logits, exact, tolerance)
        if "bits" not in how and not torch.equal(tokens_of(sessions[name], start, n), made):
            raise SystemExit(f"{case}: its tokens are not the model's")
    for name, (rival, bits, tolerance) in rivals.items():
        case = f"{title}, {name}"
        exact = of_rounded(model, ids, bits, is_rounded_product) if bits else expected
        report.errors[case] = check_close(case, rival.last_logits(ids), exact[:, -1], tolerance)
    if not isinstance(model, LinearAttentionForCausalLM):
        use_kernels(model)

    prompts: dict[str, Callable[[], object]] = {
        OURS: lambda: model(ids, use_cache=True, logits_to_keep=1)
    }
    tokens: dict[str, Callable[[], object]] = {OURS: lambda: ours_tokens(model, start, n)}
    for name, session in sessions.items():
        prompts[name] = lambda session=session: logits_of(session, ids, keep=1)
        tokens[name] = lambda session=session: tokens_of(session, start, n)
    for name, (rival, *_) in rivals.items():
        prompts[name] = lambda rival=rival: rival.read(ids)
        tokens[name] = lambda rival=rival: rival.tokens(start, n)
    weights = weight_bytes(model)
    for panel, runs, work in (
        (PROMPT, prompts, Work(2 * setting.T * weights / 4, None)),
        (TOKEN, tokens, Work(None, n * weights, "read")),
    ):
        samples = {name: sample_of(run) for name, run in runs.items()}
        timings = report.time(samples, 60)
        count = setting.T if panel == PROMPT else n
        of_float32 = dict.fromkeys((OURS, "ONNX Runtime", "standard operators"), work)
        report.add(panel, f"{title}, {count} tokens", count, timings, of_float32)


def qwen(layers: int, is_smallest: bool) -> Qwen3_5ForConditionalGeneration:
    """The Qwen3.5 of bench_upstream.py, which genai's builder takes only with its eyes."""
    text = fields_of("Qwen3.5", layers, is_smallest) | {"tie_word_embeddings": False}
    pairs = text["head_dim"] // 8  # of features that are turned, which count three axes
    section = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    text["rope_parameters"] = {
        **{"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        **{"mrope_section": section, "mrope_interleaved": True},
    }
    eyes = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=4)
    eyes |= dict(out_hidden_size=text["hidden_size"], num_position_embeddings=16)
    config = Qwen3_5Config(text_config=text, vision_config=eyes)
    torch.manual_seed(0)
    return Qwen3_5ForConditionalGeneration(config)


class Genai:
    """A graph of onnxruntime-genai's builder, with its own loop."""

    def __init__(self, original: Path, folder: Path, precision: str):
        import onnxruntime_genai

        builder = ["-m", "onnxruntime_genai.models.builder", "-i", original, "-o", folder]
        builder += ["-p", precision, "-e", "cpu", "-c", folder / "cache"]
        subprocess.run([sys.executable, *builder], check=True, capture_output=True)
        path = folder / "genai_config.json"
        config = json.loads(path.read_text())
        options = config["model"]["decoder"]["session_options"]
        options["intra_op_num_threads"] = torch.get_num_threads()
        path.write_text(json.dumps(config))
        self.genai = onnxruntime_genai
        self.model = onnxruntime_genai.Model(str(folder))

    def read(self, ids: Tensor, new_tokens: int = 0) -> Any:
        """Its generator, behind a prompt."""
        params = self.genai.GeneratorParams(self.model)
        longest = ids.shape[1] + new_tokens
        params.set_search_options(max_length=longest + 1, min_length=longest, do_sample=False)
        generator = self.genai.Generator(self.model, params)
        generator.append_tokens(ids[0].tolist())
        return generator

    def last_logits(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self.read(ids).get_logits()).float()[:, -1]

    def tokens(self, ids: Tensor, new_tokens: int) -> None:
        generator = self.read(ids, new_tokens)
        for _ in range(new_tokens):
            generator.generate_next_token()


@torch.no_grad()
def measure_qwen(report: Report, setting: Setting, folder: Path) -> None:
    whole = qwen(setting.qwen_layers, setting.size is SMALLEST).eval()
    text = Qwen3_5ForCausalLM(whole.config.text_config).eval()
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head = whole.lm_head
    rivals = {}
    if importlib.util.find_spec("onnxruntime_genai") is None:
        report.notes.append("onnxruntime-genai is not installed: no Qwen3.5 of its own")
    else:
        whole.save_pretrained(folder / "whole")
        for name, (precision, *checked) in GENAI.items():
            rivals[name] = (Genai(folder / "whole", folder / name, precision), *checked)
    measure(report, "Qwen3.5", text, setting, folder, rivals)


def main() -> None:
    assert __doc__ is not None
    report = Report("onnx", "tokens", OURS, parser(__doc__).parse_args())
    setting = SETTINGS[report.flags.setting]
    with tempfile.TemporaryDirectory() as folder:
        for preset in setting.presets:
            model = make_model(preset, setting.size)
            measure(report, preset, model, setting, Path(folder), {})
        measure_qwen(report, setting, Path(folder))
    report.save()


if __name__ == "__main__":
    main()
