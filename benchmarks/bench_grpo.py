# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A step of GRPO and of DPO by TRL's trainers, whose prompts are read once or for every answer.

    python benchmarks/bench_grpo.py

Each way has a process of its own, and they take turns. A whole step is timed: generation, log
probabilities, the gradient, and the optimizer; and so is the loss alone with its gradient, of which
the memory is what the process takes at most beyond what it had before.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3_5TextConfig
from transformers.trainer_callback import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    SharedPrompts,
    use_kernels,
)

VOCAB_SIZE = 8192
LAYERS, C = 4, 512


def qwen() -> torch.nn.Module:
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=C,
        intermediate_size=3 * C,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


def ours() -> torch.nn.Module:
    config = LinearAttentionConfig.from_preset(
        "gated_deltanet",
        vocab_size=VOCAB_SIZE,
        hidden_size=C,
        intermediate_size=3 * C,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LinearAttentionForCausalLM(config)


MODELS = {"qwen3_5": qwen, "gated_deltanet": ours}
WAYS = ("transformers", "use_kernels", "shared")  # the second: of this package's models the first


class Watch(TrainerCallback):
    """Times steps, and keeps the memory of the loss in them."""

    def __init__(self):
        self.steps: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(time.perf_counter() - self.start)


def resident(name: str) -> int:
    """MB by a line of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) // 1024


def watched(trainer_class: type) -> type:
    """Whose losses are timed with their gradients."""

    class Watched(trainer_class):
        losses: list[float] = []
        peaks: list[int] = []

        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            self.begins, self.before = time.perf_counter(), resident("VmRSS")
            return inputs

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses.append(time.perf_counter() - self.begins)
            self.peaks.append(resident("VmHWM") - self.before)
            return loss

    return Watched


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def text(length: int, seed: int) -> str:
    ids = torch.randint(2, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in ids.tolist())


def rewards(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(int(word[1:]) % 2 for word in answer.split()) / 100 for answer in completions]


def measured(task: str, model_name: str, way: str, args: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model = MODELS[model_name]()
    if way != "transformers":
        use_kernels(model) if model_name == "qwen3_5" else None
    trainer_class = watched({"grpo": GRPOTrainer, "dpo": DPOTrainer}[task])
    if way == "shared":
        trainer_class = type("Shared", (SharedPrompts, trainer_class), {})
    G, steps = args.completions, args.steps
    options: dict[str, Any] = dict(
        max_steps=steps,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
        learning_rate=1e-5,
    )
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        if task == "grpo":
            data = [{"prompt": text(args.prompt, seed)} for seed in range(steps)]
            trainer = trainer_class(
                model=model,
                reward_funcs=rewards,
                args=GRPOConfig(
                    folder,
                    per_device_train_batch_size=G,
                    num_generations=G,
                    max_completion_length=args.answer,
                    use_transformers_continuous_batching=way == "shared",
                    **options,
                ),
                train_dataset=Dataset.from_list(data),
                processing_class=tokenizer(),
                callbacks=[watch],
            )
        else:
            data = [
                {
                    "prompt": text(args.prompt, seed),
                    "chosen": " " + text(args.answer, 100 + seed),
                    "rejected": " " + text(args.answer, 200 + seed),
                }
                for seed in range(steps)
            ]
            model.save_pretrained(folder)
            model.config._name_or_path = model.name_or_path = folder
            trainer = trainer_class(
                model=model,
                args=DPOConfig(folder, per_device_train_batch_size=1, max_length=None, **options),
                train_dataset=Dataset.from_list(data),
                processing_class=tokenizer(),
                callbacks=[watch],
            )
        trainer.train()
    return {
        "step": min(watch.steps[1:]),
        "loss": min(trainer.losses[1:]),
        "MB": min(trainer.peaks[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", nargs="+", default=["grpo", "dpo"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="of each turn, the first not counted")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(*args.one, args)))
        return
    for task in args.tasks:
        for model in args.models:
            ways = WAYS if model == "qwen3_5" else WAYS[1:]
            found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for way in [way for _ in range(args.turns) for way in ways]:
                command = [sys.executable, *sys.argv, "--one", task, model, way]
                output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                found[way].append(json.loads(output.splitlines()[-1]))
            best = {
                way: {name: min(one[name] for one in turns) for name in turns[0]}
                for way, turns in found.items()
            }
            for way, of_way in best.items():
                ratios = {name: of_way[name] / best["shared"][name] for name in of_way}
                print(
                    f"{task:4} {model:14} {way:12} step {of_way['step']:6.2f} s "
                    f"({ratios['step']:.2f}x)  loss {of_way['loss']:6.2f} s ({ratios['loss']:.2f}x)"
                    f"  {of_way['MB']:5.0f} MB ({ratios['MB']:.2f}x)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
