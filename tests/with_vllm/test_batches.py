# Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
"""From what vLLM says of a batch to the slots of its sequences."""

from types import SimpleNamespace

import torch

from hf_linear_attention.vllm.states import SlotBatchBuilder


def batch_of(starts: list[int], totals: list[int], slots: list[int]):
    cache_config = SimpleNamespace(mamba_cache_mode="none")
    builder = SlotBatchBuilder(None, [], SimpleNamespace(cache_config=cache_config), "cpu")
    metadata = SimpleNamespace(
        query_start_loc_cpu=torch.tensor(starts),
        seq_lens=torch.tensor(totals),
        block_table_tensor=torch.tensor(slots)[:, None],
    )
    return builder.build(0, metadata)


def test_single_tokens_take_a_step_and_others_are_pieces():
    batch = batch_of([0, 1, 2, 5, 7], totals=[9, 4, 3, 20], slots=[8, 3, 5, 1])
    assert batch.steps.tolist() == [8, 3]
    assert batch.pieces.known == ((5, 0, 3, True), (1, 3, 5, False))
    assert batch.num_tokens == 7


def test_a_prompt_of_one_token_among_single_ones():
    batch = batch_of([0, 1, 2, 3], totals=[9, 1, 4], slots=[8, 3, 5])
    assert batch.steps.tolist() == [8]
    assert batch.pieces.known == ((3, 0, 1, True), (5, 1, 2, False))


def test_places_without_a_request():
    batch = batch_of([0, 1, 1, 1], totals=[9, 0, 0], slots=[8, 0, 0])
    assert batch.steps.tolist() == [8]
    assert batch.pieces is None
