// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a warp has of a chunk in registers (known_walk.cuh): 16 columns of all tokens, transposed,
// in the layout of accumulators.
#pragma once

#include "cuda/delta_rule/known_chunk.cuh"

namespace hfla::cuda {

using KnownValues = float[kKnownTokens / 8][4];
// As operands of products over tokens.
using KnownOperands = Bf16Operands::A[kKnownTokens / 16];

DEV void make_operands(KnownOperands& a, const KnownValues& values) {
  UNROLL
  for (int i = 0; i < kKnownTokens / 16; ++i) {
    a[i] = Bf16Operands::from_accumulators(values + 2 * i);
  }
}

// values += a triangle times others.
DEV void add_triangle(KnownValues& values, const Triangle& triangle, const KnownOperands& others) {
  UNROLL
  for (int row = 0; row < Triangle::kBlocks; ++row) {
    UNROLL
    for (int column = 0; column <= row; ++column) {
      const LaneWords b = triangle.at(row, column);
      Bf16Operands::multiply(values[2 * row], others[column], {{b.x[0], b.x[1]}});
      Bf16Operands::multiply(values[2 * row + 1], others[column], {{b.x[2], b.x[3]}});
    }
  }
}

// values += rows times a part of a state, of 16 channels from `channel` on.
template <class Rows>
DEV void add_state(KnownValues& values, const Rows& rows, int channel,
                   const Bf16Operands::A& state) {
  UNROLL
  for (int n = 0; n < kKnownTokens / 8; n += 2) {
    Bf16Operands::B b[2];
    Bf16Operands::load_b_transposed(b, rows, channel, 8 * n);
    Bf16Operands::multiply(values[n], state, b[0]);
    Bf16Operands::multiply(values[n + 1], state, b[1]);
  }
}

// The numbers of the thread's two tokens in a tile.
DEV Run<float, 2> numbers_of(const float* tokens, int tile) {
  return *reinterpret_cast<const Run<float, 2>*>(tokens + 8 * tile + 2 * lane().t);
}
DEV void scale(KnownValues& values, const float* tokens) {
  UNROLL
  for (int n = 0; n < kKnownTokens / 8; ++n) {
    const auto factors = numbers_of(tokens, n);
    UNROLL
    for (int i = 0; i < 4; ++i) values[n][i] *= factors.get(i % 2);
  }
}

}  // namespace hfla::cuda
