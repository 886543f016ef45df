# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Post-train a model by the rewards of its answers, with TRL's GRPOTrainer: sums, made on the spot.

    python examples/train_grpo.py                        # about ten minutes on two cores
    python examples/train_grpo.py --preset rwkv7 --max_steps 50

A prompt is a few worked sums and one without its result; the reward of an answer is 1 if that is
right. First a model learns from texts of such sums (`--pretrain_steps`), so that some of its
answers are right; then from rewards alone. Each prompt is read once for all of its answers, when
they are generated and when they are learned from. Leaves in --output_dir the model, metrics.json
and rewards.png.
"""

import argparse
import json
import random
from pathlib import Path

import matplotlib
import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed
from trl import GRPOConfig, GRPOTrainer

from hf_linear_attention import (
    DataCollatorWithTrees,
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    SharedPrompts,
)
from hf_linear_attention.model.presets import PRESETS

matplotlib.use("Agg")  # draws without a display
ALPHABET = ["<pad>", "\n", *"0123456789+="]  # an answer ends with its line


class GRPO(SharedPrompts, GRPOTrainer):
    """Whose prompts are read once."""


def tokenizer_of_characters() -> PreTrainedTokenizerFast:
    vocab = {character: number for number, character in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="\n")


def make_sum(rng: random.Random) -> tuple[str, str]:
    """A question and its answer, of two digits."""
    a, b = rng.randrange(10), rng.randrange(10)
    return f"{a}+{b}=", f"{a + b:02}"


def make_prompt(rng: random.Random, num_examples: int) -> tuple[str, str]:
    """Worked sums and a question, and its answer."""
    worked = ["".join(make_sum(rng)) + "\n" for _ in range(num_examples)]
    question, answer = make_sum(rng)
    return "".join(worked) + question, answer


def is_right(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """The rewards."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def pretrain(model: torch.nn.Module, tokenizer, args: argparse.Namespace) -> None:
    """On texts of sums, a few steps."""
    rng = random.Random(args.seed)
    texts = [
        {"input_ids": tokenizer(prompt + answer + "\n")["input_ids"]}
        for prompt, answer in (make_prompt(rng, args.num_examples) for _ in range(2048))
    ]
    arguments = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.pretrain_steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        seed=args.seed,
    )
    Trainer(model, arguments, train_dataset=texts, data_collator=DataCollatorWithTrees()).train()


def draw(steps: list[int], rewards: list[float], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(layout="constrained")
    axes.plot(steps, rewards, alpha=0.3, label="of each step")
    size = max(1, len(rewards) // 10)
    means = [sum(rewards[i : i + size]) / size for i in range(len(rewards) - size + 1)]
    axes.plot(steps[size - 1 :], means, label=f"mean of {size} steps")
    axes.set(xlabel="step of GRPO", ylabel="share of right answers", ylim=(0, 1))
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", default="outputs/grpo")
    parser.add_argument("--preset", default="gated_deltanet", choices=sorted(PRESETS))
    parser.add_argument("--num_examples", type=int, default=16, help="worked sums in a prompt")
    parser.add_argument("--pretrain_steps", type=int, default=60)
    parser.add_argument("--max_steps", type=int, default=120)
    parser.add_argument("--num_generations", type=int, default=8)
    parser.add_argument("--prompts_per_step", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    set_seed(args.seed)
    folder, tokenizer = Path(args.output_dir), tokenizer_of_characters()
    config = LinearAttentionConfig.from_preset(
        args.preset,
        vocab_size=len(ALPHABET),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LinearAttentionForCausalLM(config)
    pretrain(model, tokenizer, args)

    rng = random.Random(args.seed + 1)
    number = args.max_steps * args.prompts_per_step
    prompts = [make_prompt(rng, args.num_examples) for _ in range(number)]
    trainer = GRPO(
        model=model,
        reward_funcs=is_right,
        args=GRPOConfig(
            output_dir=args.output_dir,
            max_steps=args.max_steps,
            per_device_train_batch_size=args.prompts_per_step * args.num_generations,
            num_generations=args.num_generations,
            max_completion_length=4,
            learning_rate=args.learning_rate,
            use_transformers_continuous_batching=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=args.seed,
        ),
        train_dataset=Dataset.from_list([{"prompt": p, "answer": answer} for p, answer in prompts]),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(folder)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    rewards = [log["reward"] for log in logs]
    tenth = max(1, len(rewards) // 10)
    (shared,) = trainer.shared_prompts
    metrics = {
        "first_reward": sum(rewards[:tenth]) / tenth,
        "last_reward": sum(rewards[-tenth:]) / tenth,
        "tokens_read_of_given": shared.tokens_read / shared.tokens_given,
        "rewards": rewards,
    }
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2))
    draw([log["step"] for log in logs], rewards, folder / "rewards.png")
    print(
        f"right answers: {metrics['first_reward']:.2f} at first, {metrics['last_reward']:.2f} at "
        f"last; {metrics['tokens_read_of_given']:.2f} of the tokens of rows were read"
    )


if __name__ == "__main__":
    main()
