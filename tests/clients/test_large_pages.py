# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Weights that were moved to memory of large pages: the same model, in other memory."""

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_linear_attention import (
    LinearAttentionForCausalLM,
    pack_int4_weights,
    use_kernels,
    use_large_pages,
)
from hf_linear_attention.extras import large_pages
from tiny import random_ids, tiny_config

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=41)


def ours(**changes):
    torch.manual_seed(0)
    return LinearAttentionForCausalLM(tiny_config(**SIZES, **changes)).eval()


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=4, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config).eval()
    use_kernels(model)
    return model


def of_bits(bits):
    model = ours().to(torch.bfloat16)
    if bits == 8:
        quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))
    else:
        quantize_(model, IntxWeightOnlyConfig(torch.int4, PerGroup(32)))
        pack_int4_weights(model)
    return model


def generated(model):
    ids = random_ids(1, 7)
    return model.generate(
        ids, max_new_tokens=20, do_sample=False, output_logits=True, return_dict_in_generate=True
    )


def pages_of(tensor):
    """What Linux says of the memory that a tensor lies in."""
    with open("/proc/self/smaps") as maps:
        for line in maps:
            first, last = line.split()[0].split("-") if "-" in line.split()[0] else ("0", "0")
            if ":" not in first and int(first, 16) <= tensor.data_ptr() < int(last, 16):
                return next(x for x in maps if x.startswith("VmFlags")).split()
    raise AssertionError("a tensor must lie somewhere")


# Where Linux has none nothing is moved, which the last test looks at everywhere.
needs_large_pages = pytest.mark.skipif(
    large_pages._why_not() is not None, reason=f"large pages need {large_pages._why_not()}"
)
MODELS = {"ours": ours, "Llama": llama, "8 bits": lambda: of_bits(8), "4 bits": lambda: of_bits(4)}


@needs_large_pages
@pytest.mark.parametrize("name", MODELS)
def test_a_moved_model_is_the_same(name):
    model = MODELS[name]()
    before = generated(model)  # tokens are recorded with the weights where they were
    tensors = list(large_pages._plain_tensors(model))
    places = [x.data_ptr() for x in tensors]
    bytes_then = sum(x.nbytes for x in tensors)
    assert use_large_pages(model) == bytes_then
    assert not {*places} & {x.data_ptr() for x in tensors}
    assert all(x.data_ptr() % large_pages.ALIGNMENT == 0 for x in tensors)
    assert all("hg" in pages_of(x) for x in tensors)  # the advice, which a kernel may follow
    after = generated(model)
    assert torch.equal(before.sequences, after.sequences)
    assert all(map(torch.equal, before.logits, after.logits))


@needs_large_pages
def test_a_file_is_read_and_written(tmp_path):
    ours().save_pretrained(tmp_path / "before")
    model = LinearAttentionForCausalLM.from_pretrained(tmp_path / "before")
    use_large_pages(model)
    model.save_pretrained(tmp_path / "after")
    name = "model.safetensors"
    assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


@needs_large_pages
def test_tied_weights_stay_tied_and_all_can_be_trained():
    model = ours(tie_word_embeddings=True)
    use_large_pages(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = random_ids(2, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


@needs_large_pages
@pytest.mark.parametrize("part", ["whole", "turned", "rows"])
def test_parameters_with_memory_in_common_keep_it(part):
    weight = torch.randn(3, 3)
    common = {"whole": weight, "turned": weight.t(), "rows": weight[1:3]}[part]
    model = nn.ParameterList([weight, common, torch.randn(2), *torch.randn(2, 4)])
    assert use_large_pages(model) == 4 * (2 + 2 * 4)  # the last two are apart in one storage
    with torch.no_grad():
        model[0].fill_(7)
    assert (model[1] == 7).all()


@needs_large_pages
def test_shapes_strides_and_what_stays():
    model = nn.Module()
    model.turned = nn.Parameter(torch.randn(3, 5).t())
    model.empty = nn.Parameter(torch.randn(0, 4))
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("nowhere", torch.empty(3, device="meta"))
    model.register_buffer("shared", torch.randn(2).share_memory_())
    values, place = model.turned.detach().clone(), model.shared.data_ptr()
    assert use_large_pages(model) == model.turned.nbytes + model.count.nbytes
    assert torch.equal(model.turned, values) and model.turned.stride() == (1, 5)
    assert model.count == 7 and model.empty.shape == (0, 4)
    assert model.shared.data_ptr() == place and model.shared.is_shared()
    assert use_large_pages(nn.Identity()) == 0


@pytest.mark.parametrize("setting", [None, "always madvise [never]"])
def test_without_large_pages_weights_stay(setting, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(large_pages, "PAGE_SIZE", tmp_path / "hpage_pmd_size")
    monkeypatch.setattr(large_pages.logger, "propagate", True)
    if setting is not None:
        (tmp_path / "hpage_pmd_size").write_text("2097152")
        (tmp_path / "enabled").write_text(setting)
    layer = nn.Linear(2, 2)
    place = layer.weight.data_ptr()
    assert use_large_pages(layer) == 0
    assert layer.weight.data_ptr() == place
    assert ("has 'never'" if setting else "need Linux with") in caplog.text
