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
constexpr int kCombineEach = 8;  // elements of a thread: finding its pieces takes longer than one
constexpr int kCombineElements = kCombineThreads * kCombineEach;  // of a block

BOTH int64_t combine_blocks(int64_t elements) {
  return (elements + kCombineElements - 1) / kCombineElements;
}

// A block has a part of kv, or of z.
KERNEL LAUNCH_BOUNDS(kCombineThreads, 8) combine_kernel(const GRID_CONSTANT Combine p) {
  const int kv_blocks = int(combine_blocks(p.K * p.V));
  const int blocks = kv_blocks + (p.piece_states.z ? int(combine_blocks(p.K)) : 0);
  const int part = int(block_index()) % blocks, row = int(block_index()) / blocks;
  const int Hkv = int(p.Hkv), head = row % Hkv, n = row / Hkv;
  const bool is_kv = part < kv_blocks;
  const int64_t elements = is_kv ? p.K * p.V : p.K;
  const int64_t begin = (is_kv ? part : part - kv_blocks) * kCombineElements + thread_index();
  const int64_t left = elements - begin;

  // This thread's first element in a row's state, or null.
  const auto find = [&](const States& states, int64_t row) {
    float* const array = is_kv ? states.kv : states.z;
    return array ? array + (row * Hkv + head) * elements + begin : nullptr;
  };
  float carry[kCombineEach];
  const auto load = [&](float (&x)[kCombineEach], const float* from) {
    UNROLL
    for (int a = 0; a < kCombineEach; ++a) {
      x[a] = from && a * kCombineThreads < left ? from[a * kCombineThreads] : 0;
    }
  };
  const auto store = [&](float* to) {
    UNROLL
    for (int a = 0; a < kCombineEach; ++a) {
      if (to && a * kCombineThreads < left) to[a * kCombineThreads] = carry[a];
    }
  };
  const int64_t first = p.pieces.first_piece(n), count = p.pieces.num_pieces(n);
  load(carry, find(p.initial, n));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t piece = first + (p.reversed ? count - 1 - i : i);
    const float decay = p.piece_decays[piece * Hkv + head];
    float* const slots = find(p.piece_states, piece);
    float added[kCombineEach];
    load(added, slots);
    store(slots);
    UNROLL
    for (int a = 0; a < kCombineEach; ++a) carry[a] = decay * carry[a] + added[a];
  }
  for (int64_t i = 0; i < count && !p.causal; ++i) store(find(p.piece_states, first + i));
  store(find(p.final_state, n));
}

}  // namespace hfla::cuda
