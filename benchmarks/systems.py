# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What compare_systems.py compares: systems, what they are trained for, and at what size."""

import functools
import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM
from hf_linear_attention.model.presets import PRESETS
from tasks import Copy, Recall, Source, Task, Text, Tracking

BASELINE = "katharopoulos"  # whose number of weights all have
ALLOWED_DIFFERENCE = 0.01  # in it
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


class System(NamedTuple):
    """A preset, and fields of the config that differ from it.

    head_dim: at most so many features in a head, where the state grows as their square.
    """

    preset: str
    overrides: dict[str, Any] = {}
    head_dim: int | None = None


def _positions(preset: str, kind: str, **overrides: Any) -> System:
    return System(preset, {"position_embedding_type": kind, "scale_embeddings": True, **overrides})


TOO_DEEP = ("minimax",)  # whose pattern has more layers than the models of trials
SYSTEMS = {name: System(name) for name in PRESETS if name not in TOO_DEEP} | {
    "polynomial": System("polynomial", head_dim=16),
    "based": System("based", head_dim=16),
    # The authors' ranks do not follow the hidden size, which is small here.
    "rwkv6": System("rwkv6", {"proj_low_rank_dim": 16, "decay_low_rank_dim": 32}),
}
POSITIONS = {  # trained on text only
    "katharopoulos, no positions": _positions("katharopoulos", "none"),
    "katharopoulos, rotary": _positions("katharopoulos", "rotary"),
    "katharopoulos, decay per token": System("katharopoulos", {"decay": "per_token"}),
    "gla, sinusoidal": _positions("gla", "sinusoidal"),
    "gla, rotary": _positions("gla", "rotary", expand_k=1),  # keys as wide as the positions turn
    "softmax, no positions": _positions("softmax", "none"),
    "softmax, sinusoidal": _positions("softmax", "sinusoidal"),
}
NEGATIVE_EIGENVALUES = {  # trained on tracking only: a delta rule that may turn what it finds
    f"{name}, beta to 2": System(name, {"linear_allow_neg_eigval": True})
    for name in ("deltanet", "gated_deltanet", "kda")
}
VARIANTS = POSITIONS | NEGATIVE_EIGENVALUES
ALL_SYSTEMS = SYSTEMS | VARIANTS
_MEMORIES = (  # of one kind in all layers
    "katharopoulos", "based", "retnet", "gla", "hgrn2", "mamba2", "deltanet", "gated_deltanet",
    "kda", "softmax",
)  # fmt: skip
_TRACKERS = (
    "katharopoulos", "gla", "mamba2", "mamba3", "deltanet", "gated_deltanet", "gated_deltaproduct",
    "comba", "kda", "gdn2", "precond_gdn", "precond_kda", "rwkv6", "rwkv7", "softmax",
    *NEGATIVE_EIGENVALUES,
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    hidden_size: int
    intermediate_size: int  # of the baseline; the others' follow from its number of weights
    num_hidden_layers: int
    num_attention_heads: int


@dataclass(frozen=True)
class Trial:
    """A task, the models' size, and how long they train.

    rows: in a batch.
    seeds: how many, the first of them with all learning rates, the others with the best.
    systems: names of those that are trained for it; every preset without them.
    """

    task: Task
    size: Size
    rows: int
    steps: int
    learning_rates: tuple[float, ...]
    seeds: int
    systems: tuple[str, ...] = tuple(SYSTEMS)


@dataclass(frozen=True)
class Setting:
    """contexts: after which tokens are timed; timing_seconds: for the rounds of one comparison;
    autocast: trained in bfloat16 on a CPU as well, as on GPUs.
    """

    trials: dict[str, Trial]
    contexts: tuple[int, ...] = (128, 1024, 4096, 16384)
    timing_seconds: float = 15
    device: str = "cpu"
    autocast: bool = False


_TWO_LAYERS, _TINY, _SMALL, _MEDIUM, _TEN_MILLION, _LARGE = (
    Size(64, 176, 2, 2),
    Size(64, 176, 4, 2),
    Size(128, 336, 4, 4),
    Size(256, 672, 4, 4),
    Size(256, 672, 8, 4),
    Size(768, 2048, 12, 12),
)
_RATES = (2e-3, 5e-3)
_GPU_RATES = (3e-4, 1e-3, 3e-3)
_BEST = ("gated_deltanet", "kda", "qwen3_next", "kimi_linear", "hybrid", "softmax")
_TEXT_SYSTEMS = (*SYSTEMS, *POSITIONS)


def _mqar(steps: int) -> dict[str, Trial]:
    """Recall at the lengths, numbers of pairs and widths of arXiv 2312.04927, figure 2. There are
    128 symbols, not 8192, which a few hundred steps are too few to tell apart.
    """
    return {
        f"mqar_{length}_{pairs}_d{width}": Trial(
            Recall(128, length, pairs),
            Size(width, 21 * width // 8, 2, width // 32),
            rows=2048 // length,
            steps=steps,
            learning_rates=(2e-3,),
            seeds=1,
            systems=_MEMORIES,
        )
        for width in (64, 128)
        for length, pairs in ((64, 4), (128, 8), (256, 16))
    }


SETTINGS = {
    "short": Setting(
        {
            "text": Trial(Text(512, 128, 1_000_000), _TINY, 8, 40, (4e-3,), 1, _TEXT_SYSTEMS),
            "recall": Trial(Recall(64, 32, 4), _TINY, 32, 40, (4e-3,), 1),
            "copy": Trial(Copy(32), _TINY, 32, 40, (4e-3,), 1),
            "parity": Trial(Tracking(2, 16, 32), _TWO_LAYERS, 32, 40, (4e-3,), 1, _TRACKERS),
        },
        contexts=(128, 16384),
        timing_seconds=4,
    ),
    "full": Setting(
        {
            "text": Trial(Text(1024, 256, 2_000_000), _SMALL, 4, 300, _RATES, 2, _TEXT_SYSTEMS),
            "recall": Trial(Recall(64, 32, 4), _TINY, 32, 600, _RATES, 2),
            "copy": Trial(Copy(32), _TINY, 32, 200, _RATES, 2),
            "parity": Trial(Tracking(2), _TWO_LAYERS, 32, 600, (3e-3,), 2, _TRACKERS),
            "S3": Trial(Tracking(3, swaps=True), _TWO_LAYERS, 32, 1000, (3e-3,), 2, _TRACKERS),
            **_mqar(steps=1000),
        },
    ),
    "gpu": Setting(
        {
            "text": Trial(Text(8192, 1024), _LARGE, 32, 1000, _GPU_RATES, 3, _TEXT_SYSTEMS),
            "recall": Trial(Recall(8192, 256, 16), _MEDIUM, 64, 20_000, _GPU_RATES, 3),
            "copy": Trial(Copy(128), _MEDIUM, 64, 6000, _GPU_RATES, 3),
            "parity": Trial(Tracking(2), _MEDIUM, 256, 20_000, _GPU_RATES, 3, _TRACKERS),
            "S3": Trial(Tracking(3), _MEDIUM, 256, 20_000, _GPU_RATES, 3, _TRACKERS),
        },
        device="cuda",
    ),
    "medium": Setting(
        {"text": Trial(Source(8192, 1024), _TEN_MILLION, 8, 400, (2e-3,), 1, _BEST)},
        contexts=(),
        autocast=True,
    ),
    "large": Setting(
        {"text": Trial(Source(8192, 1024), _TEN_MILLION, 8, 6100, (2e-3,), 2, _BEST)},
        contexts=(),
        autocast=True,
    ),
}


# ---- equal numbers of weights ----


def make_config(system: System, trial: Trial, intermediate_size: int) -> LinearAttentionConfig:
    """The system at the trial's size. A sliding window is an eighth of the task's length."""
    sizes = asdict(trial.size) | {"intermediate_size": intermediate_size}
    head_dim = trial.size.hidden_size // trial.size.num_attention_heads
    if system.head_dim is not None and system.head_dim < head_dim:
        sizes["num_attention_heads"] = trial.size.hidden_size // system.head_dim
    if "sliding_window" in PRESETS[system.preset].fields:
        sizes["sliding_window"] = trial.task.length // 8
    return LinearAttentionConfig.from_preset(
        system.preset,
        vocab_size=trial.task.vocab_size,
        **sizes,
        **NO_SPECIAL_TOKENS,
        **system.overrides,
    )


def num_weights(config: LinearAttentionConfig) -> int:
    return _num_weights(config.to_json_string(use_diff=False))


@functools.cache
def _num_weights(config: str) -> int:
    """Of a config as JSON. A model takes a tenth of a second, and many settings have the same."""
    with torch.device("meta"):
        model = LinearAttentionForCausalLM(LinearAttentionConfig.from_dict(json.loads(config)))
    return model.num_parameters()


def fit(system: System, trial: Trial) -> LinearAttentionConfig:
    """The system with as many weights as the baseline, in that the MLPs are wider or narrower.

    Raises:
        ValueError: no width gives that number.
    """
    width = trial.size.intermediate_size
    target = num_weights(make_config(SYSTEMS[BASELINE], trial, width))
    config = make_config(system, trial, width)
    per_unit = num_weights(make_config(system, trial, width + 1)) - num_weights(config)
    fitted = width + round((target - num_weights(config)) / per_unit)
    if fitted >= 1:
        config = make_config(system, trial, fitted)
    if abs(num_weights(config) / target - 1) > ALLOWED_DIFFERENCE:
        raise ValueError(
            f"{system.preset} cannot have {target:,} weights with {trial.size}: "
            f"its intermediate_size would be {fitted}"
        )
    return config
