# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The two files of code that are made for a model's folder, and how they are put together."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_linear_attention import LinearAttentionConfig
from hf_linear_attention.model.presets import PRESETS
from hf_linear_attention.model.saving import CONFIGURATION, MODELING
from hf_linear_attention.remote import generator
from hf_linear_attention.remote.code import code_for
from saved_models import WITHOUT_PACKAGE, run
from tiny import VARIANTS, random_ids, tiny_model

ROOT = Path(__file__).parents[2]
WITH_MORE = {
    **{name: {"preset": name} for name in PRESETS},
    "cross_attention": {"add_cross_attention": True},
    "window": VARIANTS["window"],
}
LONGEST, LONGEST_OF_GATED_DELTANET = 3985, 3305  # lines of both files


def config_of(preset: str = "katharopoulos", **fields) -> LinearAttentionConfig:
    return LinearAttentionConfig.from_preset(preset, **fields)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", WITH_MORE)
def test_it_reads_as_if_written_by_hand(name, tmp_path):
    """Nothing is unused, undefined, too long, out of order or out of shape; no name of a module of
    the package is left.
    """
    files = code_for(config_of(**WITH_MORE[name]))
    for file, text in files.items():
        (tmp_path / f"{file}.py").write_text(text)
    for command in (["check", "--select", "F,E,I,UP"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", ROOT / "pyproject.toml"]
        result = subprocess.run([*ruff, tmp_path], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout
    imports = [x for text in files.values() for x in ast.walk(ast.parse(text))]
    imports = [x for x in imports if isinstance(x, ast.ImportFrom) and x.level > 0]
    assert [x.module for x in imports] == [CONFIGURATION]
    lines = sum(text.count("\n") for text in files.values())
    assert lines <= (LONGEST_OF_GATED_DELTANET if name == "gated_deltanet" else LONGEST)


def test_it_holds_what_its_config_needs():
    files = code_for(config_of("gated_deltanet"))
    whole = "".join(files.values())
    assert "class DeltaRule(" in whole and "class PerToken(" in whole
    for other in ("Aaren", "Mamba2", "LatentAttention", "FavorPlus", "HGRN2", "SlotCache"):
        assert f"class {other}(" not in whole
    assert "window_size" not in files[CONFIGURATION] and "conv_kernel_size" in files[CONFIGURATION]
    assert "class FavorPlus(" in code_for(config_of("performer"))[MODELING]


IDLE = """
import json, re, sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

idle = []
for folder in sys.argv[1:]:
    files = sorted(Path(folder).glob("*.py"))
    found = defaultdict(list)  # of each word, what stands before it
    for before, word in re.findall(r"(def )?\\b(\\w+)\\b", "".join(x.read_text() for x in files)):
        found[word].append(before)
    for file in files:
        module = import_module(f"{folder}.{file.stem}")
        for owner in vars(module).values():
            if not isinstance(owner, type) or owner.__module__ != module.__name__:
                continue
            outside = [x for x in owner.__mro__ if not x.__module__.startswith(folder)]
            for name in vars(owner):
                if found[name] == ["def "] and not any(name in vars(x) for x in outside):
                    idle.append(f"{folder}: {owner.__name__}.{name}")
print(json.dumps(idle))
"""


@pytest.mark.thorough
def test_every_method_is_called(tmp_path):
    """Somewhere in the two files, or by a class from outside that its own derives from."""
    for name, fields in WITH_MORE.items():
        folder = tmp_path / f"of_{name.replace('-', '_')}"
        folder.mkdir()
        for file, text in code_for(config_of(**fields)).items():
            (folder / f"{file}.py").write_text(text)
    folders = sorted(path.name for path in tmp_path.iterdir())
    idle = run(WITHOUT_PACKAGE + IDLE, *folders, modules=tmp_path)
    assert idle == []


def test_a_config_of_another_architecture_needs_the_package(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    script = WITHOUT_PACKAGE + (
        "import json, sys\nfrom transformers import AutoModel\n"
        "try:\n    AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True, mixer='aaren')\n"
        "except ValueError as error:\n    print(json.dumps(str(error)))"
    )
    error = run(script, tmp_path / "model", modules=tmp_path)
    assert "mixer must be 'linear' for the code in this folder, got 'aaren'; the package" in error


NEEDS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.tensor([[3, 1, 4, 1, 5]])
cache = model(ids, use_cache=True).past_key_values
asked = [
    lambda: model.generate(ids, max_new_tokens=4, prompt_lookup_num_tokens=2),
    lambda: model(ids, sequence_group=object()),
    lambda: model(ids, tree=object()),
    lambda: cache.save("file"),
    lambda: type(cache).load("file", model.config),
    lambda: type(cache).join([cache, cache]),
    lambda: cache.crop(-1),
    lambda: cache.nbytes,
    lambda: type(model.config).from_preset("retnet"),
    lambda: model.redraw_features(),
    lambda: list(cache),
    lambda: model.generate_batch([[3, 1]]),
]
said = []
for ask in asked:
    try:
        ask()
        said.append("nothing")
    except NotImplementedError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_what_needs_the_package_says_so(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    said = run(WITHOUT_PACKAGE + NEEDS, tmp_path / "model", modules=tmp_path)
    assert [x for x in said if "needs the package hf-linear-attention" not in x] == []


def test_code_may_be_left_out(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "with")
    model.save_pretrained(tmp_path / "without", code=False)
    assert not list((tmp_path / "without").glob("*.py"))
    assert "auto_map" not in (tmp_path / "without" / "config.json").read_text()
    again = type(model).from_pretrained(tmp_path / "without")
    ids = torch.tensor([[3, 1, 4]])
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


SUBCLASS = """
from hf_linear_attention import LinearAttentionForCausalLM


class Loud(LinearAttentionForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output
"""
LOAD_SUBCLASS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(json.dumps([type(model).__name__, model(torch.tensor([[3, 1, 4]])).logits.tolist()]))
"""


def test_a_subclass_of_a_user_is_saved_with_its_own_file(tmp_path, monkeypatch):
    (tmp_path / "loud.py").write_text(SUBCLASS)
    monkeypatch.syspath_prepend(tmp_path)
    from loud import Loud

    model = tiny_model(Loud, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").glob("*.py")} == {
        "loud.py",
        f"{CONFIGURATION}.py",
        f"{MODELING}.py",
    }
    name, logits = run(LOAD_SUBCLASS, tmp_path / "model", modules=tmp_path)
    assert name == "Loud"
    torch.testing.assert_close(torch.tensor(logits), model(torch.tensor([[3, 1, 4]])).logits)


SOURCE = """
def answer(config, cache):
    before = 1
    # about slots
    if isinstance(cache, Slots):
        return slots(cache)
    if config.kind == "a":
        x = 1
    elif config.has_more:
        x = 2
    else:
        x = 3
    y = 5 if not config.has_more else 6
    if not config.has_more:
        return x if cache.recording is None and y and before else None
    z = more(y)
    return z
"""
FOLDED = """
def answer(config, cache):
    before = 1
    x = 3
    y = 5
    return x if y and before else None
"""


def test_branches_that_never_run_are_left_out():
    answers = {"Slots": False, "kind": "b", "has_more": False, "recording": None}
    assert generator.fold(SOURCE, answers) == FOLDED
    assert generator.fold(SOURCE, {"other": True}) == SOURCE


def test_tables_keep_the_rows_that_are_needed():
    table = 'TABLE = {  # of numbers\n    "a": 1,\n    # two\n    "b": 2,\n    "c": 3,\n}'
    assert generator.keep_rows(table, {"c"}) == 'TABLE = {  # of numbers\n    "c": 3,\n}'
    assert generator.keep_rows(table, {}) == "TABLE = {}"
    assert generator.keep_rows('TABLE = ("a", "b")', {"b"}) == 'TABLE = ("b",)'
    with pytest.raises(ValueError, match="a table must be a dict or a tuple as it stands"):
        generator.keep_rows("TABLE = dict(a=1)", {"a"})


def package_of(folder: Path, **modules: str) -> generator.Sources:
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return generator.Sources(folder, {})


def bundle_of(sources: generator.Sources, name: str) -> generator.Bundle:
    bundle = generator.Bundle(sources, generator.Omissions({}, {}, (), (), (), (), {}))
    bundle.add_module(name)
    return bundle


def test_names_that_two_modules_define_are_refused(tmp_path):
    sources = package_of(
        tmp_path,
        first="SIZE = 1\n\n\ndef one():\n    return SIZE\n",
        second="SIZE = 2\n\n\ndef two():\n    return SIZE\n",
        both="from .first import one\nfrom .second import two\n\nx = one() + two()\n",
    )
    with pytest.raises(ValueError, match="second and first both define SIZE"):
        bundle_of(sources, "both")


def test_definitions_come_in_the_order_of_imports(tmp_path):
    sources = package_of(
        tmp_path,
        base="class Base:\n    pass\n\n\ndef unused():\n    pass\n",
        middle="from .base import Base\n\n\nclass Middle(Base):\n    pass\n",
        top="from .middle import Middle\n\n\n# above\nclass Top(Middle):\n    pass\n",
    )
    definitions = bundle_of(sources, "top").definitions
    assert [x.names for x in definitions] == [("Base",), ("Middle",), ("Top",)]
    assert definitions[2].source.startswith("# above\nclass Top")


@pytest.mark.parametrize("line", ["from .base import Base as B", "from . import base"])
def test_names_must_be_imported_as_they_are(line, tmp_path):
    sources = package_of(tmp_path, base="class Base:\n    pass\n", top=line)
    with pytest.raises(ValueError, match="must name it as it is"):
        bundle_of(sources, "top")


UNDEFINED = """
import ast, inspect, json, sys
import torch
from transformers import AutoModel

undefined = []
for folder in sys.argv[1:]:
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    objects = [*model.modules(), model.config]
    for module in {sys.modules[type(x).__module__] for x in (model, model.config)}:
        tree = ast.parse(inspect.getsource(module))
        attributes = [x for x in ast.walk(tree) if isinstance(x, ast.Attribute)]
        set_somewhere = {x.attr for x in attributes if not isinstance(x.ctx, ast.Load)}
        classes = [x for x in vars(module).values() if isinstance(x, type)]
        for node in [x for x in tree.body if isinstance(x, ast.ClassDef)]:
            of_class = [x for x in classes if issubclass(x, getattr(module, node.name))]
            known = set_somewhere.union(*map(dir, of_class))
            bases = {base for one in of_class for base in one.__mro__}
            known = known.union(*(vars(base).get("__annotations__", ()) for base in bases))
            made = [dir(x) for x in objects if isinstance(x, tuple(of_class))]
            if not made and issubclass(getattr(module, node.name), torch.nn.Module):
                continue  # what its base sets, nobody knows
            known = known.union(*made)
            for x in ast.walk(node):
                if isinstance(x, ast.Attribute) and getattr(x.value, "id", None) in ("self", "cls"):
                    undefined += [f"{node.name}.{x.attr}"] * (x.attr not in known)
print(json.dumps(undefined))
"""


@pytest.mark.thorough
def test_every_attribute_that_is_read_is_defined(tmp_path):
    for name, fields in WITH_MORE.items():
        model = tiny_model(**VARIANTS.get(f"preset_{name}", fields))
        model.save_pretrained(tmp_path / name)
    folders = [tmp_path / name for name in WITH_MORE]
    assert run(WITHOUT_PACKAGE + UNDEFINED, *folders, modules=tmp_path) == []


BEAMS = """
import json, sys, torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.tensor(json.loads(sys.argv[2]))
mask = (ids != 0).long()
options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
beams = model.generate(ids, num_beams=3, **options)
cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
cache.batch_repeat_interleave(2)
cache.reorder_cache(torch.tensor([0, 2, 3, 1]))
cache.batch_select_indices(torch.tensor([1, 3]))
logits = model(ids[:, :1], past_key_values=cache).logits
print(json.dumps([beams.tolist(), logits[..., -1].tolist()]))
"""


@pytest.mark.parametrize(
    "variant", ["preset_gated_deltanet", "preset_gated_deltaproduct", "hybrid"]
)
def test_rows_of_a_cache_go_along_with_beams(variant, tmp_path):
    model = tiny_model(**VARIANTS[variant])
    model.save_pretrained(tmp_path / "model")
    ids = random_ids(2, 9)
    ids[0, :3] = 0
    arguments = (tmp_path / "model", str(ids.tolist()))
    with_package = run(BEAMS, *arguments, modules=tmp_path)
    without = run(WITHOUT_PACKAGE + BEAMS, *arguments, modules=tmp_path)
    assert without[0] == with_package[0]
    torch.testing.assert_close(torch.tensor(without[1]), torch.tensor(with_package[1]))
