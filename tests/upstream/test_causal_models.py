# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What use_kernels does to causal language models without recurrent layers: on the CPU their norms,
products of few rows and loss become ours, and nothing else does.
"""

import copy
import io
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    StaticCache,
)
from transformers.models.llama import modeling_llama

from hf_linear_attention import use_kernels, use_kernels_everywhere
from hf_linear_attention.model.loss import causal_lm_loss
from hf_linear_attention.releases import CACHE
from hf_linear_attention.upstream.norms import PlainNorm
from hf_linear_attention.upstream.tiny_models import COMMON, VOCAB_SIZE, fill_weights
from hf_linear_attention.upstream.use_kernels import _warned_of
from tiny import tiny_model
from upstream_models import close

NOTHING = (
    "left alone: no layer of it has a replacement, and it is no causal language model on the CPU"
)
LATER = dict(COMMON, head_dim=8)
GPT2 = dict(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)
VISION = dict(
    model_type="clip_vision_model",
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=8,
    patch_size=4,
    projection_dim=16,
)
LLAVA = dict(
    text_config=dict(COMMON, model_type="llama"),
    vision_config=VISION,
    image_token_id=VOCAB_SIZE - 1,
)
# model type -> its config's fields, and what the report says of parts of it
MODELS = {
    "llama": (COMMON, ["15 Linear            product of few rows", "5 LlamaRMSNorm      norm"]),
    "mistral": (COMMON, ["5 MistralRMSNorm      norm"]),
    "qwen3": (LATER, ["9 Qwen3RMSNorm      norm"]),
    "gemma": (LATER, ["5 GemmaRMSNorm      norm"]),  # 1 + weight
    "olmo2": (COMMON, ["9 Olmo2RMSNorm      norm"]),  # rounded late
    "gpt2": (GPT2, ["1 Linear           product of few rows"]),  # LayerNorm, and its own Conv1D
    "llava": (LLAVA, [f"1 CLIPVisionModel                {NOTHING}", "5 LlamaRMSNorm"]),
}


def tiny(model_type, **changes):
    fields = MODELS[model_type][0]
    config = AutoConfig.for_model(model_type, **{**fields, **changes})
    auto_class = AutoModelForImageTextToText if model_type == "llava" else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto_class.from_config(config).eval()
    fill_weights(model, torch.default_generator)
    return model


@pytest.fixture
def model():
    return tiny("llama")


@pytest.fixture
def ids():
    return torch.randint(2, VOCAB_SIZE - 4, (2, 11))


def classes(model):
    return [type(module) for module in model.modules()]


def fields(model):
    return [(type(module), set(vars(module))) for module in model.modules()]


def loss_and_gradients(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    used = [weight for weight in model.parameters() if weight.requires_grad]
    return [loss, *torch.autograd.grad(loss, used, allow_unused=True)]


@pytest.mark.parametrize("model_type", MODELS)
def test_answers_gradients_and_tokens_are_the_same_until_it_is_undone(model_type, ids):
    model = tiny(model_type)
    before, options = fields(model), dict(max_new_tokens=6, do_sample=False)
    with torch.no_grad():
        want = model(input_ids=ids).logits
    wanted, tokens = loss_and_gradients(model, ids), model.generate(ids, **options)
    with use_kernels(model) as report:
        for line in (*MODELS[model_type][1], "loss"):
            assert line in str(report), str(report)
        assert type(model) is before[0][0]  # whose drafts and batches stay Transformers'
        with torch.no_grad():
            close(model(input_ids=ids).logits, want)
        for mine, theirs in zip(loss_and_gradients(model, ids), wanted, strict=True):
            if theirs is not None:
                close(mine, theirs)
        assert torch.equal(model.generate(ids, **options), tokens)
    assert fields(model) == before and model.loss_function is not causal_lm_loss
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_round_as_transformers(dtype, ids):
    for model_type in ("llama", "gemma", "olmo2"):
        model = tiny(model_type).to(dtype)
        with torch.no_grad():
            want = copy.deepcopy(model).double()(ids).logits
            theirs = (model(ids).logits.double() - want).norm()
            use_kernels(model)
            ours = (model(ids).logits.double() - want).norm()
        assert ours <= 1.5 * theirs + 1e-6 * want.norm()


@pytest.mark.usefixtures("new_compiler")
def test_a_step_compiles_whole_and_once(model, ids):
    with torch.no_grad():
        want = model(ids).logits
    use_kernels(model)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model, fullgraph=True, backend=count)
    cache = {CACHE: StaticCache(config=model.config, max_cache_len=16)}
    with torch.no_grad():
        model(ids[:, :8], use_cache=True, **cache)
        for t in range(8, 11):
            got = step(ids[:, t : t + 1], use_cache=True, **cache).logits
            close(got, want[:, t : t + 1])
    assert len(graphs) == 1


def test_lora_before_and_after(model, ids):
    adapter = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    plain, before = copy.deepcopy(model), copy.deepcopy(model)
    use_kernels(model)
    adapted = []
    for one in (plain, before, model):
        torch.manual_seed(1)
        adapted.append(get_peft_model(one, adapter))
    theirs, *mine = adapted
    use_kernels(before)
    wanted = loss_and_gradients(theirs, ids)
    for ours in mine:
        assert isinstance(ours.base_model.model.model.norm, PlainNorm)
        for one, their in zip(loss_and_gradients(ours, ids), wanted, strict=True):
            close(one, their)


def test_copies_and_files_are_of_the_same_classes(model, ids):
    with torch.no_grad():
        want = model(ids).logits
    names = list(model.state_dict())
    use_kernels(model)
    assert isinstance(model.model.norm, modeling_llama.LlamaRMSNorm)
    assert list(model.state_dict()) == names
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert classes(copied) == classes(model)
        with torch.no_grad():
            close(copied(ids).logits, want)


def test_twice_is_once_and_another_model_stays(model):
    other = copy.deepcopy(model)
    before = fields(other)
    use_kernels(model)
    now = fields(model)
    again = use_kernels(model)
    assert not again.has_changes and "norm" not in str(again).replace("RMSNorm", "")
    assert str(again).count("left alone: it runs on our kernels already") == 3
    again.undo()
    assert fields(model) == now and fields(other) == before


def test_everywhere_takes_it_when_it_is_called(model, ids):
    before = fields(model)
    with use_kernels_everywhere() as everywhere, torch.no_grad():
        model.model(ids)  # no language model by itself
        assert fields(model) == before
        model(ids)
        assert "5 LlamaRMSNorm      norm" in str(everywhere.reports[model])
    assert fields(model) == before


# ---- norms ----


class Same(nn.Module):
    """Somebody's own, of a known source."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.variance_epsilon = 1e-5

    forward = modeling_llama.LlamaRMSNorm.forward


class WiderNorm(Same):
    """Of another."""

    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def test_norms_are_known_by_their_source_in_any_class(model):
    model.model.layers[0].input_layernorm = Same()
    model.model.layers[1].input_layernorm = WiderNorm()
    report = str(use_kernels(model))
    norm, wider = (layer.input_layernorm for layer in model.model.layers)
    assert isinstance(norm, PlainNorm) and isinstance(norm, Same)
    assert type(wider) is WiderNorm
    assert "WiderNorm         left alone: its source is none that a norm of ours was" in report
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is type(norm)


def test_a_norm_of_another_source_stays(model, ids):
    def forward(self, hidden_states):
        return hidden_states * self.weight

    with mock.patch.object(modeling_llama.LlamaRMSNorm, "forward", forward):
        report = use_kernels(model)
        assert type(model.model.norm) is modeling_llama.LlamaRMSNorm
        assert "5 LlamaRMSNorm      left alone: its source is none" in str(report)
        assert "15 Linear" in str(report)


# ---- what is left alone ----


def test_what_is_no_causal_model_stays_and_is_said_to(ids):
    sizes = dict(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=VOCAB_SIZE)
    others = [
        AutoModel.from_config(AutoConfig.for_model("bert", **COMMON)),
        AutoModel.from_config(AutoConfig.for_model("llama", **COMMON)),
        AutoModel.from_config(AutoConfig.for_model("resnet", embedding_size=8, hidden_sizes=[8])),
        AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes)),
    ]
    _warned_of.clear()  # once for each class, and another test may have had its warning
    for other in others:
        before = fields(other)
        with pytest.warns(UserWarning, match="changes nothing in"):
            report = use_kernels(other)
        assert fields(other) == before
        assert str(report) == f"1 {type(other).__name__}  {NOTHING}"


def test_a_model_of_this_package_needs_nothing():
    own = tiny_model()
    before = fields(own)
    assert (
        str(use_kernels(own))
        == f"1 {type(own).__name__}  left alone: it runs on our kernels already"
    )
    assert fields(own) == before


def test_a_vision_tower_stays(ids):
    model = tiny("llava")
    tower = model.model.vision_tower
    before = fields(tower)
    use_kernels(model)
    assert fields(tower) == before
    assert isinstance(model.model.language_model.norm, PlainNorm)
