# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The command `python -m hf_linear_attention`. Alone it prints which backends run here, and why
others do not. `check MODEL` tests whether a model answers the same with a cache and without, and
with padding; `speedup MODEL` measures the gain of `use_kernels`; `convert MODEL OUT` makes a
linear-attention model of a softmax model of Transformers; `quantize MODEL OUT --bits 4` one with
weights of 4 bits, or 8; `export MODEL OUT` a folder with an ONNX graph; `import MODEL OUT` one of a
checkpoint of flash-linear-attention, and `export-fla MODEL OUT` such a checkpoint of one of ours.
"""

import importlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch
from transformers.utils import HF_MODULES_CACHE

from .fast.linear import product_report, products_in_use
from .fast.quantized import quantized_report
from .ops.backends import FORCED_BACKEND, WHY_NO_NATIVE, backend_report, choose_backend

COMMANDS = {  # what they are given, and where they are
    "check": ("MODEL", ".extras.self_check"),
    "speedup": ("MODEL", ".extras.speedup"),
    "convert": ("MODEL OUT", ".conversion.command"),
    "quantize": ("MODEL OUT --bits 4", ".extras.quantize"),
    "export": ("MODEL OUT", ".to_onnx.command"),
    "import": ("MODEL OUT", ".checkpoints.import_command"),
    "export-fla": ("MODEL OUT", ".checkpoints.export_command"),
}
ENVIRONMENT_PREFIX = "HF_LINEAR_ATTENTION_"


def main() -> None:
    if len(sys.argv) == 1:
        print_report()
    elif sys.argv[1] in ("-h", "--help"):
        print(
            "python -m hf_linear_attention prints what runs here; "
            f"the commands are {usages()}, and each has a --help"
        )
    elif sys.argv[1] in COMMANDS:
        _, module = COMMANDS[sys.argv[1]]
        importlib.import_module(module, __package__).main(sys.argv[2:])
    else:
        sys.exit(f"the commands are {usages()}, got {' '.join(sys.argv[1:])!r}")


def usages() -> str:
    *all_but_one, last = (f"'{name} {given}'" for name, (given, _) in COMMANDS.items())
    return f"{', '.join(all_but_one)} and {last}"


def print_report() -> None:
    print_table(
        {
            "hf-linear-attention": installed_version("hf-linear-attention"),
            "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
            "torch": torch.__version__,
            "transformers": installed_version("transformers"),
            **native_library(),
            "threads": threads(torch.get_num_threads(), cpu_limit()),
            "remote code": remote_code(Path(HF_MODULES_CACHE)),
        }
    )
    why_not = why_compiled_fails()
    print("\nbackends, in order of preference")
    for name, reason in backend_report().items():
        reason = why_not if name == "cpu" and reason is None else reason
        print(f"  {name:<10} {'available' if reason is None else 'not here: ' + reason}")
    print("\nused when none is named")
    for device_type in ("cpu", "cuda"):
        print(f"  {device_type + ' tensors':<13} {default_backend(device_type, why_not)}")
    print("\nproducts with weights on the CPU")
    fails = why_not is not None and any(products_in_use())
    for weights, product in (product_report() | quantized_report()).items():
        print(f"  {weights:<10} {f'none: {why_not}' if fails else product}")
    print("\nenvironment")
    settings = {name: v for name, v in os.environ.items() if name.startswith(ENVIRONMENT_PREFIX)}
    for name, value in sorted(settings.items()):
        print(f"  {name}={value}")
    if not settings:
        print(f"  no {ENVIRONMENT_PREFIX}... variable is set")


def print_table(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


def installed_version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def native_library() -> dict[str, str]:
    """Where the compiled kernels are, which of their instruction sets is active, and what their
    CUDA kernels are for.
    """
    if WHY_NO_NATIVE is not None:
        return {"native library": f"none: {WHY_NO_NATIVE}"}
    from .ops.compiled import library

    try:
        active = library.cpu_instruction_set()
    except RuntimeError as error:
        active = f"none: {error}"
    return {
        "native library": str(library.LIBRARY_PATH),
        "instruction set": f"{active} (built: {', '.join(library.cpu_instruction_sets_built())})",
        "CUDA kernels": ", ".join(library.cuda_architectures()) or "none",
    }


def why_compiled_fails() -> str | None:
    """Why a compiled op that is chosen on the CPU fails when it is called; None where it runs, or
    where none is there to choose.
    """
    if WHY_NO_NATIVE is not None:
        return None
    from .ops.compiled import library

    return library.why_no_op_runs()


def threads(number: int, limit: float | None) -> str:
    """How many torch uses, and fewer where no more than `limit` of them can run at a time."""
    if limit is None or number <= max(1, limit):
        return str(number)
    return (
        f"{number}, but this container has the time of {limit:g} CPUs: threads will wait for each "
        f"other. OMP_NUM_THREADS={max(1, int(limit))} in the environment sets what it has"
    )


def cpu_limit(root: Path = Path("/")) -> float | None:
    """How many CPUs' time the control groups of this process let it use on Linux; None: all.

    Containers set this (docker run --cpus), and neither torch nor OpenMP asks for it. Control
    groups are folders in folders, each with a limit of its own: so many microseconds in a period.
    """
    groups = root / "proc/self/cgroup"
    limits = []
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            top, names = root / "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        here = top / path.lstrip("/")
        for folder in (here, *here.parents):
            files = [folder / name for name in names]
            if all(file.exists() for file in files):
                quota, period = " ".join(file.read_text() for file in files).split()
                limits += [int(quota) / int(period)] if quota not in ("max", "-1") else []
    return min(limits, default=None)


def remote_code(folder: Path) -> str:
    """Where Transformers copies the code of what is loaded with trust_remote_code."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return str(folder)
    return (
        f"none: {folder} can't be written, and trust_remote_code=True copies code there. "
        "HF_MODULES_CACHE in the environment names another folder; after `import "
        "hf_linear_attention` its models load without trust_remote_code"
    )


def default_backend(device_type: str, why_not: str | None) -> str:
    """What tensors on `device_type` get; why_not: compiled code does not run on the CPU."""
    try:
        name = choose_backend(None, device_type).name
    except (RuntimeError, ValueError) as error:
        return f"none: {error}"
    if name == "cpu" and why_not is not None:
        return f"none: {why_not}"
    return name if FORCED_BACKEND is None else f"{name} (forced)"


if __name__ == "__main__":
    main()
