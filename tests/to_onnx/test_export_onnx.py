# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Folders with graphs: by the command and by the function, in all forms that weights have."""

import runpy
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch

from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    LinearAttentionForSequenceClassification,
    export_onnx,
)
from hf_linear_attention.__main__ import main
from hf_linear_attention.to_onnx import export, generate
from hf_linear_attention.to_onnx.weights import round_weights
from tiny import VARIANTS, tiny_model, tokenizer_of_letters

# Large enough that its weights are worth few bits.
SIZES = {"hidden_size": 256, "intermediate_size": 288, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"vocab_size": 300, "layer_types": None, "initializer_range": 0.1}


def model_of(dtype=torch.float32, **fields):
    return tiny_model(dtype=dtype, **{**VARIANTS["preset_gated_deltanet"], **SIZES, **fields})


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["hf_linear_attention", *map(str, arguments)])
    main()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "ours"
    model_of().save_pretrained(folder)
    tokenizer_of_letters("th/he").save_pretrained(folder)
    return folder


def test_the_command_writes_a_folder_that_generates_without_torch(
    folder, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    call(monkeypatch, "export", folder, out)
    printed = capsys.readouterr()
    assert "64 of 64 generated tokens are the model's" in printed.out
    assert "writing 2 layers down as a graph" in printed.err and "MB" in printed.err
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert files >= {"onnx/model.onnx", "config.json", "generation_config.json", "generate.py"}
    assert "tokenizer.json" in files and "modeling_linear_attention.py" not in files
    program = (
        f"import runpy, sys; sys.modules['torch'] = None; sys.argv = ['x', '3', '1', '4']; "
        f"runpy.run_path({str(out / 'generate.py')!r}, run_name='__main__')"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    model = LinearAttentionForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([[3, 1, 4]])
    expected = model.generate(prompt, max_new_tokens=50, do_sample=False, pad_token_id=0)
    assert [int(word) for word in ran.stdout.split()] == expected[0, 3:].tolist()
    for words in ([], ["7", "300"], ["-1"], ["a"]):
        monkeypatch.setattr(sys, "argv", ["generate.py", *words])
        with pytest.raises(SystemExit, match="give the numbers of tokens, 0 to 299: python gen"):
            runpy.run_path(str(out / "generate.py"), run_name="__main__")


def test_what_the_command_can_not_do_ends_it_with_the_reason(tmp_path, monkeypatch):
    tiny_model(**VARIANTS["preset_comba"]).save_pretrained(tmp_path / "comba", code=False)
    with pytest.raises(SystemExit, match="comba can't be exported: mixer must be .* got 'comba'"):
        call(monkeypatch, "export", tmp_path / "comba", tmp_path / "out")
    with pytest.raises(SystemExit, match="comba must be a new or an empty folder"):
        call(monkeypatch, "export", tmp_path / "comba", tmp_path / "comba")
    config = LinearAttentionConfig(**VARIANTS["preset_gla"])
    LinearAttentionForSequenceClassification(config).save_pretrained(tmp_path / "labels")
    with pytest.raises(
        SystemExit, match="labels must hold the weights of a .*ForCausalLM, and has no"
    ):
        call(monkeypatch, "export", tmp_path / "labels", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_tokens_are_no_piece():
    with pytest.raises(ValueError, match=r"ids must be \(rows, tokens\), .* got \(1, 0\)"):
        generate.read(None, {}, np.zeros((1, 0), np.int64), np.ones((1, 3), np.int64))


def test_bad_arguments_of_the_function_leave_no_folder(tmp_path):
    model, out = model_of(), tmp_path / "out"
    for bits in (5, 4.0, "4", True):
        with pytest.raises(ValueError, match=f"bits must be 8, 4 or None, got {bits!r}"):
            export_onnx(model, out, bits=bits)
    with pytest.raises(ValueError, match="must be a LinearAttentionForCausalLM .* got a LinearA"):
        export_onnx(model.model, out)
    model.generation_config.temperature = 0.7  # and no sampling
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        export_onnx(model, out)
    assert not out.exists()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file must be a new or an empty folder"):
        export_onnx(model_of(), tmp_path / "file")


@pytest.mark.thorough
def test_a_model_without_numbers_leaves_no_folder(tmp_path):
    model = model_of()
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(ValueError, match="model must give finite logits, got others of the model"):
        export_onnx(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "bits", "file", "difference"),
    [
        (torch.float32, None, "model", 1e-4),
        (torch.float16, None, "model_fp16", 0.1),
        (torch.float32, 8, "model_quantized", 0.8),
        (torch.float32, 4, "model_q4", 0.8),
        (torch.float16, 4, "model_q4f16", 0.8),
    ],
)
def test_weights_of_every_kind(dtype, bits, file, difference, tmp_path):
    model = model_of(dtype, tie_word_embeddings=True)
    compared = export_onnx(model, tmp_path, bits=bits)
    (path,) = (tmp_path / "onnx").iterdir()
    if bits is not None:
        assert compared.difference > 2 * difference or bits == 8
        round_weights(model, bits)  # then products differ by the 8 bits of their inputs
        compared = export.compare(model, path)
    assert compared.difference < difference < compared.largest
    assert path.name == f"{file}.onnx"
    graph = onnx.load(path).graph
    kinds = {node.op_type for node in graph.node}
    assert {"LinearAttention", "CausalConvWithState"} <= kinds
    assert ("MatMulNBits" in kinds) == ("GatherBlockQuantized" in kinds) == (bits is not None)
    assert all(
        x.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        for x in graph.input
        if x.name.startswith("past_recurrent")
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_weights_are_the_nearest(bits):
    """Of the 2^bits multiples of a block's scale; the largest number of a block is exact."""
    module = torch.nn.Linear(40, 80)  # the second block is not full
    exact = module.weight.detach().clone()
    round_weights(module, bits)
    for part in (slice(0, 32), slice(32, 40)):
        largest = exact[:, part].abs().amax(1, keepdim=True)
        error = (module.weight - exact)[:, part].abs()
        at_most = largest / 2**bits
        # A value opposite to the largest may lie one step beyond the last multiple.
        assert (error <= 2.001 * at_most).all() and (error <= 1.001 * at_most).float().mean() > 0.9
        assert torch.isclose(
            error.gather(1, exact[:, part].abs().argmax(1, True)), torch.tensor(0.0), atol=1e-7
        ).all()


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["preset_gated_deltanet", "preset_minimax"])
def test_the_standard_form_has_no_operators_of_others(variant, tmp_path):
    model = tiny_model(dtype=torch.float32, **{**VARIANTS[variant], "initializer_range": 0.1})
    compared = export_onnx(model, tmp_path, standard=True)
    assert compared.difference < 1e-5 and compared.same == compared.generated
    loaded = onnx.load(tmp_path / "onnx" / "model.onnx")
    assert [(x.domain, x.version) for x in loaded.opset_import] == [("", 27)]
    assert {node.domain for node in loaded.graph.node} == {""}
    with pytest.raises(ValueError, match="bits must be None with standard=True, got 4"):
        export_onnx(model, tmp_path, standard=True, bits=4)


@pytest.mark.thorough
def test_large_weights_have_a_file_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "LARGE", 1000)
    compared = export_onnx(model_of(), tmp_path)
    assert compared.difference < 1e-4
    assert {x.name for x in (tmp_path / "onnx").iterdir()} == {"model.onnx", "model.onnx_data"}
