// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The products of a chunk of a walk, on tensor cores.
#pragma once

#include "cuda/linear_attention/walker.cuh"

namespace hfla::cuda {

// Weights. Position i + 1 is after token i; backwards in time all of it is mirrored.
template <class Scalar, class S>
DEV float Walker<Scalar, S>::read_weight(int i) const {
  return p_.reversed ? decay_.between(i + 1, C) : decay_.between(0, i + 1);
}
template <class Scalar, class S>
DEV float Walker<Scalar, S>::write_weight(int j) const {
  return p_.reversed ? decay_.between(0, j + 1) : decay_.between(j + 1, C);
}
template <class Scalar, class S>
DEV float Walker<Scalar, S>::score_weight(int i, int j) const {
  if (p_.reversed ? j < i : j > i) return 0;
  return p_.reversed ? decay_.between(i + 1, j + 1) : decay_.between(j + 1, i + 1);
}

// out = read state, decayed. A warp has the rows 16 warp ... of the chunk.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::read_state() {
  const int first = 16 * warp_;
  UNROLL
  for (int n = 0; n < kTilesN; ++n) {
    UNROLL
    for (int i = 0; i < 4; ++i) out_[n][i] = 0;
  }
  NO_UNROLL
  for (int r = 0; r < R; r += kDepth) {
    if (r >= rows_left_) break;
    const auto a = Operands::load_a(shared_.read, first, r);
    UNROLL
    for (int n = 0; n < kTilesN; ++n) {
      if (n >= num_tiles_n()) break;
      Operands::multiply(out_[n], a, Operands::load_b(shared_.state, r, 8 * n));
    }
  }
  if (!p_.causal || !decay_.sums) return;
  const float weights[2] = {read_weight(first + g_), read_weight(first + g_ + 8)};
  UNROLL
  for (int n = 0; n < kTilesN; ++n) {
    UNROLL
    for (int i = 0; i < 4; ++i) out_[n][i] *= weights[i / 2];
  }
}

// out += (read writeᵀ, masked and decayed) values.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::read_chunk() {
  const int first = 16 * warp_;
  constexpr int kTilesAtOnce = kDepth / 8;  // make an operand
  NO_UNROLL
  for (int token = 0; token < C; token += kDepth) {
    // Tokens that come later than all of these rows.
    if (p_.reversed ? token + kDepth <= first : token > first + 15) continue;
    float scores[kTilesAtOnce][4] = {};
    NO_UNROLL
    for (int r = 0; r < R; r += kDepth) {
      if (r >= rows_left_) break;
      const auto a = Operands::load_a(shared_.read, first, r);
      UNROLL
      for (int n = 0; n < kTilesAtOnce; ++n) {
        Operands::multiply(scores[n], a,
                           Operands::load_b_transposed(shared_.write, r, token + 8 * n));
      }
    }
    UNROLL
    for (int n = 0; n < kTilesAtOnce; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const float weight = score_weight(first + g_ + 8 * (i / 2), token + 8 * n + 2 * t_ + i % 2);
        scores[n][i] = weight == 0 ? 0 : weight * scores[n][i];  // 0, even of inf
      }
    }
    const auto a = Operands::from_accumulators(scores);
    UNROLL
    for (int n = 0; n < kTilesN; ++n) {
      if (n >= num_tiles_n()) break;
      Operands::multiply(out_[n], a,
                         Operands::load_b_for_accumulators(shared_.values, token, 8 * n));
    }
  }
}

// state = decay state + writeᵀ values, decayed.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::write_chunk(bool first_writer) {
  const float decay = first_writer ? decay_.between(0, C) : 1;
  for_each_state_element([&](int, int, float& x) { x *= decay; });
  NO_UNROLL
  for (int token = 0; token < C; token += kDepth) {
    float weights[Operands::kColumnsOfA] = {};
    if (decay_.sums) {
      UNROLL
      for (int i = 0; i < Operands::kColumnsOfA; ++i) {
        weights[i] = write_weight(token + Operands::column_of_a(i));
      }
    }
    typename Operands::A a[S::kStrips];
    UNROLL
    for (int s = 0; s < S::kStrips; ++s) {
      if (!strip_exists(strip_of(s))) continue;
      a[s] =
          Operands::load_a_transposed(shared_.write, strip_of(s) * 16, token, decay_.sums, weights);
    }
    UNROLL
    for (int n = 0; n < kTilesN; ++n) {
      if (n >= num_tiles_n()) break;
      const auto b = Operands::load_b(shared_.values, token, 8 * n);
      UNROLL
      for (int s = 0; s < S::kStrips; ++s) {
        if (strip_exists(strip_of(s))) Operands::multiply(state_[s][n], a[s], b);
      }
    }
  }
}

}  // namespace hfla::cuda
