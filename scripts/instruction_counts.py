# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""How many instructions two versions of the native library take for the same calls.

    python scripts/instruction_counts.py OLD NEW            # _C.so, or wheels that have it
    python scripts/instruction_counts.py OLD NEW --isa base --only delta

Times depend on what else a machine does; instructions do not, to the last one. So this is what a
change is held against where machines are shared: it ends with an error where a call takes more
than 2 % more of them. They say nothing of memory and caches: for these there is `make compare`.

The calls are made by the package that is installed here, and recorded. Both libraries compute them
again, in one thread and without torch (tests/native/replay.cpp), under valgrind's callgrind, which
knows no AVX-512: --isa is "avx2" or "base".
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from replay_program import ROOT, build_replay
from torch import Tensor

sys.path.append(str(ROOT / "tests" / "support"))
from hf_linear_attention import (  # noqa: E402
    delta_rule,
    delta_rule_step_,
    elementwise_scan,
    linear_attention,
    linear_attention_step_,
    selective_scan,
    short_convolution,
)
from hf_linear_attention.ops.compiled.linear import linear, many_rows_linear  # noqa: E402
from hf_linear_attention.ops.compiled.quantized_linear import int4_linear, int8_linear  # noqa: E402
from hf_linear_attention.ops.compiled.rms_norm import rms_norm  # noqa: E402
from recorded_calls import Recorder  # noqa: E402

MOST_MORE = 0.02
COUNTED = "*call_kernel*"  # the function of replay.cpp
MAX_BYTES = 1 << 26
# Of a batch, sequence, head, key and value; of products, inputs and outputs.
B, T, H, D = 1, 256, 2, 64
INPUTS, OUTPUTS = 768, 512


# ---- calls ----


def random(*shape: int, dtype: torch.dtype = torch.float32, gradient: bool = False) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(gradient)


def with_gradients(call: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Forward and backward."""
    call(*tensors).sum().backward()


def attention(call: Callable[..., Tensor], dtype: torch.dtype, decays: tuple[int, ...]) -> None:
    q, k, v = (random(B, T, H, D, dtype=dtype, gradient=True) for _ in range(3))
    log_decay = -torch.rand(B, T, H, *decays).requires_grad_()
    with_gradients(call, q, k, v, log_decay)


def of_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    return linear_attention(q, k, v, log_decay, feature_map="elu+1")


def of_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    beta = torch.rand(B, T, H).requires_grad_()
    return delta_rule(q, k, v, beta, log_decay, normalize_qk=True)


def attention_step(rows: int) -> None:
    q, k, v = (random(rows, H, D) for _ in range(3))
    state = torch.zeros(rows, H, D, D), torch.zeros(rows, H, D)
    linear_attention_step_(q, k, v, state, -torch.rand(rows, H), feature_map="elu+1")


def delta_step(rows: int) -> None:
    q, k, v = (random(rows, H, D) for _ in range(3))
    state = torch.zeros(rows, H, D, D)
    delta_rule_step_(q, k, v, torch.rand(rows, H), state, -torch.rand(rows, H))


def convolution(dtype: torch.dtype) -> None:
    x = random(B, T, H * D, dtype=dtype, gradient=True)
    with_gradients(short_convolution, x, random(H * D, 4, gradient=True))


def scan() -> None:
    x, dt = random(B, T, D, gradient=True), torch.rand(B, T, D)
    with_gradients(selective_scan, x, dt, -torch.rand(D, 16), random(B, T, 16), random(B, T, 16))


def elementwise() -> None:
    log_decay = -torch.rand(B, T, H * D)
    with_gradients(elementwise_scan, random(B, T, H * D, gradient=True), log_decay)


def product(call: Callable[..., Tensor], rows: int, dtype: torch.dtype) -> None:
    call(random(rows, INPUTS, dtype=dtype), random(OUTPUTS, INPUTS, dtype=dtype), None)


def quantized_product(bits: int, rows: int, dtype: torch.dtype) -> None:
    """With groups of 32 inputs, and whole numbers where dtype is not float32."""
    call, per_byte = (int8_linear, 1) if bits == 8 else (int4_linear, 2)
    weight = torch.randint(-128, 128, (OUTPUTS, INPUTS // per_byte), dtype=torch.int8)
    scale = torch.rand(OUTPUTS, INPUTS // 32)
    rounds = dtype is not torch.float32
    x = random(rows, INPUTS, dtype=dtype)
    call(x, weight, scale if bits == 8 else scale.t().contiguous(), None, None, rounds)


def norm(dtype: torch.dtype) -> None:
    x, weight = (random(*shape, dtype=dtype, gradient=True) for shape in ((T, INPUTS), (INPUTS,)))
    with_gradients(partial(rms_norm, eps=1e-6), x, weight)


F32, BF16 = torch.float32, torch.bfloat16
CALLS: dict[str, Callable[[], None]] = {
    "linear attention": partial(attention, of_linear_attention, F32, ()),
    "linear attention, bfloat16": partial(attention, of_linear_attention, BF16, ()),
    "linear attention, decays per channel": partial(attention, of_linear_attention, F32, (D,)),
    "linear attention, 4 steps": partial(attention_step, 4),
    "delta rule": partial(attention, of_delta_rule, F32, ()),
    "delta rule, bfloat16, decays per channel": partial(attention, of_delta_rule, BF16, (D,)),
    "delta rule, 4 steps": partial(delta_step, 4),
    "short convolution": partial(convolution, F32),
    "short convolution, bfloat16": partial(convolution, BF16),
    "selective scan": scan,
    "elementwise scan": elementwise,
    "RMSNorm": partial(norm, F32),
    "product of 1 row": partial(product, linear, 1, F32),
    "product of 8 rows": partial(product, linear, 8, F32),
    "product of 32 rows, bfloat16": partial(product, linear, 32, BF16),
    "product of 256 rows, bfloat16": partial(product, many_rows_linear, 256, BF16),
    "product of 1 row, 8 bits": partial(quantized_product, 8, 1, F32),
    "product of 1 row, 8 bits, whole numbers": partial(quantized_product, 8, 1, BF16),
    "product of 1 row, 4 bits, whole numbers": partial(quantized_product, 4, 1, BF16),
    "product of 8 rows, 4 bits": partial(quantized_product, 4, 8, F32),
}


def record(name: str, folder: Path) -> Path:
    """The native calls that one of CALLS makes."""
    torch.manual_seed(0)
    path = folder / f"{name}.bin"
    with path.open("wb") as file, Recorder(file, MAX_BYTES):
        CALLS[name]()
    if path.stat().st_size == 0:
        sys.exit(f"{name}: no native op was called; python -m hf_linear_attention says why")
    return path


# ---- counting ----


def library_of(given: Path, folder: Path) -> Path:
    """Of a wheel, what it has."""
    if given.suffix != ".whl":
        return given.resolve()
    with zipfile.ZipFile(given) as wheel:
        return Path(wheel.extract("hf_linear_attention/_C.so", folder / given.name))


def count(program: Path, library: Path, calls: Path, isa: str) -> int:
    """Instructions in the ops themselves."""
    command = ["valgrind", "--tool=callgrind", f"--toggle-collect={COUNTED}"]
    command += ["--callgrind-out-file=/dev/null", str(program), str(library), str(calls)]
    environment = {"LD_LIBRARY_PATH": str(program.parent), "HF_LINEAR_ATTENTION_CPU_ISA": isa}
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", result.stderr)
    if result.returncode != 0 or found is None:
        sys.exit(f"{library}, {calls.stem}:\n{result.stdout}{result.stderr}")
    return int(found[1])


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("libraries", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--isa", choices=("avx2", "base"), default="avx2")
    parser.add_argument("--only", default="", metavar="TEXT", help="calls with this in their names")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    slower = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        program = build_replay(shlex.split(os.environ.get("CXX", "c++")), folder)
        old, new = (library_of(path, folder) for path in flags.libraries)
        print(f"{'instructions in thousands':44} {'old':>9} {'new':>9} {'new/old':>8}")
        for name in (name for name in CALLS if flags.only in name):
            calls = record(name, folder)
            before, after = (count(program, library, calls, flags.isa) for library in (old, new))
            is_slower = after > (1 + MOST_MORE) * before
            slower += is_slower
            mark = "  <- more" if is_slower else ""
            print(f"{name:44} {before / 1e3:9.0f} {after / 1e3:9.0f} {after / before:8.3f}{mark}")
            sys.stdout.flush()
    if slower:
        sys.exit(f"{slower} calls take more than {MOST_MORE:.0%} more instructions")


if __name__ == "__main__":
    main()
