# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""The compiled ops, called directly: what torch demands of an op, gradients, and refusals.

B batch, T time, Hq query heads, Hkv key-value heads, K key dim, V value dim, N packed sequences.
"""

import importlib
import shutil

import pytest
import torch

from by_name import by_name
from hf_linear_attention import delta_rule, linear_attention
from hf_linear_attention.ops import compiled as native
from hf_linear_attention.ops.arguments import LinearArguments
from hf_linear_attention.ops.compiled.library import LIBRARY_PATH
from hf_linear_attention.ops.compiled.linear import linear
from hf_linear_attention.ops.compiled.linear_attention import FEATURE_MAPS, step_
from hf_linear_attention.ops.compiled.rms_norm import rms_norm
from hf_linear_attention.ops.loops import reference_linear_attention
from new_python import run_python

OP = torch.ops.hf_linear_attention
TENSORS = ("q", "k", "v", "log_decay", "key_mask", "cu_seqlens", "initial_kv", "initial_z")
DIFFERENTIABLE = ("q", "k", "v", "log_decay", "initial_kv", "initial_z")

# Arguments of forward(), below, that between them reach every branch of the bindings.
VARIANTS = {
    "plain": {},
    "one_head": dict(Hq=1, Hkv=1, K=1, V=1),
    "decay": dict(log_decay=True),
    "padding": dict(key_mask=True, log_decay=True),
    "packed": dict(B=1, cu_seqlens=[0, 4, 4, 9], log_decay=True, initial_state=True),
    "continued": dict(initial_state=True),
    "not_normalised": dict(initial_state=True, log_decay=True, normalize=False),
    "not_causal": dict(is_causal=False, key_mask=True, initial_state=True),
    "everything": dict(
        B=1, cu_seqlens=[0, 4, 9], log_decay=True, key_mask=True, initial_state=True
    ),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def arguments(
    *,
    B=2,
    T=9,
    Hq=4,
    Hkv=2,
    K=3,
    V=5,
    dtype=torch.float64,
    log_decay=False,
    key_mask=False,
    cu_seqlens=None,
    initial_state=False,
    feature_map="elu+1",
    normalize=True,
    is_causal=True,
):
    """Arguments of the op `linear_attention`, by name and in its order; leaves require grad."""
    generator = torch.Generator().manual_seed(0)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    rows = B if cu_seqlens is None else len(cu_seqlens) - 1

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    args = dict.fromkeys(TENSORS)
    args["q"] = normal(B, Hq, T, K).transpose(1, 2)  # strided, as a model may pass it
    args["k"] = normal(B, T, Hkv, K)
    args["v"] = normal(B, T, Hkv, V)
    if log_decay:
        args["log_decay"] = -normal(B, T, Hkv, dtype=acc).abs()
    if key_mask:
        args["key_mask"] = torch.rand(B, T, generator=generator) > 0.3
    if cu_seqlens is not None:
        args["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32)
    if initial_state:
        args["initial_kv"] = normal(rows, Hkv, K, V, dtype=acc)
        args["initial_z"] = normal(rows, Hkv, K, dtype=acc).abs() if normalize else None
    for name in DIFFERENTIABLE:
        if args[name] is not None:
            args[name].requires_grad_()
    index = FEATURE_MAPS.index(feature_map)
    return args | dict(feature_map=index, normalize=normalize, eps=1e-6, is_causal=is_causal)


def forward(**args):
    """y, kv and z, without den, which has no gradient; z is None where there is none."""
    y, _, kv, z, _ = OP.linear_attention(**args)
    return (y, kv, z) if args["normalize"] else (y, kv)


def step(*, kv, z, **args):
    return step_(LinearArguments(**named(args)), (kv, z))


of_sequences = by_name("linear_attention", native.linear_attention.forward)


def named(args):
    """The arguments of an op as its wrapper takes them: with the name of the feature map."""
    return args | {"feature_map": FEATURE_MAPS[args["feature_map"]]}


def everything():
    """Arguments of the op `linear_attention`, of which none is absent."""
    return arguments(**VARIANTS["everything"], dtype=torch.float32)


def backward_arguments(**args):
    """Arguments of the op `linear_attention_backward`, by name and in its order; none requires
    grad.
    """
    args = {name: x.detach() if torch.is_tensor(x) else x for name, x in args.items()}
    y, *others = OP.linear_attention(**args)
    _, kv, z, _ = others
    upstream = dict(
        dy=torch.ones_like(y),
        dkv=torch.ones_like(kv),
        dz=torch.ones_like(z) if args["normalize"] else None,
    )
    tensors = {name: args.pop(name) for name in TENSORS}
    names = "y", "den", "kv", "z", "piece_states"
    return upstream | tensors | dict(zip(names, (y, *others), strict=True)) | args


def step_arguments(*, B=2, Hq=4, Hkv=2, K=3, V=5, dtype=torch.float32, normalize=True):
    """Arguments of the op `linear_attention_step_`, by name and in its order."""
    generator = torch.Generator().manual_seed(0)
    acc = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return dict(
        q=normal(B, Hq, K),
        k=normal(B, Hkv, K),
        v=normal(B, Hkv, V),
        log_decay=-normal(B, Hkv, dtype=acc).abs(),
        key_mask=torch.tensor([True] * (B - 1) + [False]),
        kv=normal(B, Hkv, K, V, dtype=acc),
        z=normal(B, Hkv, K, dtype=acc).abs() if normalize else None,
        feature_map=FEATURE_MAPS.index("elu+1"),
        normalize=normalize,
        eps=1e-6,
    )


def linear_arguments(*, shape=(3,), inputs=20, outputs=7, dtype=torch.float32, bias=True):
    """Arguments of the op `linear`, by name and in its order."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return dict(
        x=normal(*shape, inputs),
        weight=normal(outputs, inputs),
        bias=normal(outputs) if bias else None,
    )


def rms_norm_arguments(*, shape=(3, 20), dtype=torch.float64, scale=1):
    """Arguments of the op `rms_norm`, by name and in its order."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=generator).to(dtype) for s in (shape, shape[-1:]))
    return dict(x=(x * scale).requires_grad_(), weight=weight.requires_grad_(), eps=1e-3)


def rms_norm_backward_arguments(**options):
    """Arguments of the op `rms_norm_backward`, by name and in its order."""
    args = rms_norm_arguments(**options)
    args = {name: x.detach() if torch.is_tensor(x) else x for name, x in args.items()}
    y, inverse_rms = OP.rms_norm_forward(**args)
    return dict(dy=y.cos(), x=args["x"], weight=args["weight"], inverse_rms=inverse_rms)


# ---- what torch demands of an op ----


@pytest.mark.sample(3)
@every_variant
def test_forward_passes_opcheck(variant):
    torch.library.opcheck(
        OP.linear_attention.default, tuple(arguments(**VARIANTS[variant]).values())
    )


@pytest.mark.sample(4)
@every_variant
def test_backward_passes_opcheck(variant):
    args = backward_arguments(**arguments(**VARIANTS[variant]))
    torch.library.opcheck(OP.linear_attention_backward.default, tuple(args.values()))


@pytest.mark.parametrize("normalize", [True, False])
def test_step_passes_opcheck(normalize):
    args = step_arguments(normalize=normalize)
    torch.library.opcheck(OP.linear_attention_step_.default, tuple(args.values()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (3,), (2, 1)])
def test_linear_passes_opcheck(shape, bias):
    args = linear_arguments(shape=shape, bias=bias)
    torch.library.opcheck(OP.linear.default, tuple(args.values()))


@pytest.mark.parametrize("shape", [(20,), (3, 20), (2, 0, 20), (2, 1, 3, 5)])
def test_rms_norm_passes_opcheck(shape):
    args = rms_norm_arguments(shape=shape)
    torch.library.opcheck(OP.rms_norm_forward.default, tuple(args.values()))
    with torch.no_grad():
        plain = [x.detach() if torch.is_tensor(x) else x for x in args.values()]
        torch.library.opcheck(OP.rms_norm.default, tuple(plain))
        backward = rms_norm_backward_arguments(shape=shape)
        torch.library.opcheck(OP.rms_norm_backward.default, tuple(backward.values()))


@every_variant
def test_fakes_agree_with_results_for_reduced_precision(variant):
    args = arguments(**VARIANTS[variant], dtype=torch.bfloat16)
    meta = {name: x.to("meta") if torch.is_tensor(x) else x for name, x in args.items()}
    for real, fake in zip(OP.linear_attention(**args), OP.linear_attention(**meta), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.thorough
def test_forward_and_backward_compile_without_a_graph_break_for_any_length():
    def loss(**args):
        state = args.pop("initial_kv"), args.pop("initial_z")
        y, (kv, z) = of_sequences(initial_state=state, **named(args))
        return y.sin().sum() + kv.cos().sum() + z.sin().sum()

    def results(loss, args):
        leaves = [args[name] for name in DIFFERENTIABLE]
        value = loss(**args)
        return value, *torch.autograd.grad(value, leaves)

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for bounds in ([0, 4, 9], [0, 0, 6, 13]):
        packed = dict(T=bounds[-1], cu_seqlens=bounds)
        args = arguments(**VARIANTS["everything"] | packed)
        torch.testing.assert_close(results(compiled, args), results(loss, args))


@pytest.mark.parametrize("normalize", [True, False])
def test_step_compiles_and_updates_the_state(normalize):
    def two_steps(**args):
        return step(**args) + step(**args)

    eager, compiled = (step_arguments(normalize=normalize) for _ in range(2))
    y = torch.compile(two_steps, fullgraph=True)(**compiled)
    torch.testing.assert_close(y, two_steps(**eager))
    torch.testing.assert_close([compiled["kv"], compiled["z"]], [eager["kv"], eager["z"]])


# ---- values and gradients ----

TOLERANCE = {
    torch.float64: dict(rtol=1e-10, atol=1e-10),
    torch.float32: dict(rtol=1e-4, atol=1e-4),
    torch.bfloat16: dict(rtol=4e-2, atol=4e-2),
    torch.float16: dict(rtol=6e-3, atol=6e-3),
}


@pytest.mark.sample(23)
@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", TOLERANCE)
@every_variant
def test_matches_the_float64_reference(variant, dtype):
    options = dict(T=70, K=32, V=24, dtype=dtype) | VARIANTS[variant]
    if "cu_seqlens" in options:
        options["cu_seqlens"] = [0, 33, 33, 70]
    args = arguments(**options)
    exact = {
        name: x.detach().double().requires_grad_()
        if name in DIFFERENTIABLE and x is not None
        else x
        for name, x in args.items()
    }
    results = forward(**args)
    expected = reference(**exact)
    torch.testing.assert_close([x.double() for x in results], list(expected), **TOLERANCE[dtype])
    torch.testing.assert_close(
        [x.double() for x in gradients(results, args)],
        gradients(expected, exact),
        **TOLERANCE[dtype],
    )


def reference(*, initial_kv, initial_z, feature_map, **args):
    state = None if initial_kv is None else (initial_kv, initial_z)
    name = FEATURE_MAPS[feature_map]
    y, (kv, z) = by_name("linear_attention", reference_linear_attention)(
        feature_map=name, initial_state=state, **args
    )
    return (y, kv) if z is None else (y, kv, z)


def gradients(results, args):
    """Of a fixed function of all results, by every differentiable argument."""
    loss = sum(x.double().sin().mean() * (i + 1) for i, x in enumerate(results))
    return torch.autograd.grad(loss, [args[n] for n in DIFFERENTIABLE if args[n] is not None])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("B, H", [(2, 3), (1, 1)])
def test_threads_do_not_change_the_result(B, H, is_causal):
    # Long enough to be split among threads, by head or, with one head only, by time.
    sizes = dict(B=B, T=2000, Hq=H, Hkv=H, K=48, V=64, dtype=torch.float32)
    args = arguments(**sizes, log_decay=is_causal, initial_state=True, is_causal=is_causal)
    before = torch.get_num_threads()
    results = {}
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            outputs = forward(**args)
            results[count] = outputs, gradients(outputs, args)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(results[3], results[1], **TOLERANCE[torch.float32])


@pytest.mark.sample(5)
@every_variant
def test_gradients(variant):
    check_gradients(arguments(**VARIANTS[variant]))


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_gradients_through_feature_maps(feature_map):
    # Not normalised, since a sum of signed features may come close to 0.
    check_gradients(arguments(T=4, feature_map=feature_map, normalize=False))


def check_gradients(args):
    names = [name for name in DIFFERENTIABLE if args[name] is not None]

    def by_position(*leaves):
        return forward(**args | dict(zip(names, leaves, strict=True)))

    assert torch.autograd.gradcheck(by_position, [args[name] for name in names])


def test_gradients_reach_only_what_needs_them():
    args = arguments(**VARIANTS["continued"])
    args["k"] = args["k"].detach()
    y, *_ = forward(**args)
    y.sum().backward()
    assert args["k"].grad is None
    assert args["q"].grad is not None


def test_den_has_no_gradient():
    y, den, kv, z, piece_states = OP.linear_attention(**arguments())
    assert [x.requires_grad for x in (y, den, kv, z)] == [True, False, True, True]
    assert not piece_states.requires_grad


def test_second_derivative_is_refused_by_the_kernel_and_given_by_chunked():
    args = arguments()
    y, *_ = forward(**args)
    (dq,) = torch.autograd.grad(y.sin().sum(), args["q"], create_graph=True)
    with pytest.raises(RuntimeError, match='backend="chunked"'):
        dq.sum().backward()

    y = linear_attention(args["q"], args["k"], args["v"], feature_map="elu+1", backend="chunked")
    (dq,) = torch.autograd.grad(y.sin().sum(), args["q"], create_graph=True)
    dq.sum().backward()


@pytest.mark.kernel_numbers
def test_step_is_one_token_of_forward():
    args = step_arguments()
    unpacked = {n: args[n][:, None] for n in ("q", "k", "v", "log_decay", "key_mask")}
    y, kv, z = forward(
        **unpacked,
        **dict(cu_seqlens=None, initial_kv=args["kv"], initial_z=args["z"], is_causal=True),
        **{n: args[n] for n in ("feature_map", "normalize", "eps")},
    )
    torch.testing.assert_close(step(**args), y[:, 0])
    torch.testing.assert_close([args["kv"], args["z"]], [kv, z])


def test_autograd_notices_that_a_step_changed_what_it_needs():
    args = step_arguments()
    weight = torch.ones_like(args["kv"], requires_grad=True)
    loss = (weight * args["kv"]).sum()
    step(**args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Of sums of a few hundred products, relative to the largest.
LINEAR_TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
}


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", LINEAR_TOLERANCE)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 21])
def test_linear_matches_float64(rows, dtype):
    for inputs, outputs in [(1, 1), (3, 7), (20, 64), (129, 50), (768, 100), (257, 301)]:
        sizes = dict(shape=(rows,), inputs=inputs, outputs=outputs, dtype=dtype)
        for bias in (True, False):
            args = linear_arguments(**sizes, bias=bias)
            y = OP.linear(**args)
            expected = torch.nn.functional.linear(
                *(None if x is None else x.double() for x in args.values())
            )
            assert y.dtype == dtype
            error = (y.double() - expected).abs().max() / expected.abs().max()
            assert error <= LINEAR_TOLERANCE[dtype], (inputs, outputs, bias)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (2, 0, 3)])
def test_linear_takes_any_shape(shape):
    args = linear_arguments(shape=shape)
    torch.testing.assert_close(OP.linear(**args), torch.nn.functional.linear(*args.values()))


@pytest.mark.parametrize("inputs, outputs", [(0, 7), (20, 0)])
def test_linear_of_nothing(inputs, outputs):
    args = linear_arguments(inputs=inputs, outputs=outputs)
    torch.testing.assert_close(OP.linear(**args), torch.nn.functional.linear(*args.values()))


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_linear_treats_inf_and_nan_as_torch_does(rows):
    args = linear_arguments(shape=(rows,), inputs=37)
    args["x"][0, 36] = torch.inf
    args["weight"][0, 36] = 0  # 0 * inf
    args["weight"][1, 3] = torch.nan
    args["weight"][2, 5] = -torch.inf
    args["bias"][3] = torch.nan
    y, expected = OP.linear(**args), torch.nn.functional.linear(*args.values())
    torch.testing.assert_close(y, expected, equal_nan=True)
    assert y[0, 0].isnan()
    assert y[-1, 4:].isfinite().all() == (rows > 1)


@pytest.mark.parametrize("dtype", LINEAR_TOLERANCE)
@pytest.mark.parametrize("rows", [1, 9])
def test_linear_is_the_same_to_the_bit_with_any_number_of_threads(rows, dtype):
    args = linear_arguments(shape=(rows,), inputs=300, outputs=1001, dtype=dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3, 2, 2):
            torch.set_num_threads(count)
            results.append(OP.linear(**args))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_linear_reads_a_strided_x():
    args = linear_arguments(shape=(4,), inputs=6)
    args["x"] = args["x"].t().contiguous().t()
    torch.testing.assert_close(linear(**args), torch.nn.functional.linear(*args.values()))


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_linear_has_no_gradient_and_says_so(name):
    args = linear_arguments()
    args[name].requires_grad_()
    with pytest.raises(RuntimeError, match=r"the compiled linear has no gradient.*F?\.linear"):
        linear(**args)
    with torch.no_grad():
        linear(**args)


def exact_rms_norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


RMS_NORM_SHAPES = [
    (1, 1),
    (1, 7),
    (5, 16),
    (3, 768),
    (70, 129),
    (2, 3, 5, 6),
    (9000, 8),
    (2, 33000),
]


@pytest.mark.kernel_numbers
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", RMS_NORM_SHAPES)
def test_rms_norm_matches_float64(shape, dtype):
    # with a large eps, or else the gradient by a single column would be all rounding
    args = rms_norm_arguments(shape=shape, dtype=dtype, scale=3) | dict(eps=1.0)
    exact = {n: x.detach().double().requires_grad_() for n, x in args.items() if n != "eps"}
    y = rms_norm(**args)
    expected = exact_rms_norm(**exact, eps=1.0)
    dy = expected.detach().cos().to(dtype)
    results = [y, *torch.autograd.grad(y, (args["x"], args["weight"]), dy)]
    references = [expected, *torch.autograd.grad(expected, list(exact.values()), dy.double())]
    for result, reference in zip(results, references, strict=True):
        assert result.dtype == dtype
        error = (result.double() - reference).abs().max() / reference.abs().max()
        # y is rounded twice, relative to elements as large as the largest
        assert error <= 2 * LINEAR_TOLERANCE[dtype]
    with torch.no_grad():  # the op that keeps nothing for a gradient
        assert torch.equal(rms_norm(**args), y)


@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 3, 19)])
def test_rms_norm_has_first_and_second_derivatives(shape):
    args = rms_norm_arguments(shape=shape)

    def norm(x, weight):
        return rms_norm(x, weight, args["eps"])

    assert torch.autograd.gradcheck(norm, (args["x"], args["weight"]))
    assert torch.autograd.gradgradcheck(norm, (args["x"], args["weight"]))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norms_gradients_are_those_that_can_be_differentiated(dtype):
    args = rms_norm_arguments(shape=(6, 40), dtype=dtype)
    leaves = args["x"], args["weight"]
    dy = torch.ones(6, 40, dtype=dtype)
    once, twice = (
        torch.autograd.grad(rms_norm(**args), leaves, dy, create_graph=create_graph)
        for create_graph in (False, True)
    )
    torch.testing.assert_close(list(once), list(twice), **TOLERANCE[dtype])


@pytest.mark.parametrize("only", ["x", "weight"])
def test_rms_norm_differentiates_only_what_needs_it(only):
    args = rms_norm_arguments()
    args = {n: x.detach() if torch.is_tensor(x) and n != only else x for n, x in args.items()}
    rms_norm(**args).sum().backward()
    assert [n for n in ("x", "weight") if args[n].grad is not None] == [only]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 3)])
def test_rms_norm_of_nothing(shape):
    args = rms_norm_arguments(shape=shape)
    y = rms_norm(**args)
    y.sum().backward()
    assert y.shape == args["x"].grad.shape == shape
    assert not args["weight"].grad.any()


@pytest.mark.kernel_numbers
def test_rms_norm_treats_inf_nan_and_zero_as_torch_does():
    args = rms_norm_arguments(shape=(4, 37), dtype=torch.float32)
    with torch.no_grad():
        args["x"][0, 36] = torch.inf
        args["x"][1, 3] = torch.nan
        args["x"][2] = 0
        y = rms_norm(**args)
        torch.testing.assert_close(y, exact_rms_norm(**args), equal_nan=True)
    assert y[2].tolist() == [0] * 37
    assert y[3].isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm_is_the_same_to_the_bit_with_any_number_of_threads(dtype):
    args = rms_norm_arguments(shape=(1001, 300), dtype=dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3, 2, 2):
            torch.set_num_threads(count)
            y = rms_norm(**args)
            results.append([y, *torch.autograd.grad(y, (args["x"], args["weight"]), y.cos())])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_rms_norm_reads_strided_tensors():
    args = rms_norm_arguments(shape=(4, 6))
    strided = args | {n: torch.stack([args[n], args[n]], -1)[..., 0] for n in ("x", "weight")}
    y, expected = rms_norm(**strided), rms_norm(**args)
    assert torch.equal(y, expected)
    dy = torch.randn(6, 4, dtype=torch.float64).t()
    leaves = args["x"], args["weight"]
    expected = torch.autograd.grad(expected, leaves, dy.contiguous())
    torch.testing.assert_close(torch.autograd.grad(y, leaves, dy), expected)


def test_rms_norm_compiles_without_a_graph_break_for_any_length():
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True)
    for rows in (2, 5):
        args = rms_norm_arguments(shape=(rows, 3, 8))
        leaves = args["x"], args["weight"]
        results = []
        for norm in (compiled, rms_norm):
            y = norm(**args)
            results.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
        torch.testing.assert_close(*results)


# ---- refusals: an error, never a crash ----

WRONG_FORWARD_ARGUMENTS = {
    "q_dims": ("q", lambda x: x[0], "q must have shape"),
    "q_dtype": (
        "q",
        lambda x: x.int(),
        "q must be float32, bfloat16, float16 or float64, got int32",
    ),
    "q_features": ("q", lambda x: x[..., :0], "q must have a last dimension of 1 or more"),
    "q_heads": ("q", lambda x: x[:, :, :3], "q must have a multiple of k's 2 heads, got 3"),
    "q_no_heads": ("q", lambda x: x[:, :, :0], "q must have a multiple of k's 2 heads, got 0"),
    "k_no_heads": ("k", lambda x: x[:, :, :0], "k must have 1 head or more"),
    "k_dims": ("k", lambda x: x[0], "k must have shape"),
    "k_dtype": ("k", lambda x: x.double(), "k must be float32 here, got float64"),
    "k_time": ("k", lambda x: x[:, 1:], r"k must have shape \(1, 9, 2, 3\), got \(1, 8, 2, 3\)"),
    "k_features": ("k", lambda x: x[..., :2], "k must have shape"),
    "v_heads": ("v", lambda x: x[:, :, :1], r"v must have shape \(1, 9, 2, 5\)"),
    "v_batch": ("v", lambda x: x[:0], "v must have shape"),
    "log_decay_shape": ("log_decay", lambda x: x[..., :1], "log_decay must have shape"),
    "log_decay_dtype": ("log_decay", lambda x: x.double(), "log_decay must be float32"),
    "log_decay_sign": ("log_decay", lambda x: -x, "log_decay must be <= 0"),
    "key_mask_shape": (
        "key_mask",
        lambda x: x[0],
        r"key_mask must have shape \(1, 9\), got \(9,\)",
    ),
    "key_mask_dtype": ("key_mask", lambda x: x.int(), "key_mask must be bool here, got int32"),
    "key_mask_layout": (
        "key_mask",
        lambda x: torch.stack([x, x], -1)[..., 0],
        "key_mask must be contiguous",
    ),
    "cu_seqlens_dims": ("cu_seqlens", lambda x: x[None], "cu_seqlens must have shape"),
    "cu_seqlens_empty": ("cu_seqlens", lambda x: x[:0], "cu_seqlens must have shape"),
    "cu_seqlens_dtype": ("cu_seqlens", lambda x: x.long(), "cu_seqlens must be int32"),
    "cu_seqlens_start": ("cu_seqlens", lambda x: x + 1, "cu_seqlens must start at 0, got 1"),
    "cu_seqlens_end": (
        "cu_seqlens",
        lambda x: x * 2,
        "cu_seqlens must end at T = 9, got 18",
    ),
    "cu_seqlens_order": (
        "cu_seqlens",
        lambda x: torch.tensor([0, 10, 9], dtype=torch.int32),
        "cu_seqlens must never decrease, got 10 before 9",
    ),
    "initial_kv_shape": ("initial_kv", lambda x: x[:1], "initial_kv must have shape"),
    "initial_kv_dtype": ("initial_kv", lambda x: x.double(), "initial_kv must be float32"),
    "initial_kv_layout": ("initial_kv", lambda x: x.mT.contiguous().mT, "must be contiguous"),
    "initial_z_missing": ("initial_z", lambda x: None, "initial_z must be given"),
    "initial_kv_missing": ("initial_kv", lambda x: None, "initial_z must be None"),
    "initial_z_shape": ("initial_z", lambda x: x[..., None], "initial_z must have shape"),
    "feature_map": ("feature_map", lambda x: 6, "feature_map must be an index from 0 to 5, got 6"),
    "negative_feature_map": ("feature_map", lambda x: -1, "feature_map must be an index"),
    "normalize": ("normalize", lambda x: False, "initial_z must be None"),
    "is_causal": ("is_causal", lambda x: False, "log_decay must be None when is_causal is False"),
}


@torch.no_grad()
def test_forward_refuses_packing_in_more_than_one_row():
    args = arguments(B=2)
    args["cu_seqlens"] = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cu_seqlens packs sequences along time"):
        OP.linear_attention(**args)


WRONG_BACKWARD_ARGUMENTS = {
    "dy_shape": ("dy", lambda x: x[:, 1:], "dy must have shape"),
    "dy_dtype": ("dy", lambda x: x.double(), "dy must be float32"),
    "dkv_shape": ("dkv", lambda x: x[:1], "dkv must have shape"),
    "dkv_layout": ("dkv", lambda x: x.mT.contiguous().mT, "dkv must be contiguous"),
    "dz_shape": ("dz", lambda x: x[:1], "dz must have shape"),
    "y_shape": ("y", lambda x: x[:, 1:], "y must have shape"),
    "y_layout": ("y", lambda x: x.mT.contiguous().mT, "y must be contiguous"),
    "den_shape": ("den", lambda x: x[:, 1:], "den must have shape"),
    "kv_shape": ("kv", lambda x: x[:1], "kv must have shape"),
    "z_shape": ("z", lambda x: x[:1], "z must have shape"),
    "q_heads": ("q", lambda x: x[:, :, :3], "q must have a multiple"),
}


def test_backward_refuses_dz_without_a_normaliser():
    args = backward_arguments(**arguments(normalize=False))
    args["dz"] = args["kv"].sum(-1)
    with pytest.raises(RuntimeError, match="dz must be None without normalize"):
        OP.linear_attention_backward(**args)


WRONG_STEP_ARGUMENTS = {
    "q_dims": ("q", lambda x: x[0], r"q must have shape \(batch, heads, dim\), got \(4, 3\)"),
    "k_shape": ("k", lambda x: x[..., 1:], "k must have shape"),
    "v_dtype": ("v", lambda x: x.half(), "v must be float32 here, got float16"),
    "log_decay_shape": ("log_decay", lambda x: x[:1], "log_decay must have shape"),
    "log_decay_sign": ("log_decay", lambda x: -x, "log_decay must be <= 0"),
    "key_mask_shape": ("key_mask", lambda x: x[:1], "key_mask must have shape"),
    "kv_shape": ("kv", lambda x: x[:1], "kv must have shape"),
    "kv_dtype": ("kv", lambda x: x.bfloat16(), "kv must be float32 here, got bfloat16"),
    "kv_layout": ("kv", lambda x: x.mT.contiguous().mT, "kv must be contiguous"),
    "z_missing": ("z", lambda x: None, "z must be given with normalize"),
    "z_layout": ("z", lambda x: x.mT.contiguous().mT, "z must be contiguous"),
    "normalize": ("normalize", lambda x: False, "z must be None without normalize"),
    "feature_map": ("feature_map", lambda x: 6, "feature_map must be an index"),
}


WRONG_LINEAR_ARGUMENTS = {
    "x_dims": ("x", lambda x: x[0, 0], r"x must have 1 to 8 dimensions, got \(\)"),
    "x_dtype": ("x", lambda x: x.int(), "x must be float32, bfloat16, float16 or float64"),
    "x_layout": ("x", lambda x: x.t().contiguous().t(), "x must be contiguous"),
    "x_size": ("x", lambda x: x[0, 1:], r"weight must have shape \(7, 19\), got \(7, 20\)"),
    "weight_dims": ("weight", lambda x: x[0], r"weight must have shape \(out, in\), got \(20,\)"),
    "weight_dtype": ("weight", lambda x: x.half(), "weight must be float32 here, got float16"),
    "weight_layout": ("weight", lambda x: x.t().contiguous().t(), "weight must be contiguous"),
    "bias_shape": ("bias", lambda x: x[1:], r"bias must have shape \(7,\), got \(6,\)"),
    "bias_dtype": ("bias", lambda x: x.double(), "bias must be float32 here, got float64"),
    "bias_layout": ("bias", lambda x: torch.stack([x, x], 1)[:, 0], "bias must be contiguous"),
}


WRONG_RMS_NORM_ARGUMENTS = {
    "x_dims": ("x", lambda x: x[0, 0], r"x must have 1 to 8 dimensions, got \(\)"),
    "x_dtype": ("x", lambda x: x.int(), "x must be float32, bfloat16, float16 or float64"),
    "x_layout": ("x", lambda x: x.t().contiguous().t(), "x must be contiguous"),
    "x_size": ("x", lambda x: x[0, 1:], r"weight must have shape \(19,\), got \(20,\)"),
    "weight_dims": ("weight", lambda x: x[None], r"weight must have shape \(20,\), got \(1, 20\)"),
    "weight_dtype": ("weight", lambda x: x.half(), "weight must be float64 here, got float16"),
    "weight_layout": (
        "weight",
        lambda x: torch.stack([x, x], 1)[:, 0],
        "weight must be contiguous",
    ),
}
WRONG_RMS_NORM_BACKWARD_ARGUMENTS = WRONG_RMS_NORM_ARGUMENTS | {
    "dy_shape": ("dy", lambda x: x[1:], r"dy must have shape \(3, 20\), got \(2, 20\)"),
    "dy_dtype": ("dy", lambda x: x.float(), "dy must be float64 here, got float32"),
    "dy_layout": ("dy", lambda x: x.t().contiguous().t(), "dy must be contiguous"),
    "inverse_rms_shape": ("inverse_rms", lambda x: x[1:], r"inverse_rms must have shape \(3,\)"),
    "inverse_rms_dtype": ("inverse_rms", lambda x: x.float(), "inverse_rms must be float64"),
}


# Of each op: its arguments, and what may be wrong with them.
WRONG_ARGUMENTS = {
    "linear_attention": (everything, WRONG_FORWARD_ARGUMENTS),
    "linear_attention_backward": (
        lambda: backward_arguments(**everything()),
        WRONG_BACKWARD_ARGUMENTS,
    ),
    "linear_attention_step_": (step_arguments, WRONG_STEP_ARGUMENTS),
    "linear": (linear_arguments, WRONG_LINEAR_ARGUMENTS),
    "rms_norm": (rms_norm_arguments, WRONG_RMS_NORM_ARGUMENTS),
    "rms_norm_forward": (rms_norm_arguments, WRONG_RMS_NORM_ARGUMENTS),
    "rms_norm_backward": (rms_norm_backward_arguments, WRONG_RMS_NORM_BACKWARD_ARGUMENTS),
}


@pytest.mark.parametrize(
    "op, name", [(op, name) for op, (_, wrong) in WRONG_ARGUMENTS.items() for name in wrong]
)
@torch.no_grad()
def test_wrong_arguments_are_refused(op, name):
    right, wrong = WRONG_ARGUMENTS[op]
    argument, spoil, message = wrong[name]
    args = right()
    args[argument] = spoil(args[argument])
    with pytest.raises(RuntimeError, match=f"hf_linear_attention::{op}: .*" + message):
        getattr(OP, op)(**args)


@pytest.mark.parametrize("op", WRONG_ARGUMENTS)
@torch.no_grad()
def test_a_tensor_without_data_among_others_is_refused(op):
    """PyTorch asks no kernel then, which would say so, but what it calls for shapes alone."""
    args = WRONG_ARGUMENTS[op][0]()
    name = [name for name, x in args.items() if torch.is_tensor(x)][-1]
    with pytest.raises(RuntimeError, match=f"::{op}: all tensors must be on one device, .* meta"):
        getattr(OP, op)(**args | {name: args[name].to("meta")})


def test_memory_that_there_is_not_is_an_error_of_the_op():
    x, index = torch.ones(1, 1), torch.tensor([0], dtype=torch.int32)
    slots = torch.empty(2**60, 0, 1)  # of no tokens; but to see whether one comes twice takes a bit
    with pytest.raises(RuntimeError, match="hf_linear_attention::short_convolution_step_: "):
        OP.short_convolution_step_(x, x, None, None, slots, False, index)


# A call as quick as any, or else one that would take an hour and more.
ROWS = 2**40
int8 = torch.zeros(0, 0, dtype=torch.int8)
OF_EMPTY_ROWS = {
    "linear": lambda x: OP.linear(x, torch.ones(0, 0), None),
    "many_rows_linear": lambda x: OP.many_rows_linear(x, torch.ones(0, 0), None, 6, 6),
    "int8_linear": lambda x: OP.int8_linear(x, int8, torch.ones(0, 1), None, None),
    "int4_linear, rounded": lambda x: OP.int4_linear(x, int8, torch.ones(1, 0), None, None, True),
    "rms_norm": lambda x: OP.rms_norm(x, torch.ones(0), 1e-6),
    "decay_steps": lambda x: OP.decay_steps(x, torch.ones(0), torch.ones(0), False)[0],
    "token_mix": lambda x: OP.token_mix(x, x, [torch.ones(0)])[0],
    "rwkv7_values": lambda x: OP.rwkv7_values(*[x[None]] * 3, torch.ones(0))[0],
    "rwkv7_keys": lambda x: OP.rwkv7_keys(*[x[:, None, None]] * 3, *[torch.ones(0)] * 4, 1.0, 1.0)[
        0
    ],
    "rwkv7_read": lambda x: OP.rwkv7_read(*[x[:, None, None]] * 5, *[torch.ones(0)] * 3, 1.0),
    "squared_relu": lambda x: OP.squared_relu(x),
    "add_sinusoids": lambda x: OP.add_sinusoids(
        x[:, None], torch.zeros(1, 1, dtype=torch.int64), torch.ones(0), 1.0
    ),
}


@pytest.mark.parametrize("op", OF_EMPTY_ROWS)
def test_no_time_goes_by_with_rows_of_nothing(op):
    assert OF_EMPTY_ROWS[op](torch.ones(ROWS, 0)).shape[0] == ROWS


@pytest.mark.parametrize("sizes", [dict(B=0), dict(T=0), dict(B=1, T=0, cu_seqlens=[0])])
def test_nothing_to_do_is_done(sizes):
    args = arguments(**sizes, log_decay=True, initial_state=True)
    y, kv, z = forward(**args)
    assert y.numel() == 0
    torch.testing.assert_close((kv, z), (args["initial_kv"], args["initial_z"]))
    torch.autograd.backward((y, kv, z), (y, torch.ones_like(kv), torch.ones_like(z)))
    torch.testing.assert_close(args["initial_kv"].grad, torch.ones_like(kv))


# ---- loading ----


def test_loading_again_changes_nothing():
    args = arguments()
    before = forward(**args)
    for module in (
        native.library,
        native.linear_attention,
        native.cross_entropy,
        native.delta_rule,
        native.linear,
        native.rms_norm,
        native,
    ):
        importlib.reload(module)
    after = forward(**args)
    torch.testing.assert_close(after, before)
    after[0].sum().backward()
    assert args["q"].grad is not None


def test_a_second_copy_of_the_library_is_refused_with_the_reason(tmp_path):
    copy = tmp_path / "copy.so"
    shutil.copy(LIBRARY_PATH, copy)
    program = (
        f"import torch; torch.ops.load_library({str(copy)!r});"
        "from hf_linear_attention.ops.backends import WHY_NO_NATIVE as reason;"
        "print(reason)"
    )
    assert "torch refused the ops of" in run_python("-c", program).stdout


def test_a_forked_process_can_use_the_ops():
    program = (
        "import os, torch; from hf_linear_attention import linear_attention;"
        "x = torch.ones(1, 2, 1, 4);"
        "before = linear_attention(x, x, x, backend='cpu');"
        "child = os.fork();"
        "after = linear_attention(x, x, x, backend='cpu');"
        "child or os._exit(0 if after.equal(before) else 1);"
        "print(os.waitpid(child, 0)[1])"
    )
    assert run_python("-c", program).stdout.splitlines()[-1] == "0"


@pytest.mark.parametrize("op", ["linear_attention", "normalised", "delta_rule", "by channel"])
def test_one_token_makes_a_state_of_another(op):
    """Which is left as it was; a row that is padding keeps it."""
    generator = torch.Generator().manual_seed(0)
    B, H, K, V = 3, 2, 5, 37
    q, k = torch.rand(2, B, 1, H, K, generator=generator)
    v, beta = torch.randn(B, 1, H, V, generator=generator), torch.rand(B, 1, H, generator=generator)
    kv, z = torch.randn(B, H, K, V, generator=generator), torch.rand(B, H, K, generator=generator)
    log_decay = -torch.rand(B, 1, H, generator=generator)
    key_mask = torch.tensor([[True], [False], [True]])

    def run(backend, rows):
        common = {"key_mask": key_mask[rows], "return_state": True, "backend": backend}
        of_rows = [x[rows] for x in (q, k, v)]
        if op == "delta_rule":
            common |= {"initial_state": kv[rows], "log_decay": log_decay[rows]}
            return delta_rule(*of_rows, beta[rows], **common)
        normalize = op == "normalised"
        before = kv[rows], z[rows] if normalize else None
        g = log_decay[rows]
        if op == "by channel":
            g = g[..., None].expand(*g.shape, K)
        y, after = linear_attention(
            *of_rows, g, normalize=normalize, initial_state=before, **common
        )
        return y, torch.cat([x.flatten() for x in after if x is not None])

    copies = kv.clone(), z.clone()
    torch.testing.assert_close(run("cpu", slice(None)), run("chunked", slice(None)))
    assert torch.equal(kv, copies[0]) and torch.equal(z, copies[1])
    y, after = run("cpu", slice(1, 2))
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.equal(after.flatten()[: kv[1].numel()], kv[1].flatten())
