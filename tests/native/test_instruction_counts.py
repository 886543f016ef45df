# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Instructions of two libraries for the same calls, which a change is held against."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from hf_linear_attention.ops.compiled.library import LIBRARY_PATH, cpu_instruction_sets_built

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
import instruction_counts  # noqa: E402
from replay_program import build_replay  # noqa: E402

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
CALL = "linear attention, 4 steps"
pytestmark = pytest.mark.skipif(
    shutil.which("valgrind") is None or shutil.which(COMPILER[0]) is None,
    reason="needs valgrind and a C++ compiler",
)


def main(monkeypatch, *libraries):
    arguments = [*map(str, libraries), "--only", CALL]
    monkeypatch.setattr(sys, "argv", ["instruction_counts.py", *arguments])
    instruction_counts.main()


def test_a_library_takes_as_many_as_itself(monkeypatch, capsys):
    main(monkeypatch, LIBRARY_PATH, LIBRARY_PATH)
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith(CALL))
    old, new, ratio = line.removeprefix(CALL).split()
    assert old == new != "0" and ratio == "1.000"


@pytest.mark.thorough
@pytest.mark.skipif("avx2" not in cpu_instruction_sets_built(), reason="needs AVX2's kernels")
def test_other_code_takes_others(tmp_path):
    program = build_replay(COMPILER, tmp_path)
    calls = instruction_counts.record(CALL, tmp_path)
    narrow, wide = (
        instruction_counts.count(program, LIBRARY_PATH, calls, isa) for isa in ("base", "avx2")
    )
    assert narrow > 1.2 * wide


def test_more_instructions_are_an_error(monkeypatch, capsys):
    counts = iter([1000, 1021])
    monkeypatch.setattr(instruction_counts, "count", lambda *_: next(counts))
    with pytest.raises(SystemExit, match="1 calls take more than 2% more instructions"):
        main(monkeypatch, LIBRARY_PATH, LIBRARY_PATH)
    assert "1.021  <- more" in capsys.readouterr().out


def test_every_call_is_one_of_native_ops(tmp_path):
    for name in instruction_counts.CALLS:
        assert instruction_counts.record(name, tmp_path).stat().st_size > 0
