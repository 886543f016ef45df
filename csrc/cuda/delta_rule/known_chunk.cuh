// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Forward where all that a chunk's instructions depend on is known when they are compiled:
// bfloat16, heads of K key features, a decay for each head or none, no mask, rows that are
// contiguous and aligned. Since a decay is then a number, and so is a norm, no key or query has to
// be written again: in the words of chunk.cuh, with r_i and s_i what k_i and q_i are multiplied
// with,
//
//     f_i = from_i r_i      f'_i = from_i s_i      l_i = to_i r_i β_i      A'_ij = A_ij β_j
//
//     E = M (V - f ∘ K S)   y = f' ∘ (Q S) + A' E        S' = from_C S + Kᵀ (l ∘ E)
//
// with K and Q as they are in memory. `prepare` (known_prepare.cuh) makes M, A', f, f' and l, all
// chunks at a time; `walk` (known_walk.cuh) goes from chunk to chunk, behind its loader
// (known_loader.cuh).
#pragma once

#include "cuda/common/copy_groups.cuh"
#include "cuda/delta_rule/chunk.cuh"

namespace hfla::cuda {

constexpr int kKnownTokens = 64, kKnownThreads = 128, kKnownColumns = 64;  // of a block

// ---- what prepare leaves in device memory ----

// What a lane has of a block of 16 x 16 of a lower triangle, as operand b of two products:
// rows are columns of b, the first 8 in the first two words.
struct alignas(16) TriangleBlock {
  uint32_t x[4];

  // From the layout of accumulators: two tiles of 16 rows and 8 columns.
  DEV static TriangleBlock of(const float (&tiles)[2][4]) {
    return {{to_bf16_pair(tiles[0][0], tiles[0][1]), to_bf16_pair(tiles[1][0], tiles[1][1]),
             to_bf16_pair(tiles[0][2], tiles[0][3]), to_bf16_pair(tiles[1][2], tiles[1][3])}};
  }
  DEV Bf16Operands::B first() const { return {{x[0], x[1]}}; }
  DEV Bf16Operands::B second() const { return {{x[2], x[3]}}; }
};

// Of a chunk and head: M and A', block by block; then f, f' and l of each token, and from_C.
struct KnownUnits {
  static constexpr int kBlocks = kKnownTokens / kBlockTokens;
  static constexpr int kTriangle = kBlocks * (kBlocks + 1) / 2 * 32;  // in blocks of a lane
  static constexpr int kBytes =
      2 * kTriangle * int(sizeof(TriangleBlock)) + (3 * kKnownTokens + 4) * int(sizeof(float));
  char* data;

  DEV TriangleBlock* m() const { return reinterpret_cast<TriangleBlock*>(data); }
  DEV TriangleBlock* a() const { return m() + kTriangle; }
  DEV float* from_of_keys() const { return reinterpret_cast<float*>(a() + kTriangle); }
  DEV float* from_of_queries() const { return from_of_keys() + kKnownTokens; }
  DEV float* to_of_keys() const { return from_of_queries() + kKnownTokens; }
  DEV float* whole() const { return to_of_keys() + kKnownTokens; }

  // Where the lane's part of a triangle's block is.
  DEV static int at(int row_block, int column_block) {
    return (row_block * (row_block + 1) / 2 + column_block) * 32 + thread_index() % 32;
  }
};

// ---- what kernels are told ----

struct KnownDeltaRule : DeltaRuleProblem {
  Pieces pieces;  // chunks
  char* units;    // (chunks, Hv)
  DeltaRuleResult result;

  DEV KnownUnits units_of(int64_t chunk, int64_t head) const {
    return {units + (chunk * Hkv + head) * KnownUnits::kBytes};
  }
};

// ---- rows of a chunk ----

template <int columns>
using KnownRows = Tile<BFloat16, kKnownTokens, columns>;

// Starts copies of the first `tokens` rows of a chunk to a tile, by all threads; other rows become
// zero. Columns from `there` on are left as they are.
template <int columns>
DEV void copy_rows(CopyGroups& copies, const KnownRows<columns>& to, const BFloat16* from,
                   int64_t stride, int tokens, int there = columns) {
  using Rows = KnownRows<columns>;
  constexpr int kRun = 8, kPerRow = columns / kRun, kStep = kKnownThreads / kPerRow;
  const int first = thread_index() / kPerRow, c = thread_index() % kPerRow * kRun;
  if (c >= there) return;
  BFloat16* const at = to.data + first * Rows::kStride + c;
  from += first * stride + c;
  if (tokens == kKnownTokens) {
    UNROLL
    for (int i = 0; i < kKnownTokens / kStep; ++i, from += kStep * stride) {
      copies.copy(at + i * kStep * Rows::kStride, from);
    }
    return;
  }
  NO_UNROLL
  for (int i = 0; i < kKnownTokens / kStep; ++i, from += kStep * stride) {
    BFloat16* const row = at + i * kStep * Rows::kStride;
    if (first + i * kStep < tokens) {
      copies.copy(row, from);
    } else {
      *reinterpret_cast<Run<BFloat16, kRun>*>(row) = {};
    }
  }
}

}  // namespace hfla::cuda
