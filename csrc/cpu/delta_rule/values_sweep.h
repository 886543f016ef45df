// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Backward's first sweep, from the last token to the first, over the gradient R of the state: a
// delta rule again, with the roles of its operands exchanged. With R_t what tokens after t
// contribute, and q scaled,
//
//     G_t = R_t + q_t dy_tᵀ    du_t = G_tᵀ k_t    w_t = β_t du_t    R_{t-1} = a_t ∘ (G_t - k_t
//     w_tᵀ)
//
// w_t is the gradient of v_t, and ⟨du_t, e_t⟩ that of β_t. Without the delta rule e_t is v_t, and
// nothing is subtracted. In blocks of tokens it takes the same weights as forward does (weights.h):
//
//     du_i = R_Cᵀ k̂_i + Σ_{j>=i} B_ji dy_j - Σ_{j>i} A_ji w_j
//     R_0 = d ∘ R_C + Σ_i q̃_i dy_iᵀ - Σ_i k̃_i w_iᵀ
//
// With an erase key p, p_t w_tᵀ is in the place of k_t w_tᵀ, and p̃ in that of k̃. Where what it
// finds is added along b, and -p is in the place of p, R_{t-1} = a_t ∘ G_t - p_t w_tᵀ, du_t is the
// gradient of v_t, and w_t = G_tᵀ b_t that of e_t, made as du_t is.
#pragma once

#include "cpu/delta_rule/pass.h"
#include "cpu/delta_rule/weights.h"

namespace hfla::HFLA_ISA {
namespace {

// The operands of a segment.
template <class Acc>
struct ValuesSweep {
  const Weights<Acc>& weights;
  int64_t blocks;                  // of tokens
  RowArray<const Acc> dy, errors;  // (tokens, V)
  RowArray<Acc> w, du;             // (tokens, V); du is wanted where it is not part of w
  Acc* dbeta;                      // (tokens, lanes), to which products are added; null: not wanted
};

// What a block of tokens adds to R: -w_i with k̃_i for the first kBlockTokens, not without the
// delta rule, and dy_i with q̃_i.
template <bool delta>
constexpr int kValueWrites = (delta ? 2 : 1) * kBlockTokens;

// From du as read from R to what is written to R.
template <class Rule, int block, class Acc>
HFLA_INLINE void differentiate_values(const ValuesSweep<Acc>& s, int64_t b, int64_t column,
                                      const Vec<Acc> (&read)[Rule::writes * kBlockTokens][block],
                                      Vec<Acc> (&values)[kValueWrites<Rule::delta>][block]) {
  constexpr bool delta = Rule::delta;
  constexpr int C = kBlockTokens, kDy = delta ? C : 0;
  const BlockTerms<Acc>& terms = s.weights.terms[b];
  HFLA_UNROLL
  for (int i = C - 1; i >= 0; --i) {
    const int64_t token = b * C + i;
    Vec<Acc> products{};
    HFLA_UNROLL
    for (int c = 0; c < block; ++c) {
      const int64_t at = column + c * kLanes<Acc>;
      values[kDy + i][c] = load(s.dy.data + token * s.dy.stride + at);
      Vec<Acc> du = terms.to_end[i] * read[i][c];
      HFLA_UNROLL
      for (int j = i; j < C; ++j) du += terms.pairs.queries[j][i] * values[kDy + j][c];
      HFLA_UNROLL
      for (int j = i + 1; delta && j < C; ++j) du -= terms.pairs.keys[j][i] * values[j][c];
      Vec<Acc> w = terms.beta[i] * du;
      if constexpr (Rule::along) {
        store(s.du.data + token * s.du.stride + at, du);
        w = terms.to_end[i] * read[C + i][c];
        HFLA_UNROLL
        for (int j = i; j < C; ++j) w += terms.pairs.queries_along[j][i] * values[kDy + j][c];
        HFLA_UNROLL
        for (int j = i + 1; j < C; ++j) w -= terms.pairs.keys_along[j][i] * values[j][c];
      }
      if constexpr (delta) values[i][c] = w;
      store(s.w.data + token * s.w.stride + at, w);
      if (s.dbeta) products += du * load(s.errors.data + token * s.errors.stride + at);
    }
    if (s.dbeta)
      store(s.dbeta + token * kLanes<Acc>, load(s.dbeta + token * kLanes<Acc>) + products);
  }
  HFLA_UNROLL
  for (int i = 0; i < C; ++i) {
    HFLA_UNROLL
    for (int c = 0; c < block; ++c) {
      values[kDy + i][c] *= terms.from_start[i];
      if constexpr (delta) values[i][c] *= -terms.asked_from_start[i];
    }
  }
}

// A segment, for one block of columns.
template <class Rule, int block, class Acc>
HFLA_NOINLINE void sweep_values(const ValuesSweep<Acc>& s, int64_t column, Acc* state) {
  constexpr Decays decays = Rule::decays;
  constexpr bool delta = Rule::delta;
  using At = Tile<Acc, Rule>;
  constexpr int C = kBlockTokens, writes = kValueWrites<delta>, reads = Rule::writes * C;
  constexpr Shrink shrink = shrink_of(decays);
  static_assert(At::kQueries == At::kKeys + C * kLanes<Acc>, "one after the other");
  const int64_t K = s.weights.K;
  const auto weights = [&](int64_t written, int64_t read) HFLA_INLINE_LAMBDA {
    const Acc* const from = s.weights.template tiles_of<Rule>(written);
    const Acc* const to = s.weights.template tiles_of<Rule>(read);
    return PassWeights<Acc>{from + (delta ? At::kKeys : At::kQueries), to + At::kKeysOut,
                            from + At::kDecay, s.weights.terms[written].whole};
  };
  NoPace no_pace;
  Vec<Acc> du[reads][block], values[writes][block], nothing[1][block] = {};
  for (int64_t b = s.blocks - 1; b >= 0; --b) {
    if (b == s.blocks - 1) {
      pass<0, reads, block, At::kSize, shrink>(K, weights(b, b), state, nothing, du, no_pace);
    } else {
      pass<writes, reads, block, At::kSize, shrink>(K, weights(b + 1, b), state, values, du,
                                                    no_pace);
    }
    differentiate_values<Rule, block>(s, b, column, du, values);
  }
  pass<writes, 0, block, At::kSize, shrink>(K, weights(0, 0), state, values, nothing, no_pace);
}

}  // namespace
}  // namespace hfla::HFLA_ISA
