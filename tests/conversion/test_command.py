# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_linear_attention convert MODEL OUT`."""

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_linear_attention import __main__ as command
from softmax_models import softmax_model, some_ids
from tiny import tokenizer_of_letters

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved Qwen3 with a tokenizer, a chat template and a generation config."""
    path = tmp_path_factory.mktemp("model")
    model = softmax_model("qwen3")
    model.generation_config.repetition_penalty = 1.25
    model.save_pretrained(path)
    tokenizer = tokenizer_of_letters("th/he")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["python -m hf_linear_attention", *map(str, arguments)])
    command.main()


def test_the_folder_has_the_model_its_code_tokenizer_template_and_generation_config(
    folder, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "linear"
    call(monkeypatch, "convert", folder, out, "--softmax-layers", "all")
    assert "copied: 35 parameters" in capsys.readouterr().out
    ids = some_ids(1, 8)
    logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    model = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-5)
    assert (out / "modeling_linear_attention.py").exists()
    assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE
    assert GenerationConfig.from_pretrained(out).repetition_penalty == 1.25
    assert f"base_model: {folder}" in (out / "README.md").read_text("utf-8")


def test_flags_choose_layers_mixer_dtype_and_fields(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "linear"
    flags = ["--mixer", "gated_deltanet", "--softmax-layers", "0,2", "--dtype", "bfloat16"]
    call(monkeypatch, "convert", folder, out, *flags, "--overrides", '{"conv_kernel_size": 3}')
    printed = capsys.readouterr().out
    assert "layers: 2 x full_attention, 1 x linear_attention" in printed
    assert "model.layers.*.self_attn.g_proj.weight  (layers 1)" in printed
    assert "model.layers.*.self_attn.q_conv1d" in printed
    assert "tokenizer: " in printed
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert config.layer_types == ["full_attention", "linear_attention", "full_attention"]
    assert (config.mixer, config.conv_kernel_size) == ("delta_rule", 3)
    assert config.dtype == torch.bfloat16


def test_a_folder_without_tokenizer_says_so(tmp_path, monkeypatch, capsys):
    softmax_model("mistral").save_pretrained(tmp_path / "model")
    call(monkeypatch, "convert", tmp_path / "model", tmp_path / "out")
    assert "tokenizer: none" in capsys.readouterr().out


def test_what_can_not_be_converted_ends_it_with_the_reason(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    out = tmp_path / "out"
    for arguments, message in (
        ((tmp_path / "nothing", out), "nothing can't be converted"),
        ((folder, tmp_path / "full"), "full must be a new or an empty folder"),
        ((folder, out, "--softmax-layers", "7,8"), "can't be converted: softmax_layers must be"),
        ((folder, out, "--overrides", '{"decay": "no"}'), "can't be converted: decay must be"),
        ((folder, out, "--overrides", '{"layers": 2}'), "can't be converted: .*layers"),
    ):
        with pytest.raises(SystemExit, match=message):
            call(monkeypatch, "convert", *arguments)
    layers, fields = "must be none, all, a number n", "must be a JSON object"
    for flag, value, message in (
        ("--mixer", "hyena", "invalid choice"),
        *(("--overrides", text, fields) for text in ("[]", "{decay")),
        *(("--softmax-layers", text, layers) for text in ("few", "", ",")),
    ):
        with pytest.raises(SystemExit):
            call(monkeypatch, "convert", folder, out, flag, value)
        error = capsys.readouterr().err
        assert f"argument {flag}: {message}" in error and repr(value) in error
    assert not out.exists()
