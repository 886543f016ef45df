# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Make a linear-attention model of a softmax checkpoint, and train what is new in it.

    python examples/convert.py --model HuggingFaceTB/SmolLM2-135M       # on Python's own source
    python examples/convert.py --model my-llama --text_file book.txt --softmax_layers 4
    python examples/convert.py --model my-llama --softmax_layers damage:2  # the two that need it
    python examples/convert.py --model my-llama --lora 8 --cross_entropy 1    # without a teacher

Three stages, each in a folder of --output_dir: 1-converted, 2-transferred, where each linear layer
has learned to give what softmax attention gave in its place, and 3-distilled, where the whole model
has learned to predict what the original does. Each folder is a model with its tokenizer, and has
what Trainer leaves: checkpoints, metrics.json, loss_curve.png. With --report, report.md says what
that cost (convert_report.py). The same command again goes on where
it was stopped. Every flag of `TrainingArguments` works, for both stages that train, but for those
that each has a flag of its own for.
"""

import copy
import json
import math
import sys
from argparse import ArgumentTypeError
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from convert_report import ReportArguments, write_report
from hf_linear_attention import LinearAttentionForCausalLM, convert
from hf_linear_attention.conversion.attention_transfer import (
    AttentionTransferTrainer,
    new_parameters,
)
from hf_linear_attention.conversion.command import DTYPES, read_fields, read_layers
from hf_linear_attention.conversion.convert import KEPT, config_for, forms
from hf_linear_attention.conversion.distillation import DistillationTrainer, lora_config
from hf_linear_attention.conversion.model_files import read
from hf_linear_attention.conversion.ranking import choose_layers, rank_layers
from hf_linear_attention.conversion.softmax_form import restore_softmax
from muon import MuonWithAdamW
from recall_texts import recall_blocks
from text_blocks import InputError, pack
from train_causal_lm import (
    TRAINING_DEFAULTS,
    BitsPerByteOfBlocks,
    DataArguments,
    HelpFormatter,
    last_checkpoint,
    save_loss_curve,
)

CONVERTED, TRANSFERRED, DISTILLED = "1-converted", "2-transferred", "3-distilled"
DAMAGE, GAIN = "damage", "gain"  # before a colon and a number of layers
KEPT_METRICS = ("eval_loss", "eval_bits_per_byte")
# Flags of TrainingArguments for which each stage has its own.
OF_A_STAGE = {
    "learning_rate": "--transfer_learning_rate and --distill_learning_rate",
    "resume_from_checkpoint": "nothing: the same command goes on where it was stopped",
}


@dataclass
class ConversionArguments:
    """What becomes of the model, and how it is trained."""

    model: str = field(
        metadata={"help": "The softmax model: a folder, a name on the Hub, or a GGUF file."}
    )
    mixer: str = field(
        default="window", metadata={"help": "What layers become.", "choices": list(forms())}
    )
    softmax_layers: str = field(
        default="none",
        metadata={
            "help": f"Which layers stay softmax: {KEPT}, as 3,7,11; or, after attention transfer, "
            f"{DAMAGE}:n for the n whose linear form alone raises the loss most, or "
            f"{GAIN}:n for those that, put back one after the other, lower it most."
        },
    )
    overrides: str = field(
        default="{}",
        metadata={"help": "More fields of the config, as JSON: '{\"window_size\": 128}'."},
    )
    dtype: str = field(
        default="float32", metadata={"help": "Of the weights.", "choices": list(DTYPES)}
    )
    transferred: str | None = field(
        default=None,
        metadata={
            "help": f"The folder {TRANSFERRED} of another run of the same --mixer with "
            "--softmax_layers none, in place of attention transfer: a layer learns it alone, "
            "whatever the others are."
        },
    )
    transfer_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Train on so many in attention transfer (default: all); 0: without it, so that "
            "layers are ranked untrained, too."
        },
    )
    transfer_learning_rate: float = field(default=1e-2, metadata={"help": "The highest, there."})
    calibration_tokens: int = field(
        default=32_768,
        metadata={"help": f"By which --softmax_layers {DAMAGE}:n and {GAIN}:n measure layers."},
    )
    calibration_by_recall: bool = field(
        default=False,
        metadata={
            "help": "Whether these are recall texts, and the loss that of what was said above."
        },
    )
    distill_tokens: int | None = field(
        default=None, metadata={"help": "Train on so many in distillation (default: all)."}
    )
    distill_learning_rate: float = field(default=1e-4, metadata={"help": "The highest, there."})
    muon: bool = field(
        default=False,
        metadata={
            "help": "Whether in distillation Muon steps the matrices, and AdamW only what is none."
        },
    )
    temperature: float = field(
        default=1.0, metadata={"help": "By which the logits of both models are divided."}
    )
    cross_entropy: float = field(
        default=0.0,
        metadata={"help": "Weight of the text's own tokens beside the original's; 1: no teacher."},
    )
    hidden_states: float = field(
        default=0.0, metadata={"help": "Weight of the error of hidden states."}
    )
    lora: int = field(
        default=0,
        metadata={
            "help": "Rank of LoRA adapters on attention's projections; 0: train all weights."
        },
    )
    report: bool = field(
        default=False,
        metadata={"help": "Whether to compare all stages with the original: report.md."},
    )

    @property
    def measured(self) -> tuple[str, int] | None:
        """By which measure layers stay softmax, and how many; None: it is known which."""
        measure, colon, number = self.softmax_layers.partition(":")
        return (measure, int(number)) if colon and measure in (DAMAGE, GAIN) else None

    def conversion(self) -> dict[str, Any]:
        """Arguments of `convert`."""
        kept: Any = "none"
        if self.measured is None:
            kept = read_layers(self.softmax_layers)
        return {"mixer": self.mixer, "softmax_layers": kept, **read_fields(self.overrides)}


Arguments = tuple[ConversionArguments, DataArguments, TrainingArguments]


def parse_arguments(args: list[str]) -> Arguments:
    parser = HfArgumentParser(
        (ConversionArguments, DataArguments, TrainingArguments),
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(
        **{
            **TRAINING_DEFAULTS,
            "output_dir": "outputs/converted",
            "learning_rate": None,
            "weight_decay": 0.0,
            "eval_steps": 0.5,
            "save_total_limit": 1,
        }
    )
    try:
        *parsed, unknown = parser.parse_args_into_dataclasses(args, return_remaining_strings=True)
        parsed[0].conversion()
    except (ValueError, ArgumentTypeError) as error:  # from a dataclass that checks itself
        parser.error(str(error))
    if unknown:
        parser.error(f"unknown arguments: {' '.join(unknown)}")
    if parsed[0].muon and parsed[0].lora > 0:
        parser.error("--muon is for all weights, and --lora for adapters: give one of them")
    for name, instead in OF_A_STAGE.items():
        if getattr(parsed[2], name) is not None:
            parser.error(f"--{name} is not for this script; give {instead}")
    return tuple(parsed)


class Stage:
    """A folder with what a stage leaves. stage.json says by which settings, and whether it is done:
    it is read by the run that goes on.
    """

    def __init__(self, training_args: TrainingArguments, name: str, settings: dict[str, Any]):
        self.folder = Path(training_args.output_dir) / name
        self.settings = json.loads(json.dumps(settings))
        self.file = self.folder / "stage.json"
        self.is_done = False
        if self.file.exists():
            found = json.loads(self.file.read_text("utf-8"))
            if found["settings"] != self.settings:
                raise InputError(
                    f"{self.folder} is of a run with other settings: {found['settings']}, and not "
                    f"{self.settings}; give another --output_dir, or delete it"
                )
            self.is_done = found["is_done"]
        elif training_args.process_index == 0:
            self.write(is_done=False)

    def write(self, is_done: bool) -> None:
        """In one step: a run that dies leaves the old file or the new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        content = {"settings": self.settings, "is_done": is_done}
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        part.replace(self.file)


class Text:
    """The blocks to train on and those that are held out, and how bits per byte are measured."""

    def __init__(self, data_args: DataArguments, tokenizer: PreTrainedTokenizerFast, seed: int):
        if tokenizer.eos_token_id is None:
            raise InputError("the model's tokenizer must have an end-of-text token")
        self.documents, held_out = data_args.load(seed)
        self.seed = seed
        self.block_size = data_args.block_size
        self.tokenizer = tokenizer
        self.train: Dataset = data_args.blocks(self.documents, tokenizer, seed)
        self.held_out: Dataset = pack(held_out, tokenizer, self.block_size)
        self.metric = BitsPerByteOfBlocks(tokenizer) if is_byte_level(tokenizer) else None

    def calibration(
        self, num_tokens: int, batch_size: int, by_recall: bool = False
    ) -> list[dict[str, torch.Tensor]]:
        """Batches of about so many tokens, of blocks from all over the text: those that come last
        may be of another kind.

        by_recall: of recall texts in place of it, of which only what was said above has labels.
        """
        count = max(num_tokens // self.block_size, 1)
        blocks = self.train
        if by_recall:
            given = (self.documents, self.tokenizer, self.block_size, count, self.seed)
            blocks = recall_blocks(*given, labels_source=False)
        num_blocks = min(count, len(blocks))
        rows = [blocks[i * len(blocks) // num_blocks] for i in range(num_blocks)]
        return [
            default_data_collator(rows[start : start + batch_size])
            for start in range(0, num_blocks, batch_size)
        ]

    def for_trainer(self, has_metric: bool) -> dict[str, Any]:
        """Arguments of a Trainer."""
        arguments: dict[str, Any] = {
            "train_dataset": self.train,
            "eval_dataset": self.held_out,
            "data_collator": default_data_collator,
            "processing_class": self.tokenizer,
        }
        if has_metric and self.metric is not None:
            arguments["preprocess_logits_for_metrics"] = self.metric.negative_log_likelihood
            arguments["compute_metrics"] = self.metric.compute
        return arguments


def is_byte_level(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether each token stands for bytes of its own."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
    return decoder is not None and decoder["type"] == "ByteLevel"


def load_original(arguments: Arguments) -> PreTrainedModel:
    conversion_args = arguments[0]
    try:
        return read(AutoModelForCausalLM, conversion_args.model, dtype=conversion_args.dtype)
    except (OSError, ValueError) as error:
        raise InputError(f"--model {conversion_args.model}: {error}") from error


def load_stage(folder: Path) -> LinearAttentionForCausalLM:
    return LinearAttentionForCausalLM.from_pretrained(folder, dtype="auto")


# ---- the stages ----


def convert_model(arguments: Arguments, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The first stage."""
    conversion_args, _, training_args = arguments
    options = conversion_args.conversion()
    settings = {"model": conversion_args.model, "dtype": conversion_args.dtype, **options}
    with training_args.main_process_first(desc="converting"):
        stage = Stage(training_args, CONVERTED, settings)
        if not stage.is_done:
            original = load_original(arguments)
            try:
                model, report = convert(original, **options)
            except ValueError as error:
                raise InputError(f"{conversion_args.model} can't be converted: {error}") from error
            model.card_metadata["base_model"] = conversion_args.model
            model.save_pretrained(stage.folder)
            tokenizer.save_pretrained(stage.folder)
            (stage.folder / "report.txt").write_text(f"{report}\n", encoding="utf-8")
            print(report)
            stage.write(is_done=True)
    return stage.folder


def transfer_attention(arguments: Arguments, text: Text, converted: Path) -> Path:
    """The second stage, or what stands for it; then layers that cost too much are put back."""
    conversion_args, _, training_args = arguments
    names = ["transferred", "transfer_tokens", "transfer_learning_rate", "softmax_layers"]
    if conversion_args.measured is not None:
        names += ["calibration_tokens", "calibration_by_recall"]
    stage = Stage(training_args, TRANSFERRED, settings_of(arguments, *names))
    if stage.is_done:
        return stage.folder
    original = load_original(arguments)
    if conversion_args.transferred is not None:
        model = load_transferred(arguments, original)
    else:
        model = load_stage(converted)
        if not new_parameters(model):
            print(f"mixer {conversion_args.mixer}: no layer has anything new, nothing to transfer")
        elif conversion_args.transfer_tokens != 0:
            train_transfer(arguments, text, stage, model, original)
    if conversion_args.measured is not None:
        keep_by_measure(arguments, text, stage, model, original)
    save(training_args, stage, text, model)
    return stage.folder


def distil(arguments: Arguments, text: Text, transferred: Path) -> Path:
    """The third stage."""
    conversion_args, _, training_args = arguments
    names = ("distill_tokens", "distill_learning_rate", "temperature", "cross_entropy")
    settings = settings_of(arguments, *names, "hidden_states", "lora", "muon")
    stage = Stage(training_args, DISTILLED, {"from": transferred.name, **settings})
    if stage.is_done:
        return stage.folder
    model: Any = load_stage(transferred)
    if conversion_args.lora > 0:
        from peft import get_peft_model

        model = get_peft_model(model, lora_config(model, conversion_args.lora))
    stage_args = arguments_of(
        stage,
        training_args,
        text,
        conversion_args.distill_tokens,
        conversion_args.distill_learning_rate,
    )
    options = text.for_trainer(has_metric=True)
    if conversion_args.muon:
        model.to(training_args.device)
        options["optimizers"] = (MuonWithAdamW.of(model, stage_args), None)
    if conversion_args.cross_entropy == 1 and conversion_args.hidden_states == 0:
        trainer = Trainer(model, stage_args, **options)
    else:
        # as one of our models the original runs on the compiled kernels
        teacher = convert(load_original(arguments), softmax_layers="all").model
        trainer = DistillationTrainer(
            model,
            stage_args,
            teacher=teacher,
            temperature=conversion_args.temperature,
            cross_entropy=conversion_args.cross_entropy,
            hidden_states=conversion_args.hidden_states,
            **options,
        )
    train(trainer, stage, text, "loss, nats per token")
    if conversion_args.lora > 0:
        trainer.save_model(str(stage.folder / "adapter"))
        model = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
    save(training_args, stage, text, model)
    return stage.folder


def save(
    training_args: TrainingArguments, stage: Stage, text: Text, model: LinearAttentionForCausalLM
) -> None:
    """By one process; the others wait for it."""
    with training_args.main_process_first(desc="saving"):
        if training_args.process_index == 0:
            model.config.use_cache = True  # the Trainer turned it off
            model.save_pretrained(stage.folder)
            text.tokenizer.save_pretrained(stage.folder)
            stage.write(is_done=True)


def train_transfer(
    arguments: Arguments,
    text: Text,
    stage: Stage,
    model: LinearAttentionForCausalLM,
    original: PreTrainedModel,
) -> None:
    """Trains the model, in place."""
    conversion_args, _, training_args = arguments
    stage_args = arguments_of(
        stage,
        training_args,
        text,
        conversion_args.transfer_tokens,
        conversion_args.transfer_learning_rate,
    )
    stage_args.weight_decay = 0.0  # maps begin near what they should be, not near 0
    trainer = AttentionTransferTrainer(
        model, stage_args, original=original, **text.for_trainer(has_metric=False)
    )
    train(trainer, stage, text, "mean of the layers' relative errors")


def keep_by_measure(
    arguments: Arguments,
    text: Text,
    stage: Stage,
    model: LinearAttentionForCausalLM,
    original: PreTrainedModel,
) -> None:
    """Puts layers back to softmax, in place: those that cost most as linear ones, or help most."""
    conversion_args, _, training_args = arguments
    batches = text.calibration(
        conversion_args.calibration_tokens,
        training_args.per_device_eval_batch_size,
        conversion_args.calibration_by_recall,
    )
    model.to(training_args.device)
    measure, n = conversion_args.measured
    if measure == DAMAGE:
        found = rank_layers(model, batches, original)
        kept = found.worst(n)
    else:
        found = choose_layers(model, batches, n, original)
        kept = found.chosen
    restore_softmax(model, kept, original)
    if training_args.process_index == 0:
        print(f"{found}\nstay softmax: {kept}")
        content = json.dumps({**asdict(found), "stay_softmax": kept}, indent=2)
        (stage.folder / "ranking.json").write_text(content + "\n", encoding="utf-8")


def load_transferred(arguments: Arguments, original: PreTrainedModel) -> LinearAttentionForCausalLM:
    """Another run's model, with this run's softmax layers."""
    conversion_args = arguments[0]
    model = load_stage(Path(conversion_args.transferred))
    wanted = config_for(original.config, **conversion_args.conversion()).layer_types
    here = model.config.layer_types
    restore_softmax(model, [i for i, kind in enumerate(wanted) if kind != here[i]], original)
    return model


# ---- training ----


def settings_of(arguments: Arguments, *names: str) -> dict[str, Any]:
    """What a stage that trains depends on: these of ConversionArguments, and all of the data."""
    conversion_args, data_args, training_args = arguments
    of_trainer = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "seed")
    return {
        **{name: getattr(conversion_args, name) for name in names},
        **{name: getattr(training_args, name) for name in of_trainer},
        **asdict(data_args),
    }


def tokens_per_step(args: TrainingArguments, block_size: int) -> int:
    sequences = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return sequences * block_size


def arguments_of(
    stage: Stage, args: TrainingArguments, text: Text, num_tokens: int | None, learning_rate: float
) -> TrainingArguments:
    """A Trainer's arguments for one stage."""
    args = copy.copy(args)
    args.output_dir = str(stage.folder)
    args.learning_rate = learning_rate
    if num_tokens is not None:
        args.max_steps = max(1, math.ceil(num_tokens / tokens_per_step(args, text.block_size)))
    if last_checkpoint(stage.folder) is not None:
        args.eval_on_start = False  # the checkpoint's log has it
    return args


def train(trainer: Trainer, stage: Stage, text: Text, ylabel: str) -> None:
    """Trains from the stage's last checkpoint on, and leaves metrics.json and loss_curve.png."""
    checkpoint = last_checkpoint(stage.folder)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    history, state = trainer.state.log_history, trainer.state
    evaluated = [entry for entry in history if "eval_loss" in entry]
    if not evaluated or evaluated[-1]["step"] != state.global_step:
        trainer.evaluate()
        evaluated = [entry for entry in history if "eval_loss" in entry]
    if not trainer.is_world_process_zero():
        return
    at = {"after": evaluated[-1]}
    if evaluated[0]["step"] == 0:
        at = {"before": evaluated[0], **at}
    metrics = {
        "steps": state.global_step,
        "train_tokens": state.global_step * tokens_per_step(trainer.args, text.block_size),
        **{
            f"{x}_{when}": entry[x]
            for when, entry in at.items()
            for x in KEPT_METRICS
            if x in entry
        },
    }
    content = json.dumps(metrics, indent=2)
    (stage.folder / "metrics.json").write_text(content + "\n", encoding="utf-8")
    losses = ", ".join(f"{entry['eval_loss']:.3f} {when}" for when, entry in at.items())
    save_loss_curve(
        history, stage.folder / "loss_curve.png", f"{stage.folder.name}: {losses}", ylabel
    )
    print(f"{stage.folder}: {content}")


def report_arguments(arguments: Arguments, *stages: Path) -> ReportArguments:
    """For a comparison of the original with what each stage has left."""
    conversion_args, _, training_args = arguments
    config = AutoConfig.from_pretrained(stages[0])
    return ReportArguments(
        original=conversion_args.model,
        models=[f"{stage.name[2:]}={stage}" for stage in stages],
        output_dir=training_args.output_dir,
        window_size=config.window_size,
        window_sinks=config.window_sinks,
        seed=training_args.seed,
    )


def main(args: list[str]) -> None:
    arguments = parse_arguments(args)
    conversion_args, data_args, training_args = arguments
    set_seed(training_args.seed)
    try:
        tokenizer = read(AutoTokenizer, conversion_args.model)
    except (OSError, ValueError) as error:
        raise InputError(f"--model {conversion_args.model}: no tokenizer: {error}") from error
    text = Text(data_args, tokenizer, training_args.seed)
    converted = convert_model(arguments, tokenizer)
    transferred = transfer_attention(arguments, text, converted)
    distilled = distil(arguments, text, transferred)
    if training_args.process_index != 0:
        return
    print(f"saved the model in {distilled}")
    if conversion_args.report:
        write_report(report_arguments(arguments, converted, transferred, distilled), data_args)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        sys.exit(f"error: {error}")
