# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What is exported is what flash-linear-attention would have saved."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_linear_attention import LinearAttentionForCausalLM, export_checkpoint, from_checkpoint
from hf_linear_attention.checkpoints.files import read_config
from hf_linear_attention.checkpoints.tables import FAMILIES
from hf_linear_attention.model.presets import preset_fields
from tiny import random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDERS = Path(__file__).parents[1] / "data" / "fla"
CASES = sorted(path.name for path in FOLDERS.iterdir())
# Whose config.json says in another way what is exported: a fused norm's name, weights of ones.
OTHER_NAMES = ("gla_plain", "gla_unfused")


def logits_of(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_was_loaded_is_written_as_it_was(case, tmp_path):
    export_checkpoint(from_checkpoint(FOLDERS / case), tmp_path / "out")
    folders = FOLDERS / case, tmp_path / "out"
    before, after = (read_config(str(folder), {}) for folder in folders)
    family = FAMILIES[before["model_type"]]
    assert after["model_type"] == before["model_type"]
    assert after["architectures"] == before["architectures"]
    assert after.keys() - before.keys() <= {"fuse_linear_cross_entropy"}
    ours = [family.config_for(family.read(x)).to_dict() for x in (before, after)]
    assert ours[0] == ours[1]
    stored, tensors = (load_file(x / "model.safetensors") for x in folders)
    if case not in OTHER_NAMES:
        assert tensors.keys() == stored.keys()
    for name in tensors.keys() & stored.keys():
        assert torch.equal(tensors[name], stored[name]), name


@pytest.mark.parametrize(
    "preset",
    [
        *("retnet", "gla", "hgrn2", "hgrn", "deltanet", "gated_deltanet", "gated_deltaproduct"),
        *("comba", "precond_gdn", "precond_kda", "kda", "mamba2", "mamba3", "rwkv6"),
    ],
)
def test_a_preset_goes_there_and_back(preset, tmp_path):
    """Their embeddings and queries are of another size, which weights make up for."""
    mlp = {"intermediate_size": 0} if "mamba" in preset else {}  # theirs has none
    model = tiny_model(**preset_fields(preset, 3), **mlp)
    export_checkpoint(model, tmp_path / "out")
    back = from_checkpoint(tmp_path / "out")
    assert isinstance(back, LinearAttentionForCausalLM)
    ids = random_ids(2, 9)
    torch.testing.assert_close(logits_of(back, ids), logits_of(model, ids), rtol=0, atol=1e-10)
