# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_linear_attention speedup MODEL`."""

import mmap
import re
import sys

import pytest
import torch
from transformers import DynamicCache

from hf_linear_attention import __main__ as command
from hf_linear_attention.extras import speedup
from tiny import tiny_model
from upstream_models import tiny_upstream

pytestmark = pytest.mark.usefixtures("one_thread")


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["python -m hf_linear_attention", *map(str, arguments)])
    monkeypatch.setattr(speedup, "SECONDS", 0.0)
    command.main()


def test_the_command_prints_what_changes_the_times_and_whether_answers_do(
    folder, monkeypatch, capsys
):
    call(monkeypatch, "speedup", folder, "--tokens", 20)
    out, progress = capsys.readouterr()
    assert "1 Qwen3_5GatedDeltaNet  gated delta rule" in out
    for title in ("prompt of 20 tokens", "a token after 20", "training step of 20 tokens"):
        assert re.search(rf"^{title} +[\d.]+ m?s +[\d.]+ m?s +[\d.]+x$", out, re.M)
        assert f"{title}, before and after ..." in progress
    assert re.search(r"^  its memory +\d+ MiB +\d+ MiB", out, re.M)
    assert "answers the same but for rounding" in out
    assert "the same after 20 of 20 tokens" in out
    assert "torch.float32, threads: 1" in out


def test_a_model_that_returns_no_cache_is_given_one():
    """RecurrentGemma, whose states are on its modules; before 5.24 it goes on from them wrongly."""
    model = tiny_upstream("recurrent_gemma")
    ids = torch.randint(2, 9, (1, 12), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        pieces = [model(x, past_key_values=cache).logits for x in ids.split([11, 1], 1)]
    expected = torch.cat(pieces, 1)
    torch.testing.assert_close(speedup.answers(model, ids), expected, rtol=0, atol=1e-4)
    again = speedup.next_token(model, ids)()
    assert again.logits.shape[1] == 1 and again.logits.isfinite().all()


def test_a_model_that_returns_a_list_of_states_goes_on_from_it():
    model = tiny_upstream("rwkv")
    ids = torch.randint(2, 9, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(speedup.answers(model, ids), whole, rtol=0, atol=1e-4)
    again = speedup.next_token(model, ids)()
    assert again.logits.shape[1] == 1 and again.logits.isfinite().all()


@pytest.mark.parametrize("is_trainable", [True, False])
def test_bfloat16_is_trained_where_that_takes_no_hours(is_trainable, folder, monkeypatch, capsys):
    monkeypatch.setattr(speedup, "is_trainable", lambda dtype: is_trainable)
    call(monkeypatch, "speedup", folder, "--tokens", 8, "--dtype", "bfloat16")
    out = capsys.readouterr().out
    assert "torch.bfloat16" in out
    assert ("training step of 8 tokens: left out" in out) != is_trainable


def test_other_answers_end_it_with_status_1(folder, monkeypatch, capsys):
    measured = speedup.answers
    noise = iter([0.0, 1.0])
    monkeypatch.setattr(speedup, "answers", lambda *args: measured(*args) + next(noise))
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "speedup", folder, "--tokens", 8)
    assert ended.value.code == 1
    assert "answers NOT the same" in capsys.readouterr().out


def test_a_missing_model_is_a_sentence(tmp_path, monkeypatch):
    missing = tmp_path / "missing"
    with pytest.raises(SystemExit, match=f"^{missing} can't be loaded: "):
        call(monkeypatch, "speedup", missing)


def test_a_model_in_which_nothing_changes_is_a_sentence(tmp_path, monkeypatch):
    """As one of this package's."""
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="changes nothing in .*\n.*runs on our kernels already"):
        call(monkeypatch, "speedup", tmp_path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("speedup", "model", "--tokens", 1), "--tokens must be at least 2, got 1"),
        (("speedup",), "required: model"),
    ],
)
def test_wrong_flags_are_named(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


def test_another_command_is_named(monkeypatch):
    with pytest.raises(SystemExit, match="the commands are 'check MODEL', .*, got 'faster'"):
        call(monkeypatch, "faster")


def test_help_names_the_commands(monkeypatch, capsys):
    call(monkeypatch, "--help")
    printed = capsys.readouterr().out
    assert "'check MODEL', 'speedup MODEL', 'convert MODEL OUT', 'quantize MODEL OUT" in printed
    assert "'import MODEL OUT' and 'export-fla MODEL OUT'" in printed


@pytest.mark.parametrize("model_type", ["mamba2", "minimax"])
def test_twins_share_weights_and_answer_alike(model_type):
    model = tiny_upstream(model_type)
    twin = speedup.twin(model)
    assert twin is not model and type(twin) is type(model)
    shared = [*model.parameters(), *model.buffers()]
    for mine, theirs in zip([*twin.parameters(), *twin.buffers()], shared, strict=True):
        assert mine is theirs
    ids = torch.randint(2, 60, (1, 9))
    with torch.no_grad():
        whole = model(ids).logits
    assert speedup.compare_answers(whole, speedup.answers(twin, ids)).are_same


def test_the_peak_of_memory_is_what_a_run_needs_at_once():
    # Not malloc's memory: of any size, it may come of what earlier tests have freed, and stay.
    def use(mib):
        with mmap.mmap(-1, mib << 20) as memory:
            for page in range(0, len(memory), mmap.PAGESIZE):
                memory[page] = 1

    def run():
        use(64)
        use(128)

    assert 126 < speedup.peak_mib(run) < 140
