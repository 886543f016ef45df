# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The benchmark for GPUs, as far as it needs none: its goals, its cases, and how it times them.
tests/native/test_gpu_check.py runs all of it, on a CPU.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_cuda  # noqa: E402
import cuda_delta_rule  # noqa: E402
import cuda_goals  # noqa: E402
import cuda_linear  # noqa: E402
from cuda_shapes import Shape  # noqa: E402


def row(name: str, contender: str, ratio: float = 1.0, share: float = 1.0) -> cuda_goals.Row:
    size = f"{name} size"
    return {
        "pass": name,
        "size": size,
        "contender": contender,
        "ratio": ratio,
        "share_of_floor": share,
    }


def test_goals_are_met_by_the_rows_that_they_are_about():
    rows = [
        row("forward", "ours", share=0.65),
        row("forward", "fla", ratio=1.4, share=0.1),
        row("gated delta", "ours", share=0.2),  # of which no share is asked for
        row("gated delta", "fla", ratio=2.0),
        row("plain forward + bwd", "fla", ratio=1.5),
        row("forward", "chunked", ratio=0.5, share=0.1),
        row("token", "ours", share=1 / 1.25),
        row("tokens", "ours", share=0.1),
    ]
    fla, fla_both, floor, token = cuda_goals.outcomes(rows)
    assert (fla.worst, fla.at, fla.met, fla.of) == (1.4, "forward of forward size", 1, 2)
    assert (fla_both.worst, fla_both.met, fla_both.of) == (1.5, 1, 1)
    assert (floor.worst, floor.met, floor.of) == (0.65, 1, 1)
    assert token.worst == pytest.approx(1.25) and (token.met, token.of) == (1, 1)
    slow = [row("token", "ours", share=0.5), row("token", "ours", share=0.9)]
    worst = cuda_goals.outcomes(slow)[-1]
    assert (worst.worst, worst.met, worst.of) == (2.0, 1, 2)


def test_what_was_not_measured_is_not_met():
    found = cuda_goals.outcomes([])
    assert all(x.worst is None and (x.met, x.of) == (0, 0) for x in found)
    assert cuda_goals.table(found).count("not measured") == len(cuda_goals.GOALS)


def test_goals_are_about_cases_that_there_are():
    names = {case.name for case in bench_cuda.cases("cpu")}
    assert {name for goal in cuda_goals.GOALS for name in goal.passes} <= names


def test_published_figures_are_of_sizes_that_are_measured():
    names = {name for op in bench_cuda.SEQUENCES for name in (op.forward, op.both)}
    for name, figures in cuda_delta_rule.PUBLISHED.items():
        assert name in names and set(figures) <= set(cuda_delta_rule.SEQUENCES)
    assert str(cuda_delta_rule.SEQUENCES[3]) == "1, 8192, 16/64, 128"


def test_ours_has_to_be_right_and_others_may_be_left_out(monkeypatch):
    monkeypatch.setattr(cuda_linear, "LEFT_OUT", {})

    def wrong(q, k, v):
        return cuda_linear.ours(q, k, v) * 1.1

    def fails(q, k, v):
        raise DeprecationWarning("of another version")

    monkeypatch.setitem(cuda_linear.FORWARD, "another", wrong)
    monkeypatch.setitem(cuda_linear.PLAIN_FORWARD, "a third", fails)
    errors = cuda_linear.verify(16, "cpu")
    assert {"ours forward", "ours dq", "plain ours dv", "SDPA dk"} <= set(errors)
    assert set(cuda_linear.LEFT_OUT) == {"another", "plain a third"}
    assert "wrong" in cuda_linear.LEFT_OUT["another"]
    assert "DeprecationWarning" in cuda_linear.LEFT_OUT["plain a third"]
    monkeypatch.setitem(cuda_linear.FORWARD, "ours", wrong)
    with pytest.raises(cuda_linear.WrongResultError, match="ours is wrong"):
        cuda_linear.verify(16, "cpu")


def test_only_the_chunked_form_may_have_no_memory():
    def has_no_memory():
        raise torch.OutOfMemoryError("tried to allocate 96 GiB")

    runs = {"ours": lambda: None, "chunked": has_no_memory}
    assert set(bench_cuda.interleave(runs, "cpu", rounds=1)) == {"ours"}
    with pytest.raises(torch.OutOfMemoryError):
        bench_cuda.interleave({"ours": has_no_memory}, "cpu", rounds=1)
    with pytest.raises(RuntimeError, match="wrong"):
        bench_cuda.interleave({"chunked": raises_a_runtime_error}, "cpu", rounds=1)


def raises_a_runtime_error():
    raise RuntimeError("something is wrong")


def test_what_no_graph_takes_is_called(monkeypatch):
    calls = []
    runs = {
        name: lambda x, name=name: calls.append((name, x))
        for name in ("ours", "chunked", "refuses")
    }

    def in_a_graph(run):
        run()
        if calls[-1][0] == "refuses":
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return lambda: calls.append(("replayed", 0))

    monkeypatch.setattr(bench_cuda, "in_a_graph", in_a_graph)
    monkeypatch.setattr(bench_cuda.torch.cuda, "synchronize", lambda: None)
    case = bench_cuda.Case("forward", Shape(1, 1, 1, 1), runs, [(1,), (2,)], 8, 3)
    timed, graphs = case.prepared("cuda")
    assert graphs == {"ours"}
    for name, run in timed.items():
        calls.clear()
        run()
        assert {of for of, _ in calls} == {"replayed" if name in graphs else name}
        assert len(calls) == (1 if name in graphs else 3)
    calls.clear()
    timed, graphs = case.prepared("cpu")
    timed["ours"]()
    assert not graphs and calls == [("ours", x) for x in (1, 2, 1)]
