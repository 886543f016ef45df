# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-7 from folders of flash-linear-attention and of rwkv7-hf, and from its authors' files: the
logits of their packages, which gave them in tests/data.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_linear_attention import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    export_checkpoint,
    from_checkpoint,
)
from hf_linear_attention.checkpoints.load import load_checkpoint
from hf_linear_attention.checkpoints.rwkv_file import name_of

DATA = Path(__file__).parents[1] / "data"
sys.path += [str(DATA / "rwkv7_of_fla"), str(DATA / "rwkv7_of_authors")]
from formulas import weight  # noqa: E402
from weights import IDS, weights  # noqa: E402

OF_FLA = json.loads((DATA / "rwkv7_of_fla" / "reference.json").read_text())
OF_AUTHORS = json.loads((DATA / "rwkv7_of_authors" / "reference.json").read_text())
CONFIGS = {"fla": "config.json", "rwkv7-hf": "config_of_rwkv7_hf.json"}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path):
    """With weights by the formula, under the names that flash-linear-attention has."""
    path = tmp_path / "fla"
    path.mkdir()
    (path / "config.json").write_text((DATA / "rwkv7_of_fla" / "config.json").read_text())
    shapes = json.loads((DATA / "rwkv7_of_fla" / "shapes.json").read_text())
    like = {name: torch.empty(shape) for name, shape in shapes.items()}
    tensors = {name: weight(i, like[name], name) for i, name in enumerate(sorted(like))}
    assert tensors.keys() == OF_FLA["gradients"].keys()
    save_file(tensors, path / "model.safetensors")
    return path


def logits_of(model, ids):
    with torch.no_grad():
        return model.eval()(torch.tensor(ids)).logits


@every_config
def test_folders_give_the_logits_of_their_package(folder, config):
    (folder / "config.json").write_text((DATA / "rwkv7_of_fla" / config).read_text())
    model = from_checkpoint(folder, dtype=torch.float64)
    expected = torch.tensor(OF_FLA["logits"], dtype=torch.float64)
    torch.testing.assert_close(logits_of(model, OF_FLA["ids"]), expected, rtol=1e-10, atol=1e-10)


def test_they_go_back_bit_for_bit(folder, tmp_path):
    model = from_checkpoint(folder, dtype=torch.float64)
    export_checkpoint(model, tmp_path / "back")
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(after[name].equal(x) for name, x in before.items())
    again = from_checkpoint(tmp_path / "back", dtype=torch.float64)
    assert logits_of(again, OF_FLA["ids"]).equal(logits_of(model, OF_FLA["ids"]))


def test_a_file_of_the_authors_gives_the_logits_of_theirs(tmp_path):
    path = tmp_path / "model.pth"
    torch.save(weights(), path)
    model, report = load_checkpoint(str(path))
    expected = torch.tensor(OF_AUTHORS["logits"])
    torch.testing.assert_close(logits_of(model, [IDS])[0], expected, rtol=1e-4, atol=1e-4)
    mixed = {f"model.layers.0.attn.v_lora.lora.{x}" for x in ("0.weight", "2.weight", "2.bias")}
    assert report.left_out.keys() == mixed
    assert len(report.copied) + len(mixed) == len(weights())


def test_weights_of_a_file_lie_as_fast_products_take_them(tmp_path):
    """Its authors' low ranks are transposed; with 8 bits each went to torchao's product, slowly."""
    path = tmp_path / "model.pth"
    torch.save(weights(), path)
    model = from_checkpoint(path)
    assert [name for name, x in model.named_parameters() if not x.is_contiguous()] == []


def test_half_precision_stays(tmp_path):
    torch.save({name: x.bfloat16() for name, x in weights().items()}, tmp_path / "model.pth")
    model = from_checkpoint(tmp_path / "model.pth")
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.config.intermediate_size == 96 and model.config.num_attention_heads == 2


def test_what_is_refused_of_folders_is_named(folder):
    path = folder / "config.json"
    given = json.loads(path.read_text())
    for changed, message in (
        ({"norm_first": False}, "norm_first of its config.json must be True, got False"),
        ({"norm_bias": False}, "norm_bias of its config.json must be True, got False"),
        ({"hidden_act": "relu"}, "hidden_act of its config.json must be 'sqrelu', got 'relu'"),
        ({"attn": {"layers": [1], "num_heads": 2}}, "attn of its config.json must be None"),
        ({"value_dim": [16, 32, 16]}, "value_dim of its config.json must be the same multiple"),
        ({"num_heads": 3}, "head_dim of its config.json must be such that 3 heads have 16"),
        ({"value_dim": "x"}, "value_dim of its config.json must be the same multiple"),
        ({"value_dim": [16]}, "value_dim of its config.json must be the same multiple"),
        ({"norm_eps": "a"}, "norm_eps of its config.json must be a number of at least 0, got 'a'"),
    ):
        path.write_text(json.dumps({**given, **changed}))
        with pytest.raises(ValueError, match=message):
            from_checkpoint(folder)


def test_what_is_refused_of_files_is_named(tmp_path):
    path = tmp_path / "model.pth"
    tensors = weights()
    for changed, message in (
        ({"blocks.0.att.r_k": torch.zeros(4, 32)}, r"r_k must have the shape \(heads, 64\), got"),
        ({"blocks.0.att.r_k": torch.zeros(128)}, r"r_k must have the shape .*got \(128,\)"),
        ({"head.weight": torch.zeros(11, 128).char()}, "lm_head.weight must hold floating numbers"),
        ({"emb.weight": torch.zeros(11)}, r"emb.weight must have two dimensions, .*\(11,\)"),
        ({"blocks.0.att.w1": torch.zeros(2, 2, 2)}, "blocks.0.att.w1 must have two dimensions"),
        ({"blocks.9999999.att.x_r": torch.zeros(1, 1, 128)}, "num_hidden_layers .* at most"),
        ({"step": 5}, "model.pth must hold tensors by name, got a int by the name 'step'"),
        ({"blocks.1.ffn.s_emb.weight": torch.zeros(2, 2)}, "blocks.1.ffn.s_emb.weight"),
    ):
        torch.save({**tensors, **changed}, path)
        with pytest.raises(ValueError, match=message):
            from_checkpoint(path)
    del tensors["blocks.1.att.w1"]
    torch.save(tensors, path)
    with pytest.raises(ValueError, match="model.layers.1.attn.w_lora.lora.0.weight"):
        from_checkpoint(path)
    torch.save({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="must hold RWKV-7's weights"):
        from_checkpoint(path)
    del tensors["emb.weight"]
    torch.save(tensors, path)
    with pytest.raises(ValueError, match="must have the weights model.embeddings.weight"):
        from_checkpoint(path)
    with pytest.raises(FileNotFoundError, match="nothere.pth must be a file"):
        from_checkpoint("nothere.pth")
    path.write_bytes(b"no weights")
    with pytest.raises(ValueError, match="can't be read"):
        from_checkpoint(path)


def test_files_of_old_releases_load_and_folders_named_like_files(folder, tmp_path):
    torch.save(weights(), tmp_path / "new.pth")
    torch.save(weights(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    new, old = (from_checkpoint(tmp_path / f"{x}.pth").state_dict() for x in ("new", "old"))
    assert all(old[name].equal(x) for name, x in new.items())
    named = folder.rename(tmp_path / "model.pth")
    assert from_checkpoint(named).config.hidden_size == 16


def test_names_of_authors():
    assert name_of("blocks.3.att.output.weight") == "model.layers.3.attn.o_proj.weight"
    assert name_of("blocks.3.att.g1") == "model.layers.3.attn.g_lora.lora.0.weight"
    assert name_of("blocks.3.att.time_decay") == "blocks.3.att.time_decay"


def test_a_model_whose_ranks_follow_from_its_width_is_exported(tmp_path):
    fields = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    config = LinearAttentionConfig.from_preset("rwkv7", vocab_size=41, **fields)
    model = LinearAttentionForCausalLM(config).double()
    export_checkpoint(model, tmp_path / "out")
    again = from_checkpoint(tmp_path / "out", dtype=torch.float64)
    torch.testing.assert_close(logits_of(again, [[1, 2, 3]]), logits_of(model, [[1, 2, 3]]))
    assert again.config.gate_low_rank_dim == 32


def test_a_head_of_its_own_stays_whatever_the_config_says(folder):
    """As in Transformers, which does not tie them either."""
    path = folder / "config.json"
    expected = logits_of(from_checkpoint(folder, dtype=torch.float64), OF_FLA["ids"])
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    model, report = load_checkpoint(str(folder), dtype=torch.float64)
    assert not model.config.tie_word_embeddings and not report.left_out
    assert logits_of(model, OF_FLA["ids"]).equal(expected)


def test_a_model_without_mlps_is_not_exported(tmp_path):
    config = LinearAttentionConfig.from_preset(
        "rwkv7", hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=0
    )
    with pytest.raises(ValueError, match="rwkv7: intermediate_size must be more than 0"):
        export_checkpoint(LinearAttentionForCausalLM(config), tmp_path / "out")
