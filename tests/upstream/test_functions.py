# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Layers that no class of ours stands in for answer by their own code over our ops as without."""

import contextlib
import copy
import functools
import inspect
import io
import sys
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5

from hf_linear_attention import use_kernels
from hf_linear_attention.ops import delta_rule as op_delta
from hf_linear_attention.releases import CACHE
from hf_linear_attention.upstream.functions import ByFunctions, functions_class_for
from hf_linear_attention.upstream.proof import proved_functions
from hf_linear_attention.upstream.proof.proved_functions import routed, stand_in
from hf_linear_attention.upstream.replacements import Replacement
from upstream_models import CONFIGS, VOCAB_SIZE, cast, close, tiny_upstream

T = 19  # more than two chunks of upstream's
LENGTHS = (7, 1, 12, 3)
# These have none of these functions, and LFM3 had none that are routed before 5.24.
WITHOUT = {"minimax", "xlstm", "zaya", *(() if CACHE == "cache" else ("lfm3",))}
WITH_FUNCTIONS = [name for name in CONFIGS if name not in WITHOUT]
ONE_OF_EACH = ("qwen3_5_text", "kimi_linear", "mamba2", "zamba", "lfm2")


@contextlib.contextmanager
def without_classes():
    """As for a release whose layers read otherwise than those that ours were written for."""

    without = Replacement.why_not

    def why_not(self, module, upstream, *model):
        if functions_class_for(upstream) is None:
            return without(self, module, upstream, *model)
        return "it reads otherwise"

    with mock.patch.object(Replacement, "why_not", why_not):
        yield


def by_functions(model):
    with without_classes():
        report = use_kernels(model)
    changed = [one for one in report.changed if "by function" in one.gist]
    assert changed and all(isinstance(one.module(), ByFunctions) for one in changed)
    return report


@functools.cache
def models(name):
    """Upstream's model, and a copy of it on our functions."""
    theirs = tiny_upstream(name)
    ours = copy.deepcopy(theirs)
    by_functions(ours)
    return theirs, ours


@pytest.fixture
def ids():
    return torch.randint(2, VOCAB_SIZE - 4, (2, T))


# ---- exactness ----


def logits_in_pieces(model, ids, cuts):
    pieces, cache = [], {}
    for piece, at in zip(ids.split(cuts, 1), torch.arange(T)[None].split(cuts, 1), strict=True):
        if model.config.model_type == "bamba":  # which would count from 0 again
            cache["position_ids"] = at
        output = model(piece, use_cache=True, **cache)
        name = next(x for x in (CACHE, "past_key_values", "cache_params") if x in output)
        cache = {name: output[name]}
        pieces.append(output.logits)
    return torch.cat(pieces, 1)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", WITH_FUNCTIONS)
def test_logits_caches_and_generated_tokens_are_upstreams(name, ids):
    theirs, ours = models(name)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.no_grad():
        close(ours(ids).logits, theirs(ids).logits)
        for cuts in ((18, 1), (11, 1, 1, 5, 1)):
            close(logits_in_pieces(ours, ids, cuts), logits_in_pieces(theirs, ids, cuts))
    options = dict(max_new_tokens=3, do_sample=False, num_beams=2, attention_mask=mask)
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


def gradients(model, ids):
    model = model.train()
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


# In float64 it is upstream that rounds, where it goes to float32 in between.
@pytest.mark.parametrize("dtype, relative", [(torch.float32, 2e-3), (torch.float64, 2e-4)])
@pytest.mark.parametrize("name", WITH_FUNCTIONS)
def test_gradients_of_all_parameters_are_upstreams(name, ids, dtype, relative):
    theirs, ours = (gradients(cast(copy.deepcopy(x), dtype), ids) for x in models(name))
    for mine, their in zip(ours, theirs, strict=True):
        if their is None:
            assert mine is None
        else:
            close(mine, their, relative)


@pytest.mark.parametrize("name", WITH_FUNCTIONS)
def test_half_precision_is_as_exact_as_upstreams(name, ids):
    theirs, ours = (cast(copy.deepcopy(model), torch.bfloat16) for model in models(name))
    with torch.no_grad():
        want = models(name)[0](ids).logits
        halves = [model(ids).logits for model in (ours, theirs)]
        with torch.autocast("cpu", torch.bfloat16):
            autocast = [model(ids).logits for model in reversed(models(name))]
    for mine, their in (halves, autocast):
        errors = [(x - want).square().mean(-1).median() for x in (mine, their)]
        assert errors[0] < 2 * errors[1]


CASES = [
    (value, one, case)
    for module in (
        modeling_qwen3_5,
        modeling_mamba2,
        *(sys.modules[type(tiny_upstream(name)).__module__] for name in ("kimi_linear", "zamba")),
    )
    for value in vars(module).values()
    if (found := routed(value)) is not None and found.name in proved_functions.BY_NAME
    for one in [proved_functions.ours_for(found.name, found.in_torch)]
    for case in one.cases(proved_functions.Random())
    if proved_functions.answers_the_same(one.function, found.in_torch, case) is not None
]


def run_case(function, case, dtype):
    """Its outputs, what it changed in place, and gradients, unless it did."""
    given = {
        name: x.to(dtype, copy=True) if isinstance(x, torch.Tensor) else x
        for name, x in case.items()
    }
    states = [given[name] for name in proved_functions.CHANGED if name in given]
    inputs = [x for x in given.values() if isinstance(x, torch.Tensor)]
    for x in inputs:
        x.requires_grad_(not states)
    outputs = function(**given)
    outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x is not None]
    if not states:
        weights = [1 + torch.arange(x.numel()).view(x.shape) % 7 for x in outputs]
        sum((x.double() * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    return outputs + states, [x.grad for x in inputs if x.grad is not None]


@pytest.mark.parametrize(
    "i", range(len(CASES)), ids=[f"{c[0].__name__}-{i}" for i, c in enumerate(CASES)]
)
def test_a_function_has_upstreams_outputs_states_and_gradients(i):
    value, one, case = CASES[i]
    in_torch = routed(value).in_torch
    for dtype, relative in ((torch.float32, 2e-5), (torch.float64, 2e-5), (torch.bfloat16, 3e-2)):
        mine, my_gradients = run_case(stand_in(value), case, dtype)
        theirs, their_gradients = run_case(in_torch, case, dtype)
        for x, y in zip(mine, theirs, strict=True):
            close(x.double(), y.double(), relative)
        for x, y in zip(my_gradients, their_gradients, strict=True):
            close(x.double(), y.double(), 3 * relative)


# ---- packed sequences ----


@pytest.fixture
def sequences():
    return [torch.randint(2, VOCAB_SIZE - 4, (n,)) for n in LENGTHS]


def told_in_each_way():
    """As bounds, as numbers and as positions."""
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None].int()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"cu_seq_lens_q": bounds}, {"seq_idx": numbers}, {"position_ids": positions}


def logits_and_gradients(model, rows):
    model.zero_grad()
    logits = torch.cat([model(**row).logits.flatten(0, 1) for row in rows])
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", WITH_FUNCTIONS)
def test_packed_is_separate(name, sequences):
    """Also where a layer's tokens are read again for its gradients."""
    model = copy.deepcopy(models(name)[1]).train()
    rows = [{"input_ids": row[None], "use_cache": False} for row in sequences]
    want, wanted = logits_and_gradients(model, rows)
    for i, told in enumerate(told_in_each_way()):
        if i == 2:
            model.gradient_checkpointing_enable()
        packed = {"input_ids": torch.cat(sequences)[None], **told}
        y, gradients = logits_and_gradients(model, [packed])
        close(y, want)
        for mine, their in zip(gradients, wanted, strict=True):
            close(mine, their, 1e-3)


@pytest.mark.thorough
def test_a_graph_refuses_packed_sequences_and_a_model_in_pieces_takes_them(sequences):
    model, told = copy.deepcopy(models("qwen3_5_text")[1]), told_in_each_way()
    given = {"input_ids": torch.cat(sequences)[None], **told[0], **told[2], "use_cache": False}
    want = model(**given).logits
    torch.compiler.reset()
    with pytest.raises(Exception, match="takes no packed sequences compiled"):
        torch.compile(model, backend="eager", fullgraph=True)(**given)
    torch.compiler.reset()
    close(torch.compile(model, backend="eager")(**given).logits, want)


def test_packed_sequences_are_not_cached(sequences):
    model, ids = models("qwen3_5_text")[1], torch.cat(sequences)[None]
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True)[CACHE]
        with pytest.raises(ValueError, match="packed sequences can't be cached"):
            model(ids, **{CACHE: cache}, **told_in_each_way()[0])


# ---- layers that nobody knows ----

SOURCE = '''
import torch
from torch import nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback as route
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, l2norm
from transformers.models.qwen3_5 import modeling_qwen3_5

torch_rule = route("chunk_gated_delta_rule", "fla")(
    modeling_qwen3_5.torch_chunk_gated_delta_rule.__wrapped__
)
calls = []

def twice(function):
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)
    return wrapper

def mixed(layer, x, **told):
    k = x.unflatten(-1, (4, -1)).sigmoid()
    return torch_rule(k, k, k, g=-k.mean(-1), beta=k.mean(-1), **told)[0].flatten(2)

class Base(nn.Module):
    def forward(self, x, **told):
        return mixed(self, x, **told)

class Layer(Base):
    """Of next year."""

    def __init__(self):
        super().__init__()
        self.taps = nn.Parameter(torch.randn(32, 3))

    @twice
    def forward(self, x, *, told=None, more={"a": 1}):
        x = self.convolved(x)
        return super().forward(x, cu_seqlens=told) + more["a"]

    @classmethod
    def convolved_by(cls, x, taps, activation="gelu"):
        return causal_conv1d_fn(x.transpose(1, 2), taps, None, activation).transpose(1, 2)

    def convolved(self, x):
        return self.convolved_by(x, self.taps)

class Derived(Layer):
    def forward(self, x, told=None):
        return super().forward(x, told=told) * 3

class LooksBack(nn.Module):
    def forward(self, x, **told):
        return mixed(self, x, **told) + nn.functional.pad(x, (0, 0, 1, -1))

class Writes(nn.Module):
    def forward(self, x):
        global calls
        calls = [x]
        return mixed(self, x)

class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.rule = torch_rule

    def forward(self, x):
        return self.rule(*[x.unflatten(-1, (4, -1))] * 3, g=-x[..., :4].abs(), beta=x[..., :4])[0]
'''


@pytest.fixture
def of_next_year(monkeypatch):
    module = ModuleType("modeling_of_next_year")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(SOURCE, vars(module))
    return module


@pytest.fixture
def x():
    return torch.randn(2, T, 32)


def changed(layer):
    """It in a model, on our functions, and a copy of it as it was."""
    model = nn.Sequential(layer)
    before = copy.deepcopy(layer)
    return use_kernels(model), model[0], before


@pytest.mark.parametrize("name", ["Layer", "Derived"])
def test_a_layer_of_a_module_of_its_own_runs_on_our_ops(of_next_year, x, name):
    """By decorators, helpers, class methods and super()."""
    cls = getattr(of_next_year, name)
    report, layer, before = changed(cls())
    assert [one.gist for one in report.changed] == ["gated delta rule, by function"]
    assert type(layer) is not cls and isinstance(layer, cls) and type(layer).__name__ == name
    with mock.patch.object(op_delta, "run", wraps=op_delta.run) as ours:
        y = layer(x)
    assert ours.call_count == 1
    close(y, before(x))
    for copied in (copy.deepcopy(layer), torch.load(saved(layer), weights_only=False)):
        assert type(copied) is type(layer)
        close(copied(x), y)
    report.undo()
    assert type(layer) is cls
    close(layer(x), y)


def saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return file


def test_bounds_that_a_layer_hands_to_a_function_keep_sequences_apart(of_next_year, x):
    _, layer, before = changed(of_next_year.Base())
    bounds = torch.tensor([0, 5, T, 2 * T])
    parts = [x[:1, :5], x[:1, 5:], x[1:]]
    want = torch.cat([before(part)[0] for part in parts])
    close(layer(x, cu_seqlens=bounds).flatten(0, 1), want)
    numbers = torch.tensor([[0] * 5 + [1] * (T - 5), [0] * T])
    close(layer(x, seq_idx=numbers).flatten(0, 1), want)


def test_a_model_that_does_not_hand_bounds_on_refuses_packed_sequences(sequences):
    model = copy.deepcopy(models("qwen3_5_text")[1])
    layer = model.model.layers[0]
    forward = layer.forward

    def without_bounds(*args, cu_seq_lens_q=None, **kwargs):
        return forward(*args, **kwargs)

    layer.forward = without_bounds
    ids, told = torch.cat(sequences)[None], told_in_each_way()
    with pytest.raises(ValueError, match="reach Qwen3_5GatedDeltaNet without their bounds"):
        model(ids, **told[2])
    model(ids)  # which are not packed
    model.model.layers[0].linear_attn(torch.randn(1, 3, 32))


def test_a_layer_that_looks_back_by_itself_refuses_packed_sequences(of_next_year, x):
    """Where Transformers' function would have raised."""
    _, layer, before = changed(of_next_year.LooksBack())
    layer.train()
    with pytest.raises(ValueError, match="LooksBack can't take packed sequences: it looks back"):
        layer(x, seq_idx=torch.arange(2 * T).view(2, T) // 7)
    assert layer.training
    close(layer(x), before(x))


# ---- what is left alone ----


@pytest.mark.parametrize(
    "name, why",
    [
        ("Writes", "Writes.forward writes to its module"),
        ("Holds", "it keeps Transformers' functions as attributes"),
    ],
)
def test_what_can_not_be_copied_stays(of_next_year, name, why):
    report, layer, _ = changed(getattr(of_next_year, name)())
    assert type(layer) is getattr(of_next_year, name)
    assert [(one.name, one.why) for one in report.left] == [("0", why)]


def with_rule(module, rule):
    """The module with another rule, as a release may bring."""
    module.torch_rule = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(
        rule
    )
    return module


def with_a_scale(*args, scale=None, **kwargs):
    return torch_rule()(*args, **kwargs)


def of_twice(*args, **kwargs):
    y, state = torch_rule()(*args, **kwargs)
    return 2 * y, state


def of_short_ones(*args, **kwargs):
    y, state = torch_rule()(*args, **kwargs)
    return (y if y.shape[1] < 4096 else 2 * y), state


def that_raises(*args, **kwargs):
    raise ValueError("chunk_size must be 128")


def torch_rule():
    return routed(modeling_qwen3_5.torch_chunk_gated_delta_rule).in_torch


KNOWN = inspect.signature(torch_rule())
of_twice.__signature__ = of_short_ones.__signature__ = that_raises.__signature__ = KNOWN
with_a_scale.__signature__ = KNOWN.replace(
    parameters=[
        *list(KNOWN.parameters.values())[:-1],
        inspect.Parameter("scale", inspect.Parameter.KEYWORD_ONLY, default=None),
        list(KNOWN.parameters.values())[-1],
    ]
)


@pytest.mark.parametrize(
    "rule, why",
    [
        (with_a_scale, "with_a_scale has other parameters than those that are known"),
        (of_twice, "of_twice computes something else than ours"),
        (of_short_ones, "of_short_ones reads 4096.0, which is unknown"),
        (that_raises, "that_raises computes something else than ours"),
    ],
)
def test_a_function_that_is_another_one_stays(of_next_year, x, rule, why):
    """The report says so; others of the layer are ours."""
    with_rule(of_next_year, rule)
    report, layer, before = changed(of_next_year.Layer())
    assert [one.gist for one in report.changed] == ["short convolution, by function"]
    assert [(one.name, one.why) for one in report.left] == [("0", why)]
    if rule is not that_raises:
        close(layer(x), before(x))
    report, layer, before = changed(of_next_year.Base())
    assert not report.changed and report.left[0].why == why
    assert type(layer) is of_next_year.Base


def test_a_layer_of_which_a_function_stays_takes_no_packed_sequences(of_next_year, x):
    with_rule(of_next_year, of_twice)
    _, layer, _ = changed(of_next_year.Layer())
    with pytest.raises(ValueError, match="can't take packed sequences: of_twice computes"):
        layer(x, cu_seq_lens_q=torch.tensor([0, 2 * T]))


def test_a_whole_layer_that_transformers_computes_itself_stays():
    stub = routed(modeling_mamba2.mamba2_split_conv1d_scan_combined)
    name = "mamba_split_conv1d_scan_combined"
    assert isinstance(proved_functions.ours_for(name, stub.in_torch), proved_functions.Ours)

    def by_itself(zxbcdt, **kwargs):
        return zxbcdt

    assert "does something by itself" in proved_functions.ours_for(name, by_itself)


# ---- beside other packages, and others' models ----


def test_other_packages_functions_run_where_they_are_there_but_on_the_cpu(of_next_year, x):
    """Unless sequences are packed, which not all of these keep apart."""
    package = ModuleType("ops_of_others")
    package.chunk_gated_delta_rule = theirs = mock.Mock(
        side_effect=lambda *args, **kwargs: torch_rule()(*args, **kwargs)
    )
    theirs.__signature__ = inspect.signature(torch_rule())
    with (
        mock.patch.dict(sys.modules, {package.__name__: package}),
        mock.patch.dict(
            "transformers.integrations.hub_kernels._KERNELS_INTERNAL_PATH_MAPPINGS", clear=True
        ),
    ):
        of_next_year.torch_rule = use_kernel_func_from_hub_with_fallback(
            "chunk_gated_delta_rule", package.__name__
        )(torch_rule())
    report, layer, before = changed(of_next_year.Base())
    want = before(x)
    assert theirs.call_count == 1
    close(layer(x), want)
    assert theirs.call_count == 1
    with mock.patch.object(proved_functions, "ON_CPU", ()):  # as if it were elsewhere
        close(layer(x), want)
        assert theirs.call_count == 2
        layer(x, cu_seq_lens_q=torch.tensor([0, 2 * T]))
        assert theirs.call_count == 2
    report.undo()
    with (
        mock.patch("hf_linear_attention.upstream.functions.ON_CPU", ()),
        mock.patch("hf_linear_attention.upstream.functions.device_type_of", lambda module: "cuda"),
    ):
        report, layer, _ = changed(of_next_year.Base())
    assert not report.changed
    assert report.left[0].why == "Transformers runs it on ops_of_others there"


def test_functions_that_the_package_kernels_made_modules_are_known(of_next_year, x):
    class Func(nn.Module):  # as it makes them
        kernel_layer_name = "chunk_gated_delta_rule"

    func = of_next_year.torch_rule
    Func.forward = lambda self, *args, **kwargs: func(*args, **kwargs)
    of_next_year.torch_rule = Func()
    _, layer, before = changed(of_next_year.Base())
    assert isinstance(layer, ByFunctions)
    want = before(x)
    close(layer(x), want)
    with mock.patch.object(proved_functions, "ON_CPU", ()):  # as if it were elsewhere
        close(layer(x), want)
        of_next_year.torch_rule.forward = lambda *args, **kwargs: (args[2], None)  # its choice
        close(layer(x), x.sigmoid())


def test_no_other_model_and_no_module_of_transformers_changes(ids):
    before = dict(vars(modeling_qwen3_5))
    theirs, ours = models("qwen3_5_text")
    assert vars(modeling_qwen3_5) == before
    other = tiny_upstream("qwen3_5_text")
    with mock.patch.object(op_delta, "run", wraps=op_delta.run) as rule, torch.no_grad():
        want = other(ids).logits
        assert rule.call_count == 0
        close(ours(ids).logits, want)
        assert rule.call_count == 1


def test_undone_it_is_what_it_was(ids):
    model = tiny_upstream("qwen3_5_text")
    classes = [type(module) for module in model.modules()]
    report = by_functions(model)
    assert use_kernels(model).changed == []  # it runs on ours already
    report.undo()
    assert [type(module) for module in model.modules()] == classes
    hooks = [h for x in model.modules() for h in (x._forward_pre_hooks, x._forward_hooks) if h]
    assert hooks == []


def test_a_function_that_was_replaced_in_its_module_is_seen(of_next_year, x):
    """By who patches Transformers, before or after another model was given."""
    changed(of_next_year.Base())
    of_next_year.mixed = lambda layer, x, **told: 5 * x
    report, layer, _ = changed(of_next_year.Base())
    assert not report.changed
    close(layer(x), 5 * x)


def test_what_a_function_calls_is_seen_where_it_was_replaced(of_next_year):
    changed(of_next_year.Base())
    with mock.patch.object(modeling_qwen3_5, "l2norm", lambda x, dim, eps: 2 * x):
        report, _, _ = changed(of_next_year.Base())
        assert not report.changed and "computes something else" in report.left[0].why
    assert changed(of_next_year.Base())[0].changed


def test_a_method_that_was_replaced_in_its_class_is_seen(of_next_year, x):
    changed(of_next_year.Derived())
    of_next_year.Layer.forward = lambda self, x, **told: self.convolved(x)
    _, layer, before = changed(of_next_year.Derived())
    assert isinstance(layer, ByFunctions)
    close(layer(x), before(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_compiled_model_is_one_graph(name, ids):
    model = models(name)[1]
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        close(compiled(ids, use_cache=False).logits, want)


def test_drafts_are_left_to_classes_and_continuous_batches_are_refused_in_words():
    model = tiny_upstream("qwen3_5_text")
    before = type(model)
    report = by_functions(model)
    assert model._is_stateful and not report.takes_drafts
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.init_continuous_batching()
    report.undo()
    assert type(model) is before
