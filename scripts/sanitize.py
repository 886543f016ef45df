# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Looks for memory errors, undefined behaviour and races in the kernels and their bindings.

    make sanitize
    python scripts/sanitize.py                      # with the Python that has torch and pytest
    python scripts/sanitize.py address -k delta     # one part, and options for pytest

address: builds the library with the compiler's checks of addresses and undefined behaviour, and
         runs the tests of the ops (tests/ops) on it, for the best instruction set that is here,
         but those of PyTorch's own loops and compiler.
threads: builds tests/native/threads.cpp, which calls every kernel on several threads and in teams,
         with the compiler's check of threads. PyTorch's own threads would hide ours from it.
emulated: builds tests/native/checked, which calls the CUDA kernels in the emulator under checks of
         races, alignment, and memory next to tensors, with cases that `make test` leaves out.

It needs gcc or clang on Linux, and ends with an error where one of them finds something. What it
builds is in build/sanitized; an unoptimised library, which the compiler makes in a quarter of the
time.
"""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "sanitized"
PACKAGE = "hf_linear_attention"
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
ADDRESS = "-fsanitize=address,undefined"
# One instruction set is enough, and PyTorch's own loops and compiler take most of the time.
# What of memory stays in the process is another question with the checks' own allocator.
LEFT_OUT = ["--ignore", "tests/ops/test_instruction_sets.py"]
LEFT_OUT += ["--ignore", "tests/ops/test_kept_memory.py"]
# Its tolerance is for fused multiply-adds, which -O0 does not make.
SUM_OF_MANY_ROWS = "test_values_and_gradients_are_those_of_transformers[shape2-dtype0]"
LEFT_OUT += ["--deselect", f"tests/ops/test_rms_norm.py::{SUM_OF_MANY_ROWS}"]
# The check ends the process where memory is asked for that no machine has.
NO_SUCH_MEMORY = "test_memory_that_there_is_not_is_an_error_of_the_op"
LEFT_OUT += ["--deselect", f"tests/ops/test_ops.py::{NO_SUCH_MEMORY}"]
LEFT_OUT += ["-k", "not chunked and not compile and not opcheck"]
OPTIONS = {
    # Python and torch keep what they have until the process ends. Frames that outlive their
    # functions are not asked for: before GCC 14, vectors of 64 bytes do not fit there (its bug
    # 110027), and the process dies.
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def run(*command: object, **environment: str) -> None:
    words = [str(word) for word in command]
    print(shlex.join(words), flush=True)
    result = subprocess.run(words, cwd=ROOT, env=os.environ | OPTIONS | environment)
    if result.returncode != 0:
        sys.exit(f"{words[0]} failed, as it says above (exit status {result.returncode})")


def check_addresses(pytest_flags: list[str]) -> None:
    """Tests of the ops on a library that checks its memory."""
    copy = BUILT / PACKAGE
    shutil.rmtree(copy, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "src" / PACKAGE, copy, ignore=ignored)
    build = [sys.executable, "setup.py", "build_ext", "--build-lib", BUILT]
    run(
        *build,
        "--build-temp",
        BUILT / "objects",
        CXXFLAGS=f"-O0 -g1 -fno-sanitize-recover=all {ADDRESS}",
        LDFLAGS=ADDRESS,
        HF_LINEAR_ATTENTION_CUDA_ARCHITECTURES="none",
        HF_LINEAR_ATTENTION_REQUIRE_NATIVE="1",
    )
    run(
        *[sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"],
        *["--numprocesses", os.cpu_count(), "--dist", "worksteal"],
        *[*LEFT_OUT, *pytest_flags, "tests/ops"],
        PYTHONPATH=str(BUILT),
        OMP_NUM_THREADS="2",
        # Checks that are in a library have to come before all others, and catch their exceptions.
        LD_PRELOAD=" ".join(map(runtime, ("libasan.so", "libubsan.so", "libstdc++.so.6"))),
    )


def runtime(library: str) -> str:
    """The path of one of the compiler's libraries."""
    command = [*COMPILER, f"-print-file-name={library}"]
    return subprocess.check_output(command, text=True).strip()


def check_threads(_: list[str]) -> None:
    """Every kernel on several threads, in a program without PyTorch."""
    cpu = ROOT / "csrc" / "cpu"
    sources = [*cpu.rglob("*_isa.cpp"), cpu / "dispatch.cpp", cpu / "expert_linear.cpp"]
    sources += [ROOT / "csrc" / "torch" / "team.cpp", ROOT / "tests" / "native" / "threads.cpp"]
    objects = BUILT / "threads"
    objects.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c++17", "-O1", "-g1", "-fsanitize=thread", "-pthread", f"-I{ROOT / 'csrc'}"]
    flags += ["-fno-math-errno", "-fno-trapping-math", "-DHFLA_ISA=base"]

    def compile_one(source: Path) -> Path:
        target = objects / ("-".join(source.relative_to(ROOT).with_suffix("").parts) + ".o")
        run(*COMPILER, *flags, "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        made = list(pool.map(compile_one, sources))
    program = objects / "threads"
    run(*COMPILER, *flags, *made, "-o", program)
    # Its own memory has to be where it looks for it, which some kernels place at random.
    run("setarch", platform.machine(), "--addr-no-randomize", program)


def check_emulated(_: list[str]) -> None:
    """The CUDA kernels, emulated."""
    directory = ROOT / "tests" / "native" / "checked"
    sources = [*(ROOT / "csrc" / "cuda").rglob("*.cu"), ROOT / "csrc" / "cuda" / "kernels.cpp"]
    objects = BUILT / "emulated"
    objects.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c++17", "-O1", "-g1", "-fsanitize=thread,alignment", f"-I{ROOT / 'csrc'}"]
    flags.append("-DCHECK_ALL")

    def compile_one(source: Path) -> Path:
        target = objects / f"{source.parent.name}-{source.name}.o"
        run(*COMPILER, *flags, "-x", "c++", "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        made = list(pool.map(compile_one, [*sources, directory / "checked.cpp"]))
    program = objects / "checked"
    run(*COMPILER, *flags, *made, "-o", program)
    # Most races that it reports are those that it looks for, where a barrier was left out.
    every = "suppress_equal_stacks=0:suppress_equal_addresses=0:symbolize=0:exitcode=0"
    start = ["setarch", platform.machine(), "--addr-no-randomize", program]
    for what in ("kernels", "fragments"):
        run(*start, what, TSAN_OPTIONS=every, UBSAN_OPTIONS="")


PARTS: dict[str, Callable[[list[str]], None]] = {
    "address": check_addresses,
    "threads": check_threads,
    "emulated": check_emulated,
}


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS), help="by default all")
    flags, pytest_flags = parser.parse_known_args()
    unknown = set(flags.parts) - set(PARTS)
    if unknown:
        parser.error(f"parts must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    for name in flags.parts or PARTS:
        start = time.perf_counter()
        PARTS[name](pytest_flags)
        print(f"{name}: nothing found, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
