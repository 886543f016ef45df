# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Transformers' own recurrent models, before and after `use_kernels`: prompts, tokens, training.

    python benchmarks/bench_upstream.py           # two models of a few layers, under three minutes
    python benchmarks/bench_upstream.py --full    # all models, float32 and bfloat16; 50 minutes
    python benchmarks/bench_upstream.py --full --resume    # what an interrupted run has left

Contenders are one model, as it is and on our kernels; the two share their weights. "Without
mixers", norms, products, experts or loss has that kind of thing as it was, and all others replaced:
what is lost then is what the kind contributes. (One kind alone would say the same, in twice the
time, for most of these would keep the slow layers.) A mixer is a recurrent layer, with its
convolution. Weights are random; where a case has fewer layers than the whole model, its vocabulary
is smaller by as much, so that layers keep their share.

A case is one row of T tokens: a prompt, of which the last logits are asked; a token after such a
prompt; the loss and all gradients, without an optimizer. Peak memory is that of the latter, beyond
the weights. Shares of the peak count 2 flops per weight and token, 6 in training, and nothing for
the recurrence; those of the bandwidth that the weights are read once. Of a mixture's experts only
as many count as a token is given. Notes say in which ops the time goes. Products with weights are
the same work before and after, so that before / products is the most that faster layers could gain.

Where the processor has no products of bfloat16, gradients in it take a hundred times as long as in
float32, and are left out.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harness import Report, Work, check_close, parser, plotter, sample_of
from hf_linear_attention import use_kernels
from hf_linear_attention.extras import speedup
from hf_linear_attention.upstream.experts import Experts
from hf_linear_attention.upstream.families import replacement_for
from hf_linear_attention.upstream.report import Report as Changes
from models import NO_SPECIAL_TOKENS, weight_bytes

BEFORE, AFTER = "before", "use_kernels"
KINDS = ("mixers", "norms", "products", "experts", "attention", "loss")
VERIFIED_TOKENS = 100
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
GRADIENT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


# ---- the models ----

LINEAR, FULL = "linear_attention", "full_attention"
EVERY_FOURTH = (LINEAR, LINEAR, LINEAR, FULL)
OF_1024 = dict(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=3584,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
)
TINY = dict(
    vocab_size=1000,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
)


class Upstream(NamedTuple):
    """A model of Transformers by its config; `layers` is how many the whole model has."""

    model_type: str
    layers: int
    fields: dict[str, Any]
    smallest: dict[str, Any]  # fields of a tiny one
    types: tuple[str, ...] = ()  # of layers, again and again


MODELS = {
    # as state-spaces/mamba2-130m
    "Mamba-2": Upstream(
        "mamba2",
        24,
        dict(
            vocab_size=50288,
            hidden_size=768,
            state_size=128,
            num_heads=24,
            head_dim=64,
            n_groups=1,
            tie_word_embeddings=True,
        ),
        dict(vocab_size=1000, hidden_size=32, state_size=16, num_heads=4, head_dim=16),
    ),
    # Qwen3.5-0.8B has twice as many layers, and 248,320 tokens.
    "Qwen3.5": Upstream(
        "qwen3_5_text",
        12,
        dict(
            OF_1024,
            linear_num_value_heads=16,
            linear_num_key_heads=16,
            linear_value_head_dim=128,
            linear_key_head_dim=128,
            tie_word_embeddings=True,
        ),
        TINY
        | dict(linear_num_value_heads=2, linear_num_key_heads=2)
        | dict(linear_key_head_dim=16, linear_value_head_dim=16),
        EVERY_FOURTH,
    ),
    # Qwen3-Next-80B-A3B's layers, half as wide, with 64 of its 512 experts.
    "Qwen3-Next": Upstream(
        "qwen3_next",
        4,
        dict(
            OF_1024,
            linear_num_value_heads=16,
            linear_num_key_heads=8,
            linear_value_head_dim=128,
            linear_key_head_dim=128,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts=64,
            num_experts_per_tok=10,
        ),
        TINY
        | dict(linear_num_value_heads=2, linear_num_key_heads=2)
        | dict(linear_key_head_dim=16, linear_value_head_dim=16)
        | dict(moe_intermediate_size=24, shared_expert_intermediate_size=24)
        | dict(num_experts=3, num_experts_per_tok=2),
        EVERY_FOURTH,
    ),
    # Kimi Linear's layers, half as wide, with a dense MLP instead of its 256 experts.
    "Kimi Linear": Upstream(
        "kimi_linear",
        4,
        dict(
            OF_1024,
            num_key_value_heads=8,
            head_dim=64,
            linear_num_heads=16,
            linear_head_dim=128,
            mlp_layer_types=["dense"] * 4,
        ),
        TINY | dict(linear_num_heads=2, linear_head_dim=16, kv_lora_rank=16),
        EVERY_FOURTH,
    ),
    # MiniMax's layers, a sixth as wide, with two experts of 32. Its cache counts the tokens of its
    # first layer, which has to be one of softmax.
    "MiniMax": Upstream(
        "minimax",
        4,
        dict(
            OF_1024,
            head_dim=128,
            intermediate_size=1792,
            num_local_experts=2,
            num_experts_per_tok=2,
        ),
        TINY,
        EVERY_FOURTH[::-1],
    ),
    # xLSTM-7B's layers, an eighth as wide.
    "xLSTM": Upstream(
        "xlstm",
        32,
        dict(vocab_size=50304, hidden_size=512, num_heads=4),
        dict(vocab_size=1000, hidden_size=64, qk_dim_factor=1.0, num_heads=4),
    ),
    # Falcon-Mamba-7B's layers, a quarter as wide.
    "Falcon-Mamba": Upstream(
        "falcon_mamba",
        64,
        dict(vocab_size=65024, hidden_size=1024, state_size=16, conv_kernel=4, expand=2),
        dict(vocab_size=1000 * 16, hidden_size=32, state_size=4),
    ),
    # RecurrentGemma-2B's layers, two fifths as wide: two recurrent ones, and one of softmax.
    "RecurrentGemma": Upstream(
        "recurrent_gemma",
        26,
        dict(
            vocab_size=256000,
            hidden_size=1024,
            lru_width=1024,
            intermediate_size=3072,
            num_attention_heads=4,
            num_key_value_heads=1,
        ),
        dict(vocab_size=26000, hidden_size=32, lru_width=32, intermediate_size=64)
        | dict(num_attention_heads=2),
    ),
}


def fields_of(name: str, layers: int, is_smallest: bool) -> dict[str, Any]:
    """Of a config."""
    upstream = MODELS[name]
    fields = upstream.fields | (upstream.smallest if is_smallest else {})
    fields["vocab_size"] = fields["vocab_size"] * layers // upstream.layers
    if upstream.types:
        times = -(-layers // len(upstream.types))
        fields["layer_types"] = list((upstream.types * times)[:layers])
    return {"num_hidden_layers": layers, **fields, **NO_SPECIAL_TOKENS}


def make_model(name: str, layers: int, dtype: torch.dtype, is_smallest: bool) -> PreTrainedModel:
    """With random weights, the same every time, in evaluation mode."""
    config = AutoConfig.for_model(MODELS[name].model_type, **fields_of(name, layers, is_smallest))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def kind_of(upstream: type[nn.Module]) -> str:
    """Of a class of modules that use_kernels replaces: one of KINDS, "loss" apart."""
    if upstream is nn.Linear:
        return "products"
    replacement = replacement_for(upstream)
    if replacement is None:
        return "attention"
    if replacement.ours is Experts:
        return "experts"
    return "mixers" if replacement.is_recurrent else "norms"


def without(kind: str) -> str:
    """The name of the contender that has all but this kind replaced."""
    return f"without {kind}"


def contender(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The model with what a contender of that name has replaced, on the same weights."""
    if name == BEFORE:
        return model
    model = speedup.twin(model)
    report = use_kernels(model)
    assert not report.left, report
    if name != AFTER:
        undone = [one for one in report.changed if without(kind_of(one.before)) == name]
        Changes(undone, losses=report.losses if name == without("loss") else []).undo()
    return model


def random_tokens(model: PreTrainedModel, T: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (1, T), generator=generator)


# ---- what is measured ----


class Case(NamedTuple):
    model: str
    layers: int
    T: int
    dtype: torch.dtype = torch.float32
    work: tuple[str, ...] = tuple(speedup.WORK)
    names: tuple[str, ...] = (AFTER, BEFORE)


ALL = (AFTER, BEFORE, *map(without, KINDS))
ALL_BUT_EXPERTS = tuple(name for name in ALL if name != without("experts"))
WITHOUT_SOFTMAX = tuple(name for name in ALL_BUT_EXPERTS if name != without("attention"))
WITHOUT_TOKEN = ("prompt", "training step")
HALF = torch.bfloat16
SETTINGS = {
    "smallest": [
        Case("Mamba-2", 2, 16, names=WITHOUT_SOFTMAX),
        Case("Qwen3-Next", 4, 16, work=("token",), names=ALL),
        Case("Qwen3.5", 4, 16, HALF),
        *(
            Case(name, 4, 16, work=("training step",))
            for name in ("Kimi Linear", "MiniMax", "xLSTM", "Falcon-Mamba")
        ),
        Case("RecurrentGemma", 3, 16, work=("prompt",)),
    ],
    "short": [Case("Mamba-2", 4, 512), Case("Qwen3.5", 4, 512)],
    "full": [
        Case("Mamba-2", 24, 1024),
        Case("Qwen3.5", 12, 1024),
        Case("Qwen3.5", 4, 4096, work=WITHOUT_TOKEN),
        # A training step of Kimi Linear takes minutes before, of which mixers are nearly all.
        Case("Kimi Linear", 4, 1024),
        Case("Qwen3.5", 4, 1024, names=ALL_BUT_EXPERTS),
        *(Case(name, 4, 1024, names=WITHOUT_SOFTMAX) for name in ("Mamba-2", "xLSTM")),
        *(Case(name, 4, 1024, names=ALL) for name in ("MiniMax", "Qwen3-Next")),
        # Before, the time of Falcon-Mamba's training grows by the square of the tokens.
        Case("Falcon-Mamba", 4, 1024, work=("prompt", "token"), names=WITHOUT_SOFTMAX),
        Case("Falcon-Mamba", 4, 256, work=("training step",)),
        Case("RecurrentGemma", 3, 1024, names=ALL_BUT_EXPERTS),
        *(
            Case(name, 4, 1024, HALF)
            for name in MODELS
            if name not in ("Falcon-Mamba", "RecurrentGemma")
        ),
        Case("Falcon-Mamba", 4, 1024, HALF, work=("prompt", "token")),
        Case("Falcon-Mamba", 4, 256, HALF, work=("training step",)),
    ],
}


def prepare_training(
    name: str, model: str, layers: int, T: int, dtype: torch.dtype, is_smallest: bool
) -> Callable[[], object]:
    """A contender's training step, ready to run."""
    trained = contender(make_model(model, layers, dtype, is_smallest), name)
    speedup.training_step(trained, random_tokens(trained, 8))()
    return speedup.training_step(trained, random_tokens(trained, T))


def verify(before: PreTrainedModel, after: PreTrainedModel) -> float:
    """The error of logits, of a prompt and of a token after it, where gradients are right, too."""
    ids = random_tokens(before, VERIFIED_TOKENS)
    dtype, name = before.dtype, before.config.model_type
    if speedup.is_trainable(dtype):
        gradients = [gradients_of(model, ids) for model in (after, before)]
        check_close(f"the gradient of {name}", *gradients, GRADIENT_TOLERANCE[dtype])
    logits = [speedup.answers(model, ids) for model in (after, before)]
    return check_close(name, *logits, TOLERANCE[dtype])


def gradients_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Of all parameters that the loss of ids depends on, one after the other."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in gradients if g is not None])


def unused_bytes(model: PreTrainedModel) -> float:
    """Of the weights of experts that a token is not given."""
    unused = 0.0
    for module in model.modules():
        replacement = replacement_for(type(module))
        if replacement is not None and replacement.ours is Experts:
            share = model.config.num_experts_per_tok / module.num_experts
            unused += (1 - share) * sum(weight.nbytes for weight in module.parameters())
    return unused


def least_work(model: PreTrainedModel, work: str, T: int) -> Work:
    weights = weight_bytes(model) - unused_bytes(model)
    numbers = weights / model.dtype.itemsize
    return {
        "prompt": Work(2 * T * numbers, None),
        "token": Work(None, weights, bandwidth="read"),
        "training step": Work(6 * T * numbers, None),
    }[work]


# What the name of an op tells of it, by the first expression that is found there.
OPS = {
    "products": r"^aten::(mm|addmm)$|^hf_linear_attention::((many_rows|expert)_)?linear$",
    "recurrence": r"delta_rule|linear_attention_(forward|backward|step)|selective_scan",
    "convolution": r"conv(olution|1d)",
    "norms": r"rms_norm",
    "softmax attention": r"scaled_dot_product",
    "loss": r"log_softmax|nll_loss|logsumexp|CrossEntropy",
}


def where_time_goes(run: Callable[[], object]) -> dict[str, float]:
    """Shares of the time of a run that is spent in OPS and in the rest. What PyTorch computes by
    small ops, as its recurrences and norms, is part of the rest.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    seconds = dict.fromkeys((*OPS, "rest"), 0.0)
    for op in profile.key_averages():
        kinds = (kind for kind, expression in OPS.items() if re.search(expression, op.key))
        seconds[next(kinds, "rest")] += op.self_cpu_time_total
    return {kind: value / sum(seconds.values()) for kind, value in seconds.items()}


def note_of(contender_name: str, shares: dict[str, float]) -> str:
    parts = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items() if share >= 0.005)
    return f"{contender_name}: {parts}"


def bench(report: Report, case: Case) -> None:
    name, layers, T, dtype, _, names = case
    panel = f"{name}, {layers} layers, {str(dtype).removeprefix('torch.')}"
    titles = {
        work: f"a token after {T}" if work == "token" else f"{work} of {T} tokens"
        for work in case.work
        if work != "training step" or speedup.is_trainable(dtype)
    }
    titles = {work: title for work, title in titles.items() if not report.has(panel, title)}
    if not titles:
        return
    before = make_model(name, layers, dtype, report.is_smallest)
    models = {contender_name: contender(before, contender_name) for contender_name in names}
    exact = before
    if unused_bytes(before):  # Rounding alone makes tokens choose other experts.
        exact = make_model(name, layers, torch.float32, report.is_smallest)
    report.errors[panel] = verify(exact, contender(exact, AFTER))
    ids = random_tokens(before, T)
    for work, title in titles.items():
        peak_mib = None
        if work == "training step":
            setting = (name, layers, T, dtype, report.is_smallest)
            peak_mib = report.peak_memory(prepare_training, (AFTER, BEFORE), *setting)
        runs = {key: speedup.WORK[work](model, ids) for key, model in models.items()}
        timings = report.time({key: sample_of(run) for key, run in runs.items()}, 20)
        least = least_work(before, work, T)
        for key in (BEFORE, AFTER):
            note = note_of(key, where_time_goes(runs[key]))
            report.notes.append(f"{panel}: {title}: {note}")
        report.add(panel, title, T, timings, dict.fromkeys(names, least), peak_mib)


class GainReport(Report):
    """Its plot shows how many times as fast the model is after as before."""

    def _plot(self, path: Path) -> None:
        pyplot = plotter()
        gains = {
            f"{row.panel}: {row.case}": row.ratio for row in self.rows if row.contender == BEFORE
        }
        figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.24 * len(gains)), layout="constrained")
        bars = axis.barh(list(gains), list(gains.values()), color="C0")
        axis.bar_label(bars, fmt="%.1f", padding=3, fontsize="small")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.invert_yaxis()
        axis.margins(x=0.08, y=0.01)
        axis.set(title="With use_kernels: times as fast as before", xscale="log")
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def main() -> None:
    assert __doc__ is not None
    arguments = parser(__doc__)
    arguments.add_argument(
        "--resume", action="store_true", help="go on with a run of today that was interrupted"
    )
    flags = arguments.parse_args()
    report = GainReport("upstream", "T", AFTER, flags, flags.resume)
    for case in SETTINGS[flags.setting]:
        bench(report, case)
    report.save()


if __name__ == "__main__":
    main()
