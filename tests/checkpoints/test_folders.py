# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The files of checkpoints: what may stand in them, and what is said of what may not."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fake_hub import running_hub
from hf_linear_attention import __main__ as command
from hf_linear_attention import export_checkpoint, from_checkpoint
from hf_linear_attention.checkpoints.load import load_checkpoint
from hf_linear_attention.checkpoints.tables import FAMILIES, NOT_COMPUTED
from hf_linear_attention.model.presets import preset_fields
from saved_models import WITHOUT_PACKAGE, last_line, new_process, run
from tiny import tiny_model, tokenizer_of_letters

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDERS = Path(__file__).parents[1] / "data" / "fla"
GDN = FOLDERS / "gated_deltanet_plain"
QUERIES = "model.layers.1.attn.q_proj.weight"
FROM_HUB = """
import json
from hf_linear_attention import from_checkpoint
print(json.dumps(from_checkpoint("someone/model").num_parameters()))
"""
COMPARE = """
import json, sys
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
differences = []
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    expected = load_file(folder + ".safetensors")
    with torch.no_grad():
        logits = model(expected["ids"]).logits
    differences.append((logits - expected["logits"]).abs().max().item())
print(json.dumps(differences))
"""


@pytest.fixture
def folder(tmp_path):
    """A copy, to be changed."""
    return shutil.copytree(GDN, tmp_path / "copy")


def change_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def write_shards(folder, ending, save):
    """In place of the one file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem = "model" if ending == "safetensors" else "pytorch_model"
    weight_map = {}
    for i in range(3):
        part = dict(list(tensors.items())[i::3])
        file = f"{stem}-{i + 1:05}-of-00003.{ending}"
        save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))


def assert_same_weights(folder, original=GDN):
    expected = from_checkpoint(original).state_dict()
    for name, x in from_checkpoint(folder).state_dict().items():
        assert torch.equal(x, expected[name]), name


# ---- what may stand there ----


@pytest.mark.parametrize(
    ("ending", "save"), [("safetensors", save_file), ("bin", torch.save)], ids=["safe", "bin"]
)
def test_shards_are_one_file(ending, save, folder):
    write_shards(folder, ending, save)
    assert_same_weights(folder)


def test_pickled_weights_are_safe_ones(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_same_weights(folder)


def test_pickled_weights_of_old_releases_are_no_zip_files_and_load(folder):
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (folder / "model.safetensors").unlink()
    assert_same_weights(folder)


def test_one_file_is_read_before_the_index_of_an_earlier_model(folder):
    """As in Transformers."""
    (folder / "model.safetensors.index.json").write_text("[]")
    (folder / "pytorch_model.bin").write_bytes(b"broken")
    assert_same_weights(folder)


def test_the_joined_mlps_of_early_releases_are_split(folder):
    def join(tensors):
        for layer in range(2):
            gate, up = (f"model.layers.{layer}.mlp.{x}_proj.weight" for x in ("gate", "up"))
            tensors[gate] = torch.cat([tensors[gate], tensors.pop(up)])

    change_weights(folder, join)
    assert_same_weights(folder)
    assert "model.layers.0.mlp.gate_proj.weight" in load_checkpoint(folder).report.folded


def test_weights_that_are_cast_are_said(folder):
    def widen(tensors):
        for layer in range(2):
            name = f"model.layers.{layer}.attn.A_log"
            tensors[name] = tensors[name].float()

    assert load_checkpoint(folder).report.cast == {}
    change_weights(folder, widen)
    names = [f"model.layers.{layer}.self_attn.decay.A_log" for layer in range(2)]
    _, report = load_checkpoint(folder)
    assert report.cast == dict.fromkeys(names, "from float32 to bfloat16")
    lines = "cast, from float32 to bfloat16:\n  model.layers.*.self_attn.decay.A_log  (layers 0, 1)"
    assert lines in str(report)
    _, report = load_checkpoint(folder, dtype="float64")
    assert {*report.cast.values()} == {"from float32 to float64", "from bfloat16 to float64"}


def test_torch_dtype_is_an_older_name_of_dtype(folder):
    for keys in ({"torch_dtype": torch.float32}, {"torch_dtype": "float16", "dtype": "float32"}):
        assert from_checkpoint(folder, **keys).dtype == torch.float32
    assert from_checkpoint(folder, torch_dtype=None).dtype == torch.bfloat16


def test_what_no_layer_reads_is_left_out_and_said(folder):
    def add(tensors):
        tensors["model.layers.0.attn.D"] = torch.ones(2)
        tensors["model.layers.0.attn.rotary.inv_freq"] = torch.ones(2)

    change_weights(folder, add)
    change_config(folder, some_new_key=3)
    _, report = load_checkpoint(folder)
    assert len(report.left_out) == 2 and "multiplied by it nowhere" in str(report)
    assert "keys that nobody reads: some_new_key" in str(report)


def test_a_head_that_is_the_embeddings_may_be_there_twice(tmp_path):
    original = FOLDERS / "transformer_window"
    folder = shutil.copytree(original, tmp_path / "copy")

    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embeddings.weight"].clone()

    change_weights(folder, add_head)
    assert_same_weights(folder, original)
    left_out = load_checkpoint(folder).report.left_out
    assert left_out == {"lm_head.weight": "the head is the embeddings"}


def test_bounds_that_no_layer_has_are_left_out(tmp_path):
    """In HGRN2 all layers but the first have one: here that alone is recurrent."""
    folder = shutil.copytree(FOLDERS / "hgrn2", tmp_path / "copy")
    change_config(folder, attn={"layers": [1], "num_heads": 2})

    def make_softmax(tensors):
        for name, other in {"f": "k", "i": "v"}.items():
            x = tensors.pop(f"model.layers.1.attn.{name}_proj.weight")
            tensors[f"model.layers.1.attn.{other}_proj.weight"] = x
        del tensors["model.layers.1.attn.g_norm.weight"]

    change_weights(folder, make_softmax)
    assert load_checkpoint(folder).report.left_out.keys() == {"model.lower_bounds"}


@pytest.mark.thorough
def test_a_checkpoint_is_found_on_the_hub(folder, tmp_path):
    with running_hub() as hub:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        hub.repos["someone/model"] = {}
        hub.lfs = {name: content for name, content in files.items()}
        lines = [{"key": "lfsFile", "value": {"path": name, "oid": name}} for name in files]
        hub.commit("someone/model", lines)
        variables = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        process = new_process(tmp_path, **variables)
        call = [sys.executable, "-c", FROM_HUB]
        result = subprocess.run(call, **process, capture_output=True, timeout=300)
    assert last_line(result) == from_checkpoint(folder).num_parameters()


def test_what_is_loaded_and_saved_runs_without_the_package(tmp_path):
    cases = ("kda_bounded", "gla_hybrid", "hgrn2_hybrid", "transformer_norms", "mamba2")
    folders = []
    for case in cases:
        ids = load_file(FOLDERS / case / "expected.safetensors")["input_ids"]
        model = from_checkpoint(FOLDERS / case, dtype="float32")
        with torch.no_grad():
            save_file({"ids": ids, "logits": model(ids).logits}, tmp_path / f"{case}.safetensors")
        model.save_pretrained(tmp_path / case)
        folders.append(tmp_path / case)
    differences = run(WITHOUT_PACKAGE + COMPARE, *folders, modules=tmp_path)
    assert len(differences) == len(cases) and max(differences) < 1e-4


# ---- what may not ----


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_short_conv": False}, "use_short_conv of its config.json must be True, got False"),
        ({"attnres_block_size": 2}, "attnres_block_size .* must be None, got 2"),
        ({"hidden_act": "powlu"}, "hidden_act .* must be 'swish' or 'silu', got 'powlu'"),
        ({"output_gate_activation": "relu"}, "output_gate_activation .* got 'relu'"),
        ({"expand_v": 1.3}, "head_dim \\* expand_v .* whole numbers, got 10.4"),
        ({"attn": {"layers": [0]}}, "attn .* with layers and num_heads, got"),
        ({"attn": {"layers": [2], "num_heads": 2}}, "'layers'.* from 0 to 1, each once, got .2"),
        ({"attn": {"layers": [0], "num_heads": 2, "qkv_bias": True}}, "qkv_bias.* False in a hyb"),
        ({"attn": {"layers": [0], "num_heads": 2, "sinks": 1}}, "attn .* without sinks, got"),
        (
            {"attn": [{"layers": [x], "num_heads": x + 1} for x in (0, 1)]},
            "num_heads'. .* the same for all softmax layers, got .1, 2",
        ),
        (
            {"attn": [{"layers": [x], "num_heads": 2, "window_size": x + 1} for x in (0, 1)]},
            "window_size'. .* the same wherever there is one, got .1, 2",
        ),
        ({"model_type": "linear_attention"}, "a model of this package, which from_pretrained"),
        ({"model_type": "llama"}, "must be one of 'linear_attn', .*, got 'llama'"),
        ({"model_type": "rodimus"}, "got 'rodimus', whose layers have its own gates"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers .* at most 37, the number of its weights",
        ),
        ({"dtype": "int8"}, "dtype of its config.json must be one of float32, .*, got 'int8'"),
        ({"dtype": None, "torch_dtype": 3}, "torch_dtype of its config.json must be one of"),
        ({"hidden_size": 32}, "must have the shape .40, 32., as its config.json says, got .40, 16"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(keys, message, folder):
    change_config(folder, **keys)
    with pytest.raises(ValueError, match=message):
        from_checkpoint(folder)


@pytest.mark.parametrize(
    ("case", "keys", "message"),
    [
        ("delta_net", {"qk_norm": "sum"}, "qk_norm .* must be 'l2', got 'sum'"),
        ("delta_net", {"qk_activation": "elu"}, "qk_activation .* must be 'silu', got 'elu'"),
        ("delta_net", {"use_beta": False}, "use_beta .* must be True"),
        ("gla", {"clamp_min": -1.0}, "clamp_min .* must be None, got -1.0"),
        ("gla", {"feature_map": "gelu"}, "feature_map .* must be None or 'relu'"),
        ("retnet", {"num_kv_heads": 1}, "num_kv_heads .* forget apart, got 1"),
        ("retnet", {"feature_map": "relu"}, "feature_map .* must be None, got 'relu'"),
        ("retnet", {"attn": {"layers": [0], "num_heads": 4}}, "heads of 8 features, got .* 4$"),
        ("hgrn2", {"use_short_conv": True}, "use_short_conv .* must be False, got True"),
        ("hgrn2", {"use_lower_bound": False}, "use_lower_bound .* must be True, got False"),
        ("hgrn2", {"expand_ratio": None, "num_heads": None}, "or num_heads .* must be given"),
        ("kda", {"lower_bound": -5.0}, "lower_bound .* null without safe_gate, .* got -5.0"),
        ("precond_kda", {"num_v_heads": 4}, "num_v_heads .* null or num_heads=2, got 4"),
        ("comba", {"use_short_conv": False}, "use_short_conv .* must be True, got False"),
        ("linear_attn", {"feature_map": "hedgehog"}, "feature_map .* got 'hedgehog'"),
        ("transformer", {"rope_theta": None}, "rope_theta .* must be a positive number, got None"),
        ("linear_attn", {"norm_q": True}, "norm_q .* must be False, got True"),
        ("mamba2", {"norm_before_gate": True}, "norm_before_gate .* must be False, got True"),
        ("mamba3", {"is_mimo": True}, "is_mimo .* must be False, got True"),
        ("mamba3", {"is_outproj_norm": True}, "is_outproj_norm .* must be False, got True"),
        ("rwkv6", {"norm_first": False}, "norm_first .* must be True, got False"),
        ("rwkv6", {"attn": {"layers": [1], "num_heads": 2}}, "attn .* must be None, got {"),
        ("rwkv6", {"num_heads": 3}, "expand_k / num_heads .* features are whole numbers, got"),
        ("mamba2", {"layer_norm_epsilon": 1e-5}, "says that it is of Transformers"),
        ("mamba2", {"D_has_hdim": True}, "D_has_hdim .* must be False"),
    ],
)
def test_so_is_what_other_families_have(case, keys, message, tmp_path):
    folder = shutil.copytree(FOLDERS / case, tmp_path / "copy")
    change_config(folder, **keys)
    with pytest.raises(ValueError, match=message):
        from_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(QUERIES), f"must have the weights {QUERIES}, and has not"),
        (
            lambda tensors: tensors.update(a=torch.ones(1)),
            "no layer of its config takes the weights a$",
        ),
        (
            lambda tensors: tensors.update({QUERIES: torch.ones(8, 16)}),
            f"{QUERIES} must have the shape .16, 16., as its config.json says, got .8, 16",
        ),
        (
            lambda tensors: tensors.update({QUERIES: torch.ones(16, 16).to(torch.float8_e4m3fn)}),
            f"{QUERIES} must hold floating numbers .float32, .* got torch.float8_e4m3fn",
        ),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_weights_that_do_not_fit_are_named(change, message, folder):
    change_weights(folder, change)
    with pytest.raises(ValueError, match=message):
        from_checkpoint(folder)


def test_files_that_are_missing_or_broken_are_named(folder, tmp_path):
    with pytest.raises(OSError, match="nothing must be a folder, and is not there"):
        from_checkpoint(tmp_path / "nothing")
    with pytest.raises(OSError, match="config.json must be a folder, got a file"):
        from_checkpoint(folder / "config.json")
    write_shards(folder, "safetensors", save_file)
    (folder / "model-00002-of-00003.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="model-00002-of-00003.safetensors can't be read"):
        from_checkpoint(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(OSError, match="must have model-00002-of-00003.safetensors, which model"):
        from_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="must map tensors to files by its weight_map"):
        from_checkpoint(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(OSError, match="must have model.safetensors or pytorch_model.bin, or"):
        from_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json must hold an object, got a list"):
        from_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json must be JSON, got"):
        from_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(OSError, match="copy must have a config.json, and has none"):
        from_checkpoint(folder)


def test_arguments_of_another_kind_are_named(folder):
    for value in (None, 3, "", b"x"):
        with pytest.raises(ValueError, match="name_or_folder must be a path or a name, got"):
            from_checkpoint(value)
        with pytest.raises(ValueError, match="folder must be a path or a name, got"):
            export_checkpoint(tiny_model(), value)
    for dtype in (None, 3, "x", "int8", torch.int8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="dtype must be 'auto', a floating torch.dtype or its"):
            from_checkpoint(folder, dtype=dtype)


def test_pickled_files_that_hold_no_tensors_or_are_broken_are_named(folder):
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    for saved, message in (
        ([torch.ones(1)], "must hold tensors by name, got a list"),
        ({"state_dict": {}}, "must hold tensors by name, got a dict by the name 'state_dict'"),
        ({1: torch.ones(1)}, "must hold tensors by name, got a Tensor by the name 1"),
        ({"a": Path("x")}, "can't be read"),
    ):
        torch.save(saved, path)
        with pytest.raises(ValueError, match=f"pytorch_model.bin {message}"):
            from_checkpoint(folder)
    whole = io.BytesIO()
    torch.save({"a": torch.ones(9)}, whole, _use_new_zipfile_serialization=False)
    for content in (b"", b"broken", whole.getvalue()[:-20], whole.getvalue()[:40], b"PK\3\4"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="pytorch_model.bin can't be read: "):
            from_checkpoint(folder)


def test_indices_of_another_kind_are_named(folder):
    (folder / "model.safetensors").unlink()
    for content in ([], 3, {}, {"weight_map": []}, {"weight_map": {"a": 3}}, {"weight_map": None}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="must map tensors to files by its weight_map"):
            from_checkpoint(folder)


def test_what_is_known_and_not_computed_is_none_of_what_loads():
    assert not NOT_COMPUTED.keys() & FAMILIES.keys()


def test_a_model_that_they_have_not_is_refused_with_a_reason_for_each_of_theirs(tmp_path):
    model = tiny_model(feature_map="relu", normalizer="z")
    with pytest.raises(ValueError, match="computes the same") as caught:
        export_checkpoint(model, tmp_path / "out")
    assert len(str(caught.value).splitlines()) == 1 + len(FAMILIES)
    assert "linear_attn: normalizer must be 'rms_norm', got 'z'" in str(caught.value)
    with pytest.raises(ValueError, match="model must be a LinearAttentionForCausalLM, got Linear"):
        export_checkpoint(torch.nn.Linear(1, 1), tmp_path / "out")
    without_mlps = tiny_model(**preset_fields("gla", 3), intermediate_size=0)
    with pytest.raises(ValueError, match="gla: intermediate_size .* at least 1 or null, got 0"):
        export_checkpoint(without_mlps, tmp_path / "out")
    without_convolutions = tiny_model(
        **preset_fields("gated_deltanet", 3) | {"conv_kernel_size": 0}
    )
    with pytest.raises(ValueError, match="gated_deltanet: use_short_conv .* must be True"):
        export_checkpoint(without_convolutions, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_preconditioned_models_of_theirs_have_one_kind_of_softmax_layers(tmp_path):
    layers = {"layer_types": ["linear_attention", "full_attention", "sliding_attention"]}
    softmax = {"position_embedding_type": "rotary", "scale_embeddings": False, "sliding_window": 5}
    model = tiny_model(**{**preset_fields("precond_gdn", 3), **layers, **softmax})
    with pytest.raises(ValueError, match="layer_types must hold one kind of softmax layers"):
        export_checkpoint(model, tmp_path / "out")


# ---- commands ----


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["python -m hf_linear_attention", *map(str, arguments)])
    command.main()


def test_commands_go_there_and_back_with_the_tokenizer(folder, tmp_path, monkeypatch, capsys):
    tokenizer_of_letters("th/he").save_pretrained(folder)
    GenerationConfig(repetition_penalty=1.25, eos_token_id=2).save_pretrained(folder)
    call(monkeypatch, "import", folder, tmp_path / "ours")
    printed = capsys.readouterr().out
    assert "copied: 37 weights" in printed and "left out: nothing" in printed
    assert "tokenizer: TokenizersBackend" in printed
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert ours.config.model_type == "linear_attention" and ours.dtype == torch.bfloat16
    assert f"base_model: {folder}" in (tmp_path / "ours" / "README.md").read_text("utf-8")
    expected = from_checkpoint(folder).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in ours.state_dict().items())
    call(monkeypatch, "export-fla", tmp_path / "ours", tmp_path / "theirs")
    for name in ("ours", "theirs"):
        assert GenerationConfig.from_pretrained(tmp_path / name).repetition_penalty == 1.25
    assert "model type: gated_deltanet" in capsys.readouterr().out
    before, after = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "theirs"))
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "theirs")("the").input_ids


def test_a_folder_without_a_tokenizer_gets_none(tmp_path, monkeypatch, capsys):
    """Transformers has one without words for all folders of this model type."""
    call(monkeypatch, "import", FOLDERS / "mamba2", tmp_path / "ours")
    assert "tokenizer: none, for there is no tokenizer.json" in capsys.readouterr().out
    assert not (tmp_path / "ours" / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["import", "export-fla"])
def test_what_commands_can_not_do_ends_them_with_the_reason(name, folder, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(SystemExit, match="full must be a new or an empty folder"):
        call(monkeypatch, name, folder, tmp_path / "full")
    other = {"import": "rodimus", "export-fla": "llama"}[name]
    change_config(folder, model_type=other, num_attention_heads=2)
    with pytest.raises(SystemExit, match="copy can't be .*ported: "):
        call(monkeypatch, name, folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "full"]


def test_export_says_what_it_was_given_instead_of_a_model_of_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, message in (
        (GDN, "ported: it must be a model of this package, got a 'gated_deltanet'"),
        ("nothing", "ported: there is no folder nothing here"),
        (tmp_path / "nothing", "nothing must be a folder, and is not there"),
    ):
        with pytest.raises(SystemExit, match=message):
            call(monkeypatch, "export-fla", given, tmp_path / "out")


def test_a_run_that_ends_while_it_writes_leaves_no_folder(folder, tmp_path, monkeypatch):
    from hf_linear_attention.checkpoints import import_command

    def fail(*arguments):
        raise OSError("the disk is full")

    monkeypatch.setattr(import_command, "save_tokenizer", fail)
    with pytest.raises(SystemExit, match="the disk is full"):
        call(monkeypatch, "import", folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
