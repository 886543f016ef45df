# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Folders of mamba_ssm: those of flash-linear-attention under their other names, and their MLPs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from hf_linear_attention import from_checkpoint
from hf_linear_attention.checkpoints.families.mamba_ssm import NAMES, translated
from hf_linear_attention.checkpoints.load import load_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

FLA = Path(__file__).parents[1] / "data" / "fla"
OF_LAYERS = {
    "mamba2": ("state_size", "conv_kernel", "head_dim", "n_groups", "use_bias", "use_conv_bias"),
    "mamba3": ("state_size", "head_dim", "n_groups", "rope_fraction", "A_floor", "is_mimo"),
}
SMALL = {
    **{"d_model": 16, "n_layer": 2, "vocab_size": 37, "rms_norm": True, "residual_in_fp32": True},
    **{"fused_add_norm": True, "pad_vocab_size_multiple": 8, "tie_embeddings": True},
    "attn_cfg": {},
}
LAYERS = {"layer": "Mamba2", "headdim": 8, "d_state": 8}


def write(folder, config, weights):
    """As mamba_ssm's save_pretrained does."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def its_name(name):
    return next((theirs for theirs, other in NAMES.items() if other == name), name)


@pytest.mark.parametrize("kind", OF_LAYERS)
def test_names_and_keys_are_those_of_flash_linear_attentions(kind, tmp_path):
    keys = json.loads((FLA / kind / "config.json").read_text())
    weights = load_file(FLA / kind / "model.safetensors")
    same = tmp_path / "fla"
    write(same, {**keys, "norm_eps": 1e-5}, weights)
    weights["backbone.embedding.weight"] = weights.pop("backbone.embeddings.weight")
    layers = {its_name(x): keys[x] for x in OF_LAYERS[kind] if x in keys}
    config = {
        **SMALL,
        "tie_embeddings": False,
        "ssm_cfg": {"layer": kind.capitalize(), "chunk_size": 64, **layers},
    }
    model, report = load_checkpoint(write(tmp_path / "theirs", config, weights))
    expected = from_checkpoint(same)
    ids = torch.arange(60).view(2, 30) % 37
    with torch.no_grad():
        assert model(ids).logits.equal(expected(ids).logits)
    assert {*report.copied, *report.folded} == weights.keys() and report.not_read == ()
    assert model.config.eos_token_id is None  # of a vocabulary that nobody knows


def random_weights(mlp):
    """Of a model with an MLP of mlp features and tied embeddings."""
    torch.manual_seed(0)
    config = Mamba2Config(
        **{"hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1},
        **{"chunk_size": 16, "use_bias": False},
    )
    mixers = [Mamba2Mixer(config, layer) for layer in range(2)]
    weights = {"backbone.embedding.weight": torch.randn(40, 16)}
    weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    weights["backbone.norm_f.weight"] = 1 + torch.randn(16) / 4
    for n, mixer in enumerate(mixers):
        layer = f"backbone.layers.{n}."
        for x in mixer.parameters():
            x.data = torch.randn_like(x) / 4
        weights |= {f"{layer}mixer.{name}": x for name, x in mixer.state_dict().items()}
        for norm in ("norm", "norm2"):
            weights[f"{layer}{norm}.weight"] = 1 + torch.randn(16) / 4
        weights[f"{layer}mlp.fc1.weight"] = torch.randn(2 * mlp, 16) / 4
        weights[f"{layer}mlp.fc2.weight"] = torch.randn(16, mlp) / 4
    return mixers, weights


def logits_of(mixers, weights, ids):
    """By Transformers' mixers, with mamba_ssm's block and MLP around them."""

    def norm(x, name):
        return F.rms_norm(x, (16,), weights[name], 1e-5)

    hidden = weights["backbone.embedding.weight"][ids]
    for n, mixer in enumerate(mixers):
        layer = f"backbone.layers.{n}."
        hidden = hidden + mixer(norm(hidden, f"{layer}norm.weight"))
        x = norm(hidden, f"{layer}norm2.weight") @ weights[f"{layer}mlp.fc1.weight"].mT
        y, gate = x.chunk(2, -1)
        hidden = hidden + (y * F.silu(gate)) @ weights[f"{layer}mlp.fc2.weight"].mT
    return norm(hidden, "backbone.norm_f.weight") @ weights["lm_head.weight"].mT


def test_mlps_are_read_and_their_width_is_rounded_as_there(tmp_path):
    mixers, weights = random_weights(mlp=128)
    config = {**SMALL, "d_intermediate": 100, "attn_layer_idx": [], "ssm_cfg": LAYERS}
    model, report = load_checkpoint(write(tmp_path / "theirs", config, weights))
    assert model.config.intermediate_size == 128 and model.config.vocab_size == 40
    assert report.left_out == {"lm_head.weight": "the head is the embeddings"}
    ids = torch.arange(60).view(2, 30) % 37
    with torch.no_grad():
        logits, expected = model(ids).logits, logits_of(mixers, weights, ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_vocabulary_of_published_models_has_an_end():
    keys = translated({**SMALL, "vocab_size": 50277, "ssm_cfg": LAYERS})
    assert keys["eos_token_id"] == 0 and keys["vocab_size"] == 50280


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ssm_cfg": {}}, r"ssm_cfg\['layer'\] of its .* 'Mamba2' or 'Mamba3', got 'Mamba1'"),
        ({"attn_layer_idx": [1]}, r"attn_layer_idx of its config.json must be \[\], got \[1\]"),
        ({"rms_norm": False}, "rms_norm of its config.json must be True, got False"),
        ({"ssm_cfg": {**LAYERS, "d_ssm": 8}}, "d_ssm of its config.json must be None, got 8"),
        ({"ssm_cfg": {**LAYERS, "rmsnorm": False}}, "rmsnorm of its config.json must be True"),
        (
            {"ssm_cfg": {**LAYERS, "layer": "Mamba3", "is_mimo": True}},
            "is_mimo of its config.json must be False, got True",
        ),
        ({"ssm_cfg": "x"}, "ssm_cfg of its config.json must be an object, got 'x'"),
        ({"ssm_cfg": {"layer": []}}, r"ssm_cfg\['layer'\] .* got \[\]"),
        ({"d_model": None}, "d_model of its config.json must be a whole number .*, got None"),
        ({"n_layer": "x"}, "n_layer of its config.json must be a whole number .*, got 'x'"),
        ({"n_layer": 10**9}, "num_hidden_layers of its config.json must be at most 0"),
        ({"vocab_size": []}, r"vocab_size of its config.json must be a whole number .*, got \[\]"),
        ({"pad_vocab_size_multiple": 0}, "pad_vocab_size_multiple of its config.json must be a wh"),
        ({"d_intermediate": -1}, "d_intermediate of its config.json must be a whole number of at"),
        ({"ssm_cfg": {**LAYERS, "d_conv": 0}}, "d_conv of its config.json must be a whole number"),
        ({"ssm_cfg": {**LAYERS, "dt_limit": 1}}, "dt_limit .* must be a list of two numbers, got"),
    ],
)
def test_values_that_we_do_not_compute_are_refused_by_name(keys, message, tmp_path):
    folder = write(tmp_path / "theirs", {**SMALL, "ssm_cfg": LAYERS, **keys}, {})
    with pytest.raises(ValueError, match=message):
        from_checkpoint(folder)
