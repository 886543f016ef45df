# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""Random calls of all ops over sequences: valid ones against the float64 loop, from tensors that
are surrounded by NaN and lie in memory in any order; and calls with one thing wrong, which raise.
"""

import random

import pytest
import torch
from support import attention_cases, rule_cases
from support.attention_cases import Case, assert_all_close
from support.rule_cases import (
    RuleCase,
    run_with_gradients,
    states_of,
    tensors_of,
    to_float64,
    with_tensors,
)

from hf_linear_attention import (
    LinearAttentionState,
    delta_rule,
    delta_rule_,
    delta_rule_step_,
    elementwise_scan,
    elementwise_scan_step_,
    linear_attention,
    linear_attention_,
    linear_attention_step_,
    short_convolution,
    short_convolution_,
    short_convolution_step_,
)
from hf_linear_attention.ops.compiled.library import ops
from seeds import over_seeds

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 2, 3, 5, 8, 15, 16, 17, 24, 33, 64)


def random_call(rng):
    """A function of sequences, and valid arguments for it."""
    dtype = rng.choice(DTYPES)
    lengths = None
    T = rng.choice((0, 1, 2, 3, 7, 31, 32, 33, 40, 70))
    B = rng.choice((0, 1, 1, 2, 3))
    if rng.random() < 0.3:
        cuts = sorted(rng.randint(0, T) for _ in range(rng.randint(0, 4)))
        bounds = [0, *cuts, T]
        B, lengths = 1, tuple(b - a for a, b in zip(bounds[:-1], bounds[1:], strict=True))
    shared = {
        "B": B,
        "T": T,
        "K": rng.choice(SIZES),
        "V": rng.choice(SIZES),
        "lengths": lengths,
        "mask": rng.choice((None, "left", "right", "middle", "all")),
        "initial": rng.random() < 0.5,
    }
    heads = rng.choice((1, 2, 3))
    op = rng.choice(("plain", "linear_attention", "delta_rule", "convolution", "elementwise"))
    if op == "convolution":
        return short_convolution, inputs_of_convolution(rng, shared, dtype), dtype
    if op == "elementwise":
        return elementwise_scan, inputs_of_elementwise_scan(rng, shared, dtype), dtype
    if op == "plain":
        is_causal = rng.random() < 0.8
        case = Case(
            **shared,
            Hkv=heads,
            Hq=heads * rng.choice((1, 2, 4)),
            decay=rng.choice((None, "mild", "resets")) if is_causal else None,
            feature_map=rng.choice(("elu+1", "relu", "exp", "identity")),
            normalize=False,  # denominators near 0 would make any result right
            is_causal=is_causal,
        )
        inputs = attention_cases.make_inputs(case, dtype, seed=rng.randrange(2**31))
        return linear_attention, inputs, dtype
    Hv = heads * rng.choice((1, 2))
    case = RuleCase(
        **shared,
        op=op,
        Hk=heads,
        Hv=Hv,
        Hq=rng.choice((1, Hv, 2 * Hv)),
        decay=rng.choice((None, "head", "channel")),
        resets=rng.random() < 0.5,
        strength=rng.choice(("one", "two", "ends")),
        zero_keys=rng.random() < 0.2,
        erase=rng.choice((None, None, "keys", "values")),
    )
    return case.function, rule_cases.make_inputs(case, dtype, seed=rng.randrange(2**31)), dtype


def inputs_of_convolution(rng, shared, dtype):
    """Of a call of this batch, these tokens and their masks, with as many channels as values."""
    k = rng.choice((1, 2, 3, 4, 6))
    tokens_of_state = k - 1 + rng.choice((0, 0, 1, 3))
    # Values are as tokens of the convolution, and states as those of a single key.
    case = RuleCase(**shared | {"K": tokens_of_state or 1}, Hq=1, Hk=1, Hv=1)
    inputs = rule_cases.make_inputs(case, dtype, seed=rng.randrange(2**31))
    kept = {name: x for name, x in inputs.items() if name in ("key_mask", "cu_seqlens")}
    if "initial_state" in inputs and tokens_of_state > 0:
        kept["initial_state"] = inputs["initial_state"][:, 0].to(dtype)
    own = rng.choice((dtype, dtype, torch.float32)) if dtype != torch.float64 else dtype
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    weight, bias = torch.randn(case.V, k + 1, generator=generator).to(own).split([k, 1], 1)
    if rng.random() < 0.5:
        kept["bias"] = bias[:, 0]
    activation = rng.choice(("silu", None))
    return {"x": inputs["v"][:, :, 0], "weight": weight, "activation": activation} | kept


def inputs_of_elementwise_scan(rng, shared, dtype):
    """Of a call of this batch, these tokens and their masks, with as many channels as values."""
    case = RuleCase(
        **shared | {"K": shared["V"]},
        **dict.fromkeys(("Hq", "Hk", "Hv"), 1),
        decay="channel",
        resets=rng.random() < 0.5,
    )
    inputs = rule_cases.make_inputs(case, dtype, seed=rng.randrange(2**31))
    kept = {name: x for name, x in inputs.items() if name in ("key_mask", "cu_seqlens")}
    if "initial_state" in inputs:
        kept["initial_state"] = inputs["initial_state"][:, 0, 0]
    return {"x": inputs["v"][:, :, 0], "log_decay": inputs["log_decay"][:, :, 0]} | kept


def is_per_token(name):
    return name not in ("weight", "bias", "initial_state", "cu_seqlens")


def surrounded(x, rng):
    """x in memory of any order of dimensions, with NaN (or True) before, behind and between."""
    order = list(range(x.dim()))
    rng.shuffle(order)
    steps = [rng.choice((1, 1, 2)) for _ in order]
    sizes = [x.shape[d] * step + 2 for d, step in zip(order, steps, strict=True)]
    filling = torch.nan if x.is_floating_point() else True
    big = torch.full(sizes, filling, dtype=x.dtype)
    for i, step in enumerate(steps):
        stop = 1 + step * x.shape[order[i]]
        big = big[(slice(None),) * i + (slice(1, max(stop, 1), step),)]
    view = big.permute([order.index(d) for d in range(x.dim())])
    view.copy_(x)
    return view


def surrounded_inputs(inputs, rng):
    everywhere = with_tensors(
        inputs, {name: surrounded(x, rng) for name, x in tensors_of(inputs).items()}
    )
    if "key_mask" in inputs:
        everywhere["key_mask"] = surrounded(inputs["key_mask"], rng)
    return everywhere


@over_seeds(200)
def test_a_valid_call_gives_what_the_loop_gives(seed):
    rng = random.Random(seed)
    function, inputs, dtype = random_call(rng)
    expected = run_with_gradients(function, to_float64(inputs), "reference")
    actual = run_with_gradients(function, surrounded_inputs(inputs, rng), "cpu")
    assert_all_close(actual, expected, dtype)


def random_step(rng):
    """A function of sequences that has a step, and arguments for at least one token."""
    while True:
        function, inputs, dtype = random_call(rng)
        tokens = inputs["x" if "x" in inputs else "q"]
        if tokens.shape[1] > 0 and "cu_seqlens" not in inputs:
            if inputs.pop("is_causal", True):
                return function, inputs, dtype


@over_seeds(100)
def test_a_valid_step_is_a_token_of_the_whole(seed):
    rng = random.Random(seed)
    function, inputs, dtype = random_step(rng)
    before = inputs.pop("initial_state", None)
    first = {
        name: x[:, :1]
        for name, x in inputs.items()
        if isinstance(x, torch.Tensor) and is_per_token(name)
    }
    options = {name: x for name, x in inputs.items() if name not in first}
    y, state = function(
        **first, **options, initial_state=before, return_state=True, backend="reference"
    )
    if before is None:
        after = [torch.zeros_like(x) for x in states_of(state)]
    else:
        after = [x.clone() for x in states_of(before)]
    token = {name: surrounded(x[:, 0], rng) for name, x in first.items()}
    (rows,) = after
    slots, indices = in_slots(rows, rng) if rng.random() < 0.5 else (rows, None)
    options |= {"state_indices": indices, "backend": "cpu"}
    if function is linear_attention:
        given = LinearAttentionState(slots, None)
        actual = linear_attention_step_(**token, **options, state=given)
    elif function is short_convolution:
        slots = surrounded(slots, rng)
        options = {"bias": None} | options
        actual = short_convolution_step_(**token, **options, state=slots)
    elif function is elementwise_scan:
        slots = surrounded(slots, rng)
        actual = elementwise_scan_step_(**token, **options, state=slots)
    else:
        actual = delta_rule_step_(**token, **options, state=slots)
    assert_all_close({"y": actual}, {"y": y[:, 0].double()}, dtype)
    if indices is not None:
        others = sorted(set(range(len(slots))) - set(indices.tolist()))
        assert slots[others].isnan().all()
        slots = slots[indices]
    assert_all_close({"state": slots}, {"state": states_of(state)[0].double()}, slots.dtype)


IN_PLACE = {
    linear_attention: linear_attention_,
    delta_rule: delta_rule_,
    short_convolution: short_convolution_,
}


@over_seeds(100)
def test_a_valid_call_in_place_leaves_in_slots_what_the_loop_leaves(seed):
    rng = random.Random(seed)
    function, inputs, dtype = random_call(rng)
    while not inputs.pop("is_causal", True) or function not in IN_PLACE:
        function, inputs, dtype = random_call(rng)
    y, state = function(**to_float64(inputs), return_state=True, backend="reference")
    (wanted,) = states_of(state)
    before = inputs.pop("initial_state", None)
    if before is None:  # then whatever slots hold must not matter
        own = dtype if function is short_convolution else torch.promote_types(dtype, torch.float32)
        rows = torch.full(wanted.shape, torch.nan, dtype=own)
    else:
        (rows,) = states_of(before)
    slots, indices = in_slots(rows, rng)
    is_new = torch.full((len(rows),), before is None)
    inputs = surrounded_inputs(inputs, rng) | {"state_indices": indices, "is_new": is_new}
    if function is short_convolution:
        inputs = {"bias": None} | inputs
    given = LinearAttentionState(slots, None) if function is linear_attention else slots
    actual = IN_PLACE[function](**inputs, state=given, backend="cpu")
    assert_all_close({"y": actual}, {"y": y}, dtype)
    assert_all_close({"state": slots[indices]}, {"state": wanted}, slots.dtype)


def in_slots(rows, rng):
    """Rows of states anywhere in a larger array, all else NaN, and where each is."""
    count = len(rows) + rng.randint(0, 3)
    slots = torch.full((count, *rows.shape[1:]), torch.nan, dtype=rows.dtype)
    indices = torch.tensor(rng.sample(range(count), len(rows)), dtype=torch.int32)
    slots[indices] = rows
    return slots, indices


# Dimensions of which no other size is right, where that is not the first two.
SIZED = {
    short_convolution: {"x": (2,), "weight": (0,), "bias": (0,), "initial_state": (0, 2)},
    elementwise_scan: dict.fromkeys(("x", "log_decay"), (0, 1, 2)),
}


def broken(x, rng, kinds=("rank", "size", "dtype"), dims=(0, 1)):
    """x with one thing wrong; dims: those of which another size is wrong."""
    kind = rng.choice(kinds)
    if kind == "rank":
        return x[None]
    if kind == "dtype":
        return x.to(torch.int64 if x.dtype == torch.int32 else torch.int32)
    if kind == "device":
        return x.to("meta")
    # Heads and features of another size may be right.
    d = rng.choice([d for d in dims if d < x.dim()])
    return torch.cat([x, x.new_zeros(*x.shape[:d], 1, *x.shape[d + 1 :])], d)


@over_seeds(200)
def test_a_call_with_one_thing_wrong_raises(seed):
    rng = random.Random(seed)
    function, inputs, _ = random_call(rng)
    tensors = tensors_of(inputs)
    name = rng.choice(sorted(tensors))
    kinds = ("rank", "size", "dtype", "device")
    dims = SIZED.get(function, {}).get(name, (0, 1))
    wrong = with_tensors(inputs, {name: broken(tensors[name], rng, kinds, dims)})
    with pytest.raises((ValueError, RuntimeError)):
        function(**wrong, backend="cpu")


def arguments_of_op(rng):
    """Valid arguments of the compiled delta rule itself, whose checks guard memory."""
    B, T, H, K, V = (rng.choice((1, 2, 5)) for _ in range(5))
    arguments = {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, H, V),
        "beta": torch.rand(B, T, H),
        "log_decay": -torch.rand(B, T, H, *([K] if rng.random() < 0.5 else [])),
        "erase_key": torch.randn(B, T, H, K) * K**-0.5 if rng.random() < 0.7 else None,
        "add_along": torch.randn(B, T, H, K) * K**-0.5 if rng.random() < 0.5 else None,
        "key_mask": torch.rand(B, T) < 0.5,
        "cu_seqlens": torch.tensor([0, T], dtype=torch.int32) if B == 1 else None,
        "initial_state": torch.randn(B, H, K, V),
    }
    if arguments["erase_key"] is None:
        arguments["add_along"] = None
    if arguments["add_along"] is not None:
        arguments["beta"] = None
    return arguments


@over_seeds(100)
def test_the_compiled_op_itself_refuses_what_would_read_out_of_bounds(seed):
    rng = random.Random(seed)
    arguments = arguments_of_op(rng)
    options = (1.0, True, True, True)
    y, errors, state = ops.delta_rule(*arguments.values(), *options)
    gradients = ops.delta_rule_backward(y, state, *arguments.values(), errors, state, *options[:3])
    assert all(x.isfinite().all() for x in (y, errors, state, *gradients))
    name = rng.choice([name for name, x in arguments.items() if x is not None])
    wrong = arguments | {name: broken(arguments[name], rng)}
    with pytest.raises(RuntimeError):
        ops.delta_rule(*wrong.values(), *options)
    with pytest.raises(RuntimeError):
        ops.delta_rule_backward(y, state, *wrong.values(), errors, state, *options[:3])
