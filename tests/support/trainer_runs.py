# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Trains a tiny model with Trainer, a few steps of four sequences each, in several ways.

As a script, under the launcher that starts it: python trainer_runs.py FOLDER RUN...
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from hf_linear_attention import convert
from hf_linear_attention.conversion.attention_transfer import AttentionTransferTrainer
from hf_linear_attention.conversion.distillation import DistillationTrainer
from softmax_models import softmax_model
from tiny import VARIANTS, VOCAB_SIZE, random_ids, tiny_model

SEQUENCES_PER_STEP = 4
RUNS: dict[str, tuple[str, dict[str, Any]]] = {  # a variant of the model, and Trainer's arguments
    "plain": ("gated", {}),
    "performer": ("preset_performer", {}),
    "retnet": ("preset_retnet", {}),
    "hgrn2": ("preset_hgrn2", {}),
    "mamba2": ("preset_mamba2", {}),
    "tied": ("learned", {}),
    "hybrid": ("hybrid", {}),
    "accumulated": ("gated", {"gradient_accumulation_steps": 2}),
    "smoothed": ("gated", {"label_smoothing_factor": 0.2}),
    "checkpointed": (
        "gated",
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        },
    ),
    "checkpointed_reentrant": (
        "gated",
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
    ),
    "compiled": ("gated", {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "bfloat16": ("gated", {"bf16": True, "learning_rate": 0.02}),
    "resumed": (
        "gated",
        {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3},
    ),
}


# Runs whose processes share each sequence, by `cp_size`.
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
CONTEXT_PARALLEL = ("shared", "shared_hybrid", "shared_packed", "shared_accumulated")
RUNS |= {
    "shared": ("preset_gated_deltanet", EVALUATED),
    "shared_hybrid": ("hybrid", {"gradient_checkpointing": True, **EVALUATED}),
    "shared_packed": ("preset_rwkv7", {}),
    "shared_accumulated": ("preset_mamba2", {"gradient_accumulation_steps": 2}),
}

# The stages after a conversion, and Trainer's arguments.
STAGES: dict[str, dict[str, Any]] = {
    "transferred": {"learning_rate": 0.01},
    "distilled": {"gradient_accumulation_steps": 2},
}


def dataset() -> list[dict[str, torch.Tensor]]:
    """Sequences of 12 tokens, of which some have many labels and some few."""
    rows = []
    for row, ids in enumerate(random_ids(3 * SEQUENCES_PER_STEP, 12)):
        labels = ids.clone()
        labels[: 1 + row % 10] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def arguments(folder: Path, gradient_accumulation_steps: int = 1, **kwargs) -> TrainingArguments:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    defaults = {
        "max_steps": 3,
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": SEQUENCES_PER_STEP // ranks // gradient_accumulation_steps,
    }
    return TrainingArguments(
        output_dir=str(folder),
        gradient_accumulation_steps=gradient_accumulation_steps,
        **{**defaults, **kwargs},
    )


def trainer_of_stage(stage: str, folder: Path) -> Trainer:
    original = softmax_model("llama", vocab_size=VOCAB_SIZE, initializer_range=0.1)
    model = convert(original, window_size=3, window_sinks=1).model
    args = arguments(folder, **STAGES[stage])
    if stage == "transferred":
        return AttentionTransferTrainer(model, args, train_dataset=dataset())
    return DistillationTrainer(model, args, teacher=original, train_dataset=dataset())


def trainer_of(run: str, folder: Path) -> Trainer:
    if run in STAGES:
        return trainer_of_stage(run, folder)
    variant, kwargs = RUNS[run]
    is_shared, ranks = run in CONTEXT_PARALLEL, int(os.environ.get("WORLD_SIZE", "1"))
    dtype = torch.float64 if is_shared else torch.float32
    model = tiny_model(dtype=dtype, **{**VARIANTS[variant], "initializer_range": 0.1})
    if is_shared and ranks > 1:
        rows = SEQUENCES_PER_STEP // kwargs.get("gradient_accumulation_steps", 1)
        kwargs = kwargs | {"per_device_train_batch_size": rows}
        kwargs["parallelism_config"] = ParallelismConfig(cp_size=ranks)
    args = arguments(folder, **kwargs)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # Accelerate shards on accelerators only. It is told that this CPU is one.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    collate = DataCollatorWithFlattening(return_tensors="pt") if run == "shared_packed" else None
    return Trainer(
        model=model,
        args=args,
        train_dataset=dataset(),
        eval_dataset=dataset()[:-3] if "eval_strategy" in kwargs else None,  # no whole batches
        data_collator=collate,
    )


def train(run: str, folder: Path) -> list[dict[str, float]]:
    """Saves the model in `folder`; the loss and the gradient's norm at each step, and the loss of
    an evaluation behind it, if there is one.
    """
    trainer = trainer_of(run, folder)
    trainer.train()
    if run == "resumed":
        trainer = trainer_of(run, folder)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    trainer.save_model()
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    steps = [{name: entry[name] for name in ("loss", "grad_norm")} for entry in log]
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    for step, entry in zip(steps, evaluations, strict=False):
        step["eval_loss"] = entry["eval_loss"]
    return steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    folder = Path(sys.argv[1])
    for run in sys.argv[2:]:
        steps = train(run, folder / run)
        if PartialState().is_main_process:
            (folder / run / "steps.json").write_text(json.dumps(steps))
    PartialState().destroy_process_group()
