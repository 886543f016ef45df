# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""linear_attention and linear_attention_step_: every backend against the float64 reference."""

import functools
import shutil
from pathlib import Path

import pytest
import torch

from attention_cases import (
    TOLERANCE,
    Case,
    assert_all_close,
    expected,
    make_inputs,
    require_grad,
    run_with_gradients,
)
from by_name import by_name
from hf_linear_attention.ops import backends
from hf_linear_attention.ops import linear_attention as op_linear
from hf_linear_attention.ops.backends import backend_report, choose_backend
from hf_linear_attention.ops.chunked.linear_attention import CHUNK_SIZE, chunked_linear_attention
from hf_linear_attention.ops.compiled import cuda
from hf_linear_attention.ops.feature_maps import POINTWISE
from hf_linear_attention.ops.linear_attention import (
    LinearAttentionState,
    linear_attention,
    linear_attention_step_,
)
from new_python import run_python

BACKENDS = ["cpu", "chunked"]  # "cpu" fails, and is not skipped, where the library was not built
every_backend = pytest.mark.parametrize("backend", BACKENDS)
both_precisions = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)

CASES = [
    Case(),
    # lengths around the chunk, and none
    Case(T=0),
    Case(T=0, initial=True),
    Case(B=0),
    Case(T=1),
    Case(T=1, initial=True, decay="mild"),
    Case(T=CHUNK_SIZE - 1, decay="mild"),
    Case(T=CHUNK_SIZE),
    Case(T=CHUNK_SIZE + 1, initial=True),
    Case(B=1, T=3 * CHUNK_SIZE + 5, decay="mild", initial=True),
    # sizes
    Case(K=1, V=1),
    Case(K=20, V=64, Hkv=1),
    Case(K=64, V=20, decay="mild"),
    Case(B=1, Hq=1, Hkv=1, K=64, V=64, T=200),
    Case(K=7, V=1, feature_map="exp"),
    # grouped heads
    Case(Hq=6, Hkv=2, decay="mild", initial=True),
    Case(Hq=4, Hkv=1, mask="middle"),
    # decay
    Case(decay="resets"),
    Case(decay="resets", normalize=False, initial=True, T=150),
    Case(decay="resets", mask="middle", Hq=4),
    # padding
    Case(mask="left"),
    Case(mask="right", decay="mild"),
    Case(mask="all", initial=True),
    Case(mask="all", eps=0.0),
    # packing
    Case(B=1, T=150, lengths=(150,)),
    Case(B=1, T=150, lengths=(0, 1, 64, 0, 65, 20, 0), decay="mild"),
    Case(B=1, T=150, lengths=(3, 70, 77), initial=True, Hq=4, mask="middle"),
    Case(B=1, T=0, lengths=(0, 0), initial=True),
    Case(B=1, T=0, lengths=()),
    # not normalised
    Case(normalize=False),
    Case(normalize=False, feature_map=None, decay="mild", initial=True, Hq=4),
    # not causal
    Case(is_causal=False),
    Case(is_causal=False, T=150, initial=True, Hq=4, mask="middle"),
    Case(is_causal=False, normalize=False, T=0, initial=True),
    Case(is_causal=False, B=1, T=150, lengths=(0, 70, 80), initial=True, mask="middle"),
    # feature maps
    Case(feature_map="relu", eps=1e-2),
    Case(feature_map="relu2", eps=1e-2, mask="left"),
    Case(feature_map="exp", mask="middle", decay="mild"),
    Case(feature_map="silu", normalize=False, mask="middle"),
    Case(feature_map="identity", normalize=False),
    # strides
    Case(strided=True),
    Case(strided=True, Hq=4, decay="mild", mask="left", initial=True),
    Case(strided=True, is_causal=False),
]
HALF_CASES = [
    Case(),
    Case(Hq=4, decay="mild", mask="middle", initial=True, strided=True),
    Case(normalize=False, feature_map="silu", T=150),
    Case(is_causal=False),
    Case(B=1, T=150, lengths=(64, 0, 86)),
    Case(K=64, V=64, T=100, decay="resets"),
]


@functools.cache
def expected_of(case, dtype):
    return expected(make_inputs(case, dtype))


def run(case, dtype, backend):
    function = functools.partial(linear_attention, backend=backend, return_state=True)
    return run_with_gradients(function, make_inputs(case, dtype))


# ---- numbers ----


@every_backend
@both_precisions
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_the_reference_s(case, dtype, backend):
    assert_all_close(run(case, dtype, backend), expected_of(case, dtype), dtype)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", HALF_CASES, ids=str)
def test_half_precision_is_the_reference_s_rounded_once(case, dtype, backend):
    actual = run(case, dtype, backend)
    assert_all_close(actual, expected_of(case, dtype), dtype)
    assert actual["y"].dtype == dtype
    assert actual["final kv"].dtype == torch.float32
    # The state has seen no rounding but that of the inputs.
    precise = TOLERANCE[torch.float32]
    torch.testing.assert_close(
        actual["final kv"].double(), expected_of(case, dtype)["final kv"], **precise
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_reference_itself_against_the_sum_written_out(dtype):
    inputs = make_inputs(Case(B=1, T=9, Hq=1, Hkv=1, decay="mild"), dtype)
    q, k, v, g = (inputs[name].double()[0, :, 0] for name in ("q", "k", "v", "log_decay"))
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    y = torch.zeros_like(v)
    for t in range(9):
        weights = [phi_q[t] @ phi_k[j] * g[j + 1 : t + 1].sum().exp() for j in range(t + 1)]
        y[t] = sum(w * v[j] for j, w in enumerate(weights)) / (sum(weights) + 1e-6)
    actual = linear_attention(**inputs, backend="reference")
    torch.testing.assert_close(actual[0, :, 0].double(), y, **TOLERANCE[dtype])


@every_backend
@pytest.mark.parametrize("feature_map", POINTWISE)
def test_the_map_in_the_kernel_is_the_map_before_it(feature_map, backend):
    inputs = make_inputs(Case(normalize=False))
    q, k = inputs.pop("q"), inputs.pop("k")
    inside = linear_attention(q, k, **{**inputs, "feature_map": feature_map}, backend=backend)
    phi = POINTWISE[feature_map]
    before = linear_attention(phi(q), phi(k), **{**inputs, "feature_map": None}, backend=backend)
    torch.testing.assert_close(inside, before)


@every_backend
def test_autograd_checks_the_gradients_by_finite_differences(backend):
    case = Case(B=1, T=5, Hq=2, Hkv=1, K=2, V=2, decay="mild", mask="middle", initial=True)
    inputs = make_inputs(case)
    kv, z = inputs.pop("initial_state")
    names = ("q", "k", "v", "log_decay")
    leaves = [inputs.pop(name) for name in names] + [kv, z]

    def function(q, k, v, log_decay, kv, z):
        y, state = linear_attention(
            q, k, v, log_decay, initial_state=(kv, z), return_state=True, backend=backend, **inputs
        )
        return y, *state

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in leaves])


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_chunked_form_can_be_differentiated_twice(is_causal):
    case = Case(B=1, T=4, Hkv=1, K=2, V=1, mask="left", decay="mild" if is_causal else None)
    inputs = make_inputs(Case(**{**vars(case), "is_causal": is_causal}))
    leaves = require_grad(inputs)

    def function(*tensors):
        arguments = {**inputs, **dict(zip(leaves, tensors, strict=True))}
        return by_name("linear_attention", chunked_linear_attention)(**arguments, chunk_size=2)[0]

    assert torch.autograd.gradgradcheck(function, list(leaves.values()))


def test_the_compiled_form_refuses_a_second_derivative_and_names_the_one_that_can():
    inputs = make_inputs(Case(T=3))
    leaves = require_grad(inputs)
    y = linear_attention(**inputs, backend="cpu")
    (dq,) = torch.autograd.grad(y.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match='backend="chunked"'):
        torch.autograd.grad(dq.sum(), leaves["k"])


@every_backend
@pytest.mark.parametrize("feature_map", ["elu+1", "silu", "exp"])
def test_large_inputs_give_no_nan(feature_map, backend):
    case = Case(feature_map=feature_map, normalize=feature_map != "silu")
    inputs = make_inputs(case, torch.float32)
    size = 10 if feature_map == "exp" else 1e4
    inputs |= {"q": inputs["q"] * size, "k": inputs["k"] * size}
    function = functools.partial(linear_attention, backend=backend, return_state=True)
    for name, x in run_with_gradients(function, inputs).items():
        assert x.isfinite().all(), name


# ---- equal by construction ----


@every_backend
@pytest.mark.parametrize("cut", [0, 1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 150])
@pytest.mark.parametrize("normalize", [True, False])
def test_any_split_equals_the_whole(cut, normalize, backend):
    case = Case(T=150, Hq=4, decay="resets", mask="middle", initial=True, normalize=normalize)
    inputs = make_inputs(case)
    whole, end = linear_attention(**inputs, return_state=True, backend=backend)
    state, parts = inputs.pop("initial_state"), []
    over_time = ("q", "k", "v", "log_decay", "key_mask")
    for piece in (slice(0, cut), slice(cut, 150)):
        arguments = inputs | {name: inputs[name][:, piece] for name in over_time}
        y, state = linear_attention(
            **arguments, initial_state=state, return_state=True, backend=backend
        )
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, end)


@every_backend
@pytest.mark.parametrize("where", ["left", "right", "middle"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_padded_equals_unpadded_whatever_the_padding_holds(where, is_causal, backend):
    case = Case(mask=where, decay="resets" if is_causal else None, is_causal=is_causal, Hq=4)
    inputs = make_inputs(case)
    kept = inputs.pop("key_mask")
    for name in ("q", "k", "v", "log_decay"):
        if name in inputs:
            inputs[name][~kept] = torch.nan
            inputs[name][~kept.roll(1, 1) & ~kept] = torch.inf
    function = functools.partial(linear_attention, backend=backend, return_state=True)
    leaves = require_grad(inputs)
    y, state = function(**inputs, key_mask=kept)
    weights = torch.randn_like(y)
    weights[~kept] = torch.nan  # nor does the gradient that comes from padding matter
    gradients = torch.autograd.grad(
        [y, *state], leaves.values(), [weights, *map(torch.ones_like, state)]
    )
    assert (y[~kept] == 0).all()
    for name, gradient in zip(leaves, gradients, strict=True):
        assert (gradient[~kept] == 0).all(), name
    for b in range(case.B):
        arguments = {
            name: x.detach()[b : b + 1, kept[b]].requires_grad_() if name in leaves else x
            for name, x in inputs.items()
        }
        y_b, state_b = function(**arguments)
        torch.testing.assert_close(y[b, kept[b]], y_b[0])
        torch.testing.assert_close(state.kv[b], state_b.kv[0])
        torch.testing.assert_close(state.z[b], state_b.z[0])
        alone = torch.autograd.grad(
            [y_b, *state_b],
            [arguments[name] for name in leaves],
            [weights[b : b + 1, kept[b]], *map(torch.ones_like, state_b)],
        )
        for name, gradient, gradient_b in zip(leaves, gradients, alone, strict=True):
            torch.testing.assert_close(
                gradient[b, kept[b]], gradient_b[0], msg=lambda text, name=name: f"{name}: {text}"
            )


@every_backend
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_equals_separate(is_causal, index_dtype, backend):
    lengths = (3, 0, 70, 64, 1)
    case = Case(B=1, T=138, lengths=lengths, initial=True, Hq=4, is_causal=is_causal)
    inputs = make_inputs(Case(**{**vars(case), "decay": "mild" if is_causal else None}))
    inputs["cu_seqlens"] = inputs["cu_seqlens"].to(index_dtype)
    y, state = linear_attention(**inputs, return_state=True, backend=backend)
    bounds = inputs.pop("cu_seqlens").tolist()
    initial = inputs.pop("initial_state")
    over_time = [name for name in ("q", "k", "v", "log_decay") if name in inputs]
    for n, length in enumerate(lengths):
        piece = slice(bounds[n], bounds[n] + length)
        arguments = inputs | {name: inputs[name][:, piece] for name in over_time}
        row = LinearAttentionState(*(x[n : n + 1] for x in initial))
        y_n, state_n = linear_attention(
            **arguments, initial_state=row, return_state=True, backend=backend
        )
        torch.testing.assert_close(y[:, piece], y_n)
        torch.testing.assert_close(state.kv[n], state_n.kv[0])
        torch.testing.assert_close(state.z[n], state_n.z[0])


@every_backend
def test_without_causality_all_tokens_read_what_the_last_causal_one_reads(backend):
    inputs = make_inputs(Case(initial=True))
    inputs["q"] = inputs["q"][:, :1].expand_as(inputs["q"])
    causal, end = linear_attention(**inputs, return_state=True, backend=backend)
    inputs["is_causal"] = False
    y, state = linear_attention(**inputs, return_state=True, backend=backend)
    torch.testing.assert_close(y, causal[:, -1:].expand_as(y))
    torch.testing.assert_close(state, end)


@every_backend
def test_the_past_does_not_depend_on_the_future(backend):
    inputs = make_inputs(Case(T=100, decay="mild"))
    before = linear_attention(**inputs, backend=backend)
    for name in ("q", "k", "v", "log_decay"):
        inputs[name][:, 50:] *= 2
    after = linear_attention(**inputs, backend=backend)
    assert torch.equal(before[:, :50], after[:, :50])
    assert not torch.equal(before[:, 50], after[:, 50])


@every_backend
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_a_key_mask_of_0_and_1_is_a_bool_one(dtype, backend):
    inputs = make_inputs(Case(mask="middle"))
    y = linear_attention(**inputs, backend=backend)
    inputs["key_mask"] = inputs["key_mask"].to(dtype)
    assert torch.equal(linear_attention(**inputs, backend=backend), y)


@every_backend
@pytest.mark.parametrize("T", [0, 3])
def test_the_state_returned_is_not_the_one_given(T, backend):
    for normalize in (True, False):
        inputs = make_inputs(Case(B=1, T=T, Hq=1, Hkv=1, initial=True, normalize=normalize))
        given = inputs["initial_state"].kv.clone()
        _, state = linear_attention(**inputs, return_state=True, backend=backend)
        state.kv.zero_()
        assert torch.equal(inputs["initial_state"].kv, given)
        assert state.kv.is_contiguous() and (state.z is None or state.z.is_contiguous())


@every_backend
def test_an_expanded_log_decay_is_read_through_its_strides(backend):
    inputs = make_inputs(Case())
    fixed = torch.tensor([-0.1, -0.5], dtype=torch.float64).expand(2, 70, 2)
    expanded = linear_attention(**inputs, log_decay=fixed, backend=backend)
    assert torch.equal(
        expanded, linear_attention(**inputs, log_decay=fixed.contiguous(), backend=backend)
    )


@every_backend
def test_log_decay_of_the_inputs_half_dtype_is_accepted(backend):
    inputs = make_inputs(Case(decay="mild"), torch.bfloat16)
    inputs["log_decay"] = inputs["log_decay"].bfloat16()
    y = linear_attention(**inputs, backend=backend)
    inputs["log_decay"] = inputs["log_decay"].float()
    assert torch.equal(y, linear_attention(**inputs, backend=backend))


@every_backend
@pytest.mark.parametrize("lengths", [None, "one token each but for the first"])
def test_what_is_kept_for_the_backward_pass_grows_linearly_with_time(lengths, backend):
    def kept(T):
        case = Case(B=1, T=T, decay="mild", lengths=lengths and (T // 2, *[1] * (T // 2)))
        inputs = make_inputs(case)
        storages = {}

        def pack(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        require_grad(inputs)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            linear_attention(**inputs, backend=backend)
        return sum(storages.values())

    assert kept(1024) < 4.5 * kept(256)


def test_autocast_leaves_the_sums_alone():
    inputs = make_inputs(Case(T=200, decay="mild", initial=True), torch.float32)
    y, state = linear_attention(**inputs, return_state=True, backend="chunked")
    with torch.autocast("cpu", torch.bfloat16):
        y_auto, auto = linear_attention(**inputs, return_state=True, backend="chunked")
    assert torch.equal(y, y_auto)
    assert torch.equal(state.kv, auto.kv)


def test_the_chunked_form_runs_on_the_meta_device():
    inputs = make_inputs(Case(decay="mild", mask="left", initial=True), torch.float32)
    on_meta = {
        name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in inputs.items()
    }
    on_meta["initial_state"] = LinearAttentionState(
        *(x.to("meta") for x in inputs["initial_state"])
    )
    assert linear_attention(**on_meta).shape == inputs["v"].shape


# ---- the step ----


def over_steps(inputs, state, backend):
    """linear_attention by linear_attention_step_; returns y and changes `state`."""
    inputs = {name: x for name, x in inputs.items() if name not in ("is_causal", "initial_state")}
    over_time = [name for name in inputs if isinstance(inputs[name], torch.Tensor)]
    outputs = []
    for t in range(inputs["q"].shape[1]):
        token = inputs | {name: inputs[name][:, t] for name in over_time}
        outputs.append(linear_attention_step_(**token, state=state, backend=backend))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize(
    "case",
    [
        Case(T=12, initial=True),
        Case(T=12, initial=True, decay="resets", mask="middle", Hq=6),
        Case(T=12, initial=True, normalize=False, feature_map="silu", strided=True),
        Case(T=5, initial=True, K=64, V=32, feature_map="exp", decay="mild", strided=True),
        Case(T=5, initial=True, K=20, V=1, feature_map="relu", eps=1e-2, Hq=4, Hkv=1),
        Case(T=2, B=0, initial=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_loop_of_steps_equals_the_whole(case, dtype, backend):
    inputs = make_inputs(case, dtype)
    state = LinearAttentionState(*(x if x is None else x.clone() for x in inputs["initial_state"]))
    addresses = [x.data_ptr() for x in state if x is not None]
    y = over_steps(inputs, state, backend)
    target = expected_of(case, dtype)
    actual = {"y": y, "final kv": state.kv} | ({} if state.z is None else {"final z": state.z})
    assert_all_close(actual, {name: target[name] for name in actual}, dtype)
    assert y.dtype == dtype
    assert addresses == [x.data_ptr() for x in state if x is not None]


@every_backend
def test_a_masked_step_ignores_nan(backend):
    inputs = make_inputs(Case(T=1, initial=True, decay="mild"))
    state = LinearAttentionState(*(x.clone() for x in inputs["initial_state"]))
    inputs["key_mask"] = torch.tensor([[True], [False]])
    for name in ("q", "k", "v", "log_decay"):
        inputs[name][1] = torch.nan
    y = over_steps(inputs, state, backend)
    assert y[0].isfinite().all()
    assert (y[1] == 0).all()
    assert torch.equal(state.kv[1], inputs["initial_state"].kv[1])
    assert torch.equal(state.z[1], inputs["initial_state"].z[1])


@every_backend
@pytest.mark.parametrize("which", ["q", "k", "v", "log_decay", "kv", "z"])
def test_a_step_refuses_to_drop_a_gradient(which, backend):
    token, state = one_token()
    tensors = token | {"kv": state.kv, "z": state.z}
    tensors[which].requires_grad_()
    with pytest.raises(RuntimeError, match="no_grad"):
        linear_attention_step_(**token, state=state, backend=backend)
    with torch.no_grad():
        linear_attention_step_(**token, state=state, backend=backend)


# ---- torch.compile ----


@pytest.mark.sample(1)
@every_backend
@pytest.mark.parametrize(
    "case",
    [
        Case(T=70, Hq=4, decay="mild", mask="middle", initial=True),
        Case(T=70, normalize=False, feature_map="silu"),
        Case(T=70, is_causal=False, mask="middle"),
        Case(T=0),
    ],
    ids=str,
)
def test_compiles_as_one_graph_forward_and_backward(case, backend):
    torch.compiler.reset()
    function = functools.partial(linear_attention, backend=backend, return_state=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual = run_with_gradients(compiled, make_inputs(case))
    assert_all_close(actual, expected_of(case, torch.float64), torch.float64)


def test_compiles_packed_sequences():
    case = Case(B=1, T=150, lengths=(0, 1, 64, 0, 65, 20, 0), initial=True)
    torch.compiler.reset()
    function = functools.partial(linear_attention, backend="cpu", return_state=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual = run_with_gradients(compiled, make_inputs(case))
    assert_all_close(actual, expected_of(case, torch.float64), torch.float64)


@pytest.mark.parametrize("name", ["log_decay", "cu_seqlens"])
def test_what_compiled_code_does_not_look_at_the_kernel_refuses(name):
    torch.compiler.reset()
    compiled = torch.compile(linear_attention, fullgraph=True, backend="aot_eager")
    inputs = make_inputs(Case(B=1, T=6, decay="mild"))
    wrong = {"log_decay": -inputs["log_decay"], "cu_seqlens": torch.tensor([0, 7])}
    with pytest.raises(RuntimeError, match=name):
        compiled(**inputs | {name: wrong[name]}, backend="cpu")


@every_backend
def test_a_compiled_step_updates_the_state(backend):
    torch.compiler.reset()
    token, state = one_token()
    with torch.no_grad():
        plain = LinearAttentionState(*(x.clone() for x in state))
        y = linear_attention_step_(**token, state=plain, backend=backend)
        compiled = torch.compile(linear_attention_step_, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**token, state=state, backend=backend), y)
    torch.testing.assert_close(state, plain)


# ---- which backend ----


def test_the_compiled_kernel_is_chosen_on_a_cpu():
    assert choose_backend(None, "cpu").name == "cpu"
    assert choose_backend(None, "mps").name == "chunked"
    assert choose_backend(None, "meta").name == "chunked"
    assert list(backend_report()) == ["cuda", "cpu", "chunked", "reference"]
    assert backend_report()["cpu"] is None


@pytest.mark.parametrize("backend", [None, *BACKENDS, "reference"])
def test_the_backend_chosen_is_the_one_that_runs(backend, monkeypatch):
    ran = []

    def spy(name, implementation):
        def run(*args, **kwargs):
            ran.append(name)
            return implementation.run(*args, **kwargs)

        def step_(*args, **kwargs):
            ran.append(name)
            return implementation.step_(*args, **kwargs)

        return implementation._replace(run=run, step_=step_)

    spies = {name: spy(name, entry) for name, entry in op_linear.IMPLEMENTATIONS.items()}
    monkeypatch.setattr(op_linear, "IMPLEMENTATIONS", spies)
    linear_attention(**make_inputs(Case(T=3)), backend=backend)
    token, state = one_token()
    linear_attention_step_(**token, state=state, backend=backend)
    assert ran == [backend or "cpu"] * 2


def test_python_checks_what_kernels_are_given_only_to_explain(monkeypatch):
    inputs, (token, state) = make_inputs(Case(T=3)), one_token()
    asked = []

    def check(*args):
        asked.append(args)
        return op_linear._check_arguments(*args)

    monkeypatch.setattr(op_linear, "OP", op_linear.OP._replace(check_arguments=check))
    linear_attention(**inputs, backend="cpu")
    linear_attention_step_(**token, state=state, backend="cpu")
    assert not asked
    with pytest.raises(ValueError, match="k must have q's 7 features, got 6"):
        linear_attention(**inputs | {"k": inputs["k"][..., :6]}, backend="cpu")
    linear_attention(**inputs, backend="chunked")
    assert len(asked) == 2


def test_a_backend_that_cannot_run_says_why():
    inputs = make_inputs(Case(T=3))
    with pytest.raises(RuntimeError, match="'cuda' can't run: it runs on cuda tensors, .* on cpu"):
        linear_attention(**inputs, backend="cuda")
    inputs |= {name: inputs[name].to("meta") for name in ("q", "k", "v")}
    with pytest.raises(RuntimeError, match="'cpu' can't run: it runs on cpu tensors, .* on meta"):
        linear_attention(**inputs, backend="cpu")


def test_an_unknown_backend_lists_the_choices():
    with pytest.raises(ValueError, match="'cuda', 'cpu', 'chunked', 'reference', got 'triton'"):
        linear_attention(**make_inputs(Case(T=3)), backend="triton")
    token, state = one_token()
    with pytest.raises(ValueError, match="'cuda', 'cpu', 'chunked', 'reference', got 'triton'"):
        linear_attention_step_(**token, state=state, backend="triton")


def test_without_the_library_chunked_runs_and_cpu_says_why(monkeypatch):
    reason = "the native library was not built"
    without = [
        backend._replace(why_missing=reason) if backend.name in ("cuda", "cpu") else backend
        for backend in backends.BACKENDS
    ]
    monkeypatch.setattr(backends, "BACKENDS", without)
    assert choose_backend(None, "cpu").name == "chunked"
    with pytest.raises(RuntimeError, match="'cpu' can't run: the native library was not built"):
        choose_backend("cpu", "cpu")
    assert backend_report() == {"cuda": reason, "cpu": reason, "chunked": None, "reference": None}


def test_a_package_without_the_library_warns_once_and_names_the_report(tmp_path):
    """As where the build found no compiler, which pip does not show."""
    source = Path(backends.__file__).parents[1]
    copied = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(source, tmp_path / source.name, ignore=copied)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch, warnings; from hf_linear_attention import linear_attention;"
        "x = torch.ones(1, 2, 1, 4);\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3): linear_attention(x, x, x)\n"
        "    linear_attention(x, x, x, backend='chunked')\n"
        "print(*[each.message for each in caught], sep='\\n')"
    )
    result = run_python("-c", program)
    warning = [line for line in result.stdout.splitlines() if "hf-linear-attention" in line]
    assert len(warning) == 1 and "`python -m hf_linear_attention` says why" in warning[0]
    named = run_python("-c", program, HF_LINEAR_ATTENTION_BACKEND="chunked")
    assert "hf-linear-attention" not in named.stdout and named.returncode == 0, named.stderr


def test_the_environment_forces_a_backend():
    code = (
        "from hf_linear_attention.ops.backends import choose_backend\n"
        "print(choose_backend(None, 'cpu').name)"
    )
    result = run_python("-c", code, HF_LINEAR_ATTENTION_BACKEND="chunked")
    assert result.stdout.strip() == "chunked", result.stderr


def test_a_forced_backend_never_falls_through(monkeypatch):
    monkeypatch.setattr(backends, "FORCED_BACKEND", "chunked")
    assert choose_backend(None, "cpu").name == "chunked"
    assert choose_backend("cpu", "cpu").name == "cpu"  # what a call names goes first
    monkeypatch.setattr(backends, "FORCED_BACKEND", "cuda")
    with pytest.raises(RuntimeError, match="'cuda' can't run: it runs on cuda tensors"):
        linear_attention(**make_inputs(Case(T=3)))
    monkeypatch.setattr(backends, "FORCED_BACKEND", "triton")
    with pytest.raises(
        ValueError, match="HF_LINEAR_ATTENTION_BACKEND must be one of 'cuda', 'cpu'"
    ):
        linear_attention(**make_inputs(Case(T=3)))


@pytest.fixture
def a_gpu(monkeypatch):
    """As if the build had kernels for a GPU that is here. Returns what is told of every call that
    tries them: a function from the device to why the call fails.
    """
    monkeypatch.setattr(cuda, "_found", {})
    monkeypatch.setattr(cuda, "_why_not_by_build", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return lambda try_: monkeypatch.setattr(cuda, "_why_a_call_fails", try_)


def test_a_gpu_that_refuses_the_kernels_runs_chunked_and_the_report_says_why(a_gpu):
    tried = []

    def refuse(device):
        tried.append(device.index)
        return "the driver is too old" if device.index == 0 else None

    a_gpu(refuse)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for _ in range(2):
        assert choose_backend(None, first).name == "chunked"
        assert choose_backend(None, second).name == "cuda"
        assert choose_backend(None, first, torch.float64).name == "chunked"
        assert backend_report()["cuda"] == "the driver is too old"
        with pytest.raises(RuntimeError, match="'cuda' can't run: the driver is too old"):
            choose_backend("cuda", first)
    assert tried == [0, 1]  # once for each device


def test_a_gpu_that_refuses_the_kernels_is_worth_one_warning(a_gpu):
    a_gpu(lambda device: "the driver is too old" if device.index == 0 else None)
    with pytest.warns(UserWarning, match="slower on cuda:0: the driver is too old") as caught:
        for index in (0, 1, 0, 1):
            choose_backend(None, torch.device("cuda", index))
    assert len(caught) == 1


def test_a_machine_without_cuda_is_worth_none(a_gpu, monkeypatch, recwarn):
    for reason in cuda.NO_CUDA:
        monkeypatch.setattr(cuda, "_why_not_by_build", lambda index, reason=reason: reason)
        monkeypatch.setattr(cuda, "_found", {})
        assert choose_backend(None, torch.device("cuda", 0)).name == "chunked"
    assert not recwarn.list


def test_nothing_is_tried_while_a_graph_is_captured(a_gpu, monkeypatch):
    a_gpu(lambda device: "the driver is too old")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cuda.why_not_on_cuda(0) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert cuda.why_not_on_cuda(0) == "the driver is too old"


@pytest.mark.parametrize("refused", [False, True])
def test_a_compiled_model_s_first_call_tries_the_kernels_too(refused, a_gpu, monkeypatch):
    """Here the GPU's tensors are the CPU's, and so are the kernels."""
    try_, tried = cuda._why_a_call_fails, []

    def try_on_cpu(device):
        tried.append(try_(torch.device("cpu")))
        return "the driver is too old" if refused else tried[-1]

    a_gpu(try_on_cpu)
    on_cpu = backends.BACKENDS[0]._replace(device_types=("cpu",))
    monkeypatch.setattr(backends, "BACKENDS", (on_cpu, *backends.BACKENDS[1:]))
    torch._dynamo.reset()
    inputs = make_inputs(Case(T=3), torch.float32)
    compiled = torch.compile(linear_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs), linear_attention(**inputs))
    assert tried == [None]  # one call, and it gave a result
    assert choose_backend(None, "cpu").name == ("cpu" if refused else "cuda")
    torch._dynamo.reset()


def test_on_a_machine_without_a_gpu_nothing_is_tried():
    program = (
        "import torch; from hf_linear_attention import linear_attention;"
        "from hf_linear_attention.ops.backends import backend_report;"
        "from hf_linear_attention.ops.compiled import cuda;"
        "torch.cuda.is_available = lambda: False; cuda._why_a_call_fails = None;"
        "x = torch.ones(1, 2, 1, 4); linear_attention(x, x, x); assert cuda._found == {};"
        "print(backend_report()['cuda'])"
    )
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] in (
        "this build has no CUDA kernels",
        "torch finds no CUDA device",
    )


# ---- bad arguments ----


def one_token():
    """The arguments of a step that would run."""
    inputs = make_inputs(Case(T=1, Hq=4, decay="mild", initial=True), torch.float32)
    token = {name: inputs[name][:, 0] for name in ("q", "k", "v", "log_decay")}
    state = LinearAttentionState(*(x.clone() for x in inputs["initial_state"]))
    return token, state


def changed(name, change):
    """Replaces one argument by a function of it."""
    return lambda inputs: inputs | {name: change(inputs[name])}


def with_state(change):
    return lambda inputs: inputs | {"initial_state": change(*inputs["initial_state"])}


def positive(log_decay):
    return log_decay.index_fill(1, torch.tensor([3]), 0.25)


WRONG = {
    "q dims": (
        changed("q", lambda q: q[0]),
        r"q must have the 4 dimensions .*got shape \(6, 4, 7\)",
    ),
    "v dims": (changed("v", lambda v: v[..., 0]), r"v must have the 4 dimensions"),
    "integers": (changed("q", lambda q: q.long()), "q must be float32, .*got torch.int64"),
    "k dtype": (
        changed("k", lambda k: k.double()),
        "k must have q's dtype torch.float32, got .*64",
    ),
    "v dtype": (changed("v", lambda v: v.bfloat16()), "v must have q's dtype"),
    "k device": (changed("k", lambda k: k.to("meta")), "k must be on q's device cpu, got meta"),
    "v device": (changed("v", lambda v: v.to("meta")), "v must be on q's device cpu, got meta"),
    "k time": (changed("k", lambda k: k[:, 1:]), r"k must have q's B and T \(2, 6\), got .*\(2, 5"),
    "v batch": (changed("v", lambda v: v[:1]), r"v must have q's B and T \(2, 6\), got .*\(1, 6"),
    "k features": (changed("k", lambda k: k[..., 1:]), "k must have q's 7 features, got 6"),
    "no features": (changed("v", lambda v: v[..., :0]), "v must have at least one head and one f"),
    "no heads": (changed("k", lambda k: k[:, :, :0]), "k must have at least one head"),
    "v heads": (
        changed("v", lambda v: v[:, :, :1]),
        "v must have a multiple of k's 2 heads, got 1",
    ),
    "q heads": (
        changed("q", lambda q: q[:, :, :3]),
        "q must have a multiple of v's 2 heads or divide them, got 3",
    ),
    "decay shape": (
        changed("log_decay", lambda g: g[..., :1]),
        r"log_decay must have shape \(2, 6, 2\) or \(2, 6, 2, 7\), got \(2, 6, 1\)",
    ),
    "decay dtype": (
        changed("log_decay", lambda g: g.int()),
        "log_decay must be float.*got .*int32",
    ),
    "decay device": (
        changed("log_decay", lambda g: g.to("meta")),
        "log_decay must be on q's device",
    ),
    "decay sign": (changed("log_decay", positive), "log_decay must be at most 0, got 0.25"),
    "decay without causality": (
        lambda inputs: inputs | {"is_causal": False},
        "log_decay must be None with is_causal=False",
    ),
    "mask shape": (
        changed("key_mask", lambda mask: mask[:, :5]),
        r"key_mask must have shape \(2, 6\), got \(2, 5\)",
    ),
    "mask values": (
        changed("key_mask", lambda mask: mask.long() * 2),
        "key_mask must hold bool or 0 and 1, got 2",
    ),
    "additive mask": (
        changed("key_mask", lambda mask: torch.where(mask, 0, -torch.inf)),
        "key_mask must hold bool or 0 and 1, got -inf",
    ),
    "mask device": (changed("key_mask", lambda mask: mask.to("meta")), "key_mask must be on q's"),
    "kv shape": (
        with_state(lambda kv, z: (kv[:1], z)),
        r"initial_state.kv must have shape \(2, 2, 7, 5\), got \(1, 2, 7, 5\)",
    ),
    "z shape": (
        with_state(lambda kv, z: (kv, z[..., :1])),
        r"initial_state.z must have shape \(2, 2, 7\), got \(2, 2, 1\)",
    ),
    "state dtype": (
        with_state(lambda kv, z: (kv.double(), z)),
        "initial_state.kv must be torch.float32 for torch.float32 inputs, got torch.float64",
    ),
    "state device": (
        with_state(lambda kv, z: (kv, z.to("meta"))),
        "initial_state.z must be on q's device cpu, got meta",
    ),
    "no z": (with_state(lambda kv, z: (kv, None)), "initial_state.z must be a tensor with normal"),
    "z for nothing": (
        lambda inputs: inputs | {"normalize": False},
        "initial_state.z must be None with normalize=False, got a tensor",
    ),
    "feature map": (
        changed("feature_map", lambda _: "elu"),
        "feature_map must be None or one of 'identity', 'elu\\+1', .* got 'elu'",
    ),
    "feature map module": (
        changed("feature_map", lambda _: "hedgehog"),
        "applied to q and k before.*, got 'hedgehog'",
    ),
    "eps": (changed("eps", lambda _: -1.0), "eps must be at least 0, got -1.0"),
}


@every_backend
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_named(wrong, backend):
    inputs = make_inputs(Case(T=6, Hq=4, decay="mild", mask="left", initial=True), torch.float32)
    linear_attention(**inputs, backend=backend)
    change, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        linear_attention(**change(inputs), backend=backend)


@every_backend
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 4, 3, 6], r"must rise from 0 to T = 6 without falling, got \[0, 4, 3, 6\]"),
        ([1, 6], "must rise from 0"),
        ([0, 5], "must rise from 0 to T = 6"),
        ([0, 7], "must rise from 0 to T = 6"),
        ([-1, 6], "must rise from 0"),
        ([], r"must have shape \(N \+ 1,\), got \(0,\)"),
        ([[0, 6]], r"must have shape \(N \+ 1,\), got \(1, 2\)"),
        ([0.0, 6.0], "must be int32 or int64, got torch.float32"),
    ],
)
def test_malformed_cu_seqlens_are_named(bounds, message, backend):
    cu_seqlens = torch.tensor(bounds)
    with pytest.raises(ValueError, match="cu_seqlens " + message):
        linear_attention(**make_inputs(Case(B=1, T=6)), cu_seqlens=cu_seqlens, backend=backend)


@every_backend
def test_cu_seqlens_need_one_row_and_a_state_for_every_sequence(backend):
    cu_seqlens = torch.tensor([0, 6])
    with pytest.raises(ValueError, match="cu_seqlens must come with a batch of one packed row"):
        linear_attention(**make_inputs(Case(B=2, T=6)), cu_seqlens=cu_seqlens, backend=backend)
    with pytest.raises(ValueError, match="cu_seqlens must be on q's device cpu, got meta"):
        linear_attention(
            **make_inputs(Case(B=1, T=6)), cu_seqlens=cu_seqlens.to("meta"), backend=backend
        )
    inputs = make_inputs(Case(B=1, T=6, initial=True))
    cu_seqlens = torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match=r"initial_state.kv must have shape \(2, 2, 7, 5\), got"):
        linear_attention(**inputs, cu_seqlens=cu_seqlens, backend=backend)
    state = inputs.pop("initial_state")
    for wrong in (state.kv, state + state):
        with pytest.raises(ValueError, match=r"initial_state must be a state \(kv, z\), got"):
            linear_attention(**inputs, initial_state=wrong, backend=backend)


WRONG_STEP = {
    "q dims": (
        changed("q", lambda q: q[:, None]),
        r"q must have the 3 dimensions \(B, H, D\), got",
    ),
    "k dtype": (changed("k", lambda k: k.half()), "k must have q's dtype"),
    "v heads": (changed("v", lambda v: v[:, :1]), "v must have a multiple of k's 2 heads, got 1"),
    "v batch": (changed("v", lambda v: v[:1]), r"v must have q's B \(2,\), got"),
    "kv shape": (
        changed("state", lambda state: (state[0][..., :1], state[1])),
        r"state.kv must have shape \(2, 2, 7, 5\), got \(2, 2, 7, 1\)",
    ),
    "kv strides": (
        changed("state", lambda state: (state[0].mT.contiguous().mT, state[1])),
        r"state.kv must be contiguous, got strides",
    ),
    "kv dtype": (
        changed("state", lambda state: (state[0].bfloat16(), state[1])),
        "state.kv must be torch.float32 for torch.float32 inputs, got torch.bfloat16",
    ),
    "no z": (
        changed("state", lambda state: (state[0], None)),
        "state.z must be a tensor with norm",
    ),
    "z for nothing": (lambda inputs: inputs | {"normalize": False}, "state.z must be None with"),
    "decay shape": (changed("log_decay", lambda g: g[:, :1]), "log_decay must have shape"),
    "decay dtype": (
        changed("log_decay", lambda g: g.int()),
        "log_decay must be float32, .*got torch.int32",
    ),
    "complex decay": (
        changed("log_decay", lambda g: g + 0j),
        "log_decay must be float32, .*got torch.complex64",
    ),
    "decay sign": (changed("log_decay", lambda g: -g), "log_decay must be at most 0, got 0"),
    "mask shape": (
        lambda inputs: inputs | {"key_mask": torch.ones(3, dtype=torch.bool)},
        r"key_mask must have shape \(2,\), got \(3,\)",
    ),
    "mask values": (
        lambda inputs: inputs | {"key_mask": torch.tensor([1, 2])},
        "key_mask must hold bool or 0 and 1, got 2",
    ),
    "feature map": (
        lambda inputs: inputs | {"feature_map": "elu"},
        "feature_map must be None or one of .* got 'elu'",
    ),
    "eps": (lambda inputs: inputs | {"eps": -1.0}, "eps must be at least 0, got -1.0"),
}


@every_backend
@pytest.mark.parametrize("wrong", WRONG_STEP)
def test_a_wrong_argument_of_a_step_is_named(wrong, backend):
    token, state = one_token()
    change, message = WRONG_STEP[wrong]
    with pytest.raises(ValueError, match=message):
        linear_attention_step_(**change(token | {"state": state}), backend=backend)
