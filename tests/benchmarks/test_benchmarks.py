# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Every benchmark runs, in its smallest setting, and writes what the report can read."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_converted  # noqa: E402
import bench_decode  # noqa: E402
import bench_decode_race  # noqa: E402
import bench_far  # noqa: E402
import bench_long  # noqa: E402
import bench_ops  # noqa: E402
import bench_peers  # noqa: E402
import bench_products  # noqa: E402
import bench_rg_lru  # noqa: E402
import bench_serving  # noqa: E402
import bench_training  # noqa: E402
import bench_upstream  # noqa: E402
import harness  # noqa: E402
import llama_cpp_models  # noqa: E402
import report  # noqa: E402
from hf_linear_attention.fast.linear import is_fast  # noqa: E402
from hf_linear_attention.upstream.attention import is_hastened
from hf_linear_attention.upstream.recorded_layers import RecordedLayer  # noqa: E402
from tiny import VARIANTS, tiny_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def run(benchmark, folder: Path, monkeypatch, *more: str) -> dict:
    """What the benchmark writes."""
    flags = ["--smallest", "--threads", "1", "--results", str(folder), *more]
    monkeypatch.setattr(sys, "argv", [benchmark.__file__, *flags])
    benchmark.main()
    (path,) = folder.glob("*-smallest.json")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(path.read_text())
    assert document["is_complete"]
    assert not document["is_full"]
    if benchmark not in (bench_far, bench_long):  # which time nothing
        assert document["limits"]["flops"] > 1e8  # peak.cpp was compiled and has run
    blocks = report.section(path, document).split("\n\n")
    tables = [block.splitlines() for block in blocks if block.startswith("|")]
    assert tables
    for head, rule, *lines in tables:
        assert rule == "|---" * (head.count("|") - 1) + "|" and lines
        assert {line.count("|") for line in lines} == {head.count("|")}
    return document


def contenders(document: dict, panel: str) -> set[str]:
    rows = [row for row in document["rows"] if row["panel"] == panel]
    assert all(row["milliseconds"] > 0 for row in rows)
    return {row["contender"] for row in rows}


def test_the_op_is_measured(tmp_path, monkeypatch):
    document = run(bench_ops, tmp_path, monkeypatch)
    for what in bench_ops.PASSES:
        found = contenders(document, f"{what}, float32, B, H, D = (1, 2, 16)")
        assert found == set(bench_ops.CONTENDERS)
    backward = [row for row in document["rows"] if row["panel"].startswith("forward + backward")]
    assert all(row["peak_mib"] >= 0 for row in backward)


@pytest.mark.thorough
def test_products_are_measured(tmp_path, monkeypatch):
    document = run(bench_products, tmp_path, monkeypatch)
    for name, form in bench_products.FORMATS.items():
        found = contenders(document, f"few rows, {name}, 64 to 128")
        assert found == {"ours", "reading", *(["PyTorch"] if form.other_products else [])}
    for way in bench_products.WAYS:
        for what in ("forward", "forward + backward"):
            found = contenders(document, f"{what}, {way}, 64 to 128")
            assert found >= {"ours", "PyTorch"}
            assert (bench_products.IN_FLOAT32 in found) == (way != "float32")


@pytest.mark.thorough
def test_memory_is_that_of_a_process_of_its_own():
    shape = (1, 8, 4096, 32)
    peak = harness.peak_memory(bench_ops.prepare, "ours", shape, torch.float32, "forward")
    assert 4 <= peak < 12  # y alone is 4 MiB


def test_a_process_that_a_benchmark_has_started_is_no_other_one():
    program = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); input()"
    *_, before = harness.OtherProcesses._times()
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        *_, running = harness.OtherProcesses._times()
        child.communicate(b"\n")
    *_, ended = harness.OtherProcesses._times()
    assert before + 0.4 < running <= ended + 1e-6  # sums of ticks


@pytest.mark.thorough
def test_generation_is_measured(tmp_path, monkeypatch):
    document = run(bench_decode, tmp_path, monkeypatch)
    every = {*bench_decode.ALL, bench_decode.STATIC, bench_decode.IDENTITY, bench_decode.NN_LINEAR}
    assert contenders(document, "generate(), 1 row, float32") == every
    assert contenders(document, "forward, 1 row, float32") == every
    assert contenders(document, "generate(), 2 rows, float32") == every - {"GPT-2", "Mamba2"}
    assert "ours, float32" in contenders(document, "generate(), 1 row, bfloat16")
    assert contenders(document, "generate(), ours by context") == {"ours"}
    for panel in ("generate(), bits of weights, 1 row", "forward, bits of weights, 1 row"):
        assert contenders(document, panel) == set(bench_decode.QUANTISED)
    assert contenders(document, "generate(), bits of weights, 5 rows") == set(
        bench_decode.QUANTISED
    )
    assert contenders(document, "prompt, float32") == {"ours", "Llama"}


@pytest.mark.thorough
def test_traces_race_compilers(tmp_path, monkeypatch):
    document = run(bench_decode_race, tmp_path, monkeypatch)
    every = set(bench_decode_race.CONTENDERS)
    assert contenders(document, "gated_deltanet, 1 x 256, 4 bits") == every
    errors = document["relative_errors"]
    assert len(errors) == len(every) and max(errors.values()) > 0  # compilers round otherwise
    *_, note = document["notes"]
    assert all(f"; {name} " in note for name in every if "compile" in name or "AOT" in name)


@pytest.mark.thorough
def test_errors_are_measured_by_length(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_long, "OUTPUTS", tmp_path / "kept")
    document = run(bench_long, tmp_path, monkeypatch)
    rows = document["rows"]
    assert {row["kind"] for row in rows} == {*bench_long.KINDS}
    assert {row["way"] for row in rows} == {*bench_long.WAYS}
    by_states = {
        states: [row["state"] for row in rows if (row["kind"], row["states"]) == ("sums", states)]
        for states in bench_long.STATES
    }
    assert max(by_states["float64"]) < 1e-9 < max(by_states["float32"]) < 1e-4
    errors = {row["kind"]: row["error"] for row in document["gradients"]}
    assert errors.keys() == bench_long.KINDS.keys() and 0 < max(errors.values()) < 1e-4
    monkeypatch.setattr(bench_long, "read", None)  # what was measured is not measured again
    monkeypatch.setattr(bench_long, "gradients", None)
    assert run(bench_long, tmp_path, monkeypatch)["rows"] == rows


def tokens_of_bytes() -> PreTrainedTokenizerFast:
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.thorough
def test_bits_are_those_of_one_text_at_every_position(tmp_path, monkeypatch):
    folders = []
    for name in ("preset_gated_deltanet", "softmax"):
        folders.append(tmp_path / "models" / name)
        tiny_model(**VARIANTS[name], vocab_size=256).save_pretrained(folders[-1], code=False)
        tokens_of_bytes().save_pretrained(folders[-1])
    document = run(bench_far, tmp_path, monkeypatch, *map(str, folders))
    bits = [row["bits_per_byte"] for row in document["rows"]]
    by_states = [len(bench_far.LENGTHS["smallest"])] * 2 * len(folders)
    assert len(bits) == sum(by_states) and len(set(bits)) >= sum(by_states) / 2
    assert all(8 < x < 100 for x in bits)  # they have learned nothing


def test_a_compiler_pays_when_its_seconds_are_gained_back():
    timing = bench_decode_race.Timing
    names = (bench_decode_race.TRACES, "torch.compile", "AOTInductor")
    timings = {
        name: timing(x, x, x, 1, 0) for name, x in zip(names, (4e-3, 5e-3, 2e-3), strict=True)
    }
    tokens = bench_decode_race.TOKENS
    first = {name: 1 + tokens * timings[name].median + 9 * (name != names[0]) for name in names}
    assert bench_decode_race.note_of(first, timings) == (
        "traces 1.00 s; torch.compile 10.00 s (never pays); "
        "AOTInductor 10.00 s (has caught up after 4,500 tokens)"
    )


class LlamaByTransformers:
    """Answers as llama_cpp_worker.py does, which needs llama.cpp."""

    def __init__(self, command):
        assert Path(command[1]).is_file()
        self.models = {}

    def close(self):
        pass

    def ask(self, do, kind, **arguments):
        return getattr(self, do)(kind, **arguments)

    def load(self, kind, folder):
        self.models[kind] = AutoModelForCausalLM.from_pretrained(folder)
        return {"version": "1.2"}

    def prepare(self, kind, tokens, context):
        assert len(tokens[0]) <= context
        self.context = torch.tensor(tokens)
        return {}

    @torch.no_grad()
    def follow(self, kind, tokens):
        tokens = torch.cat([self.context, torch.tensor(tokens)], dim=1)
        return {"logits": self.models[kind](tokens).logits[:, -1].tolist()}

    def sample(self, kind, steps, untimed):
        return {"seconds": 1e-3 * steps}

    def sample_prompt(self, kind):
        return {"seconds": 1e-3}

    def release(self, kind):
        return {}


def test_llama_cpp_is_measured_beside_weights_of_few_bits(monkeypatch):
    monkeypatch.setattr(llama_cpp_models, "Worker", LlamaByTransformers)
    model = bench_decode.make_model("Llama", size=bench_decode.SMALLEST)
    llama = llama_cpp_models.LlamaCpp(Path("python"), model)
    names = set(map(llama_cpp_models.name_of, llama_cpp_models.KINDS))
    assert llama.verify() == dict.fromkeys(llama_cpp_models.KINDS, pytest.approx(0, abs=1e-5))
    with llama.at(rows=2, context=16) as (samples, work):
        assert samples.keys() == work.keys() == names
        assert {sample() for sample in samples.values()} == {1e-3 * llama_cpp_models.STEPS}
    with torch.no_grad():
        model.lm_head.weight.neg_()
    with pytest.raises(SystemExit, match="llama.cpp's llama, F32 is wrong"):
        llama.verify()


@pytest.mark.thorough
@pytest.mark.parametrize("has_llama", [False, True])
def test_transformers_models_are_measured_beside_llama_cpp(tmp_path, monkeypatch, has_llama):
    monkeypatch.setattr(llama_cpp_models, "Worker", LlamaByTransformers)
    document = run(bench_peers, tmp_path, monkeypatch, *(["--llama", "python"] * has_llama))
    peers = {bench_peers.LLAMA} if has_llama else set()
    for name in bench_peers.WHOLE:
        for form, fields in bench_peers.FORMATS.items():
            before = {bench_peers.BEFORE} if form == "float32" else set()
            has_graph = fields.has_graph and find_spec("onnxruntime") is not None
            graph = {bench_peers.GRAPH} if has_graph else set()
            for work in ("a token, 1 row", "a token, 2 rows", "prompt"):
                found = contenders(document, f"{name}, {form}, {work}")
                assert found == {bench_peers.AFTER} | before | peers | graph


@pytest.mark.thorough
@pytest.mark.parametrize("has_llama", [False, True])
def test_a_converted_model_is_measured_beside_its_original(tmp_path, monkeypatch, has_llama):
    monkeypatch.setattr(llama_cpp_models, "Worker", LlamaByTransformers)
    document = run(bench_converted, tmp_path, monkeypatch, *(["--llama", "python"] * has_llama))
    peers = {bench_converted.LLAMA} if has_llama else set()
    for form, fields in bench_converted.FORMATS.items():
        before = {bench_converted.BEFORE} if fields.bits is None else set()
        for users in ("1 user", "2 users"):
            found = contenders(document, f"{form}, a token, {users}")
            assert found == {bench_converted.CONVERTED} | before | peers
    caches = [note for note in document["notes"] if "cache of a user" in note]
    assert len(caches) == 2 * len(bench_converted.FORMATS)


@pytest.mark.thorough
def test_a_training_step_is_measured(tmp_path, monkeypatch):
    document = run(bench_training, tmp_path, monkeypatch)
    assert contenders(document, "training step, 2 layers") == set(bench_training.PLAIN)


@pytest.mark.thorough
def test_recurrent_gemma_s_layers_are_measured_beside_their_products(tmp_path, monkeypatch):
    document = run(bench_rg_lru, tmp_path, monkeypatch)
    for part in bench_rg_lru.PARTS:
        assert contenders(document, part) == set(bench_rg_lru.NAMES)
    assert len(document["notes"]) == len(bench_rg_lru.PARTS) * len(bench_rg_lru.WORK)


@pytest.mark.thorough
def test_transformers_models_are_measured_before_and_after(tmp_path, monkeypatch):
    document = run(bench_upstream, tmp_path, monkeypatch)
    of_mamba = contenders(document, "Mamba-2, 2 layers, float32")
    assert of_mamba == set(bench_upstream.WITHOUT_SOFTMAX)
    assert contenders(document, "Qwen3-Next, 4 layers, float32") == set(bench_upstream.ALL)
    panels = {row["panel"].partition(",")[0] for row in document["rows"]}
    assert panels == set(bench_upstream.MODELS)
    cases = {row["case"] for row in document["rows"]}
    assert cases == {"prompt of 16 tokens", "a token after 16", "training step of 16 tokens"}

    (path,) = tmp_path.glob("*.json")
    with pytest.raises(SystemExit, match="is not of a run that was interrupted"):
        run(bench_upstream, tmp_path, monkeypatch, "--resume")
    last = document["rows"][-1]["panel"]
    of_last = [row for row in document["rows"] if row["panel"] == last]
    rest = [row for row in document["rows"] if row not in of_last]
    path.write_text(json.dumps(document | {"rows": rest, "is_complete": False}))
    resumed = run(bench_upstream, tmp_path, monkeypatch, "--resume")
    assert [row for row in resumed["rows"] if row not in rest] != of_last  # measured anew
    names = [(row["panel"], row["case"], row["contender"]) for row in document["rows"]]
    assert [(row["panel"], row["case"], row["contender"]) for row in resumed["rows"]] == names
    assert resumed["rows"][: len(rest)] == rest


def test_a_note_says_where_the_time_of_a_model_goes():
    before = bench_upstream.make_model("Qwen3.5", 4, torch.float32, is_smallest=True)
    after = bench_upstream.contender(before, bench_upstream.AFTER)
    step = bench_upstream.speedup.training_step(after, bench_upstream.random_tokens(after, 16))
    shares = bench_upstream.where_time_goes(step)
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) > 0
    assert bench_upstream.note_of("x", {"norms": 0.25, "rest": 0.75}) == "x: norms 25%, rest 75%"


def is_other(old: torch.nn.Module, new: torch.nn.Module) -> bool:
    """Whether a module has another class, a linear layer another product, or attention another
    function.
    """
    has_other_function = is_hastened(new) or is_fast(vars(new).get("forward"), new)
    return type(old) is not type(new) or has_other_function


def test_a_contender_has_all_but_one_kind_of_thing_replaced():
    before = bench_upstream.make_model("Qwen3-Next", 4, torch.float32, is_smallest=True)
    for kind in bench_upstream.KINDS:
        model = bench_upstream.contender(before, bench_upstream.without(kind))
        modules, others = list(before.modules()), list(model.modules())
        assert isinstance(others[0], type(before))  # with an engine that has places for states
        pairs = zip(modules[1:], others[1:], strict=True)
        pairs = [pair for pair in pairs if not isinstance(pair[1], RecordedLayer)]
        kinds = {bench_upstream.kind_of(type(old)) for old, new in pairs if is_other(old, new)}
        if model.loss_function is not before.loss_function:
            kinds.add("loss")
        assert kinds == set(bench_upstream.KINDS) - {kind}
        assert model.lm_head.weight is before.lm_head.weight


@pytest.mark.thorough
def test_serving_is_measured(tmp_path, monkeypatch):
    document = run(bench_serving, tmp_path, monkeypatch)
    assert contenders(document, "HTTP, per token") == set(bench_serving.HTTP)
    assert contenders(document, "HTTP, first token") == set(bench_serving.HTTP)
    assert contenders(document, "one process, per token") == {
        bench_serving.ENGINE,
        bench_serving.GENERATE_BATCH,
        bench_serving.ONE_BY_ONE,
        bench_serving.PADDED,
    }
    long_prompts = {bench_serving.NEW, bench_serving.SHARED}
    assert contenders(document, "long prompt, first token") == long_prompts


@pytest.mark.thorough
def test_graphs_are_measured(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    import bench_onnx

    document = run(bench_onnx, tmp_path, monkeypatch)
    for panel in (bench_onnx.PROMPT, bench_onnx.TOKEN):
        rivals = bench_onnx.GENAI if find_spec("onnxruntime_genai") is not None else {}
        assert contenders(document, panel) == {*bench_onnx.NAMES, *rivals}
