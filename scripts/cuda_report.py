# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Compiles the CUDA kernels and prints what each takes of a multiprocessor, on no GPU.

    python scripts/cuda_report.py                 # every architecture
    python scripts/cuda_report.py sm_90          # some
    python scripts/cuda_report.py --dtypes bf16  # of some dtypes
    python scripts/cuda_report.py --keep cubins  # leaves what it compiled there, for cuda_sass.py

Ends with an error if a kernel doesn't compile or spills registers.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

CSRC = Path(__file__).resolve().parent.parent / "csrc"
# The last is PTX, which a driver compiles for what comes after: it has no numbers here.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "compute_80")


# What a kernel asks for in shared memory when it is launched: in C++, from its template arguments.
# Other kernels ask for none. It depends on the tile, and for some on the head's size.
HEAD_DIM = 128
SHARED_MEMORY = {
    r"walk_kernel<(.*)>": "Walker<{}>::kSharedBytes",
    r"step_kernel<[^,]*, (.*)>": "step_shared_bytes<{}>(problem)",
    r"delta_step_kernel<[^,]*, (.*)>": "delta_step_shared_bytes(delta_problem, {})",
    r"delta_(?:outputs|states|gradients)_kernel<(.*)>": "delta_walk_bytes<{}>(problem.K)",
    r"delta_fixed_size_prepare_kernel<([^,]*),.*>": (
        "FixedSizePrepareShared<{}>(SharedCarver(nullptr)).bytes"
    ),
    r"delta_fixed_size_outputs_kernel<([^,]*),.*>": "FixedSizeShared<{}>::kBytes",
    r"delta_fixed_size_states_kernel<(.*)>": "2 * StateWalkStage<{}>::kBytes",
    r"delta_fixed_size_gradients_kernel<(.*)>": "BackShared<{}>::kBytes",
    r"delta_fixed_size_token_gradients_kernel<(.*)>": (
        "GradientShared<{}>(SharedCarver(nullptr)).bytes"
    ),
    r"delta_prepare_kernel<(.*)>": "PrepareShared<{}>(SharedCarver(nullptr)).bytes",
    r"delta_token_gradients_kernel<(.*)>": "TokenGradientsShared<{}>(SharedCarver(nullptr)).bytes",
}
PROGRAM = """
#include <cstdio>
#include "cuda/delta_rule/table.cuh"
#include "cuda/linear_attention/table.cuh"
using namespace hfla;
using namespace hfla::cuda;
using __half = Float16;  // its name where nvcc compiles
int main() {
  LinearAttentionStep problem{};
  problem.K = problem.V = %d;
  DeltaRuleStep delta_problem{};
  delta_problem.K = problem.K;
  for (long bytes : {%s}) std::printf("%%ld\\n", bytes);
}
"""


class Kernel(NamedTuple):
    """What ptxas says of one kernel."""

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None)


def compile_one(nvcc: str, source: Path, architecture: str, directory: Path) -> str:
    """Compiles for one architecture and returns what the compiler printed."""
    virtual = architecture.replace("sm_", "compute_")
    name = "-".join(source.relative_to(CSRC).parts)
    suffix = ".cubin" if architecture.startswith("sm_") else ".ptx"
    target = directory / f"{name}.{architecture}{suffix}"
    # for the device alone: compiling for the host takes a fifth of the time
    kind = suffix.replace(".", "-")
    command = [nvcc, "-std=c++17", "-O3", f"-I{CSRC}", "-Xptxas=-v", kind, source, "-o", target]
    command.append(f"-gencode=arch={virtual},code={architecture}")
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{source.name} does not compile for {architecture}:\n{result.stderr}")
    return result.stderr


def demangle(names: list[str]) -> list[str]:
    if not names or not shutil.which("c++filt"):
        return names
    text = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True).stdout
    without_parameters = (re.sub(r"\(hfla[^()]*\)$", "", line) for line in text.splitlines())
    return [re.sub(r"^void |hfla::(cuda::)?", "", line) for line in without_parameters]


def parse(text: str) -> list[Kernel]:
    """Kernels in what `nvcc -Xptxas=-v` prints."""
    pattern = re.compile(
        r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\s+ptxas info\s*: Used (\d+) registers"
    )
    rows = pattern.findall(text)
    names = demangle([row[0] for row in rows])
    return [
        Kernel(name, int(registers), int(stack), int(stores), int(loads))
        for name, (_, stack, stores, loads, registers) in zip(names, rows, strict=True)
    ]


def shared_memory(names: list[str]) -> dict[str, int]:
    """Bytes by kernel, computed by the code that launches them, on the host."""
    expressions = {}
    for name in names:
        for pattern, expression in SHARED_MEMORY.items():
            if match := re.fullmatch(pattern, name):
                expressions[name] = f"long({expression.format(match[1])})"
    if not expressions:
        return {}
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    with tempfile.TemporaryDirectory() as directory:
        source, program = Path(directory) / "shared.cpp", Path(directory) / "shared"
        source.write_text(PROGRAM % (HEAD_DIM, ", ".join(expressions.values())))
        subprocess.run([*compiler, "-std=c++17", f"-I{CSRC}", source, "-o", program], check=True)
        lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return dict(zip(expressions, map(int, lines.split()), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("architectures", nargs="*", default=ARCHITECTURES)
    parser.add_argument("--dtypes", nargs="+", help="names of files: f32, bf16, f16")
    parser.add_argument("--keep", type=Path, help="a directory for the compiled files")
    options = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        raise SystemExit("nvcc is neither on PATH nor in CUDA_HOME")
    sources = sorted((CSRC / "cuda").rglob("*.cu"))
    if options.dtypes is not None:
        sources = [source for source in sources if source.stem in options.dtypes]
    jobs = [(source, name) for name in options.architectures for source in sources]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        outputs = pool.map(lambda job: compile_one(nvcc, *job, directory), jobs)
        reports = {job: parse(text) for job, text in zip(jobs, outputs, strict=True)}

    shared = shared_memory(sorted({k.name for kernels in reports.values() for k in kernels}))
    print(f"Shared memory of a step: for heads of {HEAD_DIM} features")
    print(f"{'arch':<9} {'registers':>9} {'shared':>7} {'stack':>6} {'spilled':>8}  kernel")
    spilled = False
    for (_, architecture), kernels in reports.items():
        for kernel in kernels:
            spills = kernel.spill_stores + kernel.spill_loads
            spilled |= spills > 0
            bytes_shared = shared.get(kernel.name, 0)
            numbers = f"{kernel.registers:>9} {bytes_shared:>7} {kernel.stack:>6} {spills:>8}"
            print(f"{architecture:<9} {numbers}  {kernel.name}")
    if spilled:
        raise SystemExit("a kernel spills registers")


if __name__ == "__main__":
    main()
