# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_linear_attention check MODEL`, and `check_model`."""

import sys
import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_linear_attention import LinearAttentionModel, check_model, use_kernels
from hf_linear_attention import __main__ as command
from hf_linear_attention.extras import self_check
from hf_linear_attention.releases import CACHE, CACHE_NAMES
from new_python import run_python
from tiny import VARIANTS, tiny_model
from upstream_models import ONE_OF_EACH, tiny_upstream

pytestmark = pytest.mark.usefixtures("one_thread")

PIECES, TOKENS, GENERATED, PADDED, PACKED = (check.title for check in self_check.CHECKS)
OWN = (*("paper", "learned", "hybrid", "window", "aaren"), "preset_kda", "preset_mamba2")


def failed(report):
    """What failed, and that the report as a whole says so."""
    titles = {result.title for result in report.results if not result.holds}
    assert report.holds == (not titles)
    assert str(report).count("FAILED") == len(titles)
    return titles


def change_arguments(model, change):
    """Before each forward of the model."""

    def hook(model, args, kwargs):
        return args, change(kwargs)

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def without(*names):
    return lambda kwargs: {name: value for name, value in kwargs.items() if name not in names}


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_our_own_models_hold(dtype):
    for variant in OWN:
        report = check_model(tiny_model(**VARIANTS[variant], dtype=dtype))
        assert [result.title for result in report.results] == [
            *(PIECES, TOKENS, GENERATED, PADDED, PACKED)
        ]
        assert failed(report) == set(), f"{variant}\n{report}"


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", ONE_OF_EACH)
def test_transformers_models_hold_on_our_kernels(model_type):
    model = tiny_upstream(model_type)
    before = check_model(model)
    assert not {TOKENS, GENERATED, PADDED} & failed(before), f"{model_type}\n{before}"
    assert PACKED not in {result.title for result in before.results}
    with use_kernels(model):
        after = check_model(model)
    assert after.results[-1].title == PACKED
    assert failed(after) == set(), f"{model_type}\n{after}"


def test_a_model_with_a_list_of_states_holds_on_our_kernels():
    """RWKV, which has no cache; Transformers' own reads padding as text."""
    model = tiny_upstream("rwkv")
    assert failed(check_model(model)) == {PADDED}
    with use_kernels(model):
        assert failed(check_model(model)) == set()


def test_a_model_that_keeps_its_states_holds_as_far_as_its_release_has_it_right():
    """It returns no cache, and takes one for its softmax layers."""
    model = tiny_upstream("recurrent_gemma")
    assert TOKENS not in failed(check_model(model))
    with use_kernels(model):
        after = check_model(model)
    assert not {TOKENS, GENERATED, PACKED} & failed(after), after


def tiny_llama(model_class=LlamaForCausalLM):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(vocab_size=41, initializer_range=0.4, eos_token_id=None, **sizes)
    return model_class(config)


class TakesAnotherName(LlamaForCausalLM):
    """As models whose cache got another name in a release that they were not made for: what
    generate() hands them disappears among other arguments.
    """

    def forward(self, input_ids=None, attention_mask=None, cache_params=None, **kwargs):
        kwargs.pop(CACHE, None)
        if attention_mask is not None and cache_params is None:
            attention_mask = attention_mask[:, -input_ids.shape[1] :]
        return super().forward(
            input_ids, attention_mask=attention_mask, **{CACHE: cache_params}, **kwargs
        )


def test_a_cache_that_a_model_does_not_take_from_generate_is_found_without_an_error():
    assert failed(check_model(tiny_llama())) == set()
    report = check_model(tiny_llama(TakesAnotherName))
    assert failed(report) == {GENERATED}
    (result,) = (result for result in report.results if not result.holds)
    assert result.error == "" and 0.1 < result.difference < 10
    assert "use_cache=False" in str(result)


class TakesNone(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        for name in CACHE_NAMES:
            kwargs.pop(name, None)
        kwargs.pop("attention_mask", None)
        return super().forward(input_ids, **kwargs)


def test_a_model_that_takes_no_cache_at_all_fails_by_name():
    report = check_model(tiny_llama(TakesNone))
    assert {PIECES, TOKENS, GENERATED} <= failed(report)
    assert "TakesNone takes no cache by any of the names" in report.results[0].error


def test_errors_of_a_forward_are_in_its_line():
    def refuse(kwargs):
        if kwargs.get("attention_mask") is not None and not kwargs["attention_mask"].all():
            raise ValueError("no padding here\nand more")
        return kwargs

    report = check_model(change_arguments(tiny_model(dtype=torch.float32), refuse))
    assert failed(report) == {PADDED}
    assert "FAILED  left-padded = alone" in str(report)
    assert "ValueError: no padding here\n" in str(report)


@pytest.mark.parametrize(
    ("dropped", "fails"),
    [
        ({"attention_mask"}, {PADDED}),
        ({"cu_seq_lens_q", "cu_seq_lens_k", "position_ids"}, {PACKED}),
    ],
)
def test_padding_and_neighbours_that_leak_are_found(dropped, fails):
    for variant in ("relu2", "preset_gated_deltanet", "preset_mamba2"):  # without positions
        model = tiny_model(**VARIANTS[variant], dtype=torch.float32)
        assert failed(check_model(change_arguments(model, without(*dropped)))) == fails


def test_not_a_number_holds_nowhere():
    model = tiny_model(dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    assert len(failed(check_model(model))) == len(self_check.CHECKS)


def test_tokens_may_part_where_two_are_as_likely():
    logits = torch.randn(1, self_check.NEW_TOKENS, 7)
    one = self_check.Generated(torch.tensor([[3, 1, 2, 2, 2]]), logits)
    noise = torch.zeros_like(logits)
    noise[:, 2:] = 1
    noise = noise * torch.randn_like(logits)
    other = self_check.Generated(torch.tensor([[3, 2, 4, 4, 4]]), logits + noise)
    assert self_check.parted(other, one) == 0  # they part after the second
    late = other._replace(tokens=torch.tensor([[3, 1, 2, 4, 4]]))
    assert self_check.parted(late, one) > 0.1


def test_a_model_stays_in_training_and_without_gradients():
    model = tiny_model().train()
    assert check_model(model).holds
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), tiny_model(LinearAttentionModel)])
def test_models_that_do_not_generate_are_refused(model):
    with pytest.raises(ValueError, match=f"causal language model .*got {type(model).__name__}"):
        check_model(model)


# ---- the command ----


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["python -m hf_linear_attention", *map(str, arguments)])
    command.main()


def test_the_command_prints_a_line_for_each_with_and_without_kernels(folder, monkeypatch, capsys):
    call(monkeypatch, "check", folder)
    out = capsys.readouterr().out
    before, after = out.split(self_check.AFTER)
    assert "Qwen3_5ForCausalLM of transformers.models" in before and "torch.float32" in before
    for title in (PIECES, TOKENS, GENERATED, PADDED):
        assert f"  ok      {title} " in before and f"  ok      {title} " in after
    assert PACKED in after and PACKED not in before
    assert "of 1e-03" in after
    call(monkeypatch, "check", folder, "--kernels", "without")
    assert self_check.AFTER not in capsys.readouterr().out


def test_what_fails_ends_it_with_status_1_and_says_what_to_do(folder, monkeypatch, capsys):
    def load(flags):
        return change_arguments(tiny_upstream("qwen3_5_text").bfloat16(), without("attention_mask"))

    monkeypatch.setattr(self_check, "load", load)
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "check", folder)
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert out.count("FAILED  left-padded = alone") == 2
    assert "give prompts one by one" in out and "--dtype float32" in out


def test_a_model_that_use_kernels_does_not_change_is_checked_as_it_is(
    tmp_path, monkeypatch, capsys
):
    model = tiny_llama()
    for layer in model.modules():  # products, norms and attention are to stay
        if [*layer.children()] and not hasattr(layer, "num_key_value_groups"):
            continue
        layer.forward = lambda *args, forward=layer.forward, **kwargs: forward(*args, **kwargs)
    model.loss_function = torch.nn.functional.cross_entropy
    monkeypatch.setattr(self_check, "load", lambda flags: model)
    with warnings.catch_warnings():  # it says so once
        warnings.filterwarnings("error", "use_kernels")
        call(monkeypatch, "check", tmp_path)
    out = capsys.readouterr().out
    assert out.count("\n  ok ") == 4 and "nothing changes:\n" in out
    with pytest.raises(SystemExit, match="nothing was checked"):
        call(monkeypatch, "check", tmp_path, "--kernels", "with")


def test_what_our_kernels_mend_is_said():
    model = tiny_llama()
    held = self_check.advice(model, {self_check.BEFORE: False, self_check.AFTER: True})
    assert list(held) == [f"\n{self_check.AFTER} all of it holds."]


def test_a_folders_own_code_is_checked_where_it_is_trusted(tmp_path):
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "model")
    flags = ("check", tmp_path / "model", "--trust-remote-code")
    result = run_python("-m", "hf_linear_attention", *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "LinearAttentionForCausalLM of hf_linear_attention." in result.stdout
    assert result.stdout.count("\n  ok") == len(self_check.CHECKS)


def test_a_missing_model_is_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="missing can't be loaded: "):
        call(monkeypatch, "check", tmp_path / "missing")
