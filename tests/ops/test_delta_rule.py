# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The delta rule, and linear attention in its general form, on every backend: against the float64
loop, and by what must be equal by construction.
"""

import functools

import pytest
import torch
from support.attention_cases import assert_all_close
from support.rule_cases import (
    CASES,
    RuleCase,
    make_inputs,
    run_with_gradients,
    states_of,
    tensors_of,
    to_float64,
    with_tensors,
)

from hf_linear_attention import (
    LinearAttentionState,
    delta_rule,
    delta_rule_step_,
    linear_attention,
    linear_attention_step_,
)
from hf_linear_attention.ops import delta_rule as op_delta
from hf_linear_attention.ops.backends import Missing

every_backend = pytest.mark.parametrize("backend", ["cpu", "chunked"])
both_ops = pytest.mark.parametrize("op", ["delta_rule", "linear_attention"])
every_decay = pytest.mark.parametrize("decay", [None, "head", "channel"])
HALF_CASES = [
    RuleCase(),
    RuleCase(Hv=4, decay="channel", mask="middle", initial=True, strided=True),
    RuleCase(op="linear_attention", decay="channel", T=150),
    RuleCase(op="linear_attention", normalize=True, feature_map="elu+1", decay="channel"),
    RuleCase(B=1, T=150, lengths=(64, 0, 86)),
    RuleCase(K=64, V=64, T=100, resets=True),
]


@functools.cache
def expected_of(case, dtype):
    return run_with_gradients(case.function, to_float64(make_inputs(case, dtype)), "reference")


# ---- numbers ----


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_the_reference_s(case, dtype, backend):
    actual = run_with_gradients(case.function, make_inputs(case, dtype), backend)
    assert_all_close(actual, expected_of(case, dtype), dtype)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", HALF_CASES, ids=str)
def test_half_precision_is_the_reference_s_rounded_once(case, dtype, backend):
    actual = run_with_gradients(case.function, make_inputs(case, dtype), backend)
    expected = expected_of(case, dtype)
    assert_all_close(actual, expected, dtype)
    assert actual["y"].dtype == dtype
    # The state has seen no rounding but that of the inputs.
    assert actual["final 0"].dtype == torch.float32
    torch.testing.assert_close(
        actual["final 0"].double(), expected["final 0"], rtol=2e-4, atol=2e-5
    )


@every_decay
def test_the_reference_itself_against_products_of_matrices(decay):
    inputs = make_inputs(RuleCase(B=1, T=9, Hq=1, Hk=1, Hv=1, decay=decay, strength="two"))
    q, k, v, beta = (inputs[name][0, :, 0] for name in ("q", "k", "v", "beta"))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    remember = torch.ones(9, 7, dtype=torch.float64)
    if decay is not None:
        remember = remember * inputs["log_decay"][0, :, 0].exp().view(9, -1)
    one = torch.eye(7, dtype=torch.float64)
    transitions = [
        (one - beta[t] * torch.outer(k[t], k[t])) @ torch.diag(remember[t]) for t in range(9)
    ]
    y = []
    for t in range(9):
        S = torch.zeros(7, 5, dtype=torch.float64)
        for j in range(t + 1):
            written = beta[j] * torch.outer(k[j], v[j])
            for later in transitions[j + 1 : t + 1]:
                written = later @ written
            S = S + written
        y.append(7**-0.5 * q[t] @ S)
    actual = delta_rule(**inputs, backend="reference")
    torch.testing.assert_close(actual[0, :, 0], torch.stack(y))


@pytest.mark.parametrize("feature_map, normalize", [(None, False), ("elu+1", True), ("exp", True)])
def test_the_general_form_against_the_sum_written_out(feature_map, normalize):
    case = RuleCase(
        op="linear_attention", B=1, T=9, Hq=1, Hk=1, Hv=2, decay="channel", normalize=normalize
    )
    inputs = make_inputs(case) | {"feature_map": feature_map}
    phi = {
        None: lambda x: x,
        "elu+1": lambda x: torch.nn.functional.elu(x) + 1,
        "exp": torch.exp,
    }[feature_map]
    phi_q, phi_k = (phi(inputs[name][0, :, 0]) for name in ("q", "k"))
    y = torch.zeros(9, 2, 5, dtype=torch.float64)
    for h in range(2):
        v, g = inputs["v"][0, :, h], inputs["log_decay"][0, :, h]
        strength = inputs["write_strength"][0, :, h]
        for t in range(9):
            weights = [
                strength[j] * (phi_q[t] * phi_k[j] * g[j + 1 : t + 1].sum(0).exp()).sum()
                for j in range(t + 1)
            ]
            y[t, h] = sum(w * v[j] for j, w in enumerate(weights))
            if normalize:
                y[t, h] /= sum(weights) + 1e-6
    for backend in ("reference", "chunked", "cpu"):
        torch.testing.assert_close(linear_attention(**inputs, backend=backend)[0], y)


@every_backend
@every_decay
@both_ops
def test_autograd_checks_the_gradients_by_finite_differences(op, decay, backend):
    case = RuleCase(
        op=op, B=1, T=5, Hq=1, Hv=2, Hk=1, K=2, V=3, decay=decay, mask="middle", initial=True
    )
    inputs = make_inputs(case)
    leaves = {name: x.requires_grad_() for name, x in tensors_of(inputs).items()}

    def function(*tensors):
        arguments = with_tensors(inputs, dict(zip(leaves, tensors, strict=True)))
        y, state = case.function(**arguments, return_state=True, backend=backend)
        return y, *states_of(state)

    assert torch.autograd.gradcheck(function, list(leaves.values()))


@every_decay
def test_the_chunked_form_can_be_differentiated_twice(decay):
    case = RuleCase(B=1, T=4, Hq=1, Hv=1, Hk=1, K=2, V=1, mask="left", decay=decay)
    inputs = make_inputs(case)
    inputs["key_mask"][:, 1:] = True
    leaves = {name: x.requires_grad_() for name, x in tensors_of(inputs).items()}

    def function(*tensors):
        arguments = with_tensors(inputs, dict(zip(leaves, tensors, strict=True)))
        return delta_rule(**arguments, backend="chunked")

    assert torch.autograd.gradgradcheck(function, list(leaves.values()))


def test_the_compiled_form_refuses_a_second_derivative_and_names_the_one_that_can():
    inputs = make_inputs(RuleCase(T=3))
    q, k = inputs["q"].requires_grad_(), inputs["k"].requires_grad_()
    y = delta_rule(**inputs, backend="cpu")
    (dq,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match='backend="chunked"'):
        torch.autograd.grad(dq.sum(), k)


# ---- what the rule does ----


@every_backend
def test_beta_1_replaces_what_a_key_held(backend):
    q = k = torch.eye(4).repeat(2, 1).view(1, 8, 1, 4)  # every key twice
    v = torch.randn(1, 8, 1, 3)
    beta = torch.ones(1, 8, 1)
    y, state = delta_rule(q, k, v, beta, scale=1.0, return_state=True, backend=backend)
    torch.testing.assert_close(y, v)
    torch.testing.assert_close(state[0, 0], v[0, 4:, 0])


@every_backend
def test_beta_2_follows_parity(backend):
    """A state of 1 x 1 changes its sign with every 1: k = 1, beta = 2 makes 1 - beta k^2 = -1."""
    bits = torch.randint(0, 2, (3, 200))
    one = torch.ones(3, 200, 1, 1)
    y = delta_rule(
        one,
        one,
        0 * one,
        2.0 * bits[..., None],
        scale=1.0,
        initial_state=torch.ones(3, 1, 1, 1),
        backend=backend,
    )
    assert torch.equal(y.view(3, 200), (1 - 2 * (bits.cumsum(1) % 2)).float())


# ---- equal by construction ----


@every_backend
@every_decay
@both_ops
@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 150])
def test_any_split_equals_the_whole(cut, op, decay, backend):
    case = RuleCase(
        op=op, T=150, Hv=4, decay=decay, resets=decay is not None, mask="middle", initial=True
    )
    inputs = make_inputs(case)
    function = functools.partial(case.function, return_state=True, backend=backend)
    whole, end = function(**inputs)
    state, parts = inputs.pop("initial_state"), []
    over_time = ("q", "k", "v", "log_decay", "key_mask", case.strength_name)
    for piece in (slice(0, cut), slice(cut, 150)):
        arguments = inputs | {name: inputs[name][:, piece] for name in over_time if name in inputs}
        y, state = function(**arguments, initial_state=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(states_of(state), states_of(end))


@every_backend
@both_ops
@pytest.mark.parametrize("where", ["left", "right", "middle"])
def test_padded_equals_unpadded_whatever_the_padding_holds(where, op, backend):
    case = RuleCase(op=op, mask=where, decay="channel", resets=True, Hv=4)
    case = RuleCase(**{**vars(case), "normalize": op == "linear_attention", "feature_map": "exp"})
    inputs = make_inputs(case)
    kept = inputs.pop("key_mask")
    for x in tensors_of(inputs).values():
        x[~kept] = torch.nan
        x[~kept.roll(1, 1) & ~kept] = torch.inf
    function = functools.partial(case.function, return_state=True, backend=backend)
    leaves = {name: x.requires_grad_() for name, x in tensors_of(inputs).items()}
    y, state = function(**inputs, key_mask=kept)
    weights = torch.randn(y.shape, dtype=y.dtype)
    weights[~kept] = torch.nan  # nor does the gradient that comes from padding matter
    outputs = [y, *states_of(state)]
    gradients = torch.autograd.grad(
        outputs, leaves.values(), [weights, *map(torch.ones_like, outputs[1:])]
    )
    assert (y[~kept] == 0).all()
    for b in range(case.B):
        alone = {
            name: x.detach()[b : b + 1, kept[b]].requires_grad_() for name, x in leaves.items()
        }
        y_b, state_b = function(**with_tensors(inputs, alone))
        outputs_b = [y_b, *states_of(state_b)]
        torch.testing.assert_close(y[b, kept[b]], y_b[0])
        torch.testing.assert_close([x[b] for x in outputs[1:]], [x[0] for x in outputs_b[1:]])
        gradients_b = torch.autograd.grad(
            outputs_b,
            list(alone.values()),
            [weights[b : b + 1, kept[b]], *map(torch.ones_like, outputs_b[1:])],
        )
        for name, gradient, gradient_b in zip(leaves, gradients, gradients_b, strict=True):
            assert (gradient[~kept] == 0).all(), name
            torch.testing.assert_close(
                gradient[b, kept[b]], gradient_b[0], msg=lambda text, name=name: f"{name}: {text}"
            )


@every_backend
@both_ops
def test_packed_equals_separate(op, backend):
    lengths = (3, 0, 70, 64, 1)
    case = RuleCase(op=op, B=1, T=138, lengths=lengths, initial=True, Hv=4, decay="channel")
    inputs = make_inputs(case)
    function = functools.partial(case.function, return_state=True, backend=backend)
    y, state = function(**inputs)
    bounds = inputs.pop("cu_seqlens").tolist()
    initial = inputs.pop("initial_state")
    over_time = tensors_of(inputs)
    for n, length in enumerate(lengths):
        piece = slice(bounds[n], bounds[n] + length)
        row = [x[n : n + 1] for x in states_of(initial)]
        y_n, state_n = function(
            **inputs | {name: x[:, piece] for name, x in over_time.items()},
            initial_state=row[0] if op == "delta_rule" else LinearAttentionState(row[0], None),
        )
        torch.testing.assert_close(y[:, piece], y_n)
        torch.testing.assert_close(states_of(state)[0][n], states_of(state_n)[0][0])


@every_backend
@both_ops
@every_decay
def test_shared_heads_are_copies(op, decay, backend):
    """Heads that share are those that were given the same keys, queries or values."""
    for Hq, Hk, Hv in ((1, 2, 4), (2, 1, 4), (4, 2, 2), (8, 1, 2)):
        inputs = make_inputs(RuleCase(op=op, Hq=Hq, Hk=Hk, Hv=Hv, decay=decay))
        H = max(Hq, Hv)
        copies = {
            name: x.repeat_interleave(H // x.shape[2], 2) for name, x in tensors_of(inputs).items()
        }
        function = functools.partial(
            {"delta_rule": delta_rule, "linear_attention": linear_attention}[op],
            return_state=True,
            backend=backend,
        )
        y, state = function(**inputs)
        y_copies, state_copies = function(**inputs | copies)
        torch.testing.assert_close(y, y_copies)
        torch.testing.assert_close(states_of(state)[0], states_of(state_copies)[0][:, :: H // Hv])


@every_backend
@both_ops
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_the_past_does_not_depend_on_the_future(op, decay, backend):
    inputs = make_inputs(RuleCase(op=op, T=100, decay=decay))
    function = RuleCase(op=op).function
    before = function(**inputs, backend=backend)
    for x in tensors_of(inputs).values():
        x[:, 50:] *= 1.5
    after = function(**inputs, backend=backend)
    assert torch.equal(before[:, :50], after[:, :50])
    assert not torch.equal(before[:, 50], after[:, 50])


# ---- a step ----

STEP_CASES = [
    RuleCase(B=2, T=6),
    RuleCase(B=2, T=6, decay=None, Hv=4, Hk=1, Hq=2),
    RuleCase(B=2, T=6, decay="channel", Hv=4, mask="middle", strided=True, initial=True),
    RuleCase(B=2, T=6, decay="channel", resets=True, K=32, V=48, initial=True),
    RuleCase(B=2, T=6, Hq=4, Hv=2, Hk=1, normalize_qk=False, scale=0.5),
    RuleCase(op="linear_attention", T=6, decay="channel", Hv=4, mask="middle", initial=True),
    RuleCase(op="linear_attention", T=6, normalize=True, feature_map="elu+1", mask="left"),
    RuleCase(op="linear_attention", T=6, decay="channel", Hq=4, Hv=2, Hk=1),
]


def one_token(case):
    return {name: x[:, 0] for name, x in tensors_of(make_inputs(case)).items()}


@pytest.mark.parametrize("backend", ["cpu", "chunked", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", STEP_CASES, ids=str)
def test_a_loop_of_steps_equals_the_whole(case, dtype, backend):
    inputs = make_inputs(case, dtype)
    whole, end = case.function(**inputs, return_state=True, backend="reference")
    initial = inputs.pop("initial_state", None)
    if initial is None:
        state = [torch.zeros_like(x) for x in states_of(end)]
    else:
        state = [x.clone() for x in states_of(initial)]
    options = {
        name: x
        for name, x in inputs.items()
        if not isinstance(x, torch.Tensor) and name not in ("is_causal",)
    }
    over_time = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    for t in range(case.T):
        arguments = {name: x[:, t] for name, x in over_time.items()} | options
        if case.op == "delta_rule":
            y = delta_rule_step_(**arguments, state=state[0], backend=backend)
        else:
            kv_z = LinearAttentionState(state[0], state[1] if case.normalize else None)
            y = linear_attention_step_(**arguments, state=kv_z, backend=backend)
        assert_all_close({"y": y}, {"y": whole[:, t].double()}, dtype)
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    for after, expected in zip(state, states_of(end), strict=True):
        assert_all_close({"state": after}, {"state": expected.double()}, precision)


@every_backend
def test_a_masked_step_ignores_nan(backend):
    inputs = {
        name: x[:, 0] for name, x in tensors_of(make_inputs(RuleCase(decay="channel"))).items()
    }
    for x in inputs.values():
        x[0] = torch.nan
    state = torch.randn(2, 2, 7, 5, dtype=torch.float64)
    before = state.clone()
    key_mask = torch.tensor([False, True])
    y = delta_rule_step_(**inputs, state=state, key_mask=key_mask, backend=backend)
    assert torch.equal(state[0], before[0]) and (y[0] == 0).all()
    assert y.isfinite().all() and not torch.equal(state[1], before[1])


@every_backend
@pytest.mark.parametrize("which", ["q", "k", "v", "beta", "log_decay", "state"])
def test_a_step_refuses_to_drop_a_gradient(which, backend):
    inputs = one_token(RuleCase())
    inputs["state"] = torch.zeros(2, 2, 7, 5, dtype=torch.float64)
    inputs[which].requires_grad_()
    with pytest.raises(RuntimeError, match="call it under torch.no_grad"):
        delta_rule_step_(**inputs, backend=backend)
    with torch.no_grad():
        delta_rule_step_(**inputs, backend=backend)


# ---- torch.compile ----

COMPILED_CASES = [
    RuleCase(T=9, decay="channel", mask="middle", initial=True),
    RuleCase(T=9, Hv=4),
    RuleCase(op="linear_attention", T=9, decay="channel", normalize=True, feature_map="elu+1"),
]


@pytest.mark.sample(1)
@every_backend
@pytest.mark.parametrize("case", COMPILED_CASES, ids=str)
def test_compiles_as_one_graph_forward_and_backward(case, backend):
    inputs = make_inputs(case)
    compiled = torch.compile(case.function, fullgraph=True, backend="aot_eager")
    actual = run_with_gradients(compiled, inputs, backend)
    expected = run_with_gradients(case.function, inputs, backend)
    assert_all_close(actual, expected, torch.float64)


@every_backend
def test_a_compiled_step_updates_the_state(backend):
    inputs = one_token(RuleCase())
    states = [torch.zeros(2, 2, 7, 5, dtype=torch.float64) for _ in range(2)]
    compiled = torch.compile(delta_rule_step_, fullgraph=True, backend="aot_eager")
    y = delta_rule_step_(**inputs, state=states[0], backend=backend)
    torch.testing.assert_close(compiled(**inputs, state=states[1], backend=backend), y)
    torch.testing.assert_close(states[1], states[0])


# ---- memory ----


@every_backend
@every_decay
@both_ops
def test_what_is_kept_for_the_backward_pass_grows_linearly_with_time(op, decay, backend):
    def kept(T):
        inputs = make_inputs(RuleCase(op=op, B=1, T=T, decay=decay), torch.float32)
        for x in tensors_of(inputs).values():
            x.requires_grad_()
        sizes = {}

        def note(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            RuleCase(op=op).function(**inputs, backend=backend)
        return sum(sizes.values())

    assert kept(1024) < 2.2 * kept(512)


# ---- wrong arguments ----


def changed(name, change):
    return lambda inputs: inputs | {name: change(inputs[name])}


WRONG = {
    "v heads": (
        changed("v", lambda v: v[:, :, :1]),
        "v must have a multiple of k's 2 heads, got 1",
    ),
    "q heads": (
        changed("q", lambda q: q.repeat(1, 1, 3, 1)[:, :, :3]),
        "q must have a multiple of v's 2 heads or divide them, got 3",
    ),
    "beta shape": (
        changed("beta", lambda beta: beta[..., :1]),
        r"beta must have shape \(2, 6, 2\), got \(2, 6, 1\)",
    ),
    "beta dtype": (
        changed("beta", lambda beta: beta.int()),
        "beta must be float32, .* got .*int32",
    ),
    "beta device": (
        changed("beta", lambda beta: beta.to("meta")),
        "beta must be on q's device cpu",
    ),
    "decay shape": (
        changed("log_decay", lambda g: g[..., :1]),
        r"log_decay must have shape \(2, 6, 2\) or \(2, 6, 2, 7\), got \(2, 6, 1\)",
    ),
    "decay sign": (changed("log_decay", lambda g: -g), "log_decay must be at most 0, got 0"),
    "channel's sign": (
        changed("log_decay", lambda g: -g[..., None].expand(-1, -1, -1, 7)),
        "log_decay must be at most 0, got 0",
    ),
    "state shape": (
        lambda inputs: inputs | {"initial_state": torch.zeros(2, 2, 5, 7)},
        r"initial_state must have shape \(2, 2, 7, 5\), got \(2, 2, 5, 7\)",
    ),
    "state dtype": (
        lambda inputs: inputs | {"initial_state": torch.zeros(2, 2, 7, 5).double()},
        "initial_state must be torch.float32 for torch.float32 inputs, got torch.float64",
    ),
    "mask shape": (
        lambda inputs: inputs | {"key_mask": torch.ones(2, 5)},
        r"key_mask must have shape \(2, 6\), got \(2, 5\)",
    ),
    "packed rows": (
        lambda inputs: inputs | {"cu_seqlens": torch.tensor([0, 6])},
        "cu_seqlens must come with a batch of one packed row",
    ),
    "backend": (lambda inputs: inputs | {"backend": "gpu"}, "backend must be one of .* got 'gpu'"),
}


@every_backend
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_named(wrong, backend):
    change, message = WRONG[wrong]
    inputs = make_inputs(RuleCase(T=6), torch.float32) | {"backend": backend}
    with pytest.raises(ValueError, match=message):
        delta_rule(**change(inputs))


@every_backend
@pytest.mark.parametrize("name", ["state", "beta", "log_decay"])
def test_a_wrong_argument_of_a_step_is_named(name, backend):
    inputs = one_token(RuleCase())
    inputs["state"] = torch.zeros(2, 2, 7, 5, dtype=torch.float64)
    inputs[name] = inputs[name][:, :1]
    with pytest.raises(ValueError, match=f"{name} must have shape .*, got"):
        delta_rule_step_(**inputs, backend=backend)


@every_backend
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("name", ["beta", "log_decay"])
def test_a_step_refuses_what_is_no_float(name, dtype, backend):
    inputs = one_token(RuleCase())
    inputs["state"] = torch.zeros(2, 2, 7, 5, dtype=torch.float64)
    inputs[name] = torch.zeros(2, 2, dtype=dtype)
    with pytest.raises(ValueError, match=f"{name} must be float32, .*got {dtype}"):
        delta_rule_step_(**inputs, backend=backend)
    assert not inputs["state"].any()


@every_backend
def test_a_write_strength_of_another_shape_is_named(backend):
    inputs = make_inputs(RuleCase(op="linear_attention", T=6))
    inputs["write_strength"] = inputs["write_strength"][:, :5]
    with pytest.raises(ValueError, match=r"write_strength must have shape \(2, 6, 2\), got"):
        linear_attention(**inputs, backend=backend)


def test_on_cuda_sequences_with_large_keys_go_to_pytorch():
    table = op_delta.IMPLEMENTATIONS
    large = op_delta.for_sequences_of(torch.empty(1, 1, 1, 257), table)
    assert isinstance(large["cuda"], Missing) and "up to 256 features" in large["cuda"].reason
    assert large["cpu"] is table["cpu"]
    assert op_delta.for_sequences_of(torch.empty(1, 1, 1, 256), table) is table


def test_cuda_that_can_t_run_says_so():
    inputs = make_inputs(RuleCase(T=3))
    with pytest.raises(RuntimeError, match="backend 'cuda' can't run: "):
        delta_rule(**inputs, backend="cuda")
