# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""A forward by slots, as any engine would call it, and how slots lie in memory."""

import pytest
import torch

from hf_linear_attention.cache.slots import SlotBatch, SlotLayer
from hf_linear_attention.ops.tokens import Tokens
from hf_linear_attention.recurrences.convolution import ConvolutionInputs, ConvolutionWindow
from hf_linear_attention.recurrences.delay import Delay, DelayInputs
from hf_linear_attention.serving.allocators import fit_into_sectors
from hf_linear_attention.serving.slot_layout import ALIGNMENT, SlotLayout
from hf_linear_attention.upstream.layers.compressed_projection import TwiceInputs, TwoConvolutions
from hf_linear_attention.upstream.layers.residual_convolution import (
    WeightedInputs,
    WindowOfWeightedTokens,
)
from tiny import VARIANTS, assert_near, random_ids, shallow, tiny_config, tiny_model
from without_recordings import without_recordings

pytestmark = pytest.mark.usefixtures("one_thread")

PURE = [
    name
    for name, fields in VARIANTS.items()
    if set(tiny_config(**fields).layer_types) == {"linear_attention"}
]
# Their steps look at numbers: at decays of every channel, or at which rows have a slot.
NOT_RECORDED = ("aaren", "preset_aaren", "per_channel", "preset_gla", "preset_hgrn2")
SLOTS = 6
# Batches of (sequence, first token, last token), which an engine might make of two sequences.
BATCHES = [
    [(0, 0, 4), (1, 0, 1)],  # two begin
    [(0, 4, 5), (1, 1, 5)],  # one goes on by a token, beside a piece
    [(1, 5, 6), (0, 5, 6)],  # both do
    [(1, 6, 7), (0, 6, 9), (2, 0, 3)],  # and a third begins beside a piece
]
SLOT_OF = {0: 4, 1: 2, 2: 3}


@torch.no_grad()
def read_batch(model, states, texts, batch) -> torch.Tensor:
    lengths = [stop - start for _, start, stop in batch]
    cache = model.slot_cache(
        states,
        slots=[SLOT_OF[text] for text, _, _ in batch],
        lengths=lengths,
        is_new=[start == 0 for _, start, _ in batch],
    )
    ids = torch.cat([texts[text][start:stop] for text, start, stop in batch])
    positions = torch.cat([torch.arange(start, stop) for _, start, stop in batch])
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return model(
        ids[None], position_ids=positions[None], cu_seq_lens_q=bounds, past_key_values=cache
    ).logits[0]


@pytest.mark.parametrize("name", PURE)
def test_batches_of_pieces_are_the_whole(name):
    model = tiny_model(**shallow(name))
    layout = SlotLayout.of_model(model)
    memory = torch.full((SLOTS, layout.nbytes + ALIGNMENT), 255, dtype=torch.uint8)  # NaN
    states = layout.views(memory)
    texts = [random_ids(9, seed=seed) for seed in range(3)]
    with torch.no_grad():
        expected = [model(text[None]).logits[0] for text in texts]
    for batch in BATCHES:
        logits = read_batch(model, states, texts, batch)
        assert_near(logits, torch.cat([expected[text][start:stop] for text, start, stop in batch]))
    others = [slot for slot in range(SLOTS) if slot not in SLOT_OF.values()]
    assert (memory[others] == 255).all()
    assert (memory[:, layout.nbytes :] == 255).all()


# Steps of two sequences whose places in the batch, and then whose numbers, change.
STEPS = [[(0, 4, 5), (1, 4, 5)], [(1, 5, 6), (0, 5, 6)], [(1, 6, 7)], [(0, 6, 7)]]
STEPS_AGAIN = [[(0, 7, 8), (1, 7, 8)], [(1, 8, 9)]]


@pytest.mark.parametrize("name", PURE)
def test_recorded_steps_answer_as_modules_do_to_the_last_bit(name):
    model = tiny_model(**shallow(name))
    layout = SlotLayout.of_model(model)
    texts = [random_ids(9, seed=seed) for seed in range(2)]

    def answers() -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token, and what slots hold then."""
        memory = torch.zeros(SLOTS, layout.nbytes, dtype=torch.uint8)
        states = layout.views(memory)
        batches = [[(0, 0, 4), (1, 0, 4)], *STEPS, *STEPS_AGAIN]
        return torch.cat([read_batch(model, states, texts, x) for x in batches]), memory

    expected = without_recordings(answers)()
    for got, wanted in zip(answers(), expected, strict=True):
        assert torch.equal(got, wanted)
    recordings = [found.recordings for found in model.model.recorded_tokens if found.recordings]
    assert recordings or name in NOT_RECORDED
    for found in recordings:
        assert name in NOT_RECORDED or [one.uses for one in found.values()] == [2, 2]


def test_tensors_of_a_slot_do_not_overlap():
    layout = SlotLayout.of_model(tiny_model(**VARIANTS["aaren"]))
    memory = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
    views = [x for parts in layout.views(memory).values() for x in parts.values()]
    for number, view in enumerate(views, 1):
        view[1].fill_(number)
    assert [view[1].unique().tolist() for view in views] == [[n + 1] for n in range(len(views))]
    assert not memory[0].any()


def test_single_tokens_come_first():
    with pytest.raises(ValueError, match="must come first in a batch, got lengths="):
        tiny_model().slot_cache({}, slots=[1, 2], lengths=[3, 1], is_new=[True, False])


@pytest.mark.parametrize("sector", [128, 2048, 6 * 1024, 100 * 128])
def test_slots_fit_into_sectors(sector):
    for nbytes in (1, 64, 65, 1000, 2048, 2049, 5000, 100_000):
        size = fit_into_sectors(nbytes, sector)
        assert size >= nbytes and size % ALIGNMENT == 0
        assert sector % size == 0 or size % sector == 0
        assert size - nbytes < sector


C, K = 4, 3
WINDOWS = {  # all that keep the last tokens, and what they read of T
    "convolution": (
        ConvolutionWindow("w", C, K),
        lambda T: ConvolutionInputs(torch.randn(1, T, C), torch.randn(C, 1, K), torch.randn(C)),
    ),
    "delay": (Delay("w", C), lambda T: DelayInputs(torch.randn(1, T, C))),
    "two convolutions": (
        TwoConvolutions("w", C, K),
        lambda T: TwiceInputs(
            torch.randn(1, T, C),
            *(torch.randn(C, 1, 2), torch.randn(C), torch.randn(C, 2, 2), torch.randn(C)),
        ),
    ),
    "weighted tokens": (
        WindowOfWeightedTokens("w", C, K),
        lambda T: WeightedInputs(torch.randn(1, T, C), torch.randn(1, T, K, C)),
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
@torch.no_grad()
def test_windows_are_in_slots_what_they_are_in_rows(name):
    """Of two sequences that go on by a token, one by a piece, and a new one."""
    recurrence, inputs_of = WINDOWS[name]
    slots, lengths, is_new = [3, 1, 4, 0], [1, 1, 2, 3], [False, False, False, True]
    inputs, tokens = inputs_of(sum(lengths)), Tokens(is_causal=True)
    states = {"w": torch.randn(SLOTS, *recurrence.state_sizes()["w"].shape)}
    before = states["w"].clone()
    layer = SlotLayer(states, SlotBatch.of(slots, lengths, is_new, "cpu"))
    y = layer.run(recurrence, inputs, tokens)
    stops = torch.tensor(lengths).cumsum(0).tolist()
    for i, slot in enumerate(slots):
        cut = slice(stops[i] - lengths[i], stops[i])
        piece = recurrence.tokens_of(inputs, lambda x, cut=cut: x[:, cut])
        row = {} if is_new[i] else {"w": before[slot, None]}
        expected, after = recurrence.run(piece, row, tokens)
        torch.testing.assert_close(y[:, cut], expected)
        torch.testing.assert_close(states["w"][slot, None], after["w"])
    for slot in {*range(SLOTS)} - {*slots}:
        assert torch.equal(states["w"][slot], before[slot])
