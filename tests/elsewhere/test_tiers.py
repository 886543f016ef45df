# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What `make test` leaves to `make test-all` is run there: nothing twice, nothing never."""

import re
from itertools import combinations, product
from pathlib import Path

import pytest

from new_python import run_python
from seeds import over_seeds
from tiers import MOST_CALLS, RECORDS, most_pairs, read_durations

SUPPORT = str(Path(__file__).parents[1] / "support")
TESTS = """
import pytest

def test_alone(): pass

@pytest.mark.thorough
def test_that_takes_long(): pass

@pytest.mark.sample(2)
@pytest.mark.parametrize("value", range(5))
def test_of_values(value): pass

@pytest.mark.parametrize("a", ["x", "y"])
@pytest.mark.parametrize("b", ["x", "y"])
@pytest.mark.parametrize("c", ["x", "y"])
def test_of_a_product(a, b, c): pass

@pytest.mark.parametrize("value", range(30))
def test_of_many_values(value): pass
"""
COUNT = 45


@pytest.mark.parametrize("processes", [[], ["--numprocesses", "2"]], ids=["one", "two"])
def test_two_tiers_run_every_test_once(processes, tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tiers"]')
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    thorough\n    sample\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    ran = {}
    for tier in ("test", "rest"):
        options = ("-v", "-p", "no:cacheprovider", "--tier", tier, *processes)
        # PYTHONPATH reaches xdist's workers, too.
        result = run_python("-m", "pytest", *options, cwd=tmp_path, PYTHONPATH=SUPPORT)
        assert result.returncode == 0, result.stdout + result.stderr
        passed = [line for line in result.stdout.splitlines() if "PASSED" in line]
        ran[tier] = [re.search(r"test_some.py::(\S+)", line)[1] for line in passed]
        if tier == "test":
            left = COUNT - len(ran["test"])
            assert f"\n{left} tests are left to make test-all" in result.stdout
    assert {"test_alone"} < {*ran["test"]} and {"test_that_takes_long"} < {*ran["rest"]}
    assert sum("of_values" in name for name in ran["test"]) == 2
    assert sum("of_many_values" in name for name in ran["test"]) == MOST_CALLS
    assert 4 <= sum("of_a_product" in name for name in ran["test"]) < 8
    assert len(ran["rest"]) == left and len({*ran["test"], *ran["rest"]}) == COUNT
    counts = read_durations(tmp_path / RECORDS)
    assert {key: tests for key, (tests, _) in counts.items()} == {
        ("test", "test_some.py"): COUNT - left,
        ("rest", "test_some.py"): left,
    }


def test_pairs_are_all_held_by_few():
    rows = [*product(range(4), range(3), range(5), range(2)), (7, 7, 7, 7)]
    chosen = [rows[i] for i in most_pairs(rows, "any")]
    pairs = {pair for row in rows for pair in combinations(enumerate(row), 2)}
    assert {pair for row in chosen for pair in combinations(enumerate(row), 2)} == pairs
    assert 20 <= len(chosen) <= 30
    assert chosen == [rows[i] for i in most_pairs(rows, "any")]  # in every process
    assert sorted(most_pairs([(0,), (1,), (2,)], "any")) == [0, 1, 2]


def test_a_seed_that_fails_is_named():
    seen = []

    @over_seeds(9)
    def test(seed):
        seen.append(seed)
        with pytest.raises(ZeroDivisionError):
            1 // (seed - seed % 6)  # of 0 to 5

    with pytest.raises(AssertionError, match="with seed 6: DID NOT RAISE"):
        test()
    assert seen == list(range(7))
