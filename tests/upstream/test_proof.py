# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A source of Transformers that nobody has read yet is taken where it computes the same, and left
alone where it does not.
"""

import contextlib
import functools
import importlib
import inspect
import json
import linecache
import logging
import random
import re
import textwrap
import threading
import warnings
from unittest import mock

import numpy
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from hf_linear_attention import use_kernels, use_kernels_everywhere
from hf_linear_attention.releases import CACHE
from hf_linear_attention.upstream.proof import proof, verdicts
from hf_linear_attention.upstream.tiny_models import tiny_config
from source_changes import CHANGES, Change
from upstream_models import CONFIGS, WITHOUT_CACHE, family_for, is_here, tiny_upstream

PROVED = "proved on a tiny model of these settings"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Of verdicts, so that none is known of before."""
    monkeypatch.setenv(verdicts.FOLDER, str(tmp_path))
    monkeypatch.setattr(verdicts, "_known", {})
    return tmp_path


@pytest.fixture
def model():
    return tiny_upstream("mamba2")


def unknown():
    """As if no source were known."""
    table = "hf_linear_attention.upstream.replacements.fingerprint"
    return mock.patch(table, lambda *args: "of no source")


def proved_in(report):
    return {one.before.__name__ for one in report.changed if PROVED in one.gist}


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", CONFIGS | WITHOUT_CACHE)
def test_all_sources_would_be_proved_if_they_were_not_known(model_type):
    model = tiny_upstream(model_type)
    with unknown():
        report = use_kernels(model)
    assert proved_in(report) == {
        name
        for name, replacement in family_for(model_type).replaced.items()
        if replacement.is_recurrent and is_here(name)
    }
    assert PROVED in str(report)


@pytest.mark.parametrize("model_type", CONFIGS | WITHOUT_CACHE)
def test_real_settings_are_those_of_the_tiny_model(model_type):
    """Of the size that a config has where nothing else is said, which no test could compute."""
    given = {"rms_norm_eps": 0.25, "tie_word_embeddings": True}
    real = AutoConfig.for_model(model_type).get_text_config()
    for name, value in given.items():
        setattr(real, name, value)
    sizes = family_for(model_type).sizes
    tiny = tiny_config(real, sizes)
    assert tiny.rms_norm_eps == 0.25 and type(tiny) is type(real)
    (model_class,) = {
        type(one)
        for one in tiny_upstream(model_type).modules()
        if isinstance(one, PreTrainedModel)
        and type(one.config) is type(real)
        and one.base_model is one
    }
    assert sum(weight.numel() for weight in model_class(tiny).parameters()) < 10**5


def test_the_settings_of_the_real_model_count():
    """They are those of the tiny one: a limit that is not at its default shows."""
    for limit in ((0.0, float("inf")), (0.02, 0.05)):
        model = tiny_upstream("mamba2", time_step_limit=limit)
        with unknown():
            report = use_kernels(model)
        assert proved_in(report) == {"Mamba2Mixer"}
    assert len(verdicts._known) == 2


# ---- what is accepted, and what is refused ----


def function_of(change):
    """The class, or the module, that has it, and its name there."""
    family, name, where = change.place
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return (getattr(module, name), "forward") if where == "forward" else (module, where)


def source_of(change):
    owner, name = function_of(change)
    return textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(owner, name))))


def is_in_this_release(change):
    try:
        return change.old in source_of(change)
    except (ImportError, AttributeError):
        return False


@contextlib.contextmanager
def changed_source(change):
    owner, name = function_of(change)
    module = importlib.import_module(getattr(owner, "__module__", owner.__name__))
    code = source_of(change).replace(change.old, change.new)
    file = f"<{change.what}>"
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    names = dict(vars(module))
    if owner is module:  # what it calls of its module is not to be a copy
        names = vars(module)
    before = getattr(owner, name)
    exec(compile(code, file, "exec"), names)
    try:
        setattr(owner, name, names[name])
        yield
    finally:
        setattr(owner, name, before)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "change", filter(is_in_this_release, CHANGES), ids=lambda change: change.what
)
def test_changes_of_form_are_accepted_and_changes_of_substance_refused(change: Change):
    model = tiny_upstream(change.model_type)
    _, name, _ = change.place
    with changed_source(change):
        report = use_kernels(model)
    found = [one for one in report.changed if "by function" not in one.gist]
    assert (name in {one.before.__name__ for one in found}) == change.is_form, report
    assert proved_in(report) == ({name} if change.is_form else set())
    # Its own code may run over functions of ours.
    left = rf"{name} +(left alone: |[^\n]*, by function, as )Transformers"
    assert change.is_form or re.search(left, str(report)), report


def test_the_newest_release_has_all_places_that_are_changed_here():
    counts = [sum(c.is_form == is_form for c in CHANGES) for is_form in (True, False)]
    assert counts == [17, 36]
    if CACHE == "cache":
        assert all(map(is_in_this_release, CHANGES))


def test_what_somebody_wraps_around_a_forward_is_read_and_tried(model, monkeypatch):
    """Though it bears the name of Transformers' own, and functools.wraps points to that."""
    cls = type(model.backbone.layers[0].mixer)
    forward = cls.forward

    @functools.wraps(forward)
    def handed_on(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    @functools.wraps(forward)
    def doubled(self, *args, **kwargs):
        return 2 * forward(self, *args, **kwargs)

    @functools.wraps(forward)
    def limited(self, *args, **kwargs):
        return forward(self, *args, **kwargs).clamp(max=4096)

    for wrapper, is_replaced in ((handed_on, True), (doubled, False), (limited, False)):
        monkeypatch.setattr(cls, "forward", wrapper)
        with use_kernels(model) as report:
            assert proved_in(report) == ({"Mamba2Mixer"} if is_replaced else set()), report


# ---- what a trial leaves behind ----


class Unusual:
    """Settings of a caller, all others than those at the beginning."""

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        torch.set_default_dtype(torch.bfloat16)
        self.stack.callback(torch.set_default_dtype, torch.float32)
        self.stack.enter_context(torch.inference_mode())
        self.stack.enter_context(torch.autocast("cpu"))
        warnings.simplefilter("error")
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(3)

    def __exit__(self, *error):
        self.stack.close()


def settings():
    return (
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.empty(()).device,
        list(warnings.filters),
        logging.getLogger("transformers").level,
        logging.Logger.warning_once,
        torch.get_rng_state().tolist(),
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        {name: value for name, value in vars(torch.backends.mkldnn).items() if "flag" in name},
    )


def test_what_a_caller_has_set_stays_and_does_not_matter(model):
    with warnings.catch_warnings(record=True) as seen, Unusual():
        before = settings()
        with unknown(), mock.patch.object(proof, "why_not_equal", wraps=proof.why_not_equal) as one:
            report = use_kernels(model)
        assert settings() == before
    assert one.call_count == 1 and proved_in(report) == {"Mamba2Mixer"} and not seen


def test_threads_try_one_after_the_other_and_leave_everything_as_it_was():
    models = [tiny_upstream(name) for name in ("mamba2", "lfm2", "mamba2")]
    begin, reports = threading.Barrier(len(models)), []

    def change(model):
        begin.wait()
        reports.append(use_kernels(model))

    threads = [threading.Thread(target=change, args=(model,)) for model in models]
    before = settings()
    with unknown():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert settings() == before
    found = sorted(tuple(proved_in(report)) for report in reports)
    assert found == [("Lfm2ShortConv",), ("Mamba2Mixer",), ("Mamba2Mixer",)]


def test_models_of_a_trial_are_nobody_elses():
    with unknown(), use_kernels_everywhere() as everywhere, torch.no_grad():
        model = tiny_upstream("mamba2")
        model(torch.tensor([[3, 4]]))
        assert set(everywhere.reports) == {model, model.backbone}
        assert proved_in(everywhere.reports[model]) == {"Mamba2Mixer"}


# ---- verdicts ----


def trials(model):
    """How often something was tried."""
    with unknown(), mock.patch.object(proof, "why_not_equal", wraps=proof.why_not_equal) as one:
        report = use_kernels(model)
    assert proved_in(report) == {"Mamba2Mixer"}
    report.undo()
    return one.call_count


def test_a_verdict_holds_for_all_layers_calls_and_processes(model, folder, monkeypatch):
    assert [trials(model), trials(model)] == [1, 0]
    (file,) = folder.iterdir()
    assert list(json.loads(file.read_text()).values()) == [None]
    monkeypatch.setattr(verdicts, "_known", {})
    assert trials(model) == 0
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert trials(model) == 1


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "content", ["", "[", "[]", "{}", '{"a": 3}', "[" * 10**5, "\ud800", b"\xff\x00", None]
)
def test_a_file_that_says_nothing_is_written_again(content, model, folder, monkeypatch):
    path = folder / verdicts.FILE
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(
            content if isinstance(content, bytes) else content.encode(errors="replace")
        )
    assert trials(model) == 1
    monkeypatch.setattr(verdicts, "_known", {})
    assert trials(model) == (0 if content is not None else 1)


@pytest.mark.parametrize("folder_name", ["", "a_file/below", "/proc/nowhere"])
def test_without_a_folder_it_is_tried_in_each_process(folder_name, model, folder, monkeypatch):
    (folder / "a_file").write_text("")
    name = folder_name if folder_name in ("", "/proc/nowhere") else str(folder / folder_name)
    monkeypatch.setenv(verdicts.FOLDER, name)
    assert [trials(model), trials(model)] == [1, 0]
    monkeypatch.setattr(verdicts, "_known", {})
    assert trials(model) == 1
    assert [path.name for path in folder.iterdir()] == ["a_file"]


def test_what_went_wrong_by_chance_is_not_kept(model, folder):
    def fails(twins):
        """A trial"""
        raise RuntimeError("not enough memory")

    with unknown(), mock.patch.object(proof, "CHECKS", (fails,)):
        report = use_kernels(model)
    assert "on a tiny model, A trial: RuntimeError: not enough memory" in str(report)
    assert not list(folder.iterdir())


def test_a_switch_and_a_part_leave_unknown_sources_to_functions(model, monkeypatch):
    by_function = "by function, as Transformers"
    with unknown():
        with use_kernels(model.backbone.layers[0]) as report:
            assert by_function in str(report) and "give use_kernels the model arou" in str(report)
        monkeypatch.setenv(proof.SWITCH, "0")
        report = str(use_kernels(model))
    assert by_function in report and f"{proof.SWITCH}=0 keeps it from being tried" in report
    assert not verdicts._known
