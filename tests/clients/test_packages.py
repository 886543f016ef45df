# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""PEFT, TRL, torchao, lm-evaluation-harness, offloading, shards, pipelines and threads."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig, pipeline

from hf_linear_attention import (
    LinearAttentionForCausalLM,
    LinearAttentionForSequenceClassification,
)
from saved_models import new_process, word_tokenizer
from sft import PACKED, sft_trainer, words
from tiny import NEWER, VARIANTS, assert_near, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ["paper", "gated", "hybrid", "aaren", "learned", *NEWER]


def greedy(model, ids: torch.Tensor, **options) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=12, do_sample=False, **options)


@torch.no_grad()
def assert_same_model(actual, expected, tolerance: float = 1e-4) -> None:
    """The same logits and the same tokens."""
    ids = random_ids(2, 20)
    assert_near(actual(ids).logits, expected(ids).logits, tolerance)
    assert torch.equal(greedy(actual, ids), greedy(expected, ids))


# PEFT

LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def train(adapted: PeftModel) -> None:
    """Some steps, which halve the loss."""
    ids = random_ids(2, 20)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        losses.append(adapted(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 2
    adapted.eval()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_lora_trains_and_comes_back_merged_or_not(name, tmp_path):
    model = tiny_model(dtype=torch.float32, **VARIANTS[name])
    original = tiny_model(dtype=torch.float32, **VARIANTS[name])
    linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    adapted = get_peft_model(model, LoraConfig(**LORA))
    wrapped = {
        path.removeprefix("base_model.model.").removesuffix(".base_layer")
        for path, _ in adapted.named_modules()
        if path.endswith(".base_layer")
    }
    assert wrapped == linears - {"lm_head"}

    train(adapted)
    ids = random_ids(2, 20)
    with torch.no_grad():
        assert (adapted(ids).logits - original(ids).logits).abs().max() > 1

    adapted.save_pretrained(tmp_path / "adapter")
    base = tiny_model(dtype=torch.float32, **VARIANTS[name])
    reloaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert_same_model(reloaded, adapted, tolerance=0)
    merged = reloaded.merge_and_unload()
    assert type(merged) is LinearAttentionForCausalLM
    assert type(merged.model.layers[0].mlp.up_proj) is nn.Linear
    assert_same_model(merged, adapted)
    merged.save_pretrained(tmp_path / "merged")
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), merged, 0)


# TRL


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["paper", "gated", "hybrid", "aaren", *NEWER])
def test_sft_packs_and_trains_as_without_packing(name, tmp_path):
    def one_step(**options) -> tuple[float, LinearAttentionForCausalLM, dict]:
        model = tiny_model(dtype=torch.float32, pad_token_id=0, **VARIANTS[name])
        trainer = sft_trainer(model, tmp_path, **options)
        (batch,) = trainer.get_train_dataloader()
        return trainer.train().training_loss, model, batch

    expected_loss, expected, padded = one_step(max_length=16)
    assert padded["input_ids"].shape[0] == 8
    for options in PACKED.values():
        loss, model, batch = one_step(**options)
        assert batch["input_ids"].shape == (1, padded["attention_mask"].sum())
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        for path, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, expected.get_parameter(path), msg=path)

    untrained = tiny_model(dtype=torch.float32, pad_token_id=0, **VARIANTS[name])
    assert (untrained.lm_head.weight - expected.lm_head.weight).abs().max() > 1e-3
    leaking = untrained(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    assert abs(leaking.item() - expected_loss) > 1e-2


def test_sft_finds_a_model_by_its_folder(tmp_path):
    model = tiny_model(dtype=torch.float32, pad_token_id=0, **VARIANTS["gated"])
    model.save_pretrained(tmp_path / "model")
    expected = sft_trainer(model, tmp_path, **PACKED["bfd"]).train().training_loss
    trainer = sft_trainer(str(tmp_path / "model"), tmp_path, **PACKED["bfd"])
    assert type(trainer.model) is LinearAttentionForCausalLM
    assert trainer.train().training_loss == expected


# torchao

QUANTIZATIONS = {
    "int8": (lambda: Int8WeightOnlyConfig(), 8),
    "int4": (lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4), 4),
}


@pytest.mark.parametrize("bits", QUANTIZATIONS)
@pytest.mark.parametrize("name", ["gated", "hybrid"])
def test_quantized_weights_are_what_computes(bits, name, tmp_path):
    model = tiny_model(dtype=torch.float32, **VARIANTS[name])
    model.save_pretrained(tmp_path / "model")
    make_config, num_bits = QUANTIZATIONS[bits]
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=TorchAoConfig(make_config())
    )
    ids = random_ids(2, 20)
    assert not torch.allclose(quantized(ids).logits, model(ids).logits, atol=1e-2)
    linears = {path: x for path, x in quantized.named_modules() if isinstance(x, nn.Linear)}
    del linears["lm_head"]
    for path, linear in linears.items():
        assert type(linear.weight) is not nn.Parameter, path
        assert linear.weight.qdata.dtype == torch.int8, path
        assert len(linear.weight.qdata.unique()) <= 2**num_bits
        with torch.no_grad():  # the same rounding, without quantized tensors
            model.get_submodule(path).weight.copy_(linear.weight.dequantize())
    assert_same_model(quantized, model)

    quantized.save_pretrained(tmp_path / "quantized")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    assert type(reloaded.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
    assert_same_model(reloaded, quantized, tolerance=0)


@pytest.mark.parametrize("bits", QUANTIZATIONS)
def test_lora_trains_beside_quantized_weights(bits, tmp_path):
    tiny_model(dtype=torch.float32, **VARIANTS["gated"]).save_pretrained(tmp_path / "model")

    def quantized() -> LinearAttentionForCausalLM:
        config = TorchAoConfig(QUANTIZATIONS[bits][0]())
        return AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config)

    adapted = get_peft_model(quantized(), LoraConfig(**LORA))
    train(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    reloaded = PeftModel.from_pretrained(quantized(), tmp_path / "adapter").eval()
    assert_same_model(reloaded, adapted, tolerance=0)


# accelerate, safetensors


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_shards_and_weights_left_on_disk_change_nothing(name, tmp_path):
    model = tiny_model(dtype=torch.float32, **VARIANTS[name])
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    shards = {path.name for path in tmp_path.glob("*.safetensors")}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == shards
    assert len(shards) >= 3
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path), model, tolerance=0)

    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        device_map="auto",
        max_memory={"cpu": "60KB"},
        offload_folder=tmp_path / "offloaded",
    )
    assert set(offloaded.hf_device_map.values()) == {"cpu", "disk"}
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    assert_same_model(offloaded, model, tolerance=1e-6)
    assert any(parameter.is_meta for parameter in offloaded.parameters())  # and left again


# Pipelines


def test_pipelines_answer_batches_as_single_texts():
    tokenizer = word_tokenizer(eos_token="w40")
    tokenizer.padding_side = "left"
    texts = words(3, 9, 1, 6)
    options = {"dtype": torch.float32, "pad_token_id": 0, **VARIANTS["hybrid"]}

    model = tiny_model(**options)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    answers = generator(
        texts, batch_size=4, max_new_tokens=12, do_sample=False, return_tensors=True
    )
    for text, (answer,) in zip(texts, answers, strict=True):
        tokens = greedy(model, tokenizer(text, return_tensors="pt").input_ids)[0].tolist()
        generated = [token for token in map(int, answer["generated_token_ids"]) if token != 0]
        assert generated == [token for token in tokens if token != 0]

    model = tiny_model(LinearAttentionForSequenceClassification, num_labels=3, **options)
    classifier = pipeline("text-classification", model=model, tokenizer=tokenizer)
    for text, answer in zip(texts, classifier(texts, batch_size=4, top_k=None), strict=True):
        with torch.no_grad():
            scores = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
        found = {label["label"]: label["score"] for label in answer}
        assert found == pytest.approx(
            {f"LABEL_{i}": x.item() for i, x in enumerate(scores)}, rel=1e-4
        )


# Threads

OPTIONS = {
    "plain": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "drafts": {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, options) for name in ("gated", "hybrid") for options in OPTIONS),
        *((name, "beams") for name in ("aaren", "preset_performer")),
    ],
)
def test_one_model_generates_in_many_threads_at_once(name, options):
    model = tiny_model(dtype=torch.float32, **VARIANTS[name])
    rows = 1 if options == "drafts" else 2
    prompts = [random_ids(rows, 4 + 3 * i, seed=i) for i in range(6)]

    @torch.inference_mode()
    def generate(ids: torch.Tensor) -> list:
        torch.set_num_threads(1)
        return greedy(model, ids, **OPTIONS[options]).tolist()

    alone = [generate(ids) for ids in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(generate, prompts)) == alone


# lm-evaluation-harness

QUESTIONS = [
    {"question": "w3 w14 w15", "choices": ["w9 w26", "w5", "w17 w2 w8"], "answer": 1},
    {"question": "w31 w4", "choices": ["w9", "w7", "w17 w8"], "answer": 0},
    {"question": "w20 w7 w7", "choices": ["w11 w12", "w7", "w2 w8"], "answer": 2},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: questions.jsonl}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICES = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
ANSWERS = """
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {max_gen_toks: 6, until: ["w40"], do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.mark.thorough
def test_lm_eval_finds_the_model_s_own_likelihoods_and_answers(tmp_path):
    model = tiny_model(dtype=torch.float32, pad_token_id=0, **VARIANTS["hybrid"])
    tokenizer = word_tokenizer(eos_token="w40")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, body in {"choices": CHOICES, "answers": ANSWERS}.items():
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name) + body)
    arguments = (
        f"--model hf --model_args pretrained={tmp_path}/model,trust_remote_code=True "
        f"--tasks choices,answers --include_path {tmp_path} --device cpu --batch_size 2 "
        f"--output_path {tmp_path}/out --log_samples"
    )
    result = subprocess.run(
        [sys.executable, "-m", "lm_eval", *arguments.split()],
        **new_process(tmp_path, HF_HOME=str(tmp_path / "home")),
        capture_output=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr

    (choices,) = (tmp_path / "out").rglob("samples_choices_*.jsonl")
    for line in choices.read_text().splitlines():
        sample = json.loads(line)
        question = tokenizer(sample["doc"]["question"]).input_ids
        likelihoods = []
        for choice, found in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            answer = tokenizer(choice).input_ids
            with torch.no_grad():
                logits = model(torch.tensor([question + answer])).logits[0].log_softmax(-1)
            rows = range(len(question) - 1, len(question) + len(answer) - 1)
            likelihoods.append(
                sum(logits[row, i].item() for row, i in zip(rows, answer, strict=True))
            )
            assert float(found[0]) == pytest.approx(likelihoods[-1], rel=1e-4)
        best = max(range(3), key=likelihoods.__getitem__)
        assert sample["acc"] == float(best == sample["doc"]["answer"])

    (answers,) = (tmp_path / "out").rglob("samples_answers_*.jsonl")
    for line in answers.read_text().splitlines():
        sample = json.loads(line)
        ids = tokenizer(sample["doc"]["question"], return_tensors="pt").input_ids
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert sample["resps"][0][0].strip() == tokenizer.decode(tokens, skip_special_tokens=True)
