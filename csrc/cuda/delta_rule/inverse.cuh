// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The inverse of 1 + N for a strictly lower triangular N (C, C), in float32: of blocks of 16 by
// substitution, a column for each lane, and then by halves,
//
//     ( P    )⁻¹   (     P⁻¹           )
//     ( R  Q )   = ( -Q⁻¹ R P⁻¹   Q⁻¹  )
#pragma once

#include "cuda/delta_rule/chunk.cuh"

namespace hfla::cuda {

template <int C>
class Inverse {
  static constexpr int kBlock = kBlockTokens, kBlocks = C / kBlock, kThreads = 32 * kBlocks;
  using Operands = Tf32Operands<2>;

 public:
  using Matrix = Tile<float, C, C>;

  // n may have been written just before; all threads see the inverse after the next barrier.
  DEV static void find(const Matrix& n, const Matrix& inverse) {
    for (int e = thread_index(); e < C * C; e += kThreads) {
      inverse.data[e / C * Matrix::kStride + e % C] = 0;
    }
    sync_block();
    substitute(n, inverse, thread_index() / 32 * kBlock);
    sync_block();
    const int warp = thread_index() / 32;
    if (warp % 2 == 1) merge<kBlock>(n, inverse, (warp - 1) * kBlock, 0, 0);
    if constexpr (kBlocks == 4) {
      sync_block();
      merge<2 * kBlock>(n, inverse, 0, warp / 2 * kBlock, warp % 2 * kBlock);
    }
  }

 private:
  DEV static void substitute(const Matrix& n, const Matrix& inverse, int first) {
    const int column = thread_index() % 32;
    if (column >= kBlock) return;
    float x[kBlock];
    UNROLL
    for (int i = 0; i < kBlock; ++i) {
      x[i] = i == column ? 1 : 0;
      UNROLL
      for (int j = 0; j < i; ++j) x[i] -= n.get(first + i, first + j) * x[j];
      inverse.data[(first + i) * Matrix::kStride + first + column] = x[i];
    }
  }

  // The lower left corner of the inverse of two halves of `size` that begin at `first`, from the
  // inverses of both: 16 rows and 16 columns of it from (row, column) on. A warp's work.
  template <int size>
  DEV static void merge(const Matrix& n, const Matrix& inverse, int first, int row, int column) {
    const int second = first + size;
    float product[size / 8][4] = {};  // Q⁻¹ R
    add_product<Operands>(
        product, size, [&](int k) { return Operands::load_a(inverse, second + row, second + k); },
        [&](auto& b, int k, int c) { Operands::load_b(b, n, second + k, first + c); });
    float corner[2][4] = {};
    UNROLL
    for (int k = 0; k < size; k += Operands::kDepth) {
      const auto a = Operands::from_accumulators(product + k / 8);
      Operands::B b[2];
      Operands::load_b_for_accumulators(b, inverse, first + k, first + column);
      UNROLL
      for (int i = 0; i < 2; ++i) Operands::multiply(corner[i], a, b[i]);
    }
    const auto [g, t] = lane();
    UNROLL
    for (int i = 0; i < 2; ++i) {
      UNROLL
      for (int j = 0; j < 4; ++j) {
        const int r = second + row + g + j / 2 * 8, c = first + column + 8 * i + 2 * t + j % 2;
        inverse.data[r * Matrix::kStride + c] = -corner[i][j];
      }
    }
  }
};

}  // namespace hfla::cuda
