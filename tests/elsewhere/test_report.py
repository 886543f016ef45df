# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What `python -m hf_linear_attention` says about the machine."""

import re

import pytest

from hf_linear_attention.__main__ import cpu_limit, remote_code, threads
from needs import needs_kernels
from new_python import run_python

V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def root_with(folder, groups, limits):
    """Files as Linux shows them: the groups of a process, and of groups their limits."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text(groups)
    for path, values in limits.items():
        group = folder / "sys" / "fs" / "cgroup" / path
        group.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (group / name).write_text(f"{value}\n")
    return folder


CASES = {
    "none": ("0::/\n", {}, None),
    "version 2, no limit": ("0::/a\n", {"a": {"cpu.max": "max 100000"}}, None),
    "version 2": ("0::/a\n", {"a": {"cpu.max": "150000 100000"}}, 1.5),
    "version 2, of a folder above": (
        "0::/a/b\n",
        {"a": {"cpu.max": "100000 100000"}, "a/b": {"cpu.max": "max 100000"}},
        1.0,
    ),
    "version 2, the smallest of all": (
        "0::/a/b\n",
        {"a": {"cpu.max": "400000 100000"}, "a/b": {"cpu.max": "200000 100000"}},
        2.0,
    ),
    "version 1, no limit": ("3:cpu:/\n", {"cpu": dict(zip(V1, (-1, 100000), strict=True))}, None),
    "version 1": (
        "9:name=systemd:/a\n3:cpu,cpuacct:/a\n",
        {"cpu/a": dict(zip(V1, (50000, 100000), strict=True))},
        0.5,
    ),
    # A container sees its own group at the top, by another name than the one that it is told.
    "version 1, in a container": (
        "3:cpuacct,cpu:/docker/0123\n",
        {"cpu": dict(zip(V1, (100000, 50000), strict=True))},
        2.0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_limit_of_a_container_is_found(name, tmp_path):
    groups, limits, expected = CASES[name]
    assert cpu_limit(root_with(tmp_path, groups, limits)) == expected


def test_a_system_without_control_groups_has_no_limit(tmp_path):
    assert cpu_limit(tmp_path) is None


@pytest.mark.parametrize(
    ("number", "limit", "advice"),
    [(8, None, None), (2, 2.0, None), (1, 0.5, None), (8, 1.5, "=1 "), (8, 4.0, "=4 ")],
)
def test_threads_that_would_wait_for_each_other_are_reported(number, limit, advice):
    said = threads(number, limit)
    assert said.startswith(str(number))
    assert ("OMP_NUM_THREADS" in said) == (advice is not None)
    assert advice is None or f"OMP_NUM_THREADS{advice}" in said


def test_a_folder_for_the_code_of_models_that_cannot_be_written_is_reported(tmp_path):
    folder = tmp_path / "of" / "code"
    assert remote_code(folder) == str(folder)
    (tmp_path / "of").write_text("a file, in which nobody can make a folder: as root, too")
    said = remote_code(folder)
    assert said.startswith(f"none: {folder} can't be written") and "HF_MODULES_CACHE" in said


@pytest.mark.sample(1)
@needs_kernels
@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("HF_LINEAR_ATTENTION_CPU_ISA", "mmx", "=mmx, but this build has "),
        ("HF_LINEAR_ATTENTION_KEPT_MB", "-1", " must be a number of megabytes .*, got -1"),
    ],
)
def test_a_setting_that_compiled_code_refuses_is_reported(variable, value, why):
    said = run_python("-m", "hf_linear_attention", **{variable: value}).stdout
    assert re.search(f"  cpu +not here: {variable}{why}", said)
    assert re.search(f"  cpu tensors +none: {variable}{why}", said)
    assert re.search(f"  float32 +none: {variable}{why}", said)
    assert re.search(f"  8 bits +none: {variable}{why}", said)
    without = {"HF_LINEAR_ATTENTION_BACKEND": "chunked", variable: value}
    said = run_python("-m", "hf_linear_attention", **without).stdout
    assert re.search(r"  cpu tensors +chunked \(forced\)", said)
    assert "  float32    torch's product" in said
