# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Continue a prompt with a saved model, printing the text as it comes.

    python examples/generate.py outputs/causal_lm --prompt "class Queue:"
    python examples/generate.py outputs/causal_lm/checkpoint-100 --greedy

The folder is all it needs: trust_remote_code=True takes the model's code from there.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    TextStreamer,
    pipeline,
    set_seed,
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("model", type=Path, help="folder of a saved model, or of a checkpoint")
    option("--prompt", default="class Queue:\n", help="the text to continue")
    option("--max_new_tokens", type=int, default=200, help="default: 200")
    option("--greedy", action="store_true", help="always the likeliest token; default: sample")
    option("--temperature", type=float, default=0.7, help="of the sampling; default: 0.7")
    option("--top_k", type=int, default=50, help="of the sampling; default: 50")
    option("--top_p", type=float, default=0.95, help="of the sampling; default: 0.95")
    option("--repetition_penalty", type=float, default=1.0, help="default: 1.0, none")
    option("--seed", type=int, default=0, help="of the sampling; default: 0")
    option("--device", help="cpu, cuda, ...; default: an accelerator where there is one")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"there is no saved model in {args.model}")
    return args


@torch.no_grad()
def cache_size(model: PreTrainedModel, token_ids: list[int]) -> int:
    """Bytes that the model remembers of these tokens, whatever their number."""
    inputs = torch.tensor([token_ids], device=model.device)
    return model(inputs, use_cache=True, logits_to_keep=1).past_key_values.nbytes


def main() -> None:
    args = parse_arguments()
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=True)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device=args.device)

    sampling = {}
    if not args.greedy:
        sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    start = time.perf_counter()
    [output] = generator(
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        do_sample=not args.greedy,
        repetition_penalty=args.repetition_penalty,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        return_tensors=True,
        **sampling,
    )
    seconds = time.perf_counter() - start

    token_ids = output["generated_token_ids"]
    num_prompt = len(tokenizer(args.prompt)["input_ids"])
    num_new = len(token_ids) - num_prompt
    print(
        f"\n{num_new} tokens in {seconds:.2f} s, {num_new / seconds:.0f} tokens/s; cache: "
        f"{cache_size(model, token_ids[:num_prompt]):,} bytes after {num_prompt} tokens, "
        f"{cache_size(model, token_ids):,} bytes after {len(token_ids)}"
    )


if __name__ == "__main__":
    main()
