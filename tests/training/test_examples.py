# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The example scripts, run as a user runs them, on a small model and a small text."""

import json
import math
import subprocess
import sys
from pathlib import Path

import evaluate
import pytest
import torch
from datasets import Dataset

from new_python import kill_when_whole, run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import generate  # noqa: E402
import text_blocks  # noqa: E402
import train_causal_lm  # noqa: E402

SMALL = (
    "--hidden_size 32 --intermediate_size 64 --num_hidden_layers 2 --num_attention_heads 2 "
    "--vocab_size 400 --block_size 64 --max_eval_bytes 4000 "
    "--max_steps 60 --save_steps 10 --eval_steps 30 --logging_steps 10"
).split()


def run(script: str, *args: object) -> subprocess.CompletedProcess:
    return run_python(EXAMPLES / script, *args)


def read_metrics(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """100 kB of real text: some of the source of the standard library."""
    source = "".join(Path(module.__file__).read_text() for module in (subprocess, json, pytest))
    path = tmp_path_factory.mktemp("text") / "source.txt"
    path.write_text(source[:100_000])
    return path


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory) -> Path:
    """The folder of an uninterrupted training run."""
    folder = tmp_path_factory.mktemp("trained")
    result = run("train_causal_lm.py", *SMALL, "--text_file", text, "--output_dir", folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_training_lowers_the_held_out_loss_and_saves_everything(trained):
    metrics = read_metrics(trained)
    assert metrics["steps"] == 60
    assert metrics["bits_per_byte_after"] < metrics["bits_per_byte_before"] - 0.1
    assert (trained / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    saved = {path.name for path in trained.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "checkpoint-60"} <= saved
    config = json.loads((trained / "config.json").read_text())
    assert config.get("use_cache", True)  # which is not saved where it is
    assert "AutoModelForCausalLM" in config["auto_map"]
    code_file = config["auto_map"]["AutoModelForCausalLM"].split(".")[0] + ".py"
    assert code_file in saved


@pytest.mark.thorough
def test_a_killed_run_resumes_to_the_loss_of_an_uninterrupted_one(text, trained, tmp_path):
    args = [*SMALL, "--text_file", text, "--output_dir", tmp_path]
    state_file = tmp_path / "checkpoint-20" / "trainer_state.json"
    script = EXAMPLES / "train_causal_lm.py"
    kill_when_whole(state_file, script, *args)
    assert not (tmp_path / "metrics.json").exists()
    for number, state in ((58, ""), (59, None)):  # as if killed while saving: to be passed over
        (tmp_path / f"checkpoint-{number}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text(state)

    result = run("train_causal_lm.py", *args, "--resume_from_checkpoint", "last")
    assert result.returncode == 0, result.stderr
    resumed, whole = read_metrics(tmp_path), read_metrics(trained)
    assert resumed["eval_loss"] == pytest.approx(whole["eval_loss"], abs=1e-5)
    assert resumed["bits_per_byte_before"] == whole["bits_per_byte_before"]


def test_training_goes_on_with_a_model_that_is_given(text, trained, tmp_path):
    """The default shape is another one, and the rate of the one step is too low to matter."""
    args = f"--model {trained} --text_file {text} --output_dir {tmp_path} --block_size 64 "
    args += "--max_eval_bytes 4000 --max_steps 1 --learning_rate 1e-9"
    train_causal_lm.main(args.split())
    before, after = (read_metrics(folder) for folder in (trained, tmp_path))
    assert after["parameters"] == before["parameters"]
    for when in ("before", "after"):
        assert after[f"bits_per_byte_{when}"] == pytest.approx(before["bits_per_byte_after"], 1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("folder", [".", "checkpoint-60"])
def test_generate_streams_a_continuation_with_a_cache_of_constant_size(trained, folder):
    result = run(
        "generate.py", trained / folder, "--prompt", "def run(", "--max_new_tokens", 20, "--greedy"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("def run(")
    last_line = result.stdout.splitlines()[-1]
    assert "tokens/s" in last_line
    sizes = [words.split(" bytes")[0] for words in last_line.split("cache: ")[1].split(", ")[-2:]]
    assert sizes[0] == sizes[1]


def test_generate_names_a_folder_without_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        generate.main()
    assert f"there is no saved model in {tmp_path}" in capsys.readouterr().err


def test_bad_input_ends_in_one_line(tmp_path):
    result = run("train_causal_lm.py", "--text_file", tmp_path / "absent.txt")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"error: --text_file: there is no file {tmp_path / 'absent.txt'}"
    )
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--no_such_flag 1", "unknown arguments: --no_such_flag 1"),
        ("--learning_rate fast", "--learning_rate"),
        ("--dataset_name a --text_file b", "give --dataset_name or --text_file, not both"),
        ("--preset mamba", "argument --preset: invalid choice: 'mamba' (choose from "),
        ("--block_size 1", "--block_size must be at least 2, got 1"),
        ("--recall_share 1.1", "--recall_share must lie between 0 and 1, got 1.1"),
        ("--held_out_fraction 1", "--held_out_fraction must lie between 0 and 1, got 1.0"),
    ],
)
def test_wrong_flags_are_named(args, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_causal_lm.parse_arguments(args.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], {"decay": "per_token", "mixer": "delta_rule"}),
        (["--decay", "none"], {"decay": "none", "mixer": "delta_rule"}),
        (["--preset", "katharopoulos"], {"decay": "none", "feature_map": "elu+1"}),
        (["--preset", "retnet"], {"decay": "retnet", "gate_act": "silu", "hidden_size": 128}),
        (["--preset", "retnet", "--decay", "per_head"], {"decay": "per_head", "gate_act": "silu"}),
        (
            ["--preset", "gla", "--config_overrides", '{"gate_act": "sigmoid"}'],
            {"decay": "gla", "gate_act": "sigmoid"},
        ),
    ],
)
def test_a_preset_is_overridden_by_the_other_flags(args, expected):
    model_args, *_ = train_causal_lm.parse_arguments([*args, "--use_cpu"])
    config = model_args.build_config()
    assert {name: getattr(config, name) for name in expected} == expected


def train_on(text: str | bytes, tmp_path: Path, *args: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    output = str(tmp_path / "out")
    train_causal_lm.main([*SMALL, "--text_file", str(path), "--output_dir", output, *args])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        ("", [], "text.txt is empty"),
        (" \n", [], "text.txt is empty"),
        (b"\xff\xfe\x00", [], "is not UTF-8"),
        ("too little", [], "give more text or a smaller --block_size"),
        ("word " * 5000, ["--config_overrides", "{decay"], "--config_overrides {decay: Expecting"),
        ("word " * 5000, ["--config_overrides", "[1]"], "--config_overrides"),
        ("word " * 5000, ["--config_overrides", '{"feature_map": "no"}'], "feature_map"),
        ("word " * 5000, ["--preset", "hybrid"], "num_hidden_layers must be at least 4"),
        ("word " * 5000, ["--model", "no/folder"], "no model can be loaded from no/folder"),
        ("word " * 5000, ["--resume_from_checkpoint", "last"], "no checkpoint in"),
        ("word " * 5000, ["--resume_from_checkpoint", "x"], "x is not a complete checkpoint"),
    ],
)
def test_unusable_input_is_explained(content, args, message, tmp_path):
    with pytest.raises(text_blocks.InputError, match=message):
        train_on(content, tmp_path, *args)


def load(*args: str) -> tuple[Dataset, Dataset]:
    _, data_args, training_args = train_causal_lm.parse_arguments([*args, "--use_cpu"])
    return data_args.load(training_args.seed)


def test_a_local_dataset_is_read_through_datasets(tmp_path):
    path = tmp_path / "poems.jsonl"
    path.write_text("".join(json.dumps({"poem": f"line {i}"}) + "\n" for i in range(40)))
    train, held_out = load(
        "--dataset", str(path), "--text_column", "poem", "--held_out_fraction", "0.1"
    )
    assert len(train) == 36
    assert len(held_out) == 4
    assert {row["text"] for row in [*train, *held_out]} == {f"line {i}" for i in range(40)}


def test_a_datasets_own_validation_split_is_held_out(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": split}) + "\n")
    train, held_out = load("--dataset_name", str(tmp_path))
    assert [train[0]["text"], held_out[0]["text"]] == ["train", "validation"]


def test_a_missing_dataset_or_column_is_named(tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(text_blocks.InputError, match=f"'{missing}' cannot be loaded"):
        load("--dataset_name", missing)
    (tmp_path / "train.jsonl").write_text('{"poem": "line", "number": 1}\n')
    with pytest.raises(text_blocks.InputError, match="'text' is not a column of .*'poem'"):
        load("--dataset_name", str(tmp_path))
    with pytest.raises(text_blocks.InputError, match="'number' of .* does not hold strings"):
        load("--dataset_name", str(tmp_path), "--text_column", "number")


def test_the_standard_library_is_split_by_file_and_always_alike():
    (train, held_out), again = load("--max_train_bytes", "300000"), load()
    assert sum(len(row["text"].encode()) for row in train) <= 300_000
    assert held_out[:] == again[1][:]
    assert not set(train["text"]) & set(held_out["text"])


def test_a_single_text_loses_its_tail_to_the_held_out_part():
    text = "".join(f"line {i}\n" for i in range(100))
    train, held_out = text_blocks.hold_out(Dataset.from_dict({"text": [text]}), 0.1, seed=0)
    assert train[0]["text"] + held_out[0]["text"] == text
    assert held_out[0]["text"].startswith("line 9")


def test_what_is_skipped_and_what_is_taken_make_the_whole():
    documents = Dataset.from_dict({"text": ["abc", "", "äöü", "xyz"]})
    for count in range(12):
        texts = [text_blocks.take_bytes(documents, count), text_blocks.drop_bytes(documents, count)]
        taken, left = ("".join(dataset["text"]).encode() for dataset in texts)
        whole = "abcäöüxyz".encode()
        assert whole.startswith(taken) and whole.endswith(left)
        assert len(whole) - len(taken) - len(left) == 2 * (count in (4, 6, 8))  # a letter is cut
    with pytest.raises(text_blocks.InputError, match="smaller --skip_eval_bytes"):
        text_blocks.drop_bytes(documents, 12)


def test_packing_keeps_every_token_and_the_tokenizer_every_byte():
    documents = Dataset.from_dict(
        {"text": ["def f(x):\n    return 'é'\n", "\ttabs  and spaces \n"]}
    )
    tokenizer = text_blocks.train_tokenizer(documents, 300)
    blocks = text_blocks.pack(documents, tokenizer, 5)
    packed = [token for row in blocks for token in row["input_ids"]]
    whole = [
        token
        for row in documents
        for token in [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
    ]
    assert packed == whole[: len(whole) // 5 * 5]
    assert tokenizer.decode(whole) == "".join(row["text"] + "<|endoftext|>" for row in documents)
    num_bytes = text_blocks.bytes_per_token(tokenizer)
    assert sum(num_bytes[t] for t in whole) == sum(len(row["text"].encode()) for row in documents)


def test_bits_per_byte_of_a_uniform_guess_is_eight():
    metric = evaluate.load(str(train_causal_lm.METRIC))
    result = metric.compute(predictions=[3 * math.log(256), math.log(256)], references=[3, 1])
    assert result["bits_per_byte"] == pytest.approx(8)
    with pytest.raises(ValueError, match="at least one byte"):
        metric.compute(predictions=[1.0], references=[0])


def test_the_log_likelihood_belongs_to_the_next_token():
    labels = torch.tensor([[0, 2, 1]])
    logits = torch.full((1, 3, 4), -50.0)
    logits[0, 0, 2] = logits[0, 1, 1] = 50.0
    nll = train_causal_lm.BitsPerByteOfBlocks.negative_log_likelihood(logits, labels)
    torch.testing.assert_close(nll, torch.zeros(1, 2))


@pytest.mark.thorough
def test_rewards_of_sums_are_learned_from_and_drawn(tmp_path):
    few = ("--max_steps", 3, "--pretrain_steps", 3, "--prompts_per_step", 2)
    result = run("train_grpo.py", "--output_dir", tmp_path, *few)
    assert result.returncode == 0, result.stderr
    metrics = read_metrics(tmp_path)
    assert len(metrics["rewards"]) == 3
    assert metrics["tokens_read_of_given"] < 0.5  # of eight answers for each prompt
    assert (tmp_path / "rewards.png").stat().st_size > 0
    assert (tmp_path / "model.safetensors").exists()
