# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""examples/convert.py, on a tiny model and a small text."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from new_python import kill_when_whole, launch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import convert  # noqa: E402
import text_blocks  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

# 8 steps each, of 2 sequences
SMALL = (
    "--block_size 32 --max_eval_bytes 1000 --per_device_train_batch_size 2 --transfer_tokens 512 "
    "--distill_tokens 512 --distill_learning_rate 2e-4 --save_strategy no "
    "--eval_steps 8 --logging_steps 2 --use_cpu --disable_tqdm 1"
).split()


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> list[str]:
    """Flags that name a model and a text."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "text.txt").write_text(Path(subprocess.__file__).read_text()[:20_000])
    documents = text_blocks.text_files([str(folder / "text.txt")])
    tokenizer = text_blocks.train_tokenizer(documents, 300)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return [*SMALL, "--model", str(folder / "model"), "--text_file", str(folder / "text.txt")]


def metrics(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory) -> Path:
    """What an uninterrupted run leaves."""
    folder = tmp_path_factory.mktemp("whole")
    convert.main([*given, "--output_dir", str(folder), "--overrides", '{"window_size": 8}'])
    return folder


def test_each_stage_leaves_a_model_that_is_better_than_before(whole):
    for name in ("1-converted", "2-transferred", "3-distilled"):
        model = AutoModelForCausalLM.from_pretrained(whole / name)
        assert model.config.layer_types == ["linear_attention"] * 3
        assert model.config.use_cache
        assert len(AutoTokenizer.from_pretrained(whole / name)) == model.config.vocab_size
    assert "new, to be trained" in (whole / "1-converted" / "report.txt").read_text()
    for name in ("2-transferred", "3-distilled"):
        found = metrics(whole / name)
        assert (found["steps"], found["train_tokens"]) == (8, 512)
        assert found["eval_loss_after"] < found["eval_loss_before"]
        assert (whole / name / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "eval_bits_per_byte_after" in found


@pytest.mark.thorough
def test_a_run_that_was_killed_goes_on(given, whole, tmp_path):
    """In each stage, after a checkpoint; a stage that is done is not run again."""
    args = [*given, "--output_dir", str(tmp_path), "--overrides", '{"window_size": 8}']
    args += ["--save_strategy", "steps", "--save_steps", "4"]
    for name in ("2-transferred", "3-distilled"):
        checkpoint = tmp_path / name / "checkpoint-4"
        kill_when_whole(checkpoint / "trainer_state.json", EXAMPLES / "convert.py", *args)
        assert not (tmp_path / name / "metrics.json").exists()
    stage = json.loads((tmp_path / "2-transferred" / "stage.json").read_text())
    assert stage["is_done"]
    convert.main(args)
    for name in ("2-transferred", "3-distilled"):
        expected = metrics(whole / name)
        assert metrics(tmp_path / name) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(text_blocks.InputError, match="1-converted is of a run with other settings"):
        convert.main([*args, "--mixer", "t2r"])


@pytest.mark.thorough
def test_two_processes_convert_as_one_does(given, whole, tmp_path):
    args = [*given, "--output_dir", str(tmp_path), "--overrides", '{"window_size": 8}']
    launch("ddp", EXAMPLES / "convert.py", *args, "--per_device_train_batch_size", "1")
    for name, loss in (("2-transferred", "eval_loss"), ("3-distilled", "eval_bits_per_byte")):
        one, two = metrics(whole / name), metrics(tmp_path / name)
        assert (two["steps"], two["train_tokens"]) == (one["steps"], one["train_tokens"])
        gains = [x[f"{loss}_before"] - x[f"{loss}_after"] for x in (one, two)]
        # errors are relative to what each process has seen
        assert gains[1] == pytest.approx(gains[0], rel=0.1)


def test_layers_by_damage_lora_and_no_teacher(given, tmp_path, capsys):
    flags = "--mixer gated_deltanet --softmax_layers damage:1 --lora 2 --cross_entropy 1 "
    flags += "--transfer_tokens 64 --distill_tokens 64"
    convert.main([*given, *flags.split(), "--output_dir", str(tmp_path)])
    ranking = json.loads((tmp_path / "2-transferred" / "ranking.json").read_text())
    (kept,) = ranking["stay_softmax"]
    assert ranking["losses"][str(kept)] == max(ranking["losses"].values())
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "3-distilled").config
    assert [kind == "full_attention" for kind in config.layer_types] == [
        i == kept for i in range(3)
    ]
    assert (tmp_path / "3-distilled" / "adapter" / "adapter_config.json").exists()
    assert f"stay softmax: [{kept}]" in capsys.readouterr().out


def test_layers_by_gain_measured_on_recall_texts(given, whole, tmp_path, monkeypatch):
    seen = []

    def choose(model, batches, n, original):
        seen.extend(batches)
        return choose_layers(model, batches, n, original)

    choose_layers = convert.choose_layers
    monkeypatch.setattr(convert, "choose_layers", choose)
    flags = ["--overrides", '{"window_size": 8}', "--softmax_layers", "gain:2"]
    flags += ["--calibration_by_recall", "true", "--calibration_tokens", "256"]
    flags += ["--transferred", str(whole / "2-transferred"), "--output_dir", str(tmp_path)]
    convert.main([*given, *flags, "--distill_tokens", "64"])
    assert sum(batch["labels"].numel() for batch in seen) == 256
    labels = torch.cat([batch["labels"].flatten() for batch in seen])
    assert 0 < (labels != -100).sum() < 200  # what was said above, alone
    found = json.loads((tmp_path / "2-transferred" / "ranking.json").read_text())
    assert found["linear_loss"] > 0 and [len(losses) for losses in found["rounds"]] == [3, 2]
    kinds = AutoModelForCausalLM.from_pretrained(tmp_path / "3-distilled").config.layer_types
    kept = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    assert sorted(found["stay_softmax"]) == kept


def test_a_hybrid_takes_the_layers_of_another_runs_transfer(given, whole, tmp_path):
    flags = ["--overrides", '{"window_size": 8}', "--softmax_layers", "2", "--distill_tokens", "64"]
    flags += ["--transferred", str(whole / "2-transferred"), "--output_dir", str(tmp_path)]
    convert.main([*given, *flags])
    trained, hybrid = (
        AutoModelForCausalLM.from_pretrained(folder / "2-transferred")
        for folder in (whole, tmp_path)
    )
    assert hybrid.config.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    for name, x in hybrid.named_parameters():
        assert torch.equal(x, trained.get_parameter(name)), name


def test_muon_steps_the_matrices_in_distillation(given, whole, tmp_path):
    """Its first step changes a matrix by a fifth of the rate on average, AdamW's by all of it."""
    flags = "--muon true --distill_tokens 64 --lr_scheduler_type constant --warmup_steps 0".split()
    flags += ["--overrides", '{"window_size": 8}', "--output_dir", str(tmp_path)]
    convert.main([*given, *flags, "--transferred", str(whole / "2-transferred")])
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).model.layers[1].state_dict()
        for name in ("2-transferred", "3-distilled")
    )
    changes = {name: (after[name] - x).pow(2).mean().sqrt() / 2e-4 for name, x in before.items()}
    for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight"):
        assert 0.1 < changes[name] < 0.3, name
    assert changes["input_layernorm.weight"] == pytest.approx(1, rel=0.05)


def test_a_mixer_without_anything_new_has_nothing_to_transfer(given, tmp_path, capsys):
    flags = "--mixer elu+1 --softmax_layers 2 --distill_tokens 64".split()
    convert.main([*given, *flags, "--output_dir", str(tmp_path)])
    assert "elu+1: no layer has anything new, nothing to transfer" in capsys.readouterr().out
    assert metrics(tmp_path / "3-distilled")["steps"] == 1
    assert not (tmp_path / "2-transferred" / "metrics.json").exists()


def test_layers_are_ranked_by_blocks_from_all_over_the_text():
    """Recall texts stand behind all others."""
    rows = [{"input_ids": [i] * 4, "labels": [i] * 4} for i in range(10)]
    text = SimpleNamespace(block_size=4, train=Dataset.from_list(rows))
    batches = convert.Text.calibration(text, num_tokens=21, batch_size=3)
    seen = [ids[0].item() for batch in batches for ids in batch["input_ids"]]
    assert seen == [0, 2, 4, 6, 8]
    assert [len(batch["labels"]) for batch in batches] == [3, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--learning_rate 1", "give --transfer_learning_rate and --distill_learning_rate"),
        ("--resume_from_checkpoint last", "the same command goes on where it was stopped"),
        ("--softmax_layers damage:x", "invalid literal"),
        ("--softmax_layers gain:x", "invalid literal"),
        ("--softmax_layers few", "a list of layers that stay softmax, got 'few'"),
        ("--mixer hyena", "invalid choice: 'hyena'"),
        ("--muon true --lora 4", "--muon is for all weights, and --lora for adapters"),
        ("--overrides []", "must be a JSON object of fields, got '[]'"),
    ],
)
def test_wrong_flags_are_named(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        convert.parse_arguments(["--model", "x", "--use_cpu", *flags.split()])
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(given, tmp_path):
    flags = ["--model", str(tmp_path / "nothing"), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(text_blocks.InputError, match="--model .*nothing: no tokenizer"):
        convert.main([*given, *flags])
