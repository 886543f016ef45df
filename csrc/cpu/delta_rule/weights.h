// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a block of C tokens needs whatever the column of the state: staged once for all columns.
//
// For tokens i = 1..C of a block that begins with S₀, where c_i = g_1 + ... + g_i:
//
//     k̃_i = e^{c_i} ∘ k_i    q̃_i = e^{c_i} ∘ q_i    k̂_i = e^{c_C - c_i} ∘ k_i    d = e^{c_C}
//     A_ij = Σ_r k_i k_j e^{c_i - c_j}  (j < i)      B_ij = Σ_r q_i k_j e^{c_i - c_j}  (j <= i)
//     e_i = v_i - S₀ᵀ k̃_i - Σ_{j<i} A_ij u_j         u_i = β_i e_i, or β_i v_i without delta
//     y_i = S₀ᵀ q̃_i + Σ_{j<=i} B_ij u_j              S_C = d ∘ S₀ + Σ_i k̂_i u_iᵀ
//
// An erase key p is in the place of k in k̃_i and A_ij. Where what it finds is added along b, -p is,
// it asks the state before it decays, so that there are
//
//     p̃_i = -e^{c_{i-1}} ∘ p_i    A_ij = -Σ_r p_i k_j e^{c_{i-1} - c_j}
//
// and e_i is without v_i: u_i is β_i v_i, and b_i e_iᵀ is written beside k_i u_iᵀ. So there are b̂
// beside k̂, and sums with b_j beside those with k_j.
//
// Here q has the scale in it, and q and k are normalised if that is asked for. What decays between
// two tokens is a product of the a = e^g of the tokens between them, never a quotient: no exponent
// is above 0, and a = 0 is exact.
//
// A decay per head is a number, which the sums over channels need not know: the weights are then k
// and q themselves, which heads that share them share as well, and the decays are factors of what
// is read from the state and written to it.
#pragma once

#include "cpu/common/constants.h"
#include "cpu/sequences/staging.h"
#include "cpu/sequences/token_scalars.h"
#include "kernels/delta_rule.h"

namespace hfla::HFLA_ISA {
namespace {

enum class Decays { none, per_head, per_channel };

HFLA_INLINE Decays decays_of(const View& log_decay, bool per_channel) {
  if (!log_decay.data) return Decays::none;
  return per_channel ? Decays::per_channel : Decays::per_head;
}

// What a token asks the state by, before it writes: with nothing it is no delta rule.
enum class Asks { nothing, key, erase_key, and_adds_along };

HFLA_INLINE Asks asks_of(const DeltaRuleProblem& p) {
  if (!p.delta) return Asks::nothing;
  if (!p.erase_key.data) return Asks::key;
  return p.add_along.data ? Asks::and_adds_along : Asks::erase_key;
}

// What the innermost loops are compiled for, one for each rule: the kind of decays, and what asks.
// All around them is compiled once, and decides as it runs.
template <Decays its_decays, Asks its_asks>
struct Rule {
  static constexpr Decays decays = its_decays;
  static constexpr Asks asks = its_asks;
  static constexpr bool delta = asks != Asks::nothing;
  static constexpr bool along = asks == Asks::and_adds_along;       // and asks before the decay
  static constexpr bool erases = asks == Asks::erase_key || along;  // by an erase key
  static constexpr int writes = along ? 2 : 1;                      // of a token
};

// Calls run(a rule), whose decays mean nothing.
template <class Run>
HFLA_INLINE void with_asks(Asks asks, Run run) {
  switch (asks) {
    case Asks::nothing:
      return run(Rule<Decays::none, Asks::nothing>{});
    case Asks::key:
      return run(Rule<Decays::none, Asks::key>{});
    case Asks::erase_key:
      return run(Rule<Decays::none, Asks::erase_key>{});
    case Asks::and_adds_along:
      return run(Rule<Decays::none, Asks::and_adds_along>{});
  }
}

// Calls run(the rule).
template <class Run>
HFLA_INLINE void with_rule(Decays decays, Asks asks, Run run) {
  with_asks(asks, [&](auto rule) {
    constexpr Asks its_asks = decltype(rule)::asks;
    switch (decays) {
      case Decays::none:
        return run(Rule<Decays::none, its_asks>{});
      case Decays::per_head:
        return run(Rule<Decays::per_head, its_asks>{});
      case Decays::per_channel:
        return run(Rule<Decays::per_channel, its_asks>{});
    }
  });
}

// Tokens of a block: as many as the registers hold sums for, two or three of each for every token
// and vector of columns.
constexpr int kBlockTokens = kHasManyRegisters ? 4 : 2;
static_assert(kRowMultiple % kBlockTokens == 0);

// The weights of a block lie in tiles of as many channels as a vector has lanes: (K / lanes, token
// of one kind after the other, lanes). So they are stored as whole vectors, and those of a channel
// are at constant distances from one pointer, whatever K is. These are the places in a tile.
template <class Acc, class Rule>
struct Tile {
  static constexpr bool kDecayed = Rule::decays == Decays::per_channel;
  static constexpr bool kHasKeysOut = kDecayed || Rule::erases;
  static constexpr int64_t kTokens = kBlockTokens * kLanes<Acc>;
  static constexpr int64_t kKeys = 0;                                 // k̃, or k; p̃, or p
  static constexpr int64_t kQueries = kTokens;                        // q̃, or q
  static constexpr int64_t kKeysOut = kHasKeysOut ? 2 * kTokens : 0;  // k̂, or k
  static constexpr int64_t kAlongOut = 3 * kTokens;                   // b̂, or b
  static constexpr int64_t kDecay = (Rule::along ? 4 : 3) * kTokens;  // d; only per channel
  static constexpr int64_t kSize = kDecayed      ? kDecay + kLanes<Acc>
                                   : kHasKeysOut ? kDecay
                                                 : 2 * kTokens;
};

// Sums over channels for the pairs of a block's tokens.
template <class Acc>
struct PairSums {
  Acc keys[kBlockTokens][kBlockTokens];     // A, but for a decay per head: j < i
  Acc queries[kBlockTokens][kBlockTokens];  // B, but for a decay per head: j <= i
  Acc keys_along[kBlockTokens][kBlockTokens],
      queries_along[kBlockTokens][kBlockTokens];  // with b_j
};

// What else there is to a block, for one head of the state.
template <class Acc>
struct BlockTerms {
  PairSums<Acc> pairs;  // A and B
  Acc beta[kBlockTokens];
  // Of a decay per head, else 1: e^{c_i}, which goes with k and q in a tile for k̃ and q̃;
  // e^{c_C - c_i}, which goes with k for k̂; d. With b asked_from_start is e^{c_{i-1}}.
  Acc from_start[kBlockTokens], asked_from_start[kBlockTokens], to_end[kBlockTokens];
  Acc whole;
};

// Of one segment of one head: the staged weights, and the rows that they are made of.
template <class Acc>
struct Weights {
  int64_t K, stride;
  // (rows, stride), where they can't be read in the tensors themselves
  Acc *q, *k, *log_decay, *erase_key, *add_along;
  Acc *q_factor, *k_factor;  // (rows,) scale and norms
  Acc *decay, *beta;         // (rows,)
  PairSums<Acc>* pairs;      // (blocks,)
  BlockTerms<Acc>* terms;    // (blocks,)
  Acc* tiles;                // (blocks, tiles, Tile::kSize)

  // Whose k and q the tiles are made of.
  struct Origin {
    int64_t batch, first, q_head, k_head;
  } origin{-1, -1, -1, -1};

  Weights(Carver& carver, const Plan& plan, Decays decays, Asks asks)
      : K(plan.sequences.K), stride(row_stride<Acc>(K)) {
    const int64_t rows = plan.segment.rows, blocks = rows / kBlockTokens;
    const bool per_channel = decays == Decays::per_channel;
    const bool along = asks == Asks::and_adds_along, erases = along || asks == Asks::erase_key;
    q = carver.take<Acc>(rows * stride);
    k = carver.take<Acc>(rows * stride);
    log_decay = carver.take<Acc>(per_channel ? rows * stride : 0);
    erase_key = carver.take<Acc>(erases ? rows * stride : 0);
    add_along = carver.take<Acc>(along ? rows * stride : 0);
    q_factor = carver.take<Acc>(rows);
    k_factor = carver.take<Acc>(rows);
    decay = carver.take<Acc>(rows);
    beta = carver.take<Acc>(rows);
    pairs = carver.take<PairSums<Acc>>(blocks);
    terms = carver.take<BlockTerms<Acc>>(blocks);
    with_rule(decays, asks, [&](auto rule) {
      constexpr int64_t tile = Tile<Acc, decltype(rule)>::kSize;
      tiles = carver.take<Acc>(blocks * ceil_div(K, kLanes<Acc>) * tile);
    });
  }

  template <class Rule>
  const Acc* tiles_of(int64_t block) const {
    return tiles + block * ceil_div(K, kLanes<Acc>) * Tile<Acc, Rule>::kSize;
  }
};

HFLA_INLINE int64_t blocks_of(const Segment& segment) {
  return ceil_div(segment.count, kBlockTokens);
}

// The same tokens, of the head that `group` heads share.
HFLA_INLINE Segment of_shared_head(Segment segment, int64_t group) {
  segment.head /= group;
  return segment;
}

// What a row of `columns` numbers is multiplied with.
template <class Acc>
void find_factors(RowArray<const Acc> rows, int64_t count, int64_t columns, bool normalize,
                  Acc scale, Acc* factors) {
  for (int64_t row = 0; row < count; ++row) {
    factors[row] = scale;
    if (!normalize) continue;
    Vec<Acc> squares{};
    for (int64_t c = 0; c < columns; c += kLanes<Acc>) {
      const Vec<Acc> x = load(rows.data + row * rows.stride + c);
      squares += x * x;
    }
    factors[row] /= square_root(sum<Acc>(squares) + static_cast<Acc>(kNormEps));
  }
}

// The rows of a segment that weights are made of.
template <class Acc>
struct WeightRows {
  RowArray<const Acc> q, k, log_decay, erase_key, add_along;
};

// The tiles and sums of one block. Returns false if a decay would grow.
template <class Rule, class Acc>
bool make_block(const Weights<Acc>& w, const WeightRows<Acc>& rows, int64_t block) {
  constexpr int64_t W = kLanes<Acc>;
  constexpr int C = kBlockTokens;
  constexpr bool erases = Rule::erases, along = Rule::along;
  using At = Tile<Acc, Rule>;
  const int64_t first = block * C;
  const auto row = [&](RowArray<const Acc> from, int i)
                       HFLA_INLINE_LAMBDA { return from.data + (first + i) * from.stride; };
  Vec<Acc> keys[C][C] = {}, queries[C][C] = {}, largest{};
  Vec<Acc> keys_along[C][C] = {}, queries_along[C][C] = {};
  Acc* tile = w.tiles + block * ceil_div(w.K, W) * At::kSize;
  for (int64_t c = 0; c < w.K; c += W, tile += At::kSize) {
    Vec<Acc> k[C], q[C], a[C], p[C], b[C], from_start = broadcast(Acc(1));
    HFLA_UNROLL
    for (int i = 0; i < C; ++i) {
      k[i] = load(row(rows.k, i) + c) * w.k_factor[first + i];
      q[i] = load(row(rows.q, i) + c) * w.q_factor[first + i];
      p[i] = k[i];
      if constexpr (erases) p[i] = load(row(rows.erase_key, i) + c);
      if constexpr (along) {
        b[i] = load(row(rows.add_along, i) + c);
        p[i] = -p[i];
        store(tile + At::kKeys + i * W, At::kDecayed ? from_start * p[i] : p[i]);
      }
      if constexpr (At::kDecayed) {
        const Vec<Acc> log_decay = load(row(rows.log_decay, i) + c);
        largest = select(log_decay > largest, log_decay, largest);
        a[i] = exp(log_decay);
        from_start *= a[i];
      }
      if constexpr (!along)
        store(tile + At::kKeys + i * W, At::kDecayed ? from_start * p[i] : p[i]);
      store(tile + At::kQueries + i * W, At::kDecayed ? from_start * q[i] : q[i]);
    }
    HFLA_UNROLL
    for (int j = 0; j < C; ++j) {
      Vec<Acc> decayed = k[j], decayed_b = along ? b[j] : k[j];
      queries[j][j] += q[j] * decayed;
      if constexpr (along) queries_along[j][j] += q[j] * decayed_b;
      HFLA_UNROLL
      for (int i = j + 1; i < C; ++i) {
        if constexpr (along) {
          keys[i][j] += p[i] * decayed;
          keys_along[i][j] += p[i] * decayed_b;
        }
        if constexpr (At::kDecayed) decayed *= a[i];
        if constexpr (At::kDecayed && along) decayed_b *= a[i];
        if constexpr (!along) keys[i][j] += p[i] * decayed;
        queries[i][j] += q[i] * decayed;
        if constexpr (along) queries_along[i][j] += q[i] * decayed_b;
      }
      if constexpr (At::kHasKeysOut) store(tile + At::kKeysOut + j * W, decayed);
      if constexpr (along) store(tile + At::kAlongOut + j * W, decayed_b);
    }
    if constexpr (At::kDecayed) store(tile + At::kDecay, from_start);
  }
  PairSums<Acc>& pairs = w.pairs[block];
  for (int i = 0; i < C; ++i) {
    for (int j = 0; j < i; ++j) pairs.keys[i][j] = sum<Acc>(keys[i][j]);
    for (int j = 0; j <= i; ++j) pairs.queries[i][j] = sum<Acc>(queries[i][j]);
    for (int j = 0; along && j < i; ++j) pairs.keys_along[i][j] = sum<Acc>(keys_along[i][j]);
    for (int j = 0; along && j <= i; ++j) pairs.queries_along[i][j] = sum<Acc>(queries_along[i][j]);
  }
  return !(At::kDecayed && sum<Acc>(largest) > 0);
}

template <class Acc>
void make_terms(const Weights<Acc>& w, bool per_head, bool along, int64_t block) {
  constexpr int C = kBlockTokens;
  BlockTerms<Acc>& terms = w.terms[block];
  terms.pairs = w.pairs[block];
  terms.whole = 1;
  for (int i = 0; i < C; ++i) {
    terms.beta[i] = w.beta[block * C + i];
    terms.from_start[i] = terms.asked_from_start[i] = terms.to_end[i] = 1;
  }
  if (!per_head) return;
  for (int i = 0; i < C; ++i) {
    const Acc before = terms.whole;
    terms.whole *= w.decay[block * C + i];
    terms.from_start[i] = terms.whole;
    terms.asked_from_start[i] = along ? before : terms.whole;
  }
  for (int j = 0; j < C; ++j) {
    Acc between = 1;
    for (int i = j + 1; i < C; ++i) {
      const Acc before = between;
      between *= w.decay[block * C + i];
      const Acc asked = along ? before : between;
      terms.pairs.keys[i][j] *= asked;
      terms.pairs.keys_along[i][j] *= asked;
      terms.pairs.queries[i][j] *= between;
      terms.pairs.queries_along[i][j] *= between;
    }
    terms.to_end[j] = between;
  }
}

// The weights of the segment's tokens, in the order of time: a sweep backwards takes the segments
// from the last on, each as a segment forwards. Returns false if a decay would grow.
template <class Acc>
bool stage_weights(const DeltaRuleProblem& p, Decays decays, const Segment& segment,
                   Weights<Acc>& w) {
  const int64_t blocks = blocks_of(segment), padded = blocks * kBlockTokens;
  const Segment of_q = of_shared_head(segment, p.q_group),
                of_k = of_shared_head(segment, p.k_group);
  const typename Weights<Acc>::Origin o{segment.batch, segment.first, of_q.head, of_k.head},
      &was = w.origin;
  const bool per_channel = decays == Decays::per_channel, erases = p.erase_key.data;
  bool valid = true;
  if (per_channel || erases || o.batch != was.batch || o.first != was.first ||
      o.q_head != was.q_head || o.k_head != was.k_head) {
    w.origin = o;
    WeightRows<Acc> rows{
        find_rows<Acc>(p.dtype, of_q, {p.q, RowsPer::token, 0, p.K}, {w.q, w.stride}),
        find_rows<Acc>(p.dtype, of_k, {p.k, RowsPer::token, 0, p.K}, {w.k, w.stride}),
        {}};
    if (per_channel) {
      rows.log_decay =
          find_rows<Acc>(segment, {p.log_decay, RowsPer::token, 0, p.K}, {w.log_decay, w.stride});
    }
    if (erases) {
      rows.erase_key =
          find_rows<Acc>(segment, {p.erase_key, RowsPer::token, 0, p.K}, {w.erase_key, w.stride});
    }
    if (p.add_along.data) {
      rows.add_along =
          find_rows<Acc>(segment, {p.add_along, RowsPer::token, 0, p.K}, {w.add_along, w.stride});
    }
    find_factors<Acc>(rows.q, padded, p.K, p.normalize_qk, static_cast<Acc>(p.scale), w.q_factor);
    find_factors<Acc>(rows.k, padded, p.K, p.normalize_qk, 1, w.k_factor);
    // Without decays in the tiles, and where no erase key asks, these are the same for all rules.
    with_rule(per_channel ? Decays::per_channel : Decays::none, erases ? asks_of(p) : Asks::key,
              [&](auto rule) {
                for (int64_t block = 0; block < blocks; ++block) {
                  valid &= make_block<decltype(rule)>(w, rows, block);
                }
              });
  }
  stage_token_scalars<Acc>(segment, p.beta, p.beta.data ? 0 : 1, w.beta);
  if (decays == Decays::per_head) valid &= stage_decay<Acc>(segment, p.log_decay, w.decay);
  for (int64_t block = 0; block < blocks; ++block) {
    make_terms<Acc>(w, decays == Decays::per_head, p.add_along.data, block);
  }
  return valid;
}

}  // namespace
}  // namespace hfla::HFLA_ISA
