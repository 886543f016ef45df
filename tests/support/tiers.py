# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What `make test` runs, what it leaves to `make test-all`, and how long either takes.

Left are tests that are marked `thorough`; of those marked `sample(n)`, all parametrisations but n;
and of every other test those that hold no pair of two parameters' values that is not in another,
and all beyond MOST_CALLS, those that hold most pairs first.
Without --tier everything runs.
"""

import random
from collections import defaultdict
from itertools import chain, combinations
from math import inf
from pathlib import Path

import pytest

MOST_CALLS = 20  # of one test
RECORDED = Path("tests", "durations.tsv")  # lines: tier, file, tests, seconds
RECORDS = Path("build", "durations.tsv")  # of the last runs
LEFT = pytest.StashKey[int]()


def most_pairs(rows, seed):
    """Indices of rows that together hold every value, and every pair of two columns' values, that
    any row holds; first those that add most, and of these any.
    """
    held = [set(chain(enumerate(row), combinations(enumerate(row), 2))) for row in rows]
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    missing, chosen = set().union(*held), []
    while missing:
        chosen.append(max(order, key=lambda i: len(held[i] & missing)))
        missing -= held[chosen[-1]]
    return chosen


def mark_what_is_left(items):
    """Marks it `thorough`."""
    calls = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("thorough"):
            calls[item.parent, item.originalname].append(item)
    for (_, name), group in calls.items():
        # A parameter's values are the same objects in every call.
        chosen = most_pairs([tuple(map(id, item.callspec.params.values())) for item in group], name)
        sample = group[0].get_closest_marker("sample")
        kept = set(chosen[: sample.args[0] if sample else MOST_CALLS])
        for i, item in enumerate(group):
            if i not in kept:
                item.add_marker(pytest.mark.thorough)


def read_durations(path):
    """From (tier, file) to the number of tests and their seconds."""
    lines = [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []
    return {(tier, file): (int(tests), float(time)) for tier, file, tests, time in lines}


def pytest_addoption(parser):
    parser.addoption(
        "--tier",
        choices=("test", "rest"),
        help="run what make test runs, or what it leaves; record how long that takes in build/",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    mark_what_is_left(items)
    tier = config.option.tier
    if tier:
        parts = {"test": [], "rest": []}
        for item in items:
            parts["rest" if item.get_closest_marker("thorough") else "test"].append(item)
        items[:] = parts.pop(tier)
        [others] = parts.values()
        config.stash[LEFT] = len(others)
        config.hook.pytest_deselected(items=others)
    # Longest first: begun last, one would keep one process busy while others have nothing to do.
    seconds = defaultdict(float)
    for (of_tier, file), (_, time) in read_durations(config.rootpath / RECORDED).items():
        if tier in (None, of_tier):
            seconds[file] += time
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), inf))


def file_of(nodeid):
    return nodeid.partition("::")[0]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash.get(LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Of pytest-xdist: what a worker says at its end."""
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", 0)


def pytest_terminal_summary(terminalreporter, config):
    tier = config.option.tier
    if not tier or hasattr(config, "workeroutput"):  # a worker of pytest-xdist
        return
    tests, seconds = defaultdict(set), defaultdict(float)
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            tests[tier, file_of(report.nodeid)].add(report.nodeid)
            seconds[tier, file_of(report.nodeid)] += report.duration
    if not tests:  # only collected
        return
    records = config.rootpath / RECORDS
    lines = {
        **{key: value for key, value in read_durations(records).items() if key[0] != tier},
        **{key: (len(tests[key]), seconds[key]) for key in tests},
    }
    records.parent.mkdir(exist_ok=True)
    records.write_text(
        "".join(f"{a}\t{b}\t{n}\t{time:.1f}\n" for (a, b), (n, time) in sorted(lines.items()))
    )
    minutes = sum(seconds.values()) / 60
    terminalreporter.write_line(
        f"{minutes:.1f} minutes in all processes; {RECORDS} has each file's"
    )
    if tier == "test":
        terminalreporter.write_line(f"{config.stash[LEFT]} tests are left to make test-all")
