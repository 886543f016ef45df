// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Forward and backward where all that a chunk's instructions depend on is known when they are
// compiled: bfloat16, heads of K key features, a decay for each head or none, no mask, rows that
// are contiguous and aligned. Since a decay is then a number, and so is a norm, no key or query has
// to be written again: in the words of chunk.cuh, with r_i and s_i what k_i and q_i are multiplied
// with,
//
//     f_i = from_i r_i      f'_i = from_i s_i      l_i = to_i r_i β_i      A'_ij = A_ij β_j
//
//     E = M (V - f ∘ K S)   y = f' ∘ (Q S) + A' E        S' = from_C S + Kᵀ (l ∘ E)
//
// with K and Q as they are in memory. `prepare` (fixed_size_prepare.cuh) makes M, A', f, f' and l,
// all chunks at a time; `walk` (fixed_size_walk.cuh) goes from chunk to chunk.
//
// Backward, with M and A' of before, dS' what comes from the chunks behind, and dv = W:
//
//     dE = A'ᵀ dy + l ∘ (K dS')      W = Mᵀ dE      dS = from_C dS' + Qᵀ (f' ∘ dy) - Kᵀ (f ∘ W)
//
// `prepare` leaves M and A' transposed; one walk finds S of every chunk again, of the errors that
// forward has kept (fixed_size_state_walk.cuh), and one goes back and leaves every dS'
// (fixed_size_back_walk.cuh). The gradients of q, k, β and the decay then follow, all chunks at a
// time (fixed_size_token_gradients.cuh).
#pragma once

#include "cuda/common/copy_groups.cuh"
#include "cuda/delta_rule/chunk.cuh"

namespace hfla::cuda {

constexpr int kFixedSizeTokens = 64, kFixedSizeThreads = 128, kFixedSizeColumns = 32;  // of a block

// ---- what prepare leaves in device memory ----

// A lane's four words of an operand.
struct alignas(16) LaneWords {
  uint32_t x[4];
};

// A lower triangle of C x C, in blocks of 16 x 16, of which a lane has what it needs as operand b
// of two products: rows of the triangle are columns of b, the first 8 in the first two words.
struct Triangle {
  static constexpr int kBlocks = kFixedSizeTokens / kBlockTokens;
  static constexpr int kWords = kBlocks * (kBlocks + 1) / 2 * 32;
  static constexpr int kBytes = kWords * int(sizeof(LaneWords));
  LaneWords* words;

  DEV LaneWords& at(int row_block, int column_block) const {
    return words[(row_block * (row_block + 1) / 2 + column_block) * 32 + thread_index() % 32];
  }
  // From the layout of accumulators: two tiles of 16 rows and 8 columns. Transposed, a block's
  // columns are those of b.
  template <bool transposed>
  DEV void set(int row_block, int column_block, const float (&tiles)[2][4]) const {
    const LaneWords words = {
        {to_bf16_pair(tiles[0][0], tiles[0][1]), to_bf16_pair(tiles[1][0], tiles[1][1]),
         to_bf16_pair(tiles[0][2], tiles[0][3]), to_bf16_pair(tiles[1][2], tiles[1][3])}};
    at(row_block, column_block) =
        transposed ? LaneWords{{transpose_matrix(words.x[0]), transpose_matrix(words.x[2]),
                                transpose_matrix(words.x[1]), transpose_matrix(words.x[3])}}
                   : words;
  }
};

// Of a chunk and head, what is needed with its keys: M, f, l and from_C,
struct KeyUnit {
  static constexpr int kEndBytes = (kFixedSizeTokens + 4) * int(sizeof(float));  // l and from_C
  static constexpr int kBytes =
      Triangle::kBytes + kFixedSizeTokens * int(sizeof(float)) + kEndBytes;
  char* data;
  DEV Triangle m() const { return {reinterpret_cast<LaneWords*>(data)}; }
  DEV float* from() const { return reinterpret_cast<float*>(data + Triangle::kBytes); }
  DEV float* to() const { return from() + kFixedSizeTokens; }
  DEV float* whole() const { return to() + kFixedSizeTokens; }
};
// and with its queries: A' and f'.
struct QueryUnit {
  static constexpr int kBytes = Triangle::kBytes + kFixedSizeTokens * int(sizeof(float));
  char* data;
  DEV Triangle a() const { return {reinterpret_cast<LaneWords*>(data)}; }
  DEV float* from() const { return reinterpret_cast<float*>(data + Triangle::kBytes); }
};
constexpr int kFixedSizeUnitBytes = KeyUnit::kBytes + QueryUnit::kBytes;

// What tokens' gradients need: a, β, and 1 or what a norm divides by.
struct TokenUnit {
  static constexpr int kBytes = 4 * kFixedSizeTokens * int(sizeof(float));
  float* data;
  DEV float* decay() const { return data; }
  DEV float* beta() const { return data + kFixedSizeTokens; }
  DEV float* q_norm() const { return data + 2 * kFixedSizeTokens; }
  DEV float* k_norm() const { return data + 3 * kFixedSizeTokens; }
};

// ---- what kernels are told ----

struct FixedSizeDeltaRule : DeltaRuleProblem {
  Pieces pieces;  // chunks
  char* units;    // (chunks, Hv): a key unit and a query unit
  DeltaRuleResult result;
  // Of backward:
  DeltaRuleUpstream upstream;
  DeltaRuleGradients gradients;
  float* token_units;                   // (chunks, Hv)
  LaneWords *states, *state_gradients;  // (chunks, Hv, V / 16, K / 16, 32): S, dS', as operands
  BFloat16* errors;                     // (chunks, Hv, C, V): E
  float *dq, *dk;                       // (B, T, Hv, K), where heads share queries or keys, or null

  DEV KeyUnit key_unit(int64_t chunk, int64_t head) const {
    return {units + (chunk * Hkv + head) * kFixedSizeUnitBytes};
  }
  DEV QueryUnit query_unit(int64_t chunk, int64_t head) const {
    return {key_unit(chunk, head).data + KeyUnit::kBytes};
  }
  DEV TokenUnit token_unit(int64_t chunk, int64_t head) const {
    return {token_units + (chunk * Hkv + head) * (TokenUnit::kBytes / int64_t(sizeof(float)))};
  }
  // Of `all`, states or state_gradients, of heads of K channels; the words of 16 columns follow
  // those of others.
  template <int K>
  DEV LaneWords* state_words(LaneWords* all, int64_t chunk, int64_t head, int column) const {
    return all + ((chunk * Hkv + head) * V + column) * (K / 16 * 32 / 16);
  }
  DEV BFloat16* errors_of(int64_t chunk, int64_t head) const {
    return errors + (chunk * Hkv + head) * kFixedSizeTokens * V;
  }
};

// ---- rows of a chunk ----

template <int columns, class Element = BFloat16>
using FixedSizeRows = Tile<Element, kFixedSizeTokens, columns>;

// One of `threads` that copy a chunk's rows to tiles of so many columns.
template <int columns, int threads, class Element = BFloat16>
struct RowCopies {
  using Rows = FixedSizeRows<columns, Element>;
  static constexpr int kRun = Rows::kUnit, kPerRow = columns / kRun, kStep = threads / kPerRow;
  static constexpr int kCopies = kFixedSizeTokens / kStep;
  int row, column;  // the first of the thread's; the others follow by kStep rows

  DEV explicit RowCopies(int thread) : row(thread / kPerRow), column(thread % kPerRow * kRun) {}

  // Starts copies of the first `tokens` rows; others become zero. `from` is the thread's first.
  DEV void start(CopyGroups& copies, const Rows& to, const Element* from, int64_t stride,
                 int tokens) const {
    Element* const at = to.data + row * Rows::kStride + column;
    if (tokens == kFixedSizeTokens) {
      UNROLL
      for (int i = 0; i < kCopies; ++i, from += kStep * stride) {
        copies.copy(at + i * kStep * Rows::kStride, from);
      }
      return;
    }
    NO_UNROLL
    for (int i = 0; i < kCopies; ++i, from += kStep * stride) {
      Element* const to_row = at + i * kStep * Rows::kStride;
      if (row + i * kStep < tokens) {
        copies.copy(to_row, from);
      } else {
        *reinterpret_cast<Run<Element, kRun>*>(to_row) = {};
      }
    }
  }
};

// Starts `threads` copies of 16 bytes at a time, of so many bytes.
template <int bytes, int threads>
DEV void start_copies(CopyGroups& copies, void* to, const void* from, int thread) {
  constexpr int kStep = 16 * threads;
  UNROLL
  for (int i = 0; i < bytes; i += kStep) {
    if (i + kStep <= bytes || i + 16 * thread < bytes) {
      copies.copy(static_cast<char*>(to) + i + 16 * thread,
                  static_cast<const char*>(from) + i + 16 * thread);
    }
  }
}

}  // namespace hfla::cuda
