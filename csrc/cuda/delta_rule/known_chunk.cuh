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
// chunks at a time; `walk` (known_walk.cuh) goes from chunk to chunk.
#pragma once

#include "cuda/common/copy_groups.cuh"
#include "cuda/delta_rule/chunk.cuh"

namespace hfla::cuda {

constexpr int kKnownTokens = 64, kKnownThreads = 128, kKnownColumns = 32;  // of a block

// ---- what prepare leaves in device memory ----

// A lane's four words of an operand.
struct alignas(16) LaneWords {
  uint32_t x[4];
};

// A lower triangle of C x C, in blocks of 16 x 16, of which a lane has what it needs as operand b
// of two products: rows of the triangle are columns of b, the first 8 in the first two words.
struct Triangle {
  static constexpr int kBlocks = kKnownTokens / kBlockTokens;
  static constexpr int kWords = kBlocks * (kBlocks + 1) / 2 * 32;
  static constexpr int kBytes = kWords * int(sizeof(LaneWords));
  LaneWords* words;

  DEV LaneWords& at(int row_block, int column_block) const {
    return words[(row_block * (row_block + 1) / 2 + column_block) * 32 + thread_index() % 32];
  }
  // From the layout of accumulators: two tiles of 16 rows and 8 columns.
  DEV void set(int row_block, int column_block, const float (&tiles)[2][4]) const {
    at(row_block, column_block) = {
        {to_bf16_pair(tiles[0][0], tiles[0][1]), to_bf16_pair(tiles[1][0], tiles[1][1]),
         to_bf16_pair(tiles[0][2], tiles[0][3]), to_bf16_pair(tiles[1][2], tiles[1][3])}};
  }
};

// Of a chunk and head, what is needed with its keys: M, f, l and from_C,
struct KeyUnit {
  static constexpr int kBytes = Triangle::kBytes + (2 * kKnownTokens + 4) * int(sizeof(float));
  char* data;
  DEV Triangle m() const { return {reinterpret_cast<LaneWords*>(data)}; }
  DEV float* from() const { return reinterpret_cast<float*>(data + Triangle::kBytes); }
  DEV float* to() const { return from() + kKnownTokens; }
  DEV float* whole() const { return to() + kKnownTokens; }
};
// and with its queries: A' and f'.
struct QueryUnit {
  static constexpr int kBytes = Triangle::kBytes + kKnownTokens * int(sizeof(float));
  char* data;
  DEV Triangle a() const { return {reinterpret_cast<LaneWords*>(data)}; }
  DEV float* from() const { return reinterpret_cast<float*>(data + Triangle::kBytes); }
};
constexpr int kKnownUnitBytes = KeyUnit::kBytes + QueryUnit::kBytes;

// ---- what kernels are told ----

struct KnownDeltaRule : DeltaRuleProblem {
  Pieces pieces;  // chunks
  char* units;    // (chunks, Hv): a key unit and a query unit
  DeltaRuleResult result;

  DEV KeyUnit key_unit(int64_t chunk, int64_t head) const {
    return {units + (chunk * Hkv + head) * kKnownUnitBytes};
  }
  DEV QueryUnit query_unit(int64_t chunk, int64_t head) const {
    return {key_unit(chunk, head).data + KeyUnit::kBytes};
  }
};

// ---- rows of a chunk ----

template <int columns>
using KnownRows = Tile<BFloat16, kKnownTokens, columns>;

// One of `threads` that copy a chunk's rows to tiles of so many columns.
template <int columns, int threads>
struct RowCopies {
  using Rows = KnownRows<columns>;
  static constexpr int kRun = 8, kPerRow = columns / kRun, kStep = threads / kPerRow;
  static constexpr int kCopies = kKnownTokens / kStep;
  int row, column;  // the first of the thread's; the others follow by kStep rows

  DEV explicit RowCopies(int thread) : row(thread / kPerRow), column(thread % kPerRow * kRun) {}

  // Starts copies of the first `tokens` rows; others become zero. `from` is the thread's first.
  DEV void start(CopyGroups& copies, const Rows& to, const BFloat16* from, int64_t stride,
                 int tokens) const {
    BFloat16* const at = to.data + row * Rows::kStride + column;
    if (tokens == kKnownTokens) {
      UNROLL
      for (int i = 0; i < kCopies; ++i, from += kStep * stride) {
        copies.copy(at + i * kStep * Rows::kStride, from);
      }
      return;
    }
    NO_UNROLL
    for (int i = 0; i < kCopies; ++i, from += kStep * stride) {
      BFloat16* const to_row = at + i * kStep * Rows::kStride;
      if (row + i * kStep < tokens) {
        copies.copy(to_row, from);
      } else {
        *reinterpret_cast<Run<BFloat16, kRun>*>(to_row) = {};
      }
    }
  }
};

}  // namespace hfla::cuda
