# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Train a linear-attention language model on text with Transformers' Trainer.

    python examples/train_causal_lm.py                               # Python's standard library
    python examples/train_causal_lm.py --text_file book.txt
    python examples/train_causal_lm.py --dataset_name roneneldan/TinyStories
    python examples/train_causal_lm.py --preset retnet               # another attention
    python examples/train_causal_lm.py --preset llama                # Transformers' own Llama
    python examples/train_causal_lm.py --resume_from_checkpoint last

Trains a tokenizer and a model, measures held-out bits per byte before and after, and leaves in
--output_dir the model, the tokenizer, checkpoints, metrics.json and loss_curve.png. Every flag of
`TrainingArguments` works; `--help` lists them all with their defaults.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import evaluate
import matplotlib
import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    EvalPrediction,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from hf_linear_attention import LinearAttentionConfig
from hf_linear_attention.model.presets import PRESETS
from muon import MuonWithAdamW
from recall_texts import mix_recall_blocks, with_recall_texts
from text_blocks import (
    InputError,
    bytes_per_token,
    drop_bytes,
    hold_out,
    hub_or_local_dataset,
    pack,
    standard_library,
    take_bytes,
    text_files,
    train_tokenizer,
)

matplotlib.use("Agg")  # draws without a display
logging.disable_progress_bar()  # of loading and saving; the Trainer's stays

LLAMA = "llama"
METRIC = Path(__file__).parent / "metrics" / "bits_per_byte.py"


@dataclass
class ModelArguments:
    """The model's shape. Any other field of its config goes into --config_overrides."""

    vocab_size: int = field(
        default=1024, metadata={"help": "Size of the tokenizer that is trained."}
    )
    hidden_size: int = field(default=128, metadata={"help": "Width of the residual stream."})
    intermediate_size: int = field(default=336, metadata={"help": "Width of each MLP."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Number of decoder layers."})
    num_attention_heads: int = field(default=2, metadata={"help": "Number of attention heads."})
    preset: str = field(
        default="gated_deltanet",
        metadata={
            "help": "A system of the field (docs/presets.md), or Transformers' Llama, which "
            "convert.py can make a linear one of; the other flags override it.",
            "choices": [*PRESETS, LLAMA],
        },
    )
    decay: str | None = field(
        default=None,
        metadata={
            "help": 'How attention forgets, "none" for a sum that does not. Without: as the '
            "--preset has it."
        },
    )
    config_overrides: str = field(
        default="{}",
        metadata={
            "help": "Further config fields as JSON, for example '{\"conv_kernel_size\": 4}'."
        },
    )

    model: str | None = field(
        default=None,
        metadata={
            "help": "A model to go on with, a folder or a name on the Hub, and its tokenizer; no "
            "other flag says anything of its shape then."
        },
    )
    muon: bool = field(
        default=False,
        metadata={"help": "Whether Muon steps the matrices, and AdamW only what is none."},
    )

    def build_config(self) -> PreTrainedConfig:
        try:
            overrides = dict(json.loads(self.config_overrides))
        except (TypeError, ValueError) as error:
            raise InputError(f"--config_overrides {self.config_overrides}: {error}") from error
        values = {name: value for name, value in asdict(self).items() if value is not None}
        del values["config_overrides"], values["muon"]
        try:
            if self.preset == LLAMA:
                return self._llama_config({**values, **overrides})
            return LinearAttentionConfig.from_preset(**{**values, **overrides})
        except (TypeError, ValueError) as error:
            raise InputError(f"no such model: {error}") from error

    @staticmethod
    def _llama_config(values: dict[str, Any]) -> LlamaConfig:
        del values["preset"]
        unknown = sorted(set(values) - {field.name for field in fields(LlamaConfig)})
        if unknown:
            raise ValueError(f"LlamaConfig has no {', '.join(unknown)}")
        return LlamaConfig(**values)


@dataclass
class DataArguments:
    """The text. Without --dataset_name and --text_file: the source of Python's standard library."""

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "A dataset on the Hub, or a local data file or folder, read by `datasets`.",
            "aliases": ["--dataset"],
        },
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    text_column: str = field(default="text", metadata={"help": "Its column of text."})
    text_file: list[str] | None = field(
        default=None, metadata={"help": "One or more UTF-8 text files."}
    )
    block_size: int = field(default=256, metadata={"help": "Tokens in a training sequence."})
    held_out_fraction: float = field(
        default=0.05, metadata={"help": "Share of the documents that is only tested on."}
    )
    max_train_bytes: int | None = field(
        default=None, metadata={"help": "Train on at most so much text (default: all)."}
    )
    max_eval_bytes: int | None = field(
        default=100_000, metadata={"help": "Test on at most so much text."}
    )
    skip_eval_bytes: int = field(
        default=0,
        metadata={
            "help": "Leave out so much text before: to choose settings by other text than what is "
            "reported then."
        },
    )

    recall_share: float = field(
        default=0.0,
        metadata={
            "help": "Share of the blocks to train on that ask for names and numbers which stood "
            "above (recall_texts.py)."
        },
    )

    def __post_init__(self):
        if self.dataset_name and self.text_file:
            raise ValueError("give --dataset_name or --text_file, not both")
        if not 0 <= self.recall_share <= 1:
            raise ValueError(f"--recall_share must lie between 0 and 1, got {self.recall_share}")
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(
                f"--held_out_fraction must lie between 0 and 1, got {self.held_out_fraction}"
            )
        if self.block_size < 2:
            raise ValueError(f"--block_size must be at least 2, got {self.block_size}")

    def load(self, seed: int) -> tuple[Dataset, Dataset]:
        """Documents to train on and held-out documents, whose split the seed decides."""
        if self.dataset_name:
            splits = hub_or_local_dataset(
                self.dataset_name, self.dataset_config_name, self.text_column
            )
            train = splits["train"] if "train" in splits else next(iter(splits.values()))
            held_out = splits.get("validation", splits.get("test"))
        else:
            train, held_out = (
                text_files(self.text_file) if self.text_file else standard_library(),
                None,
            )
        if held_out is None or held_out is train:
            train, held_out = hold_out(train, self.held_out_fraction, seed)
        held_out = drop_bytes(held_out, self.skip_eval_bytes)
        return take_bytes(train, self.max_train_bytes), take_bytes(held_out, self.max_eval_bytes)

    def for_tokenizer(self, documents: Dataset, seed: int) -> Dataset:
        """What to train a tokenizer on."""
        return with_recall_texts(documents, seed) if self.recall_share else documents

    def blocks(self, documents: Dataset, tokenizer: PreTrainedTokenizerBase, seed: int) -> Dataset:
        """The blocks to train on."""
        blocks = pack(documents, tokenizer, self.block_size)
        return mix_recall_blocks(blocks, documents, tokenizer, self.recall_share, seed)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help with defaults, below this file's docstring as it stands."""


# Of TrainingArguments, for a small model on a laptop's CPU; ratios below 1 are shares of all steps.
TRAINING_DEFAULTS = {
    "output_dir": "outputs/causal_lm",
    "num_train_epochs": 1,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 8,
    "learning_rate": 4e-3,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "logging_steps": 0.02,
    "eval_strategy": "steps",
    "eval_steps": 0.2,
    "eval_on_start": True,
    "save_steps": 0.2,
    "save_total_limit": 2,
    "report_to": "none",
    "dataloader_pin_memory": torch.accelerator.is_available(),
}


def parse_arguments(args: list[str]) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    parser = HfArgumentParser(
        (ModelArguments, DataArguments, TrainingArguments),
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(**TRAINING_DEFAULTS)
    try:
        *parsed, unknown = parser.parse_args_into_dataclasses(args, return_remaining_strings=True)
    except ValueError as error:  # from a dataclass that checks itself
        parser.error(str(error))
    if unknown:
        parser.error(f"unknown arguments: {' '.join(unknown)}")
    return tuple(parsed)


def find_checkpoint(training_args: TrainingArguments) -> Path | None:
    """What --resume_from_checkpoint names: a folder, or the "last" complete one in --output_dir."""
    name = training_args.resume_from_checkpoint
    if name is None or name.lower() == "false":
        return None
    if name.lower() not in ("last", "true"):
        if not is_complete(Path(name)):
            raise InputError(f"--resume_from_checkpoint: {name} is not a complete checkpoint")
        return Path(name)
    last = last_checkpoint(Path(training_args.output_dir))
    if last is None:
        raise InputError(f"--resume_from_checkpoint: no checkpoint in {training_args.output_dir}")
    return last


def last_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint that a Trainer has left in a folder."""
    complete = filter(is_complete, folder.glob("checkpoint-*"))
    return max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)


def is_complete(checkpoint: Path) -> bool:
    """Whether the Trainer's state is whole, which it writes last: else the run died meanwhile."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return True


def load_config(name: Path | str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(f"no model can be loaded from {name}: {error}") from error


def load_or_train_tokenizer(
    documents: Dataset,
    vocab_size: int,
    start: Path | str | None,
    training_args: TrainingArguments,
) -> PreTrainedTokenizerFast:
    """That of the model to start from, or a new one, trained by one process and read by all."""
    if start:
        return AutoTokenizer.from_pretrained(start)
    with training_args.main_process_first(desc="training the tokenizer"):
        if training_args.local_process_index == 0:
            train_tokenizer(documents, vocab_size).save_pretrained(training_args.output_dir)
        return AutoTokenizer.from_pretrained(training_args.output_dir)


class BitsPerByteOfBlocks:
    """The Trainer's two metric hooks: log-likelihoods instead of logits, then bits per byte."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.metric = evaluate.load(str(METRIC))
        self.token_bytes = np.array(bytes_per_token(tokenizer))

    @staticmethod
    def negative_log_likelihood(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(B, T, V) logits and (B, T) labels -> (B, T - 1) nats, so that no logits are gathered."""
        logits = logits[:, :-1].flatten(0, 1).float()
        targets = labels[:, 1:]
        return torch.nn.functional.cross_entropy(
            logits, targets.flatten(), reduction="none"
        ).view_as(targets)

    def compute(self, prediction: EvalPrediction) -> dict[str, float]:
        # A block's first token is given, not predicted: its bytes do not count.
        num_bytes = self.token_bytes[prediction.label_ids[:, 1:]]
        return self.metric.compute(
            predictions=prediction.predictions.sum(-1, dtype=np.float64),
            references=num_bytes.sum(-1),
        )


def evaluations(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in log_history if "eval_bits_per_byte" in entry]


def save_loss_curve(
    log_history: list[dict[str, Any]],
    path: Path,
    title: str,
    ylabel: str = "loss, nats per token",
) -> None:
    """Draws the loss of training and of held-out text over the steps."""
    from matplotlib import pyplot

    trained = [entry for entry in log_history if "loss" in entry]
    evaluated = [entry for entry in log_history if "eval_loss" in entry]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot([e["step"] for e in trained], [e["loss"] for e in trained], label="training text")
    axes.plot(
        [e["step"] for e in evaluated],
        [e["eval_loss"] for e in evaluated],
        "o-",
        label="held-out text",
    )
    axes.set(xlabel="step", ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(args: list[str]) -> None:
    model_args, data_args, training_args = parse_arguments(args)
    output_dir = Path(training_args.output_dir)
    set_seed(training_args.seed)
    checkpoint = find_checkpoint(training_args)
    start = checkpoint or model_args.model
    config = load_config(start) if start else model_args.build_config()
    if checkpoint:
        training_args.eval_on_start = False  # the checkpoint's log has it

    train_documents, held_out_documents = data_args.load(training_args.seed)
    tokenizer = load_or_train_tokenizer(
        data_args.for_tokenizer(train_documents, training_args.seed),
        model_args.vocab_size,
        start,
        training_args,
    )
    train_blocks = data_args.blocks(train_documents, tokenizer, training_args.seed)
    held_out_blocks = pack(held_out_documents, tokenizer, data_args.block_size)

    if start is None:
        config.vocab_size = len(tokenizer)  # a short text may not yield all the tokens asked for
        config.bos_token_id = config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    if model_args.model and not checkpoint:
        model = AutoModelForCausalLM.from_pretrained(model_args.model, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config)
    print(
        f"{model.num_parameters():,} parameters; {len(train_blocks):,} blocks of "
        f"{data_args.block_size} tokens to train on, {len(held_out_blocks):,} held out"
    )

    metric = BitsPerByteOfBlocks(tokenizer)
    optimizer = None
    if model_args.muon:
        optimizer = MuonWithAdamW.of(model.to(training_args.device), training_args)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_blocks,
        eval_dataset=held_out_blocks,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        preprocess_logits_for_metrics=metric.negative_log_likelihood,
        compute_metrics=metric.compute,
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    history = trainer.state.log_history
    if not evaluations(history) or evaluations(history)[-1]["step"] != trainer.state.global_step:
        trainer.evaluate()
    model.config.use_cache = True  # the Trainer turned it off
    trainer.save_model()
    if not trainer.is_world_process_zero():
        return

    first, last = evaluations(history)[0], evaluations(history)[-1]
    metrics = {
        "bits_per_byte_before": first["eval_bits_per_byte"],
        "bits_per_byte_after": last["eval_bits_per_byte"],
        "perplexity_after": math.exp(last["eval_loss"]),
        "eval_loss": last["eval_loss"],
        "steps": trainer.state.global_step,
        "train_tokens": trainer.state.global_step
        * training_args.train_batch_size
        * training_args.gradient_accumulation_steps
        * training_args.world_size
        * data_args.block_size,
        "parameters": model.num_parameters(),
    }
    (output_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    before, after = first["eval_bits_per_byte"], last["eval_bits_per_byte"]
    title = f"Held-out bits per byte: {before:.2f} before training, {after:.2f} after"
    save_loss_curve(history, output_dir / "loss_curve.png", title)
    print(
        f"held-out bits per byte: {before:.3f} at step {first['step']}, "
        f"{after:.3f} at step {last['step']}\n"
        f"saved the model, metrics.json and loss_curve.png in {output_dir}"
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(f"error: {error}")
