# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_linear_attention quantize`: folders with weights of 8 and 4 bits of any model."""

import json
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

from hf_linear_attention import use_kernels
from hf_linear_attention.extras import quantize as module
from hf_linear_attention.extras.quantize import bits_per_byte, main
from new_python import run_python
from tiny import tiny_config

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=256)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
CONFIGS = {
    "ours": lambda: tiny_config(**SIZES, tie_word_embeddings=True),
    "llama": lambda: AutoConfig.for_model("llama", **SIZES, **HEADS),
    "mamba2": lambda: AutoConfig.for_model(
        "mamba2", **SIZES, num_heads=4, head_dim=32, state_size=16, n_groups=1, eos_token_id=None
    ),
}


def byte_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save(name, folder, with_tokenizer=True):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    model.save_pretrained(folder)
    if with_tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return model


def kinds(model):
    return {
        name: type(x.weight).__name__
        for name, x in model.named_modules()
        if isinstance(x, torch.nn.Linear)
    }


KINDS = {8: "Int8Tensor", 4: "Int4Tensor"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_any_model_becomes_a_folder_of_few_bits(name, bits, tmp_path, capsys):
    save(name, tmp_path / "model")
    main([str(tmp_path / "model"), str(tmp_path / "out"), "--bits", str(bits)])
    printed = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tied = {"lm_head"} if model.config.tie_word_embeddings else set()
    assert {kind for name, kind in kinds(model).items() if name not in tied} == {KINDS[bits]}
    assert ("lm_head stays bfloat16: its weight is that of the embeddings" in printed) == bool(tied)
    assert model.dtype == torch.bfloat16
    before, after = printed.split("bits per byte: ")[1].split(" now")[0].split(", ")
    assert abs(float(after) / float(before) - 1) < 0.05
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = module.default_text()[: module.MOST_BYTES]
    assert bits_per_byte(model, tokenizer, text) == pytest.approx(float(after), abs=1e-4)
    assert ("use_kernels" in printed) == (bits == 4 and name != "ours")
    use_kernels(model)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    generate("def f", max_new_tokens=3, do_sample=False)


def test_a_head_may_get_its_own_weight(tmp_path, capsys):
    model = save("ours", tmp_path / "model")
    options = ["--bits", "8", "--untie", "--dtype", "float32"]
    main([str(tmp_path / "model"), str(tmp_path / "out"), *options])
    assert "stays" not in capsys.readouterr().out
    untied = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert kinds(untied)["lm_head"] == "Int8Tensor" and untied.dtype == torch.float32
    assert torch.equal(untied.get_input_embeddings().weight, model.get_input_embeddings().weight)
    exact = model.lm_head.weight.detach()
    torch.testing.assert_close(untied.lm_head.weight.dequantize(), exact, rtol=0, atol=0.01)
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    assert saved["tie_word_embeddings"]  # what was given stays


def test_groups_that_do_not_divide_are_said_and_another_is_looked_for(tmp_path, capsys):
    config = AutoConfig.for_model("llama", **SIZES | {"intermediate_size": 96}, **HEADS)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    main([str(tmp_path / "model"), str(tmp_path / "32"), "--bits", "4"])
    printed = capsys.readouterr().out
    assert "stays" not in printed and "bits per byte" not in printed
    assert "tokenizer: none" in printed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "32")
    assert model.lm_head.weight.block_size[1] == 32
    main([str(tmp_path / "model"), str(tmp_path / "64"), "--bits", "4", "--group-size", "64"])
    left = "model.layers.0.mlp.down_proj stays bfloat16: its 96 inputs are no multiple of 64"
    assert left in capsys.readouterr().out


def test_a_text_of_ones_own_is_read(tmp_path, capsys):
    save("llama", tmp_path / "model")
    (tmp_path / "text").write_text("Wörter " * 400)
    main([str(tmp_path / "model"), str(tmp_path / "out"), "--bits", "8", "--text"]
         + [str(tmp_path / "text")])  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loss = bits_per_byte(model, byte_tokenizer(), "Wörter " * 400)
    assert f"{loss:.4f} now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["MODEL", "FULL", "--bits", "8"], "must be a new or an empty folder"),
        (["MODEL", "OUT"], "the following arguments are required: --bits"),
        (["MODEL", "OUT", "--bits", "5"], "invalid choice: 5"),
        (["MODEL", "OUT", "--bits", "4", "--group-size", "7"], "positive even number, got '7'"),
        (["MODEL", "OUT", "--bits", "8", "--group-size", "32"], "--group-size is for 4 bits"),
        (["MODEL", "OUT", "--bits", "4", "--group-size", "6"], "none of its linear layers can"),
        (["MODEL", "OUT", "--bits", "4", "--text", "NONE"], "must be a file of text, got"),
        (["NONE", "OUT", "--bits", "4"], "can't be quantised"),
        (["EIGHT", "OUT", "--bits", "4"], "is quantised already"),
    ],
)
def test_what_can_not_be_is_said(given, message, tmp_path, capsys):
    save("llama", tmp_path / "MODEL", with_tokenizer=False)
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "file").touch()
    if "EIGHT" in given:
        main([str(tmp_path / "MODEL"), str(tmp_path / "EIGHT"), "--bits", "8"])
    places = [str(tmp_path / x) if x.isupper() else x for x in given]
    with pytest.raises(SystemExit) as ended:
        main(places)
    assert message in f"{ended.value} {capsys.readouterr().err}"
    assert not (tmp_path / "OUT").exists()


def test_it_is_a_command():
    result = run_python("-m", "hf_linear_attention", "quantize", "--help")
    assert result.returncode == 0 and "--bits {8,4}" in result.stdout


def test_experts_that_stay_are_said(tmp_path, capsys):
    config = AutoConfig.for_model(
        "qwen3_5_moe_text",
        **SIZES,
        **HEADS,
        head_dim=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_value_head_dim=32,
        linear_key_head_dim=32,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    main([str(tmp_path / "model"), str(tmp_path / "out"), "--bits", "4"])
    printed = capsys.readouterr().out
    experts = r"model\.layers\.\*\.mlp\.experts\.\w+ stays bfloat16: its \d\.\d MB are no linear"
    assert re.search(experts, printed)
    assert "bits per byte" not in printed  # of a tokenizer that makes no tokens


@pytest.mark.parametrize(
    "make",
    [
        lambda: BertForMaskedLM(BertConfig(**SIZES, num_attention_heads=2)),
        lambda: LlamaForSequenceClassification(AutoConfig.for_model("llama", **SIZES, **HEADS)),
    ],
)
def test_heads_that_would_be_lost_are_refused(make, tmp_path):
    make().save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit, match="it must be a causal language model, got "):
        main([str(tmp_path / "model"), str(tmp_path / "out"), "--bits", "8"])
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_what_was_interrupted_can_be_begun_again(tmp_path, monkeypatch):
    save("llama", tmp_path / "model")
    arguments = [str(tmp_path / "model"), str(tmp_path / "new" / "out"), "--bits", "8"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_tokenizer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            main(arguments)
    assert [*(tmp_path / "new").iterdir()] == []
    (tmp_path / "new" / "out").mkdir()
    main(arguments)
    assert [x.name for x in (tmp_path / "new").iterdir()] == ["out"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "out")


def test_a_folder_that_can_not_be_is_said_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="out can't be written"):
        main(["no model", str(tmp_path / "file" / "out"), "--bits", "8"])
