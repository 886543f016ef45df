# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The report on compiled CUDA kernels: what it reads of the compiler, and what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "cuda_report.py"
sys.path.insert(0, str(SCRIPT.parent))
import cuda_model  # noqa: E402
import cuda_sass  # noqa: E402
from cuda_report import ARCHITECTURES, Kernel, find_nvcc, parse  # noqa: E402

PRINTED = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'tidy' for 'sm_90'
ptxas info    : Function properties for tidy
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : Compile time = 29.488 ms
ptxas info    : Compiling entry function 'greedy' for 'sm_90'
ptxas info    : Function properties for greedy
    232 bytes stack frame, 284 bytes spill stores, 4812 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 232 bytes cumulative stack size
"""


def test_the_compilers_numbers_are_read():
    assert parse(PRINTED) == [Kernel("tidy", 40, 0, 0, 0), Kernel("greedy", 255, 232, 284, 4812)]


def test_a_missing_compiler_is_an_error(tmp_path):
    environment = {**os.environ, "CUDA_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "nvcc is neither on PATH nor in CUDA_HOME" in result.stderr


def test_a_report_is_made_of_what_any_compiler_prints(tmp_path):
    """Shared memory included, which the host's compiler works out, whether nvcc is here or not."""
    names = {
        "tidy": "_ZN4hfla4cuda11walk_kernelIfNS0_10BlockShapeILi64ELi144ELi32ELi1ELi1EEE"
        "NS0_7AnyWalkEEEvNS0_4WalkE",
        "greedy": "_ZN4hfla4cuda11step_kernelIfLi4ELi1EEEvNS_19LinearAttentionStepE",
    }
    printed = PRINTED
    for name, mangled in names.items():
        printed = printed.replace(name, mangled)
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\ncat >&2 <<'END'{printed}END\n")
    nvcc.chmod(0o755)
    environment = {**os.environ, "CUDA_HOME": str(tmp_path)}
    command = [sys.executable, SCRIPT, "sm_90"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    walk, step = (re.search(rf"sm_90 .* {k}_k.*", result.stdout)[0] for k in ("walk", "step"))
    assert walk.split()[1] == "40" and step.split()[1] == "255"  # registers
    assert int(walk.split()[2]) > 1000 and int(step.split()[2]) > 1000  # bytes of shared memory
    assert result.returncode != 0 and "a kernel spills registers" in result.stderr


# On the oldest and the newest architecture, since each takes minutes, and of the dtypes each once
# but bfloat16, whose machine code is looked at; the script alone does all. PTX has no registers
# yet; that it compiles, the wheel of test_build.py shows.
OLDEST, *_, NEWEST = [name for name in ARCHITECTURES if name.startswith("sm_")]
DTYPES = {OLDEST: ("f32", "bf16"), NEWEST: ("bf16", "f16")}
needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
needs_disassembler = pytest.mark.skipif(
    find_nvcc() is None or cuda_sass.find_disassembler() is None, reason="needs nvcc and nvdisasm"
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What the reports say of the kernels, and the folder with them: compiled once."""
    directory = tmp_path_factory.mktemp("cubins")
    reports = []
    for architecture, dtypes in DTYPES.items():
        command = [sys.executable, SCRIPT, architecture, "--keep", directory, "--dtypes", *dtypes]
        reports.append(subprocess.run(command, capture_output=True, text=True))
    return reports, directory


@pytest.mark.thorough
@needs_nvcc
def test_all_kernels_compile_without_spills(compiled):
    reports, _ = compiled
    for (name, dtypes), report in zip(DTYPES.items(), reports, strict=True):
        assert report.returncode == 0, report.stdout + report.stderr
        for dtype in dtypes:
            kernel = {"f32": "float", "bf16": "BFloat16", "f16": "__half"}[dtype]
            assert re.search(rf"^{name} .* walk_kernel<{kernel},", report.stdout, re.M)


# ---- the machine code ----


class Bounds(NamedTuple):
    """What the machine code of a kernel may have of each kind: what it had when it was looked at
    last, and a bit.
    """

    instructions: int
    products: int  # at least, each with its operands in registers of their own
    operand_loads: int
    loads_ahead: int = 0  # at least so many loads of 16 bytes on their way at once
    copies: int = 0  # at least so many of 16 bytes, past the registers
    copies_ahead: bool = False  # these are on their way while products are taken
    per_copy: int = 0  # instructions in a loop for each 16 bytes copied
    per_run: int = 0  # and for each 16 bytes loaded, or converted in shared memory
    stores_of_16_bits: int = 2  # in the loop for what has no aligned pairs
    per_chunk: int = 10000  # instructions of a warp beside its loops


def walk_kernel(C: int, R: int, columns: int, stages: int) -> str:
    return f"walk_kernel<BFloat16, BlockShape<{C}, {R}, {columns}, {stages}, 1>, AnyWalk>"


def fixed_size_walk(
    D: int, feature_map: int, is_gradient: bool, has_second: bool = False, finds: bool = False
) -> str:
    """Of a head's size, by the number of a feature map in csrc/kernels."""
    R, flags = D + 16 * is_gradient, f"{is_gradient}, {has_second}, {finds}".lower()
    shape = f"BlockShape<64, {R}, {D}, 2, 2>"
    return f"walk_kernel<BFloat16, {shape}, FixedSizeWalk<(FeatureMap){feature_map}, {flags}> >"


WALK = Bounds(12600, 100, 56, copies=4, copies_ahead=True, per_copy=9, per_run=80)
# A walk of a fixed size has no alternatives in a chunk, and no loops but that over earlier tokens.
# The one with wide stores comes once, and finds the tensors.
FIXED_SIZE = Bounds(
    3300, 50, 48, copies=12, copies_ahead=True, per_run=40, stores_of_16_bits=0, per_chunk=900
)
FIXED_SIZE_OF_128 = FIXED_SIZE._replace(
    instructions=4300, products=160, operand_loads=110, copies=24, per_chunk=1500
)
# Forward of the delta rule of fixed sizes has loops for the rows of a last chunk alone.
FIXED_SIZE_DELTA = Bounds(
    2700, 230, 102, copies=70, copies_ahead=True, per_copy=21, stores_of_16_bits=0, per_chunk=1110
)
FIXED_SIZE_PREPARE = Bounds(3700, 190, 57, copies=16, per_copy=23, stores_of_16_bits=0)
DELTA = Bounds(0, 0, 0, copies=24, copies_ahead=True, per_copy=5)
BOUNDS = {
    "linear_attention": {
        walk_kernel(64, 80, 64, 2): WALK,
        walk_kernel(64, 128, 64, 2): WALK,
        walk_kernel(128, 144, 64, 2): WALK,
        walk_kernel(64, 128, 64, 1): WALK._replace(copies_ahead=False),
        walk_kernel(128, 144, 64, 1): WALK._replace(copies_ahead=False),
        fixed_size_walk(64, 1, False): FIXED_SIZE,
        fixed_size_walk(64, 1, True): FIXED_SIZE,
        fixed_size_walk(128, 1, False): FIXED_SIZE_OF_128,
        fixed_size_walk(128, 1, True): FIXED_SIZE_OF_128,
        fixed_size_walk(128, 0, True): FIXED_SIZE_OF_128,
        fixed_size_walk(64, 1, True, True): FIXED_SIZE._replace(
            instructions=3600, products=80, operand_loads=62, per_chunk=1050
        ),
        fixed_size_walk(64, 1, True, finds=True): FIXED_SIZE._replace(
            instructions=3600, copies=20, per_chunk=1050
        ),
        fixed_size_walk(128, 1, True, finds=True): FIXED_SIZE_OF_128._replace(
            instructions=4600, copies=40, per_chunk=1750
        ),
        fixed_size_walk(128, 1, True, True): FIXED_SIZE_OF_128._replace(
            instructions=4600, products=250, operand_loads=146, per_chunk=1830
        ),
    },
    # Stores of 16 bits: columns of which the last may not be there, of every number.
    "delta_rule": {
        "delta_fixed_size_outputs_kernel<128, false>": FIXED_SIZE_DELTA,
        "delta_fixed_size_outputs_kernel<128, true>": FIXED_SIZE_DELTA._replace(
            instructions=3000, per_chunk=1370
        ),
        "delta_fixed_size_outputs_kernel<64, false>": FIXED_SIZE_DELTA._replace(
            instructions=2100, products=136, operand_loads=54, copies=50, per_chunk=830
        ),
        "delta_fixed_size_prepare_kernel<128, false>": FIXED_SIZE_PREPARE,
        "delta_fixed_size_prepare_kernel<128, true>": FIXED_SIZE_PREPARE,
        "delta_fixed_size_states_kernel<128>": FIXED_SIZE_DELTA._replace(
            instructions=1100, products=16, operand_loads=8, copies=14, per_chunk=380
        ),
        "delta_fixed_size_gradients_kernel<128>": FIXED_SIZE_DELTA._replace(
            instructions=2900, operand_loads=108, copies=60, per_copy=25, per_chunk=1450
        ),
        "delta_fixed_size_gradients_kernel<64>": FIXED_SIZE_DELTA._replace(
            instructions=2200, products=136, operand_loads=60, copies=44, per_chunk=1150
        ),
        # Its chunk is no loop: what comes in columns is, with products of many of them.
        "delta_fixed_size_token_gradients_kernel<128>": FIXED_SIZE_DELTA._replace(
            instructions=4100,
            products=200,
            operand_loads=98,
            copies=36,
            per_copy=50,
            per_run=215,
            per_chunk=3550,
        ),
        "delta_outputs_kernel<BFloat16, 32>": DELTA._replace(
            instructions=5000, products=20, operand_loads=12, stores_of_16_bits=16
        ),
        "delta_gradients_kernel<BFloat16, 32>": DELTA._replace(
            instructions=5100, products=24, operand_loads=15, stores_of_16_bits=16
        ),
        "delta_states_kernel<BFloat16, 32>": DELTA._replace(
            instructions=3750, products=4, operand_loads=3, stores_of_16_bits=0
        ),
        "delta_prepare_kernel<BFloat16, false>": Bounds(7200, 60, 7, stores_of_16_bits=25),
        "delta_token_gradients_kernel<BFloat16, false>": Bounds(13000, 76, 58, stores_of_16_bits=0),
        "delta_step_kernel<BFloat16, 4>": Bounds(
            2400, 0, 0, loads_ahead=8, per_run=66, stores_of_16_bits=13
        ),
    },
}


def faults(code: list[cuda_sass.Instruction], bounds: Bounds) -> list[str]:
    """What is worse than the bounds, in words."""

    def number(pattern: str) -> int:
        return cuda_sass.count(code, pattern)

    loops = cuda_sass.loops(code)
    copying = [x for x in loops if x.wide_copies]
    converting = [x for x in loops if x.wide_shared_loads and x.wide_shared_stores]
    loading = [x for x in loops if x.wide_loads]
    found = {
        "loads are not ahead": cuda_sass.loads_in_flight(code) < bounds.loads_ahead,
        "loads through registers": not bounds.loads_ahead and number(cuda_sass.WIDE_LOAD) > 0,
        "fewer copies": number(cuda_sass.WIDE_COPY) < bounds.copies,
        "copies are not ahead": bounds.copies_ahead and not copies_are_ahead(code),
        "stores of 16 bits": number(cuda_sass.STORE_OF_16_BITS) > bounds.stores_of_16_bits,
        "more instructions": len(code) > bounds.instructions,
        "fewer products": number(cuda_sass.PRODUCT) < bounds.products,
        "more loads of operands": number(cuda_sass.OPERAND_LOAD) > bounds.operand_loads,
        "long chunks": cuda_model.read_code(code).beside > bounds.per_chunk,
        "slow copies": any(x.instructions > bounds.per_copy * x.wide_copies for x in copying),
        "slow loops": any(x.instructions > bounds.per_run * x.wide_loads for x in loading)
        or any(x.instructions > bounds.per_run * x.wide_shared_stores for x in converting),
    }
    return [fault for fault, is_there in found.items() if is_there]


def copies_are_ahead(code: list[cuda_sass.Instruction]) -> bool:
    return cuda_model.read_code(code).copies_ahead


@pytest.mark.thorough
@needs_disassembler
@pytest.mark.parametrize("architecture", [OLDEST, NEWEST])
@pytest.mark.parametrize("op", BOUNDS)
def test_the_machine_code_is_what_the_source_means(compiled, op, architecture):
    _, directory = compiled
    [cubin] = directory.glob(f"*{op}-bf16.cu.{architecture}.cubin")
    kernels = cuda_sass.disassemble(cuda_sass.find_disassembler(), cubin)
    found = {name: faults(kernels[name], bounds) for name, bounds in BOUNDS[op].items()}
    assert found == dict.fromkeys(BOUNDS[op], [])


GOOD_CODE = """
	.section	.text.good,"ax",@progbits
.text.good:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x10] ;
        /*0030*/                   FADD R20, R4, R5 ;
        /*0040*/                   STS.128 [R24], R8 ;
        /*0050*/               @P1 BRA `(.L_x_0) ;
.L_x_2:
        /*0060*/                   DEPBAR.LE SB0, 0x0 ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_3:
        /*0080*/                   LDGSTS.E.BYPASS.128 [R24], desc[UR4][R2.64] ;
        /*0090*/                   LDGSTS.E.BYPASS.LTC128B.128 [R24+0x10], desc[UR4][R2.64+0x10] ;
        /*00a0*/               @P1 BRA `(.L_x_3) ;
        /*00b0*/                   LDGDEPBAR ;
.L_x_4:
        /*00c0*/                   LDS.128 R8, [R24] ;
        /*00d0*/                   STS.128 [R24], R8 ;
        /*00e0*/               @P1 BRA `(.L_x_4) ;
        /*00f0*/                   LDSM.16.MT88.4 R12, [R25] ;
        /*0100*/                   HMMA.16816.F32.BF16 R16, R12, R4, R16 ;
        /*0110*/               @P1 BRA `(.L_x_2) ;
        /*0120*/                   STG.E desc[UR4][R2.64], R16 ;
        /*0130*/                   EXIT ;
.L_x_1:
        /*0140*/                   BRA `(.L_x_1);
"""
GOOD = Bounds(21, 1, 1, 2, 2, True, per_copy=2, per_run=3, stores_of_16_bits=0)
PLANTED = {  # what is in the place of what, and how it shows
    "loads are not ahead": ("LDG.E.128.CONSTANT R8,", "LDG.E.128.CONSTANT R4,"),
    "fewer copies": ("LDGSTS.E.BYPASS.LTC128B.128 [R24+0x10],", "LDGSTS.E [R24+0x10],"),
    "copies are not ahead": ("LDSM.16.MT88.4 R12, [R25]", "DEPBAR.LE SB0, 0x0"),
    "stores of 16 bits": ("STG.E desc", "STG.E.U16 desc"),
    "more instructions": ("        /*0130*/", "        /*0124*/ NOP ;\n        /*0130*/"),
    "fewer products": ("HMMA.16816.F32.BF16", "FFMA"),
    "more loads of operands": ("FADD R20, R4, R5", "LDSM.16.M88.2 R20, [R25]"),
    "slow copies": ("/*0090*/                   LDGSTS.E.BYPASS.LTC128B.128", "/*0090*/ FADD"),
}


def test_machine_code_is_read():
    code = cuda_sass.parse(GOOD_CODE)["good"]
    assert len(code) == 21
    assert cuda_sass.loads_in_flight(code) == 2
    assert cuda_sass.loops(code) == [
        cuda_sass.Loop(
            5, 0, 0, wide_loads=2, wide_copies=0, wide_shared_loads=0, wide_shared_stores=1
        ),
        cuda_sass.Loop(
            3, 0, 0, wide_loads=0, wide_copies=2, wide_shared_loads=0, wide_shared_stores=0
        ),
        cuda_sass.Loop(
            3, 0, 0, wide_loads=0, wide_copies=0, wide_shared_loads=1, wide_shared_stores=1
        ),
    ]
    assert faults(code, GOOD) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_of_machine_code_is_found(fault):
    was, now = PLANTED[fault]
    assert was in GOOD_CODE
    assert fault in faults(cuda_sass.parse(GOOD_CODE.replace(was, now))["good"], GOOD)


def test_loads_through_registers_are_found_where_there_should_be_copies():
    code = cuda_sass.parse(GOOD_CODE)["good"]
    assert faults(code, GOOD._replace(loads_ahead=0)) == ["loads through registers"]


def test_a_slow_loop_is_found():
    code = cuda_sass.parse(GOOD_CODE)["good"]
    assert faults(code, GOOD._replace(per_run=2)) == ["slow loops"]
