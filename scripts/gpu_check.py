# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Checks the CUDA kernels on the GPU that is here, and measures them, within ten minutes.

    make gpu-check
    python scripts/gpu_check.py                 # with the Python that has torch

It needs no network: torch, transformers and pytest have to be there, and either the package with
CUDA kernels or nvcc and setuptools, with which it builds the library in place. It runs

1. tests/native/on_gpu.py, delta_on_gpu.py and ops_on_gpu.py, on numbers that are new every time;
2. a part of it in compute-sanitizer: memcheck and racecheck;
3. benchmarks/bench_cuda.py,

prints a table, and writes benchmarks/results/<date>-<device>.json, with the commit. It ends with an
error where there is no GPU, where a check fails, or where compute-sanitizer is missing. Goals that
are missed are no error; the benchmark says which.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# What a process of its own says of torch, the device and the library: this one can't load a library
# that is built only now.
DESCRIBE = """
import json, torch
from hf_linear_attention.ops.backends import backend_report
found = {"torch": torch.__version__, "device": None, "why_not": backend_report()["cuda"]}
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    found |= {
        "device": p.name,
        "capability": [p.major, p.minor],
        "multiprocessors": p.multi_processor_count,
        "memory": p.total_memory,
        "cuda": torch.version.cuda,
    }
print(json.dumps(found))
"""
# Small enough for the sanitizer, which makes kernels a hundred times slower.
SANITIZED = "small_cases or (steps_are and not 128) or masked_nan"
TOOLS = ("memcheck", "racecheck")


class Checks:
    """Runs commands in the time that is left, and remembers how they went."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds
        self.results: dict[str, dict[str, Any]] = {}

    def left(self) -> float:
        return self.end - time.monotonic()

    def run(self, name: str, command: list[Any], environment: dict[str, str], most: float) -> bool:
        """Whether the command worked within `most` seconds and what is left."""
        limit = max(min(most, self.left()), 1)
        words = [str(word) for word in command]
        print(f"\n== {name}: {' '.join(words)}", flush=True)
        start = time.monotonic()
        try:
            code = subprocess.run(words, cwd=ROOT, env=environment, timeout=limit).returncode
            outcome = "passed" if code == 0 else f"failed, exit status {code}"
        except subprocess.TimeoutExpired:
            outcome = f"not finished after {limit:.0f} s"
        except OSError as error:
            outcome = f"not run: {error}"
        self.results[name] = {"outcome": outcome, "seconds": time.monotonic() - start}
        return outcome == "passed"

    def passed(self) -> bool:
        return all(result["outcome"] == "passed" for result in self.results.values())


def describe(environment: dict[str, str]) -> dict[str, Any]:
    """With the package in src where none is installed, as `environment` then says."""
    command = [sys.executable, "-c", DESCRIBE]
    for path in ({}, {"PYTHONPATH": str(ROOT / "src")}):
        environment |= path
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode == 0:
            return json.loads(result.stdout.splitlines()[-1])
    raise SystemExit(f"torch and the package could not be imported:\n{result.stderr}")


def commit() -> str | None:
    """Of the source, marked where files differ from it; None where there is no repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(
            command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
        )
    except OSError:
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def prepare(checks: Checks, environment: dict[str, str]) -> dict[str, Any]:
    """The device, once there are kernels for it; builds them in place where there are none."""
    found = describe(environment)
    if found["device"] is None:
        raise SystemExit(
            f"No check was made: torch {found['torch']} finds no CUDA device here. "
            "This needs an NVIDIA GPU, its driver and a PyTorch for CUDA."
        )
    if found["why_not"] is None:
        return found
    capability = "".join(map(str, found["capability"]))
    environment["PYTHONPATH"] = str(ROOT / "src")
    build = dict(environment, HF_LINEAR_ATTENTION_REQUIRE_NATIVE="1")
    build["HF_LINEAR_ATTENTION_CUDA_ARCHITECTURES"] = f"sm_{capability}"
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    if not checks.run("build", command, build, 300):
        raise SystemExit(f"No check was made: {found['why_not']}, and building kernels failed.")
    found = describe(environment)
    if found["why_not"] is not None:
        raise SystemExit(f"No check was made: {found['why_not']}.")
    return found


def check(checks: Checks, environment: dict[str, str], device: str, results: Path) -> dict:
    """Everything; returns what the benchmark measured."""
    tests = [f"tests/native/{name}_gpu.py" for name in ("on", "delta_on", "ops_on")]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    checks.run("numerics", pytest, environment, 240)

    # Every tensor an allocation of its own, whose bounds memcheck knows.
    own_memory = dict(environment, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    for tool in TOOLS if device == "cuda" else ():
        options = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
        checks.run(tool, [sanitizer, *options, *pytest, "-k", SANITIZED], own_memory, 80)

    results.unlink(missing_ok=True)
    bench = [sys.executable, "benchmarks/bench_cuda.py", "--device", device, "--json", results]
    # The last case that starts in time may take a while, and so do checks before the first.
    budget = max(min(100, checks.left() - 60), 10)
    bench += ["--budget", f"{budget:.0f}"]
    if not checks.run("benchmark", bench, environment, 160):
        return {}
    measured = json.loads(results.read_text())
    results.unlink()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=570, help="for everything")
    parser.add_argument("--seed", type=int, help="of the numbers, to repeat a run")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries this script alone"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory")
    flags = parser.parse_args()
    seed = random.randrange(2**31) if flags.seed is None else flags.seed
    environment = os.environ | {"ON_GPU_SEED": str(seed), "ON_GPU_DEVICE": flags.device}

    checks = Checks(flags.seconds)
    if flags.device == "cuda":
        found = prepare(checks, environment)
    else:
        found = describe(environment) | {"device": "cpu"}
    print(f"{found['device']}, torch {found['torch']}, seed {seed}")
    date = datetime.now(timezone.utc)
    device = re.sub(r"[^a-z0-9]+", "-", found["device"].lower()).strip("-")
    path = flags.results / f"{date:%Y-%m-%d}-{device}.json"
    flags.results.mkdir(parents=True, exist_ok=True)
    measured = check(checks, environment, flags.device, path.with_suffix(".bench.json"))

    document = {
        "bench": "gpu-check",
        "is_full": True,
        "is_complete": checks.passed(),
        "date": date.isoformat(timespec="seconds"),
        "commit": commit(),
        "seed": seed,
        "machine": found,
        "checks": checks.results,
        "measured": measured,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\n{'check':<12}{'seconds':>8}  outcome")
    for name, result in checks.results.items():
        print(f"{name:<12}{result['seconds']:>8.0f}  {result['outcome']}")
    print(f"wrote {path}")
    sys.exit(not checks.passed())


if __name__ == "__main__":
    main()
