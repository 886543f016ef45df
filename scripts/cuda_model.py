# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Estimates how long the CUDA kernels take, on no GPU: a tool for choosing between designs.

    python scripts/cuda_model.py                          # H100, H200, A100, B200
    python scripts/cuda_model.py --gpu H200 --kernels     # one, and a line for every launch
    python scripts/cuda_model.py --cubins build/cubins    # compiled by cuda_report.py --keep
    python scripts/cuda_model.py --calibrate figures.json # other constants than those below

Nothing here is measured. From the launchers come blocks, threads and shared memory of each launch
(cuda_plan.cpp); from the emulator, what a block loads, stores and multiplies; from the machine code
(cuda_sass.py), how many instructions stand beside each of these, and how many loads are on their
way at once. A launch then takes the longest of

    latency   a block alone: its loads' rounds, its barriers, its warps' instructions one by one
    issue     all instructions of the blocks that share a multiprocessor
    tensor    all products on its tensor cores
    shared    all bytes through its shared memory
    memory    bytes that no block before has touched, from memory; or all, from the L2 cache

times its waves, and the time that a launch itself takes. The floor is what it takes to read the
inputs and to write the results once. Instructions are by estimate within 40 %, and so are times.

Needs nvcc and nvdisasm, as cuda_sass.py, and a C++ compiler.
"""

import argparse
import functools
import json
import math
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import cuda_sass
from cuda_report import CSRC, compile_one, demangle, find_nvcc

ROOT = CSRC.parent


@dataclass(frozen=True)
class Gpu:
    """What the estimate knows of a GPU: by its data sheet, but for what is assumed below."""

    architecture: str  # whose machine code it runs
    multiprocessors: int
    gigahertz: float
    memory: float  # bytes per second
    cache: float  # bytes per second, from the second-level cache
    block_shared: int  # bytes, at most
    shared: int  # bytes of a multiprocessor
    # Of an mma of 16 x 8 x 16 in bfloat16, or 16 x 8 x 8 in TF32, on one of four tensor cores.
    product_cycles: float
    # Assumed, until a GPU says otherwise.
    efficiency: float = 0.9  # of memory
    load_ns: float = 500  # from the first of a round of loads to its use
    barrier_cycles: float = 40
    alone_cycles: float = 2.5  # between instructions of a warp that has a scheduler to itself
    issue_efficiency: float = 0.8
    launch_us: float = 2  # one after the other, in a graph


# Products are mma.sync's: from H100 on, the newer instructions are faster.
GPUS = {
    "A100": Gpu("sm_80", 108, 1.41, 2.04e12, 4.0e12, 163 << 10, 164 << 10, 8),
    "H100": Gpu("sm_90", 132, 1.75, 3.35e12, 5.5e12, 227 << 10, 228 << 10, 6.5),
    "H200": Gpu("sm_90", 132, 1.75, 4.80e12, 5.5e12, 227 << 10, 228 << 10, 6.5),
    "B200": Gpu("sm_100", 148, 1.85, 8.00e12, 10.0e12, 227 << 10, 228 << 10, 6.5),
}
REGISTERS, THREADS, BLOCKS, SCHEDULERS = 65536, 2048, 32, 4  # of a multiprocessor
SHARED_BYTES_PER_CYCLE = 128
SIZES = [(8, 16, 4096, 64), (1, 8, 16384, 64), (4, 16, 2048, 128), (1, 32, 32768, 128)]  # B H T D
DELTA_SIZES = [(1, 16, 8192, 128)]  # gated, B, H, T, D
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SOURCES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
OPS = {"linear_attention": SIZES, "delta_rule": DELTA_SIZES}
# Tensors that are read and written once: q, k, v, y; and again with dy, for dq, dk, dv.
TENSORS = {"forward": 4, "backward": 7}


class Launch(NamedTuple):
    """One launch, by what cuda_plan.cpp prints of it; counts are per block."""

    kernel: str
    blocks: int
    threads: int
    shared: int
    rounds: float  # through the barrier that is passed most often: a block's chunks
    barriers: float  # counted per thread, as all that follow
    shuffles: float
    products: float
    operand_loads: float
    copies: float  # asynchronous loads, past the registers
    wide_copies: float  # of 16 bytes
    loads: float  # of any kind
    loaded: float  # bytes
    stores: float
    stored: float
    shared_accesses: float
    shared_bytes: float
    unique: float  # bytes of device memory that no other block has touched before


class Code(NamedTuple):
    """What the estimate needs of a kernel's machine code."""

    registers: int
    per_product: float  # instructions in loops that multiply, for each: in the best of them
    per_load: float  # instructions in loops that load, for each: in the loop in the middle
    per_copy: float  # in loops that copy, and in those that convert 16 bytes in place, likewise
    beside: int  # other instructions in a chunk's loop
    stores_beside: int  # to device memory, among them; of all feature maps, of which one is taken
    products_beside: int
    copies_beside: int  # of 16 bytes; where there are any, a chunk's code has no alternatives
    loads_ahead: int
    copies_ahead: bool  # copies are on their way while products are taken


class Estimate(NamedTuple):
    """Of one launch. Times in seconds, by what limits them."""

    launch: Launch
    resident: int  # blocks on a multiprocessor
    waves: float
    instructions: float  # of a block, by warp
    limits: dict[str, float]
    total: float

    @property
    def limit(self) -> str:
        return max(self.limits, key=self.limits.__getitem__)


# ---- from the machine code ----

ANY_STORE = r"STG\."


def read_code(code: list[cuda_sass.Instruction]) -> Code:
    """A kernel's numbers: of its innermost loops, and of the smallest with all products and with
    barriers, which is a chunk's; without one, of the whole.
    """
    spans = sorted(set(cuda_sass.branches_back(code)), key=lambda s: s[1] - s[0])
    bodies = {s: [i for i in code if s[0] <= i.address <= s[1]] for s in spans}

    def number(span: tuple[int, int], pattern: str) -> int:
        return cuda_sass.count(bodies[span], pattern)

    products = cuda_sass.count(code, cuda_sass.PRODUCT)
    chunks = [s for s in spans if number(s, r"BAR\.") and number(s, cuda_sass.PRODUCT) == products]
    first, last = chunks[0] if chunks else (code[0].address, code[-1].address)
    chunk = [i for i in code if first <= i.address <= last]
    innermost = [
        s
        for s in spans
        if first <= s[0]
        and s[1] <= last
        and not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)
    ]
    multiplying = [s for s in innermost if number(s, cuda_sass.PRODUCT)]
    others = [s for s in innermost if s not in multiplying]
    loading = [s for s in others if number(s, cuda_sass.LOAD)]
    copying = [s for s in others if number(s, cuda_sass.WIDE_COPY)]
    converting = [
        s
        for s in others
        if number(s, cuda_sass.WIDE_SHARED_LOAD)
        and number(s, cuda_sass.WIDE_SHARED_STORE)
        and s not in loading
    ]

    def per_one(spans: list[tuple[int, int]], pattern: str) -> float:
        each = sorted(len(bodies[s]) / number(s, pattern) for s in spans)
        return each[len(each) // 2] if each else 0

    # Where a chunk is no loop, its copies are waited for in those that multiply some of it.
    waiting = [bodies[s] for s in spans if number(s, r"BAR\.") and number(s, cuda_sass.PRODUCT)]
    beside = [i for i in chunk if not any(s <= i.address <= e for s, e in innermost)]
    unrolled = [number(s, cuda_sass.LOAD) for s in loading]  # where loads are narrow
    return Code(
        registers=1 + max(cuda_sass.highest_register(i) for i in code),
        per_product=min(
            (len(bodies[s]) / number(s, cuda_sass.PRODUCT) for s in multiplying), default=1
        ),
        per_load=per_one(loading, cuda_sass.LOAD) or 1,
        per_copy=per_one(copying, cuda_sass.WIDE_COPY)
        + per_one(converting, cuda_sass.WIDE_SHARED_STORE),
        beside=len(beside),
        stores_beside=cuda_sass.count(beside, ANY_STORE),
        products_beside=cuda_sass.count(beside, cuda_sass.PRODUCT),
        copies_beside=cuda_sass.count(beside, cuda_sass.WIDE_COPY),
        loads_ahead=max(cuda_sass.loads_in_flight(code, cuda_sass.LOAD), min(unrolled, default=1)),
        copies_ahead=any(map(cuda_sass.copies_are_ahead, [chunk] if chunks else waiting)),
    )


# ---- the estimate ----


def resident_blocks(launch: Launch, registers: int, gpu: Gpu) -> int:
    """How many blocks a multiprocessor has at once."""
    warps = math.ceil(launch.threads / 32)
    registers_of_warp = math.ceil(registers * 32 / 256) * 256
    limits = [BLOCKS, THREADS // launch.threads, REGISTERS // (registers_of_warp * warps)]
    limits.append(gpu.shared // (launch.shared + 1024))  # of which the system takes one KB
    return max(1, min(limits))


def estimate(launch: Launch, code: Code, gpu: Gpu) -> Estimate:
    """The time of one launch."""
    warps = math.ceil(launch.threads / 32)
    resident = resident_blocks(launch, code.registers, gpu)
    at_once = gpu.multiprocessors * resident
    together = min(resident, math.ceil(launch.blocks / gpu.multiprocessors))
    waves = launch.blocks / at_once
    times = max(1, math.floor(waves)) + (1 if waves > 1 and waves % 1 > 0 else 0)

    # By warp, of a block.
    products, stores = launch.products / 32, launch.stores / 32
    loads, copies = (launch.loads - launch.copies) / 32, launch.wide_copies / 32
    times_beside = max(1, launch.rounds) * warps
    # No oftener than what is done there: of a walk that only writes, half is passed over.
    limits = [(stores, code.stores_beside)]
    if code.copies_beside:
        limits = [(copies, code.copies_beside), (products, code.products_beside)]
    times_beside = min([times_beside, *(done / beside for done, beside in limits if beside)])
    instructions = times_beside * code.beside + loads * code.per_load
    instructions += max(0, products - times_beside * code.products_beside) * code.per_product
    instructions += max(0, copies - times_beside * code.copies_beside) * code.per_copy

    # Cycles of a block, alone on its multiprocessor; then of all that share one.
    latency = gpu.load_ns * gpu.gigahertz
    waiting = loads / warps / code.loads_ahead * latency
    copying = launch.rounds * latency if launch.copies else 0  # all of a chunk's at once
    working = instructions / warps * gpu.alone_cycles
    working += launch.barriers / launch.threads * gpu.barrier_cycles
    cycles = {
        "latency": (
            max(copying, waiting + working) if code.copies_ahead else copying + waiting + working
        ),
        "issue": together * instructions / SCHEDULERS / gpu.issue_efficiency,
        "tensor": together * products / SCHEDULERS * gpu.product_cycles,
        "shared": together * launch.shared_bytes / SHARED_BYTES_PER_CYCLE,
    }
    limits = {name: times * x / gpu.gigahertz / 1e9 for name, x in cycles.items()}
    moved = launch.blocks * (launch.loaded + launch.stored) / gpu.cache
    new = launch.blocks * launch.unique / (gpu.memory * gpu.efficiency)
    limits["memory"] = max(moved, new)
    total = max(limits.values()) + gpu.launch_us * 1e-6
    return Estimate(launch, resident, waves, instructions, limits, total)


def floor(size: tuple[int, ...], dtype: str, passes: Iterable[str], gpu: Gpu) -> tuple[int, float]:
    """The bytes of inputs and results, and how long the memory takes for them at its full speed."""
    bytes_ = sum(TENSORS[name] for name in passes) * math.prod(size) * BYTES[dtype]
    return bytes_, bytes_ / gpu.memory


# ---- from launchers and compilers ----


def build_plan(directory: Path, op: str, dtypes: Iterable[str]) -> Path:
    """cuda_plan.cpp as a program, with an op's kernels, whose addresses nm prints. What the
    directory has of the objects is not compiled again.
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++17", "-O1", "-fno-pie", "-fsanitize=thread", f"-I{CSRC}"]
    kernels = [CSRC / "cuda" / op / f"{SOURCES[dtype]}.cu" for dtype in dtypes]
    objects = []
    for source in [*kernels, CSRC / "cuda" / "kernels.cpp", ROOT / "scripts" / "cuda_plan.cpp"]:
        target = directory / f"{source.parent.name}-{source.name}.o"
        if not target.exists():
            subprocess.run([*compiler, *flags, "-x", "c++", "-c", source, "-o", target], check=True)
        objects.append(target)
    program = directory / "cuda_plan"
    # Kernels of other dtypes and ops are not there, and not called.
    link = [*compiler, "-no-pie", "-Wl,--unresolved-symbols=ignore-in-object-files"]
    subprocess.run([*link, *objects, "-o", program], check=True)
    return program


@functools.cache
def plan(
    program: Path,
    op: str,
    dtype: str,
    name: str,
    size: tuple[int, ...],
    multiprocessors: int,
    shared: int,
) -> list[Launch]:
    """The launches of a pass."""
    command = [program, op, dtype, name, *map(str, (*size, multiprocessors, shared))]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    symbols = kernel_names(program)
    launches = []
    for line in printed.splitlines():
        address, blocks, threads, shared, *counts = line.split()
        kernel = symbols[int(address, 16)]
        launches.append(Launch(kernel, int(blocks), int(threads), int(shared), *map(float, counts)))
    return launches


def kernel_names(program: Path) -> dict[int, str]:
    """By address, as nvcc has them."""
    text = subprocess.run(["nm", program], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in text.splitlines() if "_kernel" in line]
    names = demangle([row[2] for row in rows])
    return {
        int(row[0], 16): name.replace("_Float16", "__half")
        for row, name in zip(rows, names, strict=True)
    }


@functools.cache
def codes(directory: Path, op: str, dtype: str, architecture: str) -> dict[str, Code]:
    """An op's kernels of a dtype, by name, from a directory of compiled files, or compiled."""
    disassembler = cuda_sass.find_disassembler()
    if disassembler is None:
        raise SystemExit("nvdisasm is neither in CUDA_HOME nor on PATH nor among pip's packages")
    pattern = f"*{op}-{SOURCES[dtype]}.cu.{architecture}.cubin"
    if not list(directory.glob(pattern)):
        nvcc = find_nvcc()
        if nvcc is None:
            raise SystemExit("nvcc is neither on PATH nor in CUDA_HOME")
        source = CSRC / "cuda" / op / f"{SOURCES[dtype]}.cu"
        compile_one(nvcc, source, architecture, directory)
    found = {}
    for cubin in directory.glob(pattern):
        for name, code in cuda_sass.disassemble(disassembler, cubin).items():
            found[name] = read_code(code)
    return found


# ---- the tables ----


def rows_of(
    program: Path, cubins: Path, op: str, dtype: str, size: tuple[int, ...], gpu: Gpu
) -> dict[str, list[Estimate]]:
    """The estimates of all launches of each pass."""
    known = codes(cubins, op, dtype, gpu.architecture)
    return {
        name: [
            estimate(launch, known[launch.kernel], gpu)
            for launch in plan(
                program, op, dtype, name, size, gpu.multiprocessors, gpu.block_shared
            )
        ]
        for name in TENSORS
    }


HEADER = (
    "| GPU | B, H, T, D | dtype | pass | bytes | floor, ms | instructions per chunk "
    "| blocks, waves | estimate, ms | / floor | limited by |\n" + "|---" * 11 + "|"
)


def row(name: str, gpu: Gpu, size, dtype: str, passes: str, estimates: list[Estimate]) -> str:
    """A line of the table: of all launches of a pass; blocks and so on, of the longest."""
    longest = max(estimates, key=lambda e: e.total)
    total = sum(e.total for e in estimates)
    bytes_, least = floor(size, dtype, passes.split(" + "), gpu)
    by_limit: dict[str, float] = {}
    for e in estimates:
        by_limit[e.limit] = by_limit.get(e.limit, 0) + e.total
    limit = max(by_limit, key=by_limit.__getitem__)
    return (
        f"| {name} | {', '.join(map(str, size))} | {dtype} | {passes} | {bytes_ / 1e6:.0f} M "
        f"| {1e3 * least:.3f} | {longest.instructions / max(1, longest.launch.rounds):.0f} "
        f"| {longest.launch.blocks}, {longest.waves:.2f} | {1e3 * total:.3f} "
        f"| {total / least:.1f} | {limit} {by_limit[limit] / total:.0%} |"
    )


def of_a_launch(e: Estimate) -> str:
    limits = ", ".join(f"{name} {1e3 * x:.3f}" for name, x in sorted(e.limits.items()))
    return (
        f"    {1e3 * e.total:.3f} ms  {e.launch.kernel}: {e.launch.blocks} blocks, "
        f"{e.resident} on a multiprocessor; {limits}"
    )


def calibrated(gpus: dict[str, Gpu], path: Path | None) -> dict[str, Gpu]:
    """With other constants, as {"H200": {"load_ns": 620}, ...}; "all" is for all."""
    if path is None:
        return gpus
    given = json.loads(path.read_text())
    unknown = set(given) - set(gpus) - {"all"}
    if unknown:
        raise SystemExit(f"{path}: GPUs must be of {', '.join(gpus)} or all, got {unknown}")
    try:
        return {
            name: replace(gpu, **given.get("all", {}) | given.get(name, {}))
            for name, gpu in gpus.items()
        }
    except TypeError as error:
        raise SystemExit(f"{path}: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", choices=GPUS, action="append", help="by default all")
    parser.add_argument("--op", choices=OPS, default="linear_attention")
    parser.add_argument("--dtype", choices=BYTES, action="append", help="by default bfloat16")
    parser.add_argument("--size", action="append", metavar="B,H,T,D")
    parser.add_argument("--kernels", action="store_true", help="a line for every launch as well")
    parser.add_argument("--cubins", type=Path, help="compiled files, or where to leave them")
    parser.add_argument("--calibrate", type=Path, help="a JSON file of constants")
    options = parser.parse_args()
    gpus = calibrated(GPUS, options.calibrate)
    sizes = [tuple(map(int, text.split(","))) for text in options.size or []] or OPS[options.op]
    print("Estimates, of which none is measured; instructions and times within 40 %.\n")
    print(HEADER)
    with tempfile.TemporaryDirectory() as temporary:
        cubins = options.cubins or Path(temporary)
        cubins.mkdir(parents=True, exist_ok=True)
        dtypes = options.dtype or ["bfloat16"]
        program = build_plan(Path(temporary), options.op, dtypes)
        for name in options.gpu or gpus:
            for dtype in dtypes:
                for size in sizes:
                    passes = rows_of(program, cubins, options.op, dtype, size, gpus[name])
                    show(name, gpus[name], dtype, size, passes, options.kernels)


def show(
    name: str,
    gpu: Gpu,
    dtype: str,
    size: tuple[int, ...],
    passes: dict[str, list[Estimate]],
    kernels: bool,
) -> None:
    print(row(name, gpu, size, dtype, "forward", passes["forward"]), flush=True)
    both = passes["forward"] + passes["backward"]
    print(row(name, gpu, size, dtype, "forward + backward", both), flush=True)
    if kernels:
        print("\n".join(map(of_a_launch, both)), flush=True)


if __name__ == "__main__":
    main()
