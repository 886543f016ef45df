// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Between walks over pieces: the states that come into them.
#pragma once

#include "cuda/linear_attention/walk.cuh"

namespace hfla::cuda {

// For every element of every sequence's states: from what the pieces add, in `pieces`, to what
// comes into each of them (or to the total, if not causal), and to the last state.
struct Combine : HeadSizes {
  Pieces pieces;
  bool causal, reversed;
  States initial, piece_states, final_state;
  const float* piece_decays;  // (pieces, Hkv)
};

constexpr int kCombineThreads = 128;

KERNEL LAUNCH_BOUNDS(kCombineThreads, 8) combine_kernel(const GRID_CONSTANT Combine p) {
  const int64_t elements = p.K * p.V + (p.piece_states.z ? p.K : 0);
  const int64_t blocks = (elements + kCombineThreads - 1) / kCombineThreads;
  const int64_t head = block_index() / blocks % p.Hkv, n = block_index() / blocks / p.Hkv;
  const int64_t e = block_index() % blocks * kCombineThreads + thread_index();
  if (e >= elements) return;

  const auto element = [&](const States& states, int64_t row) -> float* {
    const int64_t at = row * p.Hkv + head;
    if (e < p.K * p.V) return states.kv ? states.kv + at * p.K * p.V + e : nullptr;
    return states.z ? states.z + at * p.K + e - p.K * p.V : nullptr;
  };
  const int64_t first = p.pieces.first_piece(n), count = p.pieces.num_pieces(n);
  const float* const initial = element(p.initial, n);
  float carry = initial ? *initial : 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t piece = first + (p.reversed ? count - 1 - i : i);
    float* const slot = element(p.piece_states, piece);
    const float added = *slot;
    *slot = carry;
    carry = p.piece_decays[piece * p.Hkv + head] * carry + added;
  }
  if (!p.causal) {
    for (int64_t i = 0; i < count; ++i) *element(p.piece_states, first + i) = carry;
  }
  float* const to = element(p.final_state, n);
  if (to) *to = carry;
}

}  // namespace hfla::cuda
