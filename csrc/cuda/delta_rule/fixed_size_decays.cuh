// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Decays from token to token of a chunk, of which each has a number (fixed_size_chunk.cuh). Within
// blocks of 16 tokens they are kept for all pairs; from block to block they are multiplied.
#pragma once

#include "cuda/delta_rule/fixed_size_chunk.cuh"

namespace hfla::cuda {

struct FixedSizeDecays {
  static constexpr int kBlock = kBlockTokens, kBlocks = kFixedSizeTokens / kBlock;
  static constexpr int kWithin = kFixedSizeTokens * kBlock;
  float* decay;   // (C,)
  float* within;  // (C, 16): from a token of its block, a column, to a token, a row

  // A token's part of `within`: those from it on.
  DEV void multiply(int token) const {
    if (token >= kFixedSizeTokens) return;
    const int j = token % kBlock;
    float product = 1;
    UNROLL
    for (int i = 0; i < kBlock; ++i) {
      if (i < j) continue;
      if (i > j) product *= decay[token - j + i];
      within[(token - j + i) * kBlock + j] = product;
    }
  }

  // From before the token's block, and to its end; of a whole block.
  DEV float from(int token) const {
    return decay[token / kBlock * kBlock] * within[token * kBlock];
  }
  DEV float to(int token) const { return within[(token | (kBlock - 1)) * kBlock + token % kBlock]; }
  DEV float of_block(int block) const { return from(block * kBlock + kBlock - 1); }
  DEV float of_blocks(int begin, int end) const {
    float product = 1;
    UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if (begin <= block && block < end) product *= of_block(block);
    }
    return product;
  }
  // From before the chunk, to its end, and both.
  DEV float from_begin(int token) const { return of_blocks(0, token / kBlock) * from(token); }
  DEV float to_end(int token) const { return of_blocks(token / kBlock + 1, kBlocks) * to(token); }
  DEV float whole() const { return of_blocks(0, kBlocks); }

  // From columns to rows of two blocks, or of one, in the layout of accumulators. Undefined where a
  // row is before its column.
  template <bool same>
  DEV void find_pairs(float (&decays)[2][4], int row_block, int column_block) const {
    const auto [g, t] = lane();
    const int row = row_block * kBlock + g, column = column_block * kBlock + 2 * t;
    if constexpr (same) {
      UNROLL
      for (int i = 0; i < 8; ++i) {
        decays[i / 4][i % 4] = within[(row + i % 4 / 2 * 8) * kBlock + 2 * t + i / 4 * 8 + i % 2];
      }
      return;
    }
    const float between = of_blocks(column_block + 1, row_block);
    const float of_rows[2] = {between * from(row), between * from(row + 8)};
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const float of_column = to(column + i / 2 * 8 + i % 2);
      decays[i / 2][i % 2] = of_rows[0] * of_column;
      decays[i / 2][2 + i % 2] = of_rows[1] * of_column;
    }
  }
};

}  // namespace hfla::cuda
