# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Runs the native library of ARM here, and compares what it computes with this processor's.

    make arm-check
    python scripts/arm_check.py                       # with the Python that has torch and pytest
    python scripts/arm_check.py --library a.whl       # of a wheel, in place of one that is built
    python scripts/arm_check.py -k "quantized or rms"  # fewer calls, by the names of tests

The tests of the ops run here, on the instruction set "base", and are checked as ever, against
loops in float64. What they ask of the native ops and what these answer is recorded. Then a program
that is a libtorch for nothing else (tests/native/replay.cpp) loads the library for ARM in qemu's
emulator of one process, asks it the same, and compares.

It needs a compiler for ARM and that emulator: of Debian and Ubuntu, the packages
g++-aarch64-linux-gnu and qemu-user-static. What it builds is in build/arm.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from replay_program import build_replay
from sanitize import SUM_OF_MANY_ROWS

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "arm"
COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", EMULATORS[0]: "qemu-user-static"}
SYSTEM = Path("/usr/aarch64-linux-gnu")  # where the compiler's package has ARM's C library
# PyTorch's own loops and compiler call no op, or the same ones again.
LEFT_OUT = ["--ignore", "tests/ops/test_instruction_sets.py"]
LEFT_OUT += ["--ignore", "tests/ops/test_kept_memory.py", "--ignore", "tests/ops/test_loss.py"]
# Its tolerance is for fused multiply-adds, which "base" does not have here.
LEFT_OUT += ["--deselect", f"tests/ops/test_rms_norm.py::{SUM_OF_MANY_ROWS}"]
NOT_THESE = "not chunked and not compile and not opcheck"


def run(*command: object, **environment: str) -> int:
    words = [str(word) for word in command]
    print(shlex.join(words), flush=True)
    return subprocess.run(words, cwd=ROOT, env=os.environ | environment).returncode


def run_or_exit(*command: object, **environment: str) -> None:
    if run(*command, **environment) != 0:
        sys.exit(f"{command[0]} failed, as it says above")


def find_emulator() -> str:
    """Ends the program, and says what to install, where there is no emulator or no compiler."""
    emulator = next(filter(shutil.which, EMULATORS), None)
    missing = [] if shutil.which(COMPILER) else [COMPILER]
    missing += [] if emulator else [EMULATORS[0]]
    if emulator is None or missing:
        names = " and ".join(missing)
        packages = " ".join(PACKAGES[name] for name in missing)
        sys.exit(f"not here: {names}. On Debian and Ubuntu: apt install {packages}")
    return emulator


def build_library() -> Path:
    """The package's library, compiled for ARM."""
    run_or_exit(
        *(sys.executable, "setup.py", "-q", "build_ext"),
        *("--build-lib", BUILT, "--build-temp", BUILT / "objects"),
        CXX=COMPILER,
        _PYTHON_HOST_PLATFORM="linux-aarch64",
        HF_LINEAR_ATTENTION_CUDA_ARCHITECTURES="none",
        HF_LINEAR_ATTENTION_REQUIRE_NATIVE="1",
    )
    return BUILT / "hf_linear_attention" / "_C.so"


def library_of(given: Path) -> Path:
    if given.suffix != ".whl":
        return given
    with zipfile.ZipFile(given) as wheel:
        return Path(wheel.extract("hf_linear_attention/_C.so", BUILT / "of_wheel"))


def record(names: str) -> Path:
    calls = BUILT / "calls.bin"
    path = os.pathsep.join(
        filter(None, [str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH")])
    )
    run_or_exit(
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "recorded_calls"),
        *("-p", "no:cacheprovider", *LEFT_OUT, "-k", f"({names}) and {NOT_THESE}", "tests/ops"),
        PYTHONPATH=path,
        RECORDED_CALLS=str(calls),
        HF_LINEAR_ATTENTION_CPU_ISA="base",
    )
    return calls


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", type=Path, help="of ARM: _C.so, or a wheel that has it")
    parser.add_argument("--calls", type=Path, help="recorded before: build/arm/calls.bin")
    parser.add_argument("-k", default="test", dest="names", help="of tests, as pytest takes them")
    flags = parser.parse_args()
    emulator = find_emulator()
    BUILT.mkdir(parents=True, exist_ok=True)
    library = library_of(flags.library) if flags.library else build_library()
    program = build_replay([COMPILER], BUILT)
    calls = flags.calls or record(flags.names)
    paths = f"{BUILT}:{SYSTEM / 'lib'}"
    failed = run(emulator, "-L", SYSTEM, "-E", f"LD_LIBRARY_PATH={paths}", program, library, calls)
    sys.exit("what ARM computes differs, as it says above" if failed else 0)


if __name__ == "__main__":
    main()
