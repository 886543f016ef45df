# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""What use_kernels does to a model, beside making it fast: nothing that anybody would notice."""

import copy
import gc
import importlib
import io
import re
import warnings
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BertConfig, BertModel, StaticCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.qwen3_5 import modeling_qwen3_5

from hf_linear_attention import use_kernels, use_kernels_everywhere
from hf_linear_attention.model.loss import causal_lm_loss
from hf_linear_attention.upstream.families import FAMILIES, replacement_for
from hf_linear_attention.upstream.proof.fingerprints import source_of
from hf_linear_attention.upstream.report import Report
from hf_linear_attention.upstream.use_kernels import _warned_of
from upstream_models import (
    SINCE,
    VOCAB_SIZE,
    cache_name,
    close,
    is_here,
    tiny_upstream,
)


@pytest.fixture
def ids():
    return torch.randint(2, VOCAB_SIZE - 4, (2, 11))


@pytest.fixture
def model():
    return tiny_upstream("qwen3_5_text")


def classes(model):
    return [type(module) for module in model.modules()]


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


# ---- the table ----


@pytest.mark.parametrize("model", filter(is_here, FAMILIES))
def test_every_source_is_the_one_that_a_replacement_was_written_for(model):
    """Fails where the supported range of Transformers moves to one that computes it otherwise."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    for name in filter(is_here, FAMILIES[model].replaced):
        upstream = getattr(module, name)
        assert replacement_for(upstream).knows(upstream)


def versions_of(replacement):
    """Of Transformers, that it was written for."""
    while replacement is not None:
        yield from replacement.sources.values()
        replacement = replacement.earlier


def test_the_oldest_transformers_that_may_be_installed_has_known_sources_too():
    """Fails where the supported range begins with a version that nobody looked at."""
    requirements = (Path(__file__).parents[2] / "setup.cfg").read_text()
    (oldest,) = re.findall(r"transformers>=([\d.]+)", requirements)
    for model, family in FAMILIES.items():
        for name, replacement in family.replaced.items():
            first = SINCE.get(name, SINCE.get(model, oldest))
            spans = [versions.split(" to ") for versions in versions_of(replacement)]
            assert any(Version(span[0]) <= Version(first) <= Version(span[-1]) for span in spans), (
                name
            )


def test_a_fingerprint_is_of_what_is_computed():
    def plain(self, x):
        return x + 1

    def documented(self, x: torch.Tensor) -> torch.Tensor:
        """Adds one."""
        return x + 1  # one

    def another(self, x):
        return x + 2

    def of(function):
        return source_of(function).replace(function.__name__, "forward")

    assert of(plain) == of(documented) != of(another)


# ---- what changes, and what does not ----


def test_the_report_says_what_was_changed(model):
    report = use_kernels(model)
    assert str(report) == (
        " 1 Qwen3_5GatedDeltaNet  gated delta rule\n"
        " 1 Qwen3_5RMSNormGated   gated norm\n"
        "16 Linear                product of few rows\n"
        " 7 Qwen3_5RMSNorm        norm\n"
        " 1 Qwen3_5Attention      attention of few queries\n"
        " 1 Qwen3_5ForCausalLM    loss"
    )


def test_only_the_classes_change_and_undo_brings_them_back(model, ids):
    before, names = classes(model), list(model.state_dict())
    report = use_kernels(model)
    for old, new in zip(before, classes(model), strict=True):
        assert issubclass(new, old) and new.__name__ == old.__name__
    assert list(model.state_dict()) == names
    assert isinstance(model.model.layers[0].linear_attn, modeling_qwen3_5.Qwen3_5GatedDeltaNet)
    report.undo()
    assert classes(model) == before
    assert not model.model._forward_pre_hooks


def test_a_with_block_ends_it_even_by_an_error(model):
    before = classes(model)
    with pytest.raises(KeyError), use_kernels(model) as report:
        assert isinstance(report, Report) and classes(model) != before
        raise KeyError
    assert classes(model) == before


def test_other_models_stay_as_they_are(model):
    other = tiny_upstream("qwen3_5_text")
    before = classes(other)
    use_kernels(model)
    assert classes(other) == before


def test_twice_is_once(model):
    use_kernels(model)
    before = classes(model)
    again = use_kernels(model)
    assert not again.changed and "it runs on our kernels already" in str(again)
    again.undo()
    assert classes(model) == before


@pytest.mark.parametrize("model_type", ["mamba", "qwen3_5_text", "jamba"])
def test_a_part_before_the_whole_is_the_whole(model_type, ids):
    """Heads have to hand bounds on, take drafts and have our loss, whichever layers came first."""
    whole, parts = (tiny_upstream(model_type) for _ in range(2))
    use_kernels(whole)
    before = classes(parts)
    with use_kernels(parts.base_model.layers[0]), use_kernels(parts.base_model):
        with use_kernels(parts):
            assert classes(parts) == classes(whole)
            assert parts.loss_function is causal_lm_loss and not parts._is_stateful
            bounds = dict(cu_seq_lens_q=torch.tensor([0, 4, 11], dtype=torch.int32))
            apart = [logits(whole, piece) for piece in ids[:1].split([4, 7], dim=1)]
            with torch.no_grad():
                packed = parts(ids[:1], **bounds).logits
            close(packed, torch.cat(apart, dim=1))
        assert parts.loss_function is not causal_lm_loss
    assert classes(parts) == before


def test_copies_and_files_answer_alike(model, ids, tmp_path):
    want = logits(model, ids)
    use_kernels(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    for copied in copies:
        assert classes(copied) == classes(model)
        close(logits(copied, ids), want)
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(saved.model.layers[0].linear_attn).__module__.startswith("transformers.")
    assert saved.config.architectures == ["Qwen3_5ForCausalLM"]
    assert torch.equal(logits(saved, ids), want)


def test_hidden_states_are_returned_as_before(model, ids):
    want = model(ids, output_hidden_states=True).hidden_states
    use_kernels(model)
    got = model(ids, output_hidden_states=True).hidden_states
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "mamba2", "minimax", "mamba", "zamba"])
def test_a_cache_passes_from_one_to_the_other(model_type, ids):
    model = tiny_upstream(model_type)
    name = cache_name(model)
    want = logits(model, ids)
    with torch.no_grad():
        cache = {name: model(ids[:, :5], use_cache=True)[name]}
        got = []
        for start, end in ((5, 6), (6, 7), (7, 10), (10, 11)):
            with use_kernels(model):
                got.append(model(ids[:, start:end], use_cache=True, **cache).logits)
            if end < 11:
                copied = copy.deepcopy(cache)
                following = model(ids[:, end : end + 1], use_cache=True, **copied).logits
                close(following, want[:, end : end + 1])
    close(torch.cat(got, dim=1), want[:, 5:])


# ---- what is left alone ----


def test_another_source_upstream_is_left_alone(model, ids):
    def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
        return hidden_states

    with mock.patch.object(modeling_qwen3_5.Qwen3_5GatedDeltaNet, "forward", forward):
        report = use_kernels(model)
        assert not report.changed
        assert "computes it otherwise than 5.17 to 5.20, 5.21 to 5.22, 5.23, 5.24 do" in str(report)


def test_a_patched_function_is_called(model, ids):
    """And the others of its layer are ours."""

    def of_zeros(query, key, value, **kwargs):
        return torch.zeros_like(value), None

    with mock.patch.object(modeling_qwen3_5, "torch_chunk_gated_delta_rule", of_zeros):
        want = model(ids, use_cache=False).logits
        report = use_kernels(model)
    assert "by function, as Transformers" in str(report)
    close(model(ids, use_cache=False).logits, want)


def test_a_subclass_keeps_what_it_computes(model, ids):
    class Mine(modeling_qwen3_5.Qwen3_5GatedDeltaNet):
        def forward(self, hidden_states, *args, **kwargs):
            return 2 * super().forward(hidden_states, *args, **kwargs)

    model.model.layers[0].linear_attn.__class__ = Mine
    want = logits(model, ids)
    report = str(use_kernels(model))
    assert "gated delta rule, by function, as a subclass of Qwen3_5GatedDeltaNet" in report
    close(logits(model, ids), want)


def test_another_activation_is_the_layers_own(model, ids):
    model.model.layers[0].linear_attn.activation = "gelu"
    want = logits(model, ids)
    assert "by function, as its convolution is followed by 'gelu'" in str(use_kernels(model))
    close(logits(model, ids), want)


def test_a_call_that_changes_nothing_warns_once_for_each_class(model):
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    bert = BertModel(BertConfig(vocab_size=16, **sizes))
    _warned_of.clear()
    with pytest.warns(UserWarning, match="(?s)nothing in BertModel.*no layer of it has"):
        use_kernels(bert)
    other = tiny_upstream("qwen3_5_text")
    other.model.layers[0].linear_attn.forward = lambda *args, **kwargs: None
    with pytest.warns(UserWarning, match="its forward was replaced on the module"):
        use_kernels(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (bert, other, model, model):  # the last is on our kernels already
            use_kernels(one)


def test_vision_stays_as_it_is():
    model = tiny_upstream("glm5_next")
    before = classes(model.model.visual)
    report = use_kernels(model)
    assert classes(model.model.visual) == before
    assert "1 Glm5NextVisionModel " in str(report)


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match="model must be a torch.nn.Module, got str"):
        use_kernels("Qwen/Qwen3.5-0.8B")


# ---- beside others ----


def test_lora_before_and_after(model, ids):
    adapter = LoraConfig(target_modules=["in_proj_qkv", "o_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    theirs = get_peft_model(copy.deepcopy(model), adapter)
    before = copy.deepcopy(theirs)
    use_kernels(before)
    use_kernels(model)
    torch.manual_seed(1)
    after = get_peft_model(model, adapter)
    want = theirs(input_ids=ids, labels=ids).loss
    want.backward()
    for ours in (before, after):
        assert type(ours.base_model.model.model.layers[0].linear_attn).__mro__[1].__name__ == (
            "GatedDelta"
        )
        loss = ours(input_ids=ids, labels=ids).loss
        loss.backward()
        close(loss, want)
        for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (mine.grad is None) == (their.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, their.grad, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "mamba2", "falcon_mamba", "jamba"])
def test_gradient_checkpointing_of_packed_sequences(model_type, ids):
    """The bounds are there when a layer is computed again, in whatever order backward comes."""
    model = tiny_upstream(model_type).train()
    use_kernels(model)
    batches = [
        {"input_ids": ids[:1], "labels": ids[:1]},
        {
            "input_ids": ids[1:],
            "labels": ids[1:],
            "position_ids": torch.tensor([[*range(4), *range(7)]]),
        },
    ]

    def gradients():
        model.zero_grad()
        sum(model(**batch).loss for batch in batches).backward()
        return [parameter.grad for parameter in model.parameters()]

    want = gradients()
    model.gradient_checkpointing_enable()
    for mine, their in zip(gradients(), want, strict=True):
        torch.testing.assert_close(mine, their)


# One model of each family that has a static cache: a layer of each kind, and no experts, whose
# plain form Transformers can't compile whole.
STATIC = {
    "qwen3_5_text": {},
    "kimi_linear": dict(mlp_layer_types=["dense", "dense"]),
    "mamba2": dict(num_hidden_layers=1),
    "mamba": dict(num_hidden_layers=1),
    "jamba": dict(num_experts=1),
    "lfm2": {},
}


def addresses(cache):
    """Of the states of recurrent layers."""
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    states = [x for layer in layers for x in (layer.conv_states[0], layer.recurrent_states[0])]
    return [state.data_ptr() for state in states if state is not None]


@pytest.mark.sample(1)
@pytest.mark.usefixtures("new_compiler")
@pytest.mark.parametrize("model_type", STATIC)
def test_a_step_with_a_static_cache_compiles_whole_and_once(model_type, ids):
    model = tiny_upstream(model_type, **STATIC[model_type])
    want = logits(model, ids)
    use_kernels(model)
    name = cache_name(model)
    cache = {name: StaticCache(config=model.config, max_cache_len=16)}
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model, fullgraph=True, backend=count)
    with torch.no_grad():
        model(ids[:, :8], use_cache=True, **cache)
        before = addresses(cache[name])
        for t in range(8, 11):
            close(step(ids[:, t : t + 1], use_cache=True, **cache).logits, want[:, t : t + 1])
    assert len(graphs) == 1 and before == addresses(cache[name])


@pytest.mark.parametrize("model_type", STATIC)
def test_a_static_cache_generates_as_a_dynamic_one(model_type, ids):
    model = tiny_upstream(model_type, **STATIC[model_type])
    options = dict(max_new_tokens=4, do_sample=False)
    want = model.generate(ids, **options)
    use_kernels(model)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), want)


def test_everywhere_takes_every_model_that_is_used_until_it_is_undone(ids):
    early = tiny_upstream("mamba2")
    before, want = classes(early), logits(early, ids)
    with use_kernels_everywhere() as everywhere:
        late = tiny_upstream("mamba2")
        for model in (early, late):
            close(logits(model, ids), want)
            assert classes(model) != before
        assert "Mamba-2's state space" in str(everywhere.reports[early])
        assert str(everywhere.reports[early.backbone]) == "nothing was changed"  # any more
    assert classes(early) == before == classes(late)
    model = tiny_upstream("mamba2")
    logits(model, ids)
    assert classes(model) == before


def test_everywhere_a_base_model_may_be_called_before_its_head(ids):
    model = tiny_upstream("mamba2")
    before = classes(model)
    with use_kernels_everywhere() as everywhere, torch.no_grad():
        model.backbone(ids)
        model(ids)
        assert everywhere.reports[model.backbone].changed and model.loss_function is causal_lm_loss
    assert classes(model) == before and not model.backbone._forward_pre_hooks


def test_reports_keep_no_model_in_memory(ids):
    with use_kernels_everywhere() as everywhere:
        model = tiny_upstream("qwen3_5_text")
        model.generate(ids, max_new_tokens=4)
        report, gone = everywhere.reports[model], weakref.ref(model)
        text = str(report)
        assert report.recorded and report.losses and report.takes_batches and report.takes_drafts
        del model
        gc.collect()
        assert gone() is None and not everywhere.reports
        assert str(report) == text
    report.undo()
