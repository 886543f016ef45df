// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Backward's other sweeps, over transposed states: rows along V, columns along K. By now u_t and
// w_t are known, so both are plain recurrences. With q scaled, and S' and G as the first sweep and
// forward have them,
//
//     S_t = a_t ∘ S_{t-1} + k_t u_tᵀ       dq_t = S_t dy_t    m_t = S'_t w_t     forwards
//     R_{t-1} = a_t ∘ (G_t - k_t w_tᵀ)     p_t = G_t u_t                         backwards
//
// and dk_t = p_t - m_t. In a block of tokens i = 1..C, with c_i the sum of log decays up to i,
// P_ij = dy_i·u_j and M_ij = w_i·u_j:
//
//     dq_i = e^{c_i} ∘ (S_0 dy_i) + Σ_{j<=i} P_ij e^{c_i - c_j} ∘ k_j
//     m_i  = e^{c_i} ∘ (S_0 w_i)  + Σ_{j<i}  M_ij e^{c_i - c_j} ∘ k_j
//     p_i  = e^{c_C - c_i} ∘ (R_C u_i)
//            + Σ_{j>=i} P_ji e^{c_j - c_i} ∘ q_j - Σ_{j>i} M_ji e^{c_j - c_i} ∘ k_j
//
// With an erase key p, R_{t-1} = a_t ∘ (G_t - p_t w_tᵀ), and p_j is in the place of k_j beside M in
// p_i; dk_t = p_t, dp_t = -m_t. Where what it finds is added along b, and -p is in the place of p,
// it asks before its token's decay: then m_t = S_{t-1} w_t and R_{t-1} = a_t ∘ G_t - p_t w_tᵀ, and
// beside M there is c_{i-1} in the place of c_i, and c_{j-1} in that of c_j. b_t e_tᵀ is in S_t,
// too: b_j with dy_i·e_j and w_i·e_j is beside k_j in dq_i and m_i, and db_t = G_t e_t is made as
// p_t is.
//
// A decay per channel lies along the vectors here: what decays between two tokens is multiplied by
// the decays between them. Of a decay per head the products are in P and M.
#pragma once

#include "cpu/delta_rule/pass.h"
#include "cpu/delta_rule/weights.h"
#include "cpu/sequences/staging.h"

namespace hfla::HFLA_ISA {
namespace {

enum class Direction { forwards, backwards };

// ---- what a block of tokens needs, whatever the column ----

// The places in a tile of weights: dy, w, u of all tokens, and e where u is not made of it, (V /
// lanes, 3 or 4 kBlockTokens, lanes).
template <class Acc, bool along>
struct ValueTile {
  static constexpr int64_t kTokens = kBlockTokens * kLanes<Acc>;
  static constexpr int64_t kDy = 0, kW = kTokens, kU = 2 * kTokens, kE = 3 * kTokens;
  static constexpr int64_t kSize = (along ? 4 : 3) * kTokens;
};

template <class Acc>
struct ValueTerms {
  Acc dy_u[kBlockTokens][kBlockTokens];  // P
  Acc w_u[kBlockTokens][kBlockTokens];   // M
  Acc dy_e[kBlockTokens][kBlockTokens],
      w_e[kBlockTokens][kBlockTokens];  // with e_j in place of u_j
  // e^{c_i} and e^{c_C - c_i} of a decay per head, else 1. With b asked_from_start is e^{c_{i-1}}.
  Acc from_start[kBlockTokens], asked_from_start[kBlockTokens], to_end[kBlockTokens];
};

// Of the tokens of a segment.
template <class Acc>
struct ValueWeights {
  int64_t V;
  ValueTerms<Acc>* terms;  // (blocks,)
  Acc* tiles;              // (blocks, tiles, ValueTile::kSize)

  ValueWeights(Carver& carver, int64_t V, const SegmentShape& segment, bool along) : V(V) {
    const int64_t blocks = segment.rows / kBlockTokens;
    const int64_t tile = along ? ValueTile<Acc, true>::kSize : ValueTile<Acc, false>::kSize;
    terms = carver.take<ValueTerms<Acc>>(blocks);
    tiles = carver.take<Acc>(blocks * ceil_div(V, kLanes<Acc>) * tile);
  }

  template <bool along>
  Acc* tiles_of(int64_t block) const {
    return tiles + block * ceil_div(V, kLanes<Acc>) * ValueTile<Acc, along>::kSize;
  }
};

// What they are made of: rows of a segment, and numbers per token. w is not read without delta,
// values are only where u is not made of errors.
template <class Acc>
struct ValueRows {
  RowArray<const Acc> dy, w, errors, values;
  const Acc *beta, *decay;  // decay: per head; null: none, or per channel
};

template <class Acc>
void include_decay_per_head(ValueTerms<Acc>& terms, bool along, const Acc* decay) {
  constexpr int C = kBlockTokens;
  Acc whole = 1;
  for (int i = 0; i < C; ++i) {
    const Acc before = whole;
    whole *= decay[i];
    terms.from_start[i] = whole;
    terms.asked_from_start[i] = along ? before : whole;
  }
  for (int j = 0; j < C; ++j) {
    Acc between = 1;
    for (int i = j + 1; i < C; ++i) {
      const Acc before = between;
      between *= decay[i];
      const Acc asked = along ? before : between;
      terms.dy_u[i][j] *= between;
      terms.dy_e[i][j] *= between;
      terms.w_u[i][j] *= asked;
      terms.w_e[i][j] *= asked;
    }
    terms.to_end[j] = between;
  }
}

template <class Rule, class Acc>
void make_value_block(const ValueWeights<Acc>& weights, const ValueRows<Acc>& rows, int64_t block) {
  constexpr bool along = Rule::along;
  using At = ValueTile<Acc, along>;
  constexpr int64_t W = kLanes<Acc>;
  constexpr int C = kBlockTokens;
  const int64_t first = block * C;
  const auto row = [&](RowArray<const Acc> from, int i)
                       HFLA_INLINE_LAMBDA { return from.data + (first + i) * from.stride; };
  Vec<Acc> dy_u[C][C] = {}, w_u[C][C] = {}, dy_e[C][C] = {}, w_e[C][C] = {};
  Acc* tile = weights.template tiles_of<along>(block);
  for (int64_t c = 0; c < weights.V; c += W, tile += At::kSize) {
    Vec<Acc> u[C], e[C];
    HFLA_UNROLL
    for (int i = 0; i < C; ++i) {
      e[i] = load(row(rows.errors, i) + c);
      u[i] = rows.beta[first + i] * (along ? load(row(rows.values, i) + c) : e[i]);
      if constexpr (along) store(tile + At::kE + i * W, e[i]);
      const Vec<Acc> dy = load(row(rows.dy, i) + c);
      store(tile + At::kDy + i * W, dy);
      store(tile + At::kU + i * W, u[i]);
      HFLA_UNROLL
      for (int j = 0; j <= i; ++j) {
        dy_u[i][j] += dy * u[j];
        if constexpr (along) dy_e[i][j] += dy * e[j];
      }
      if constexpr (Rule::delta) {
        const Vec<Acc> w = load(row(rows.w, i) + c);
        store(tile + At::kW + i * W, w);
        HFLA_UNROLL
        for (int j = 0; j < i; ++j) {
          w_u[i][j] += w * u[j];
          if constexpr (along) w_e[i][j] += w * e[j];
        }
      }
    }
  }
  ValueTerms<Acc>& terms = weights.terms[block];
  for (int i = 0; i < C; ++i) {
    terms.from_start[i] = terms.asked_from_start[i] = terms.to_end[i] = 1;
    for (int j = 0; j <= i; ++j) {
      terms.dy_u[i][j] = sum<Acc>(dy_u[i][j]);
      terms.w_u[i][j] = j < i ? sum<Acc>(w_u[i][j]) : 0;
      terms.dy_e[i][j] = along ? sum<Acc>(dy_e[i][j]) : 0;
      terms.w_e[i][j] = along && j < i ? sum<Acc>(w_e[i][j]) : 0;
    }
  }
  if (rows.decay) include_decay_per_head(terms, along, rows.decay + first);
}

// ---- the sweeps ----

// The rows of a segment along K, (tokens, stride): normalised k, normalised and scaled q,
// e^log_decay where it is per channel, p and b; dq, and dk: m_t forwards, p_t backwards; db.
template <class Acc>
struct KeyRows {
  int64_t stride;
  Acc *q, *k, *decay, *erase_key, *add_along, *dq, *dk, *dadd_along;

  Acc* at(Acc* rows, int64_t token, int64_t column) const { return rows + token * stride + column; }
};

template <class Acc>
struct KeysSweep {
  const ValueWeights<Acc>& weights;
  int64_t blocks;  // of tokens
  const KeyRows<Acc>& rows;
};

// How many tokens' vectors a block of tokens adds to the state, and how many reads it for. Without
// delta, the terms with w fall away.
template <Direction direction, class Rule>
struct Counts {
  static constexpr int kGradients = (Rule::delta ? 2 : 1) * kBlockTokens;  // dy and w
  static constexpr int kValues = Rule::writes * kBlockTokens;              // u, or u and e
  static constexpr bool forwards = direction == Direction::forwards;
  static constexpr int kWrites = forwards ? kValues : kGradients;
  static constexpr int kReads = forwards ? kGradients : kValues;
};

// One vector of columns: from S_0 dy_i and S_0 w_i to dq_i and m_i, and what k_i adds to S_C.
// Returns the decay of the block.
template <class Rule, bool per_channel, class Acc, class Read, class Values>
HFLA_INLINE Vec<Acc> differentiate_forwards(const KeysSweep<Acc>& s, int64_t b, int64_t column,
                                            Read read, Values values) {
  constexpr int C = kBlockTokens;
  const ValueTerms<Acc>& terms = s.weights.terms[b];
  const KeyRows<Acc>& rows = s.rows;
  constexpr bool along = Rule::along;
  Vec<Acc> from_start = broadcast(Acc(1));
  HFLA_UNROLL
  for (int i = 0; i < C; ++i) {
    const int64_t token = b * C + i;
    const auto store_m = [&](Vec<Acc> asked_from_start) HFLA_INLINE_LAMBDA {
      Vec<Acc> m = asked_from_start * read(C + i);
      HFLA_UNROLL
      for (int j = 0; j < i; ++j) {
        m += terms.w_u[i][j] * values(j);
        if constexpr (along) m += terms.w_e[i][j] * values(C + j);
      }
      store(rows.at(rows.dk, token, column), m);
    };
    if constexpr (along) {
      store_m(per_channel ? from_start : broadcast(terms.asked_from_start[i]));
    }
    if constexpr (per_channel) {
      const Vec<Acc> a = load(rows.at(rows.decay, token, column));
      from_start *= a;
      HFLA_UNROLL
      for (int j = 0; j < i; ++j) {
        values(j) *= a;
        if constexpr (along) values(C + j) *= a;
      }
    } else {
      from_start = broadcast(terms.from_start[i]);
    }
    values(i) = load(rows.at(rows.k, token, column));
    if constexpr (along) values(C + i) = load(rows.at(rows.add_along, token, column));
    Vec<Acc> dq = from_start * read(i);
    HFLA_UNROLL
    for (int j = 0; j <= i; ++j) {
      dq += terms.dy_u[i][j] * values(j);
      if constexpr (along) dq += terms.dy_e[i][j] * values(C + j);
    }
    store(rows.at(rows.dq, token, column), dq);
    if constexpr (Rule::delta && !along) store_m(from_start);
  }
  HFLA_UNROLL
  for (int i = 0; !per_channel && i < C; ++i) {
    values(i) *= terms.to_end[i];
    if constexpr (along) values(C + i) *= terms.to_end[i];
  }
  return from_start;
}

// One vector of columns: from R_C u_i to p_i, and what q_i and -k_i add to R_0.
template <class Rule, bool per_channel, class Acc, class Read, class Values>
HFLA_INLINE Vec<Acc> differentiate_backwards(const KeysSweep<Acc>& s, int64_t b, int64_t column,
                                             Read read, Values values) {
  constexpr int C = kBlockTokens;
  constexpr bool delta = Rule::delta, erases = Rule::erases;
  const ValueTerms<Acc>& terms = s.weights.terms[b];
  const KeyRows<Acc>& rows = s.rows;
  Vec<Acc> to_end = broadcast(Acc(1));
  HFLA_UNROLL
  for (int i = C - 1; i >= 0; --i) {
    const int64_t token = b * C + i;
    if constexpr (!per_channel) to_end = broadcast(terms.to_end[i]);
    values(i) = load(rows.at(rows.q, token, column));
    if constexpr (delta) {
      values(C + i) = -load(rows.at(erases ? rows.erase_key : rows.k, token, column));
    }
    Vec<Acc> p = to_end * read(i);
    HFLA_UNROLL
    for (int j = i; j < C; ++j) p += terms.dy_u[j][i] * values(j);
    HFLA_UNROLL
    for (int j = i + 1; delta && j < C; ++j) p += terms.w_u[j][i] * values(C + j);
    store(rows.at(rows.dk, token, column), p);
    if constexpr (Rule::along) {
      Vec<Acc> db = to_end * read(C + i);
      HFLA_UNROLL
      for (int j = i; j < C; ++j) db += terms.dy_e[j][i] * values(j);
      HFLA_UNROLL
      for (int j = i + 1; j < C; ++j) db += terms.w_e[j][i] * values(C + j);
      store(rows.at(rows.dadd_along, token, column), db);
    }
    if constexpr (per_channel) {
      const Vec<Acc> a = load(rows.at(rows.decay, token, column));
      to_end *= a;
      HFLA_UNROLL
      for (int j = i; j < C; ++j) {
        values(j) *= a;
        if constexpr (delta) {
          if (!Rule::along || j > i) values(C + j) *= a;
        }
      }
    }
  }
  if constexpr (per_channel) return to_end;
  HFLA_UNROLL
  for (int i = 0; i < C; ++i) {
    values(i) *= terms.from_start[i];
    if constexpr (delta) values(C + i) *= terms.asked_from_start[i];
  }
  return broadcast(terms.from_start[C - 1]);
}

// A segment, for one block of columns.
template <Direction direction, class Rule, bool per_channel, int block, class Acc>
HFLA_NOINLINE void sweep_keys(const KeysSweep<Acc>& s, int64_t column, Acc* state) {
  using At = ValueTile<Acc, Rule::along>;
  using Count = Counts<direction, Rule>;
  constexpr bool forwards = direction == Direction::forwards;
  constexpr int writes = Count::kWrites, reads = Count::kReads;
  static_assert(At::kW == At::kDy + kBlockTokens * kLanes<Acc>, "one after the other");
  constexpr Shrink shrink = Shrink::columns;
  Acc decay[block * kLanes<Acc>];  // of the block that writes
  const auto weights = [&](int64_t written, int64_t read) HFLA_INLINE_LAMBDA {
    const Acc* const from = s.weights.template tiles_of<Rule::along>(written);
    const Acc* const to = s.weights.template tiles_of<Rule::along>(read);
    return PassWeights<Acc>{from + (forwards ? At::kU : At::kDy),
                            to + (forwards ? At::kDy : At::kU), decay, 1};
  };
  const int64_t V = s.weights.V;
  NoPace no_pace;
  Vec<Acc> sums[reads][block], values[writes][block], nothing[1][block] = {};
  int64_t last = 0;
  for (int64_t step = 0; step < s.blocks; ++step) {
    const int64_t b = forwards ? step : s.blocks - 1 - step;
    if (step == 0) {
      pass<0, reads, block, At::kSize, shrink>(V, weights(b, b), state, nothing, sums, no_pace);
    } else {
      pass<writes, reads, block, At::kSize, shrink>(V, weights(last, b), state, values, sums,
                                                    no_pace);
    }
    HFLA_UNROLL
    for (int c = 0; c < block; ++c) {
      const auto read = [&](int i) HFLA_INLINE_LAMBDA { return sums[i][c]; };
      const auto value = [&](int i) HFLA_INLINE_LAMBDA -> Vec<Acc>& { return values[i][c]; };
      const int64_t at = column + c * kLanes<Acc>;
      store(decay + c * kLanes<Acc>,
            forwards ? differentiate_forwards<Rule, per_channel>(s, b, at, read, value)
                     : differentiate_backwards<Rule, per_channel>(s, b, at, read, value));
    }
    last = b;
  }
  pass<writes, 0, block, At::kSize, shrink>(V, weights(last, last), state, values, nothing,
                                            no_pace);
}

}  // namespace
}  // namespace hfla::HFLA_ISA
