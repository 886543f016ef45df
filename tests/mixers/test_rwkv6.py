# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""RWKV-6's recurrence, which is read before it is written, against a loop; first values, and what
is refused. tests/checkpoints/test_fla.py has the answers of flash-linear-attention's model.
"""

import pytest
import torch

from hf_linear_attention import LinearAttentionConfig, LinearAttentionForCausalLM
from hf_linear_attention.ops.tokens import Tokens
from hf_linear_attention.recurrences.interface import SlotPieces
from hf_linear_attention.recurrences.linear_attention import LinearInputs
from hf_linear_attention.recurrences.read_first import ReadFirst
from tiny import VARIANTS

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = VARIANTS["preset_rwkv6"]
H, K, V = 3, 4, 5
RECURRENCE = ReadFirst(H, K, V, normalize=False)
TOKENS = Tokens(is_causal=True)


def draw(T: int, rows: int = 2, strength: float = 1.0) -> tuple[LinearInputs, torch.Tensor]:
    """Inputs with decays of that strength, and a state to begin with."""
    made = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    q, k, w = (normal(rows, T, H, K) for _ in range(3))
    inputs = LinearInputs(q, k, normal(rows, T, H, V), -strength * w.exp())
    return inputs, normal(rows, H, K, V)


def by_loop(inputs: LinearInputs, S: torch.Tensor, key_mask: torch.Tensor | None = None):
    """Outputs, and the state after the last token."""
    y = []
    for t in range(inputs.k.shape[1]):
        q, k, v, log_decay = (x[:, t, ..., None] for x in inputs[:4])
        y.append((q * S).sum(2))
        later = log_decay.exp() * S + k * v.transpose(2, 3)
        S = later if key_mask is None else torch.where(key_mask[:, t, None, None, None], later, S)
    return torch.stack(y, 1), S


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strength", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("T", [1, 2, 63, 64, 130])
def test_the_state_is_read_before_it_is_written(T, strength):
    inputs, state = draw(T, strength=strength)
    y, after = RECURRENCE.run(inputs, {"kv": state}, TOKENS)
    expected, last = by_loop(inputs, state)
    assert_same(y, expected)
    assert_same(after["kv"], last)


def test_gradients_are_those_of_the_loop():
    inputs, state = draw(9)
    for x in inputs[:4]:
        x.requires_grad_()
    gradients = []
    for run in (
        lambda: RECURRENCE.run(inputs, {"kv": state}, TOKENS)[0],
        lambda: by_loop(inputs, state)[0],
    ):
        gradients.append(torch.autograd.grad(run().square().sum(), inputs[:4]))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_tokens_behind_padding_read_the_state_before_it():
    """Whatever padding holds."""
    inputs, state = draw(7)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 1, 0]]).bool()
    expected, last = by_loop(inputs, state, mask)
    broken = LinearInputs(*(x.masked_fill(~mask[:, :, None, None], torch.nan) for x in inputs[:4]))
    y, after = RECURRENCE.run(broken, {"kv": state}, TOKENS._replace(key_mask=mask))
    assert_same(y[mask], expected[mask])
    assert not y[~mask].any()
    assert_same(after["kv"], last)


def test_steps_are_the_whole():
    inputs, state = draw(7)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 1, 0]]).bool()
    expected, last = by_loop(inputs, state, mask)
    for t in range(7):
        token = LinearInputs(*(x[:, t : t + 1] for x in inputs[:4]))
        y = RECURRENCE.step_(token, {"kv": state}, TOKENS._replace(key_mask=mask[:, t : t + 1]))
        assert_same(y[:, 0], expected[:, t])
    assert_same(state, last)


@pytest.mark.parametrize("bounds", [[0, 3, 7], [0, 1, 2, 7], [0, 7]])
def test_packed_sequences_are_read_apart(bounds):
    inputs, _ = draw(7, rows=1)
    _, states = draw(1, rows=len(bounds) - 1)
    packed = TOKENS._replace(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    y, after = RECURRENCE.run(inputs, {"kv": states}, packed)
    for i, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        piece = LinearInputs(*(x[:, begin:end] for x in inputs[:4]))
        expected, last = by_loop(piece, states[i, None])
        assert_same(y[:, begin:end], expected)
        assert_same(after["kv"][i, None], last)


def test_pieces_in_slots_go_on_or_begin_and_leave_room_behind_them():
    inputs, _ = draw(9, rows=1)
    _, before = draw(1, rows=4)
    slots, is_new = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([False, True])
    pieces = SlotPieces(
        slots,
        is_new,
        torch.tensor([0, 2, 6], dtype=torch.int32),
        ((3, 0, 2, False), (1, 2, 6, True)),
    )
    states = {"kv": before.clone()}
    with torch.no_grad():
        y = RECURRENCE.run_in_slots_(inputs, states, pieces, TOKENS)
    for slot, begin, end, new in pieces.known:
        piece = LinearInputs(*(x[:, begin:end] for x in inputs[:4]))
        expected, last = by_loop(piece, before[slot, None] * (not new))
        assert_same(y[:, begin:end], expected)
        assert_same(states["kv"][slot, None], last)
    assert torch.equal(states["kv"][[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("cuts", [[0, 6], [0, 2, 6], [0, 1, 4, 6]])
def test_pieces_combine_to_the_whole(cuts):
    inputs, _ = draw(6)
    expected = RECURRENCE.run(inputs, {}, TOKENS)[1]
    pieces = [
        RECURRENCE.piece(RECURRENCE.tokens_of(inputs, lambda x, s=s, e=e: x[:, s:e]), TOKENS)
        for s, e in zip(cuts, cuts[1:], strict=False)
    ]
    joined = {name: torch.stack([piece[name] for piece in pieces]) for name in pieces[0]}
    assert_same(RECURRENCE.combine(joined)["kv"], expected["kv"])


def test_first_values_are_the_authors():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 9}
    config = LinearAttentionConfig.from_preset("rwkv6", **sizes, intermediate_size=32)
    layer = LinearAttentionForCausalLM(config).model.layers[1]
    mixer, mlp = layer.self_attn, layer.mlp
    for x in (mixer.o_proj, mlp.down_proj, mlp.r_proj, mixer.x_mix.a_proj, mixer.w_lora.a_proj):
        assert not x.weight.any()
    assert mixer.x_mix.a_proj.out_features == 5 * 32 and mixer.w_lora.a_proj.out_features == 64
    i, room, depth = torch.arange(8), 2 / 3, 1 / 2  # of the second layer of three
    of_channels = (i / 8) ** room
    shares = dict(zip("rwkvg", mixer.x_mix.bias, strict=True))
    for share in (mixer.x_mix.mu, shares["w"], shares["k"], mlp.x_k, mlp.x_r):
        torch.testing.assert_close(share, 1 - of_channels)
    torch.testing.assert_close(shares["v"], 1 - of_channels - 0.3 * depth)
    for name in "rg":
        torch.testing.assert_close(shares[name], 1 - (i / 8) ** (room / 2))
    torch.testing.assert_close(mixer.w_lora.bias, -6 + 5 * (i / 7) ** (0.7 + 1.3 * depth))
    bonus = depth * (1 - i / 7) + 0.1 * ((i + 1) % 3 - 1)
    torch.testing.assert_close(mixer.bonus, bonus.view(2, 4))


def test_what_it_needs_is_named():
    for fields, message in (
        ({"normalizer": "z"}, "normalizer must be 'layer_norm' with mixer='rwkv6'"),
        ({"decay": "gla"}, "decay must be 'none' with mixer='rwkv6', got 'gla'"),
        ({"is_causal": False}, 'mixer must not be "rwkv6" with is_causal=False'),
        ({"conv_kernel_size": 4}, "conv_kernel_size must be 0 with mixer='rwkv6', got 4"),
        ({"linear_num_key_heads": 2}, "linear_num_key_heads must be .*=4 .*rwkv6.*got 2"),
        ({"proj_low_rank_dim": 0}, "proj_low_rank_dim=0 must be at least 1"),
        (
            {"layer_types": ["full_attention", *["linear_attention"] * 2]},
            "layer_types must be \"linear_attention\" alone with mixer='rwkv6'",
        ),
    ):
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
        with pytest.raises(ValueError, match=message):
            LinearAttentionConfig(**{**TINY, **sizes, **fields})
