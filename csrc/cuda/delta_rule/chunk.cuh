// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The delta rule for a chunk of C tokens at a time. With q and k as they are used (normed, scaled),
// a_i = e^{g_i}, a number or one per channel, and products of these within the chunk,
//
//     from_i = a_1 ... a_i    to_i = a_{i+1} ... a_C    between_ij = a_{j+1} ... a_i
//
// and S what comes into the chunk, S' what leaves it:
//
//     A_ij = ⟨q_i, between_ij ∘ k_j⟩, j ≤ i     N_ij = ⟨k_i, between_ij ∘ k_j⟩, j < i
//     Q_i = from_i ∘ q_i       F_i = from_i ∘ k_i        L_i = to_i ∘ k_i
//
//     E = M (V - F S),  M = (1 + N β)⁻¹      what the tokens find missing; without delta, E = V
//     U = β E                                what they write
//     y = Q S + A U        S' = from_C S + Lᵀ U
//
// With an erase key p_i, F_i = from_i ∘ p_i and N_ij = ⟨p_i, between_ij ∘ k_j⟩; it is multiplied by
// a_i as it is loaded, so that it asks before its token's decay. With add_along, where it is to ask
// there, a token is two steps, and kernels take steps for tokens: the first asks by -p and writes
// what it finds under b, the second writes v under k, reads and does not decay.
//
// Decays are multiplied, never divided or summed as logs: all products are at most 1, whatever they
// underflow to is as small as it should be, and -inf needs no care.
//
// Forward is two kernels: `prepare`, all chunks at a time, makes Q, F, L, A and M in device memory;
// `walk` goes from chunk to chunk. Backward: prepare; a walk that leaves S of every chunk; one
// backwards that leaves the gradient of every S'; `gradients`, all chunks at a time; `finish`.
//
// B batch, T time, Hv heads of the state, K key dim, V value dim, C tokens of a chunk.
#pragma once

#include "cuda/common/operands.cuh"
#include "cuda/common/pieces.cuh"
#include "cuda/common/tiles.cuh"
#include "kernels/delta_rule.h"

namespace hfla::cuda {

// ---- sizes ----

constexpr int kBlockTokens = 16;  // within which decays are multiplied token by token
constexpr int kUnitChannels = 64;

template <class Scalar>
struct Chunk {
  using Operands = typename OperandsOf<Scalar>::Type;
  using Element = typename Operands::Element;
  static constexpr int C = sizeof(Element) == 2 ? 64 : 32;
  static constexpr int kBlocks = C / kBlockTokens;
  static constexpr int kThreads = 32 * kBlocks;  // of kernels in which a warp has such a block
};

// ---- what prepare leaves in device memory ----

// Of each chunk and head, units of one size, in the order in which a walk needs them:
//
//     F and Q of 64 channels, and so on for all channels
//     M and A
//     L of 64 channels, and of the next 64, and so on
//
// Each with from_C of its channels, but for the scores. What has no channel or token is zero.
template <class Scalar>
struct UnitLayout {
  using Element = typename Chunk<Scalar>::Element;
  static constexpr int C = Chunk<Scalar>::C;
  static constexpr int kTile = C * kUnitChannels;  // elements
  static constexpr int kTail = 2 * kUnitChannels;
  static constexpr int kBytes = 2 * kTile * int(sizeof(Element)) + kTail * int(sizeof(float));
};

struct Units {
  int64_t slabs;  // of 64 channels
  BOTH explicit Units(int64_t K) : slabs((K + kUnitChannels - 1) / kUnitChannels) {}
  BOTH int64_t per_chunk() const { return slabs + 1 + pairs(); }
  BOTH int64_t pairs() const { return (slabs + 1) / 2; }
  BOTH int64_t of_scores() const { return slabs; }
  BOTH int64_t of_last_keys(int64_t pair) const { return slabs + 1 + pair; }
};

// ---- what kernels are told ----

struct DeltaRuleChunks : DeltaRuleProblem {
  Pieces pieces;  // chunks
  char* units;    // (chunks, Hv, units per chunk)
  DeltaRuleResult result;
  DeltaRuleUpstream upstream;
  DeltaRuleGradients gradients;
  bool backward;           // M is then (1 + β N)⁻¹
  float* states;           // (chunks, Hv, K, V): S
  float* state_gradients;  // of S', likewise
  float* write_gradients;  // (steps, B, T, Hv, V): of U, and of what follows from it
  float *dq, *dk;          // (B, T, Hv, K): of q and k as they are used

  DEV int64_t chunk_and_head(int64_t chunk, int64_t head) const { return chunk * Hkv + head; }
  template <class Scalar>
  DEV char* unit(int64_t chunk, int64_t head, int64_t unit) const {
    return units +
           (chunk_and_head(chunk, head) * Units(K).per_chunk() + unit) * UnitLayout<Scalar>::kBytes;
  }
  // Of a token; which of them a chunk's step is, and of which of the piece's tokens.
  BOTH int steps() const { return add_along.data ? 2 : 1; }
  DEV int part_of(int step) const { return add_along.data ? step % 2 : 0; }
  DEV int token_of(int step) const { return add_along.data ? step / 2 : step; }
  DEV bool present(const Piece& piece, int step) const {
    const int64_t t = piece.begin + token_of(step);
    return t < piece.end && (!key_mask || key_mask[piece.batch * T + t]);
  }
};

// The element of a tensor at a piece's first token, at its first feature.
template <class T>
DEV T* at_piece(const View& view, const Piece& piece, int64_t head) {
  return static_cast<T*>(view.data) + piece.batch * view.batch + piece.begin * view.time +
         head * view.head;
}

// ---- products ----

// c (16, 8 n) += a b over `depth`, a multiple of 16. Tensor cores cut off what they accumulate, so
// their sums start from zero, and are added by an addition that rounds.
// load_a(k) and load_b(b, k, column) give the operands at k.
template <class Operands, int n, class LoadA, class LoadB>
DEV void add_product(float (&c)[n][4], int depth, LoadA load_a, LoadB load_b) {
  constexpr int kTogether = n % 2 == 0 ? 2 : 1;
  float sum[n][4];
  UNROLL
  for (int i = 0; i < n; ++i) {
    UNROLL
    for (int j = 0; j < 4; ++j) sum[i][j] = 0;
  }
  NO_UNROLL
  for (int k = 0; k < depth; k += Operands::kDepth) {
    const typename Operands::A a = load_a(k);
    UNROLL
    for (int i = 0; i < n; i += kTogether) {
      typename Operands::B b[kTogether];
      load_b(b, k, 8 * i);
      UNROLL
      for (int j = 0; j < kTogether; ++j) Operands::multiply(sum[i + j], a, b[j]);
    }
  }
  UNROLL
  for (int i = 0; i < n; ++i) {
    UNROLL
    for (int j = 0; j < 4; ++j) c[i][j] += sum[i][j];
  }
}

// Operands b of a tile of floats.
template <class Operands, int count, class FloatTile>
DEV void load_b_of_floats(typename Operands::B (&b)[count], const FloatTile& tile, int k,
                          int column) {
  if constexpr (std::is_same_v<typename Operands::Element, float>) {
    Operands::load_b(b, tile, k, column);
  } else {
    const auto [g, t] = lane();
    UNROLL
    for (int i = 0; i < count; ++i) {
      UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = k + 2 * t + 8 * half, c = column + 8 * i + g;
        b[i].x[half] = to_bf16_pair(tile.get(row, c), tile.get(row + 1, c));
      }
    }
  }
}

template <class Operands, class Tile>
DEV typename Operands::A load_a_transposed(const Tile& tile, int row, int k) {
  const float ones[Operands::kColumnsOfA] = {};
  return Operands::load_a_transposed(tile, row, k, false, ones);
}

// ---- shared memory ----

// Hands out arrays that start at multiples of 16 bytes; from null on it only measures.
class SharedCarver {
 public:
  BOTH explicit SharedCarver(char* base) : base_(base) {}
  template <class T>
  BOTH T* take(int64_t count) {
    // Of the offset, not of the pointer, lest a compiler forget that it is to shared memory.
    T* const array = reinterpret_cast<T*>(base_ + (base_ ? used_ : 0));
    used_ += (count * int64_t(sizeof(T)) + 15) / 16 * 16;
    return array;
  }
  template <class Tile>
  BOTH void take_tile(Tile& tile, int64_t rows) {
    using Element = std::remove_reference_t<decltype(*tile.data)>;
    tile.data = take<Element>(rows * Tile::kStride);
  }
  BOTH int64_t used() const { return used_; }
  BOTH void take_back(int64_t used) { used_ = used; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace hfla::cuda
