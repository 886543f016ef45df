# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What is known of a family of Transformers' recurrent models stands in one file."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from unittest import mock

import transformers

from hf_linear_attention.upstream import families
from hf_linear_attention.upstream.family import UNKNOWN

FOLDER = Path(families.__file__).parent
PACKAGE = FOLDER.parents[1]
# Files that name a class of a model elsewhere, and why.
MAY_NAME = {
    "fast/rms_norm.py": "Llama's norm is the base of the package's",
    "remote/stand_ins/fast/rms_norm.py": "as it is of what travels",
    "mixers/parts/rotary.py": "and so are its angles",
    "model/auto.py": "registries, and models that are made of two others",
    "conversion/sources.py": "softmax models that are converted",
    "upstream/minimax_cache.py": "a class derived from it, imported when there is one",
    "to_onnx/stock.py": "a layer and a cache of MiniMax, whose loops no graph can have",
    "upstream/xlstm_cache.py": "a class derived from it, imported when there is one",
    "upstream/layers/rg_lru.py": "a function of its, imported when there is such a layer",
}


def named_in(path: Path) -> set[str]:
    """Names in code and in strings of one word, docstrings and types apart."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                found.add(name)
            case ast.Constant(value=str(name)):
                found.add(name)
    return found


def classes_of_models() -> set[str]:
    """Of all models of the installed Transformers, but for its base and automatic classes, and for
    names that everybody uses.
    """
    found: set[str] = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        if path.parent.name != "auto":
            found |= set(re.findall(r"^class (\w+)", path.read_text("utf-8"), re.M))
    return {name for name in found if len(re.findall("[A-Z]", name)) > 1} - {"MLP"}


def test_no_other_file_names_a_class_of_a_model():
    classes = classes_of_models()
    assert "Mamba2Mixer" in classes and "LlamaRMSNorm" in classes
    files = set(PACKAGE.rglob("*.py")) - set(FOLDER.glob("*.py"))
    naming = {path.relative_to(PACKAGE).as_posix(): named_in(path) & classes for path in files}
    assert {name for name, found in naming.items() if found} == set(MAY_NAME), naming


def test_a_file_is_all_that_a_further_family_needs(tmp_path):
    """Beside one that replaces it: read as those in the folder are."""
    (tmp_path / "further.py").write_text(
        "from ..family import Family\n"
        "from ..replacements import PLAIN_NORM\n"
        "FAMILIES = [Family(name='llama', replaced={'LlamaRMSNorm': PLAIN_NORM}, sizes={},\n"
        "                   model='LlamaModel', layer='LlamaDecoderLayer')]\n"
    )
    spec = importlib.util.spec_from_file_location(
        families.__name__,
        families.__file__,
        submodule_search_locations=[str(FOLDER), str(tmp_path)],
    )
    with mock.patch.dict(sys.modules):
        read = sys.modules[families.__name__] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(read)
    from transformers.models.llama import modeling_llama

    assert families.family_of(modeling_llama.LlamaModel) is UNKNOWN
    assert read.family_of(modeling_llama.LlamaModel) is read.FAMILIES["llama"]
    assert set(read.FAMILIES) == {*families.FAMILIES, "llama"}
    assert read.replacement_for(modeling_llama.LlamaRMSNorm).gist == "norm"
    assert (modeling_llama.__name__, "LlamaDecoderLayer") in read.LAYERS


def test_no_two_families_have_a_class_of_one_name():
    """By which classes are found again, from pickles and in models that are derived from them."""
    names = [
        name
        for family in families.FAMILIES.values()
        for name in (*family.replaced, family.model, family.layer, family.head)
        if name is not None
    ]
    assert len(names) == len(set(names))
