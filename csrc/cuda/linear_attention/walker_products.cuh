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

// out += a b, of whose columns load(b, c) gives some from c on. All are loaded before the first is
// used.
template <class Scalar, class S>
template <class Load>
DEV void Walker<Scalar, S>::add_to_out(const typename Operands::A& a, Load load) {
  typename Operands::B b[(kTilesN - 1) / kTogether][kTogether], last[1];
  UNROLL
  for (int i = 0; i < (kTilesN - 1) / kTogether; ++i) load(b[i], 8 * kTogether * i);
  load(last, S::kColumns);
  UNROLL
  for (int n = 0; n < kTilesN - 1; ++n) {
    Operands::multiply(out_[n], a, b[n / kTogether][n % kTogether]);
  }
  if (has_normalizer()) Operands::multiply(out_[kTilesN - 1], a, last[0]);
}

// out = read state, decayed. A warp has the rows 16 warp ... of the chunk.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::read_state() {
  const int first = 16 * warp_;
  NO_UNROLL
  for (int r = 0; r < rows_here(); r += kDepth) {
    add_to_out(Operands::load_a(read_tile(), first, r),
               [&](auto& b, int c) { Operands::load_b(b, shared_.state(), r, c); });
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
  NO_UNROLL
  for (int token = 0; token < C; token += kDepth) {
    // Tokens that come later than all of these rows.
    if (p_.reversed ? token + kDepth <= first : token > first + 15) continue;
    float scores[kTogether][4] = {};
    UNROLL_BY(4)
    for (int r = 0; r < rows_here(); r += kDepth) {
      const auto a = Operands::load_a(read_tile(), first, r);
      typename Operands::B b[kTogether];
      Operands::load_b_transposed(b, write_tile(), r, token);
      UNROLL
      for (int n = 0; n < kTogether; ++n) Operands::multiply(scores[n], a, b[n]);
    }
    UNROLL
    for (int n = 0; n < kTogether; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const float weight = score_weight(first + g_ + 8 * (i / 2), token + 8 * n + 2 * t_ + i % 2);
        scores[n][i] = weight == 0 ? 0 : weight * scores[n][i];  // 0, even of inf
      }
    }
    add_to_out(Operands::from_accumulators(scores), [&](auto& b, int c) {
      Operands::load_b_for_accumulators(b, values_tile(), token, c);
    });
  }
}

// state = decay state + writeᵀ values, decayed. Tensor cores truncate what they add to: a state
// that stayed in their accumulators would lose a bit of the same sign with every chunk. So theirs
// are sums over a few tokens, from zero, and it is the next addition that rounds.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::write_chunk(bool first_writer) {
  const float decay = first_writer ? decay_.between(0, C) : 1;
  NO_UNROLL
  for (int token = 0; token < C; token += kSumTokens) {
    const float keep = token == 0 ? decay : 1;
    typename Operands::A a[kSumSteps][S::kStrips];
    load_written(a, token);
    // Of the next columns, while these are multiplied.
    typename Operands::B b[2][kSumSteps][kTogether];
    load_values_of(b[0], token, 0);
    UNROLL
    for (int i = 0; i < (kTilesN - 1) / kTogether; ++i) {
      const int n = i * kTogether;
      if (n + kTogether < kTilesN - 1) load_values_of(b[(i + 1) % 2], token, 8 * (n + kTogether));
      add_to_state(a, b[i % 2], n, keep);
    }
    if (!has_normalizer()) continue;
    typename Operands::B last[kSumSteps][1];
    load_values_of(last, token, S::kColumns);
    add_to_state(a, last, kTilesN - 1, keep);
  }
}

// writeᵀ of tokens from `token` on, weighted, in registers: once, for all columns of values.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::load_written(typename Operands::A (&a)[kSumSteps][S::kStrips],
                                         int token) {
  UNROLL
  for (int step = 0; step < kSumSteps; ++step, token += kDepth) {
    float weights[Operands::kColumnsOfA] = {};
    if (decay_.sums) {
      UNROLL
      for (int i = 0; i < Operands::kColumnsOfA; ++i) {
        weights[i] = write_weight(token + Operands::column_of_a(i));
      }
    }
    UNROLL
    for (int s = 0; s < S::kStrips; ++s) {
      a[step][s] = {};  // a register without a value on some way here is kept for it everywhere
      if (!strip_exists(strip_of(s))) continue;
      a[step][s] =
          Operands::load_a_transposed(write_tile(), strip_of(s) * 16, token, decay_.sums, weights);
    }
  }
}

template <class Scalar, class S>
template <int count>
DEV void Walker<Scalar, S>::load_values_of(typename Operands::B (&b)[kSumSteps][count], int token,
                                           int column) {
  UNROLL
  for (int step = 0; step < kSumSteps; ++step) {
    Operands::load_b(b[step], values_tile(), token + step * kDepth, column);
  }
}

template <class Scalar, class S>
template <int count>
DEV void Walker<Scalar, S>::add_to_state(const typename Operands::A (&a)[kSumSteps][S::kStrips],
                                         const typename Operands::B (&b)[kSumSteps][count], int n,
                                         float keep) {
  UNROLL
  for (int s = 0; s < S::kStrips; ++s) {
    if (!strip_exists(strip_of(s))) continue;
    float sums[count][4] = {};
    UNROLL
    for (int step = 0; step < kSumSteps; ++step) {
      UNROLL
      for (int i = 0; i < count; ++i) Operands::multiply(sums[i], a[step][s], b[step][i]);
    }
    UNROLL
    for (int i = 0; i < count; ++i) {
      UNROLL
      for (int e = 0; e < 4; ++e) {
        float& x = state_[s][n + i][e];
        x = keep * x + sums[i][e];
      }
    }
  }
}

}  // namespace hfla::cuda
