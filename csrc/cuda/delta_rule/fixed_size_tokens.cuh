// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a warp has of a chunk in registers (fixed_size_walk.cuh): 16 columns of all tokens,
// transposed, in the layout of accumulators.
#pragma once

#include "cuda/delta_rule/fixed_size_chunk.cuh"

namespace hfla::cuda {

using FixedSizeValues = float[kFixedSizeTokens / 8][4];
// As operands of products over tokens.
using FixedSizeOperands = Bf16Operands::A[kFixedSizeTokens / 16];

DEV LaneWords words_of(const Bf16Operands::A& a) { return {{a.x[0], a.x[1], a.x[2], a.x[3]}}; }
DEV Bf16Operands::A operand_of(const LaneWords& words) {
  return {{words.x[0], words.x[1], words.x[2], words.x[3]}};
}

DEV void make_operands(FixedSizeOperands& a, const FixedSizeValues& values) {
  UNROLL
  for (int i = 0; i < kFixedSizeTokens / 16; ++i) {
    a[i] = Bf16Operands::from_accumulators(values + 2 * i);
  }
}

// values += a triangle times others.
DEV void add_triangle(FixedSizeValues& values, const Triangle& triangle,
                      const FixedSizeOperands& others) {
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

// values += a triangle that was stored transposed, transposed, times others.
DEV void add_transposed_triangle(FixedSizeValues& values, const Triangle& triangle,
                                 const FixedSizeOperands& others) {
  UNROLL
  for (int column = 0; column < Triangle::kBlocks; ++column) {
    UNROLL
    for (int row = column; row < Triangle::kBlocks; ++row) {
      const LaneWords b = triangle.at(row, column);
      Bf16Operands::multiply(values[2 * column], others[row], {{b.x[0], b.x[1]}});
      Bf16Operands::multiply(values[2 * column + 1], others[row], {{b.x[2], b.x[3]}});
    }
  }
}

// values += rows times a part of a state, of 16 channels from `channel` on.
template <class Rows>
DEV void add_state(FixedSizeValues& values, const Rows& rows, int channel,
                   const Bf16Operands::A& state) {
  UNROLL
  for (int n = 0; n < kFixedSizeTokens / 8; n += 2) {
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
DEV void scale(FixedSizeValues& values, const float* tokens, float sign = 1) {
  UNROLL
  for (int n = 0; n < kFixedSizeTokens / 8; ++n) {
    const auto factors = numbers_of(tokens, n);
    UNROLL
    for (int i = 0; i < 4; ++i) values[n][i] *= sign * factors.get(i % 2);
  }
}

// Rows of 16 columns in device memory, of 8 tokens after another, as a warp has them transposed.
class ColumnRows {
 public:
  // `rows` is of the first token.
  DEV ColumnRows(BFloat16* rows, int64_t stride, int tokens)
      : row_(rows + lane().g * stride + 2 * lane().t),
        step_(8 * stride),
        left_(tokens - lane().g) {}

  // The first 8 columns and the last.
  DEV void store(uint32_t first, uint32_t last) {
    const uint32_t low = transpose_matrix(first), high = transpose_matrix(last);
    if (left_ > 0) {
      *reinterpret_cast<uint32_t*>(row_) = low;
      *reinterpret_cast<uint32_t*>(row_ + 8) = high;
    }
    row_ += step_, left_ -= 8;
  }

 private:
  BFloat16* row_;
  const int64_t step_;
  int left_;
};

}  // namespace hfla::cuda
