# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The model of CUDA kernels' times: what it reads of code and launchers, and how it counts."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from emulated_kernels import WITH_CHECKS, compiled_kernels

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import cuda_model  # noqa: E402
import cuda_sass  # noqa: E402
from cuda_model import GPUS, Launch, estimate, floor  # noqa: E402

# A chunk's loop, from 0010 to 0140, with loops that copy, convert in place, load and multiply.
MACHINE_CODE = """
	.section	.text.walk,"ax",@progbits
.text.walk:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   DEPBAR.LE SB0, 0x0 ;
.L_x_1:
        /*0020*/                   LDGSTS.E.BYPASS.128 [R87], desc[UR4][R82.64] ;
        /*0030*/              @P1 BRA `(.L_x_1) ;
        /*0040*/                   LDGDEPBAR ;
.L_x_2:
        /*0050*/                   LDS.128 R4, [R87] ;
        /*0060*/                   FADD R4, R4, R5 ;
        /*0070*/                   STS.128 [R87], R4 ;
        /*0080*/              @P2 BRA `(.L_x_2) ;
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_3:
        /*00a0*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*00b0*/                   LDG.E R5, desc[UR4][R2.64+0x10] ;
        /*00c0*/                   FADD R20, R4, R5 ;
        /*00d0*/              @P1 BRA `(.L_x_3) ;
.L_x_4:
        /*00e0*/                   LDSM.16.MT88.4 R12, [R25] ;
        /*00f0*/                   HMMA.16816.F32.BF16 R16, R12, R4, R16 ;
        /*0100*/              @P2 BRA `(.L_x_4) ;
        /*0110*/                   STG.E desc[UR4][R2.64], R16 ;
        /*0120*/                   NOP ;
        /*0130*/                   NOP ;
        /*0140*/              @P3 BRA `(.L_x_0) ;
        /*0150*/                   EXIT ;
"""
CODE = cuda_model.Code(
    registers=88,
    per_product=3,
    per_load=2,
    per_copy=2 + 4,
    beside=7,
    stores_beside=1,
    products_beside=0,
    copies_beside=0,
    loads_ahead=2,
    copies_ahead=True,
)
# 264 blocks of a warp with 10 chunks: one wave on an H100 of two blocks to a multiprocessor.
LAUNCH = Launch(
    kernel="walk",
    blocks=264,
    threads=32,
    shared=100 << 10,
    rounds=10,
    barriers=320,
    shuffles=0,
    products=32000,
    operand_loads=32000,
    copies=3200,
    wide_copies=1600,
    loads=9600,
    loaded=1e5,
    stores=320,
    stored=1e3,
    shared_accesses=0,
    shared_bytes=0,
    unique=1e5,
)


def test_a_kernel_s_loops_are_read():
    assert cuda_model.read_code(cuda_sass.parse(MACHINE_CODE)["walk"]) == CODE


def test_a_way_back_from_behind_the_end_is_no_loop():
    cold = "/*0160*/ FADD R4, R4, R5 ;\n        /*0170*/ BRA `(.L_x_2) ;\n"
    behind = f"{MACHINE_CODE}        {cold}"
    assert cuda_model.read_code(cuda_sass.parse(behind)["walk"]) == CODE


# Where a chunk's copies are waited for before it is computed, and no others are started.
WAITS = MACHINE_CODE.replace(
    "/*0090*/                   BAR", "/*0088*/  DEPBAR.LE SB0, 0x0 ;\n        /*0090*/  BAR"
)


def test_a_wait_before_the_products_is_seen():
    code = cuda_model.read_code(cuda_sass.parse(WAITS)["walk"])
    assert code == CODE._replace(beside=8, copies_ahead=False)


def test_copies_are_ahead_in_a_loop_that_multiplies_a_part_of_a_chunk():
    """As of columns, whose sums are multiplied after it."""
    for code, ahead in ((MACHINE_CODE, True), (WAITS, False)):
        last = "/*0148*/ HMMA.16816.F32.BF16 R16, R12, R4, R16 ;\n        /*0150*/"
        code = cuda_model.read_code(cuda_sass.parse(code.replace("/*0150*/", last))["walk"])
        assert (code.copies_ahead, code.products_beside) == (ahead, 1)


def test_instructions_stand_beside_loads_copies_products_and_stores():
    """By warp: 1000 products with 3 each, 200 loads with 2, 50 copies with 6, and 7 in each of 10
    chunks."""
    instructions = estimate(LAUNCH, CODE, GPUS["H100"]).instructions
    assert instructions == 1000 * 3 + 200 * 2 + 50 * 6 + 10 * 7


def test_what_stands_beside_loops_is_done_as_often_as_its_copies_and_products():
    """And these are then not counted again: 5 of 10 chunks, as half of the products are."""
    code = CODE._replace(copies_beside=5, products_beside=20)
    launch = LAUNCH._replace(products=3200)
    instructions = estimate(launch, code, GPUS["H100"]).instructions
    assert instructions == 5 * 7 + 200 * 2 + (50 - 5 * 5) * 6


def test_a_second_wave_takes_as_long_as_the_first():
    one, two, three = (
        estimate(LAUNCH._replace(blocks=n), CODE, GPUS["H100"]).limits["latency"]
        for n in (264, 265, 529)
    )
    assert (two, three) == pytest.approx((2 * one, 3 * one))


def test_copies_that_are_ahead_wait_beside_the_work():
    slow = LAUNCH._replace(rounds=1000)
    gpu = GPUS["H100"]
    ahead, before = (
        estimate(slow, CODE._replace(copies_ahead=x), gpu).limits["latency"] for x in (True, False)
    )
    assert 1000 * gpu.load_ns * 1e-9 <= ahead < before < 2 * ahead
    none = LAUNCH._replace(rounds=1000, loads=6400, copies=0, wide_copies=0)
    assert estimate(none, CODE, gpu).limits["latency"] < 0.2 * ahead


def test_what_moves_bytes_alone_is_limited_by_memory():
    gpu = GPUS["H200"]
    bytes_ = 1e6
    copying = LAUNCH._replace(
        blocks=10000, loads=32, products=0, barriers=0, loaded=bytes_, unique=bytes_
    )
    got = estimate(copying, CODE, gpu)
    assert got.limit == "memory"
    least = 10000 * bytes_ / gpu.memory
    assert least < got.total < 1.3 * least


def test_the_floor_is_what_is_read_and_written_once():
    size = (8, 16, 4096, 64)
    bytes_, seconds = floor(size, "bfloat16", ["forward"], GPUS["H200"])
    assert bytes_ == 4 * 8 * 16 * 4096 * 64 * 2
    assert seconds == pytest.approx(0.056e-3, rel=0.01)


def test_constants_come_from_a_file(tmp_path):
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"all": {"load_ns": 700}, "H200": {"barrier_cycles": 20}}))
    gpus = cuda_model.calibrated(GPUS, path)
    assert gpus["A100"].load_ns == gpus["H200"].load_ns == 700
    assert (gpus["A100"].barrier_cycles, gpus["H200"].barrier_cycles) == (40, 20)
    for wrong in ({"H300": {}}, {"H200": {"load": 1}}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(SystemExit, match="H300|load"):
            cuda_model.calibrated(GPUS, path)


needs_compiler = pytest.mark.skipif(
    not all(map(shutil.which, ("c++", "nm", "c++filt"))), reason="needs a C++ compiler and binutils"
)


def build_plan(tmp_path_factory, op):
    """With the kernels in bfloat16 that are compiled for test_cuda_checked.py."""
    directory = tmp_path_factory.mktemp("plan")
    [kernels] = compiled_kernels(tmp_path_factory, WITH_CHECKS, op, ("bf16",))
    os.link(kernels, directory / kernels.name)
    return cuda_model.build_plan(directory, op, ["bfloat16"])


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The launches of a pass of linear attention, of a size, with so many multiprocessors."""
    op = "linear_attention"
    program = build_plan(tmp_path_factory, op)
    return lambda *which: cuda_model.plan(program, op, "bfloat16", *which, 227 << 10)


@needs_compiler
@pytest.mark.thorough
def test_launches_are_the_launchers_and_counts_the_emulators(plan):
    B, H, T, D = size = 4, 16, 640, 32
    [walk] = plan("forward", size, 16)
    assert walk.kernel.startswith("walk_kernel<BFloat16")
    assert walk.wide_copies == walk.copies == 3 * T * D // 8  # of 8 numbers each
    assert walk.blocks == B * H
    tensor = T * D * 2  # bytes of a head
    assert 0.99 * 3 * tensor < walk.loaded < 1.2 * 3 * tensor
    assert 0.99 * tensor < walk.stored < 1.5 * tensor  # and denominators, and the state
    least = 2 * T * D * D / (16 * 8 * 16) * 32  # one product with the state, and one into it
    assert least < walk.products < 4 * least


@pytest.mark.thorough
@needs_compiler
def test_backward_s_first_walk_has_the_states_of_forward_s_pieces(plan):
    """Which forward and the walk back sum up and combine. All have as many blocks."""
    size = 1, 2, 4096, 64
    sums, combine, walk = plan("forward", size, 132)
    dq, sums_back, combine_back, dk = plan("backward", size, 132)
    assert combine.kernel == combine_back.kernel == "combine_kernel"
    assert walk.kernel == sums.kernel and dk.kernel == sums_back.kernel != dq.kernel
    assert 2 * 8 <= dq.blocks == walk.blocks == dk.blocks
    # What comes into a piece is loaded beside its rows: of 64 x 65 numbers, once.
    rows = 5 * 2 * 4096 * 64 * 2 / dq.blocks  # bytes of q, k, v, y and dy
    assert rows + 64 * 65 * 4 < dq.loaded < 1.2 * (rows + 64 * 65 * 4)


@pytest.mark.thorough
@needs_compiler
def test_the_delta_rule_s_kernels_are_those_that_the_sizes_decide_on(tmp_path_factory):
    op = "delta_rule"
    program = build_plan(tmp_path_factory, op)
    B, H, T = 1, 4, 640
    for D, multiprocessors, columns, of_prepare, of_walk in (
        (32, 2, 32, "prepare_kernel<BFloat16, false>", "outputs_kernel<BFloat16, 32>"),
        (32, 132, 16, "prepare_kernel<BFloat16, false>", "outputs_kernel<BFloat16, 16>"),
        (
            64,
            132,
            32,
            "fixed_size_prepare_kernel<64, false>",
            "fixed_size_outputs_kernel<64, false>",
        ),
    ):
        size = B, H, T, D
        prepare, walk = cuda_model.plan(
            program, op, "bfloat16", "forward", size, multiprocessors, 227 << 10
        )
        assert prepare.kernel == f"delta_{of_prepare}"
        assert walk.kernel == f"delta_{of_walk}"
        assert walk.blocks == B * H * D // columns
        least = 2 * T * D * columns / (16 * 8 * 16) * 32  # one product with the state, one into it
        assert least < walk.products < 4 * least
