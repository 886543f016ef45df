# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Installs a wheel as a user without a compiler does, and trains a small model on its kernels.

    python scripts/try_wheel.py dist/*x86_64.whl
    python scripts/try_wheel.py a.whl --with torch==2.10.0 transformers==5.17.0
    python scripts/try_wheel.py a.whl --python python3.13 --at outputs/wheel   # keep what it makes

It makes a new virtual environment, where PATH has no compiler, and lets pip find torch and
Transformers, in the versions of constraints.txt where --with names none. Then it asks the package
what is there, and trains, generates, saves and loads. Whatever does not run on the compiled kernels
is an error.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ["--constraint", str(ROOT / "constraints.txt")]

FIRST_STEPS = """
import torch
from transformers import AutoModelForCausalLM

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM

torch.manual_seed(0)
config = LinearAttentionConfig.from_preset(
    "gated_deltanet", vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
model = LinearAttentionForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.arange(3, 51).expand(4, 48).contiguous()  # a text that is soon known by heart
for step in range(40):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
model.eval().save_pretrained("model")
loaded = AutoModelForCausalLM.from_pretrained("model").eval()
answer = loaded.generate(tokens[:1, :8], max_new_tokens=40, do_sample=False)
assert torch.equal(answer, tokens[:1]), answer
print("generated what it was trained on:", answer[0, 8:18].tolist(), "...")
"""


def run(command: list, **options) -> str:
    """What it prints, which is shown, too."""
    words = [str(word) for word in command]
    print(shlex.join(words[:1] + [word for word in words[1:] if "\n" not in word]), flush=True)
    result = subprocess.run(words, stdout=subprocess.PIPE, text=True, **options)
    print(result.stdout, end="", flush=True)
    if result.returncode != 0:
        sys.exit(f"{words[0]} failed, as it says above")
    return result.stdout


def try_wheel(wheel: Path, versions: list[str], python: str, folder: Path) -> None:
    """Makes an environment in `folder`, and ends the program where something does not work."""
    here = folder / "venv"
    run([python, "-m", "venv", here])
    inside = {name: v for name, v in os.environ.items() if name not in ("PYTHONPATH", "CXX")}
    inside |= {"PATH": str(here / "bin"), "HF_HUB_OFFLINE": "1"}
    pip = [here / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    run([*pip, *(versions or CONSTRAINTS), wheel.resolve()], env=inside)
    options = {"env": inside | {"HF_LINEAR_ATTENTION_BACKEND": "cpu"}, "cwd": folder}
    report = run([here / "bin" / "python", "-m", "hf_linear_attention"], **options)
    if "cpu tensors   cpu (forced)" not in report:
        sys.exit("the kernels are not there, as it says above")
    run([here / "bin" / "python", "-c", FIRST_STEPS], **options)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--with", nargs="+", default=[], dest="versions", help="as pip takes them")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--at", type=Path, help="a folder, in place of one that is removed")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = flags.at or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try_wheel(flags.wheel, flags.versions, flags.python, folder.resolve())
    print(f"{flags.wheel.name} works")


if __name__ == "__main__":
    main()
