# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The RG-LRU, compiled and in PyTorch: against a loop in float64, and by what must be equal by
construction.
"""

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import pad
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative

from attention_cases import assert_all_close
from hf_linear_attention.ops.compiled import library
from hf_linear_attention.upstream.layers.rg_lru import IMPLEMENTATIONS
from rule_cases import strided

FORMS = ["cpu", "chunked"]
every_form = pytest.mark.parametrize("form", FORMS)
GATES = ("input_gate", "recurrent_gate")


@dataclass(frozen=True)
class Case:
    """One call. Dims as in native.rg_lru."""

    B: int = 2
    T: int = 21
    H: int = 2
    P: int = 19
    begins: bool = True
    initial: bool = True
    strong: bool = False  # rates and gates of all sizes
    strided: bool = False  # amid NaN

    def __str__(self):
        default = Case()
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"


CASES = [
    Case(),
    # channels of a head around a vector and a block, tokens around a tile
    *(Case(T=5, P=P) for P in (1, 8, 15, 64, 65, 130)),
    Case(B=1, H=1, P=1100),
    *(Case(T=T, begins=T % 2 > 0) for T in (0, 1, 2, 31, 32, 33, 65)),
    Case(begins=False, initial=False),
    Case(begins=True, initial=False),
    Case(B=0),
    Case(strong=True),
    Case(strided=True, P=40),
]


def make_inputs(case, dtype=torch.float64, seed=1):
    """The keyword arguments of a call, the same numbers for every dtype."""
    g = torch.Generator().manual_seed(seed)
    B, T, H, P = case.B, case.T, case.H, case.P
    sums = torch.promote_types(dtype, torch.float32)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    inputs = {name: normal(B, T, H, P).to(dtype) for name in GATES}
    inputs |= {"x": normal(B, T, H * P).to(dtype), "rate": -8 * normal(H * P).abs().to(sums)}
    if case.strong:
        for name, strengths in {
            "rate": [0, 1e-30, 1e-6, 1, 1e4, 1e30],
            "input_gate": [-torch.inf, -200, -1, 1, 40, torch.inf],
            "recurrent_gate": [-torch.inf, -200, -30, -1, 0, 1e4, torch.inf],
        }.items():
            of_all = torch.tensor(strengths, dtype=torch.float64)
            which = torch.randint(len(of_all), inputs[name].shape, generator=g)
            strong = of_all[which].to(inputs[name].dtype)
            inputs[name] = -strong if name == "rate" else strong
    begins = torch.rand(B, T, generator=g) < 0.2
    inputs["begins"] = begins if case.begins else torch.zeros_like(begins)
    inputs["initial_state"] = normal(B, H * P).to(sums) if case.initial else None
    if case.strided:
        inputs |= {name: strided(inputs[name]) for name in ("x", "rate", *GATES)}
    return inputs


def in_float64(inputs):
    return {
        name: x.double() if x is not None and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def loop(x, input_gate, recurrent_gate, rate, *, begins, initial_state):
    """Token by token."""
    h = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state
    outputs = []
    for t in range(x.shape[1]):
        i, r = (gate[:, t].flatten(1).sigmoid() for gate in (input_gate, recurrent_gate))
        log_decay, of_input, begin = rate * r, i * x[:, t], begins[:, t, None]
        root = SqrtBoundDerivative.apply(-torch.expm1(2 * log_decay))
        h = torch.where(begin, of_input, log_decay.exp() * h + root * of_input)
        outputs.append(h)
    return torch.stack(outputs, 1), h


def run_with_gradients(function, inputs):
    """y, the final state, and the gradients of a weighted sum of both, by name."""
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in inputs.items()
        if x is not None and x.is_floating_point()
    }
    results = dict(zip(("y", "state"), function(**inputs | leaves), strict=True))
    loss = torch.zeros((), dtype=torch.float64)
    for x in results.values():
        weights = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape).cos()
        loss = loss + (x.double() * weights).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        results[f"d {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: x.detach() for name, x in results.items()}


def expected_of(case, dtype):
    inputs = in_float64(make_inputs(case, dtype))
    if case.T > 0:
        return run_with_gradients(loop, inputs)
    return run_with_gradients(IMPLEMENTATIONS["chunked"], inputs)


# ---- numbers ----


@pytest.mark.kernel_numbers
@every_form
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_those_of_a_loop(case, form):
    for dtype in (torch.float64, torch.float32):
        actual = run_with_gradients(IMPLEMENTATIONS[form], make_inputs(case, dtype))
        expected = expected_of(case, dtype)
        assert all(x.isfinite().all() for x in expected.values())
        assert_all_close(actual, expected, dtype)


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_the_loop_s_rounded_once(dtype):
    for case in (Case(T=70), Case(strided=True, begins=False)):
        actual = run_with_gradients(IMPLEMENTATIONS["cpu"], make_inputs(case, dtype))
        expected = expected_of(case, dtype)
        assert_all_close(actual, expected, dtype)
        exact, eps = expected["y"], torch.finfo(dtype).eps
        off = (actual["y"].double() - exact.to(dtype).double()).abs()
        assert (off <= eps * exact.abs() + 1e-5).all() and (off == 0).double().mean() > 0.98
        assert actual["y"].dtype == dtype
        assert actual["state"].dtype == torch.float32


@every_form
def test_autograd_checks_the_gradients_by_finite_differences(form):
    for case in (Case(T=5, H=1, P=2), Case(B=1, T=4, P=2, begins=False)):
        inputs = make_inputs(case)
        leaves = {k: x.requires_grad_() for k, x in inputs.items() if x.is_floating_point()}

        def function(*tensors, inputs=inputs, leaves=leaves):
            return IMPLEMENTATIONS[form](**inputs | dict(zip(leaves, tensors, strict=True)))

        assert torch.autograd.gradcheck(function, list(leaves.values()))


def test_the_compiled_form_refuses_a_second_derivative_and_names_the_one_that_can():
    inputs = make_inputs(Case())
    x = inputs["x"].requires_grad_()
    y, _ = IMPLEMENTATIONS["cpu"](**inputs)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="BACKEND=chunked"):
        torch.autograd.grad(dx.sum(), x)


@pytest.mark.kernel_numbers
@every_form
def test_what_is_hardly_forgotten_is_exact_to_the_last_digits(form):
    """There 1 - a^2 has none left when it is computed as it is written."""
    rate = -torch.logspace(-20, 1, 64)
    zeros = torch.zeros(1, 1, 1, 64)
    y, _ = IMPLEMENTATIONS[form](
        torch.ones(1, 1, 64),
        zeros,
        zeros,
        rate,
        begins=torch.zeros(1, 1, dtype=torch.bool),
        initial_state=torch.zeros(1, 64),
    )
    expected = (-torch.expm1(rate.double())).sqrt() / 2  # both gates are 1/2
    torch.testing.assert_close(y[0, 0].double(), expected, rtol=5e-7, atol=0)


@every_form
def test_the_derivative_of_the_root_is_bounded(form):
    """At most 1,000, where it would be infinite."""
    inputs = make_inputs(Case(T=3, begins=False), torch.float32)
    inputs["rate"].zero_()
    actual = run_with_gradients(IMPLEMENTATIONS[form], inputs)
    assert all(x.isfinite().all() for x in actual.values())
    assert actual["d rate"].abs().max() > 10


@pytest.mark.kernel_numbers
@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_no_infinity_meets_a_zero_where_rates_are_out_of_range(form, dtype):
    """An infinite one forgets all, also where float32 has rounded its gate to 0."""
    gates = torch.tensor([-700.0, -104, -90, -86, 0, 200, torch.inf], dtype=dtype)
    for rate in (-torch.inf, -3.4e38, -1e30):
        inputs = make_inputs(Case(T=3, H=1, P=len(gates), begins=False), dtype)
        inputs["recurrent_gate"] = gates.expand(2, 3, 1, -1).contiguous()
        inputs["rate"].fill_(rate)
        exact = run_with_gradients(loop, in_float64(inputs))
        actual = run_with_gradients(IMPLEMENTATIONS[form], inputs)
        assert all(x.isfinite().all() for x in actual.values())
        if rate == -torch.inf:  # in float64, too, 0 meets it in the gate's gradient
            assert exact.pop("d recurrent_gate").isnan().all()
            assert not actual.pop("d recurrent_gate").any()
            assert_all_close(actual, exact, dtype)


def after_a_beginning(begin=17):
    """Arguments of a call where sequences begin there, and what is theirs alone."""
    inputs = make_inputs(Case(T=40, begins=False), torch.float32)
    inputs["begins"][:, begin] = True
    per_token = ("x", "begins", *GATES)
    return inputs, inputs | {name: inputs[name][:, begin:] for name in per_token}


@every_form
def test_nothing_crosses_a_beginning_in_either_direction(form):
    inputs, alone = after_a_beginning()
    inputs["x"].requires_grad_()
    y, state = IMPLEMENTATIONS[form](**inputs)
    torch.testing.assert_close((y[:, 17:], state), IMPLEMENTATIONS[form](**alone))
    (dx,) = torch.autograd.grad(y[:, 17:].sum() + state.sum(), inputs["x"])
    assert not dx[:, :17].any() and dx[:, 17:].all()


def test_nor_does_an_infinity_or_a_nan_in_the_compiled_form():
    for bad in (torch.inf, torch.nan):
        inputs, alone = after_a_beginning()
        inputs["x"][:, 16] = bad
        y, state = IMPLEMENTATIONS["cpu"](**inputs)
        torch.testing.assert_close((y[:, 17:], state), IMPLEMENTATIONS["cpu"](**alone))


@every_form
@pytest.mark.parametrize("cut", [0, 1, 32, 70])
def test_any_split_equals_the_whole(cut, form):
    inputs = make_inputs(Case(T=70), torch.float32)
    whole, end = IMPLEMENTATIONS[form](**inputs)
    state, parts = inputs["initial_state"], []
    for tokens in (slice(0, cut), slice(cut, 70)):
        piece = {name: inputs[name][:, tokens] for name in ("x", "begins", *GATES)}
        y, state = IMPLEMENTATIONS[form](**inputs | piece | {"initial_state": state})
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, end)


def test_results_are_the_same_to_the_bit_with_any_number_of_threads():
    before = torch.get_num_threads()
    try:
        for case in (Case(B=1, T=60, P=700), Case(B=30, T=40, P=70, begins=False)):
            inputs = make_inputs(case, torch.float32)
            torch.set_num_threads(1)
            expected = run_with_gradients(IMPLEMENTATIONS["cpu"], inputs)
            for threads in (2, 3, 7):
                torch.set_num_threads(threads)
                actual = run_with_gradients(IMPLEMENTATIONS["cpu"], inputs)
                for name, x in expected.items():
                    assert torch.equal(actual[name], x), name
    finally:
        torch.set_num_threads(before)


def test_long_sequences_stay_exact():
    for scale in (1e-4, 1.0):
        inputs = make_inputs(Case(B=1, T=3000, H=1, P=2, begins=False), torch.float32)
        inputs["rate"] *= scale
        actual = run_with_gradients(IMPLEMENTATIONS["cpu"], inputs)
        assert_all_close(actual, run_with_gradients(loop, in_float64(inputs)), torch.float32)


# ---- torch ----


@every_form
def test_compiles_as_one_graph_forward_and_backward(form):
    inputs = make_inputs(Case())
    compiled = torch.compile(IMPLEMENTATIONS[form], fullgraph=True, backend="aot_eager")
    actual = run_with_gradients(compiled, inputs)
    assert_all_close(actual, run_with_gradients(IMPLEMENTATIONS[form], inputs), torch.float64)


def test_the_ops_pass_opcheck():
    for case in (Case(T=5, P=3), Case(T=4, P=3, initial=False)):
        inputs = make_inputs(case)
        names = ("x", *GATES, "rate", "begins", "initial_state")
        arguments = [inputs[name] for name in names]
        for x in arguments:
            if x is not None and x.is_floating_point():
                x.requires_grad_()
        torch.library.opcheck(library.ops.rg_lru.default, tuple(arguments))
        plain = [None if x is None else x.detach() for x in arguments]
        y, state = library.ops.rg_lru(*plain)
        torch.library.opcheck(library.ops.rg_lru_backward.default, (y, state, y, *plain))


# ---- wrong arguments ----

WRONG = {
    "x of another rank": ({"x": lambda x: x[0]}, r"x must have shape \(batch, time, channels\)"),
    "an x of integers": ({"x": torch.Tensor.int}, "x must be float32, .*got int32"),
    "gates without heads": (
        {"input_gate": lambda x: x.flatten(2)},
        r"input_gate must have shape \(batch, time, heads, channels of a head\), got",
    ),
    "heads that do not divide": (
        {"input_gate": lambda x: x[..., :4]},
        "input_gate must have heads that divide x's 38 channels, got 4",
    ),
    "too few heads": (
        {"input_gate": lambda x: x[:, :, :1]},
        r"input_gate must have shape \(2, 21, 2, 19\), got \(2, 21, 1, 19\)",
    ),
    "gates of another dtype": (
        {"recurrent_gate": torch.Tensor.float},
        "recurrent_gate must be float64 here, got float32",
    ),
    "too few rates": ({"rate": lambda x: x[1:]}, r"rate must have shape \(38,\), got \(37,\)"),
    "beginnings of another length": (
        {"begins": lambda x: pad(x, (0, 1))},
        r"begins must have shape \(2, 21\), got \(2, 22\)",
    ),
    "a state of another size": (
        {"initial_state": lambda x: x[:1]},
        r"initial_state must have shape \(2, 38\), got \(1, 38\)",
    ),
    "a rate above 0": ({"rate": torch.neg}, "log_decay must be <= 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name):
    changes, message = WRONG[name]
    inputs = make_inputs(Case())
    for argument, change in changes.items():
        inputs[argument] = change(inputs[argument])
    with pytest.raises(RuntimeError, match=message):
        IMPLEMENTATIONS["cpu"](**inputs)


def test_a_backward_that_is_called_by_hand_checks_its_arguments_too():
    inputs = make_inputs(Case(initial=False))
    y, state = IMPLEMENTATIONS["cpu"](**inputs)
    arguments = (y, *(inputs[name] for name in ("x", *GATES, "rate", "begins", "initial_state")))
    for upstream, message in {
        (y[:, 1:], None): r"dy must have shape \(2, 21, 38\), got \(2, 20, 38\)",
        (None, state[1:]): r"dstate must have shape \(2, 38\), got \(1, 38\)",
    }.items():
        with pytest.raises(RuntimeError, match=message):
            library.ops.rg_lru_backward(*upstream, *arguments)
    with pytest.raises(RuntimeError, match=r"y must have shape"):
        library.ops.rg_lru_backward(y, None, y[1:], *arguments[1:])
