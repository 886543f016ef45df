// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// A chunk's tokens in shared memory, for the kernels that take all chunks at a time: numbers of
// each token, and 32 channels of its q, k and decay.
//
// A warp has a block of 16 tokens, and each of its lanes a channel. Within a block decays are
// multiplied token by token; blocks meet by halves, as products of matrices: rows decayed from the
// bound between two halves, columns to it. Of 64 tokens, blocks 0 and 1 meet, and 2 and 3, and then
// the first two the last two. To the last bound block 0 is further than to its own, and block 3
// further from it; both are kept for either.
#pragma once

#include "cuda/delta_rule/chunk.cuh"

namespace hfla::cuda {

constexpr int kSlabChannels = 32;

// ---- numbers of tokens ----

struct TokenNumbers {
  float *q_factor, *k_factor;  // (C,): what q and k are multiplied with; 0 where there is no token
  float* beta;                 // (C,)

  BOTH TokenNumbers(SharedCarver& carver, int C)
      : q_factor(carver.take<float>(C)),
        k_factor(carver.take<float>(C)),
        beta(carver.take<float>(C)) {}
};

// Those of the warp's block.
template <class Scalar>
DEV void load_token_numbers(const DeltaRuleChunks& p, const Piece& piece, int64_t head,
                            const TokenNumbers& to) {
  const int lane = thread_index() % 32, first = thread_index() / 32 * kBlockTokens;
  const Scalar* const q = at_piece<const Scalar>(p.q, piece, head / p.q_group);
  const Scalar* const k = at_piece<const Scalar>(p.k, piece, head / p.k_group);
  constexpr int kTogether = 4;  // steps whose loads don't wait for each other
  NO_UNROLL
  for (int step = first; step < first + kBlockTokens; step += kTogether) {
    float squares[kTogether][2] = {};
    bool present[kTogether];
    UNROLL
    for (int i = 0; i < kTogether; ++i) present[i] = p.present(piece, step + i);
    for (int64_t c = lane; p.normalize_qk && c < p.K; c += 32) {
      UNROLL
      for (int i = 0; i < kTogether; ++i) {
        if (!present[i]) continue;
        const int token = p.token_of(step + i);
        const float x = to_float(q[token * p.q.time + c * p.q.dim]);
        const float y = to_float(k[token * p.k.time + c * p.k.dim]);
        squares[i][0] += x * x, squares[i][1] += y * y;
      }
    }
    UNROLL
    for (int i = 0; i < kTogether; ++i) {
      float factors[2];
      UNROLL
      for (int x = 0; x < 2; ++x) {
        for (int lanes = 16; lanes > 0; lanes /= 2) {
          squares[i][x] += shuffle_xor(squares[i][x], lanes);
        }
        factors[x] = p.normalize_qk ? 1 / sqrtf(squares[i][x] + float(kNormEps)) : 1;
      }
      if (lane != 0) continue;
      const bool reads = present[i] && p.part_of(step + i) == p.steps() - 1;
      to.q_factor[step + i] = reads ? factors[0] * float(p.scale) : 0;
      to.k_factor[step + i] = present[i] ? factors[1] : 0;
      const float* const beta = at_piece<const float>(p.beta, piece, head);
      to.beta[step + i] = !present[i]   ? 0
                          : p.beta.data ? beta[p.token_of(step + i) * p.beta.time]
                                        : 1;
    }
  }
}

// ---- 32 channels ----

// (C, 32) floats; rows are not a multiple of the banks, so that neither are columns.
struct FloatRows {
  static constexpr int kStride = kSlabChannels + 1;
  float* data;
  DEV float get(int token, int c) const { return data[token * kStride + c]; }
  DEV float& at(int token, int c) const { return data[token * kStride + c]; }
};

// `erases`: there is an erase key. All else is as without one.
template <class Scalar, bool erases>
struct Slab {
  using Element = typename Chunk<Scalar>::Element;
  static constexpr int C = Chunk<Scalar>::C, kBlocks = Chunk<Scalar>::kBlocks;
  static constexpr bool kTwice = kBlocks == 4;  // halves of halves
  static constexpr int kRows = kTwice ? C + kBlockTokens : C;
  using DecayedTile = Tile<Element, kRows, kSlabChannels>;

  FloatRows q, k, a;           // as they are used; zeros and a decay by 1 where there is no token
  FloatRows erase;             // before its token's decay; only with `erases`
  DecayedTile q_rows, k_rows;  // decayed from the bound before their block, or (from row C on,
                               // the last block) from the middle; k_rows of what asks
  DecayedTile k_columns;       // to the bound behind their block, or (the first) to the middle
  float* whole;                // (blocks, 32): a block's decay

  BOTH explicit Slab(SharedCarver& carver) {
    q.data = carver.take<float>(C * FloatRows::kStride);
    k.data = carver.take<float>(C * FloatRows::kStride);
    a.data = carver.take<float>(C * FloatRows::kStride);
    if (erases) erase.data = carver.take<float>(C * FloatRows::kStride);
    carver.take_tile(q_rows, kRows);
    carver.take_tile(k_rows, kRows);
    carver.take_tile(k_columns, kRows);
    whole = carver.take<float>(kBlocks * kSlabChannels);
  }

  // Of the warp's block, the thread's channel being the lane'th from `first` on.
  DEV void load(const DeltaRuleChunks& p, const Piece& piece, int64_t head, int64_t first,
                const TokenNumbers& numbers) const {
    const int lane = thread_index() % 32;
    const int64_t c = first + lane;
    const Scalar* const of_q = at_piece<const Scalar>(p.q, piece, head / p.q_group) + c * p.q.dim;
    const Scalar* const of_k = at_piece<const Scalar>(p.k, piece, head / p.k_group) + c * p.k.dim;
    const float* const g = at_piece<const float>(p.log_decay, piece, head) + c * p.log_decay.dim;
    UNROLL_BY(4)
    for (int i = 0; i < kBlockTokens; ++i) {
      const int step = thread_index() / 32 * kBlockTokens + i;
      const int token = erases ? p.token_of(step) : step;
      const bool there = c < p.K && p.present(piece, step);
      const bool is_first = !erases || p.part_of(step) == 0;
      q.at(step, lane) = there ? numbers.q_factor[step] * to_float(of_q[token * p.q.time]) : 0;
      k.at(step, lane) = there ? numbers.k_factor[step] * to_float(of_k[token * p.k.time]) : 0;
      const bool decays = there && is_first && p.log_decay.data;
      a.at(step, lane) = decays ? expf(g[token * p.log_decay.time]) : 1;
      if constexpr (erases) {
        load_erasing(p, piece, head, c, step, there && is_first);
      }
    }
  }

  // Of a step that does not ask, zero.
  DEV void load_erasing(const DeltaRuleChunks& p, const Piece& piece, int64_t head, int64_t c,
                        int step, bool asks) const {
    const int lane = thread_index() % 32, token = p.token_of(step);
    const auto number = [&](const View& of) {
      return at_piece<const float>(of, piece, head)[token * of.time + c * of.dim];
    };
    erase.at(step, lane) = !asks              ? 0
                           : p.add_along.data ? -number(p.erase_key)
                                              : a.get(step, lane) * number(p.erase_key);
    if (asks && p.add_along.data) k.at(step, lane) = number(p.add_along);
  }
  DEV const FloatRows& asking() const {  // but for the decay, which goes with k only
    if constexpr (erases) return erase;
    return k;
  }

  // Of the same. The block's decays are complete after the next barrier, and the rows for the
  // middle are missing.
  DEV void decay_block() const {
    const int c = thread_index() % 32, first = thread_index() / 32 * kBlockTokens;
    float from = 1, to = 1;
    UNROLL_BY(4)
    for (int i = first; i < first + kBlockTokens; ++i) from = set_rows(i, i, c, from);
    whole[first / kBlockTokens * kSlabChannels + c] = from;
    UNROLL_BY(4)
    for (int i = first + kBlockTokens - 1; i >= first; --i) {
      set(k_columns, i, c, to * k.get(i, c));
      to *= a.get(i, c);
    }
  }

  // After that barrier: what is decayed from and to the middle.
  DEV void decay_to_the_middle() const {
    if (!kTwice) return;
    const int c = thread_index() % 32, block = thread_index() / 32;
    if (block == 3) {
      float from = whole_of(2);
      for (int i = 0; i < kBlockTokens; ++i) {
        from = set_rows(C + i, 3 * kBlockTokens + i, c, from);
      }
    } else if (block == 0) {
      float to = whole_of(1);
      for (int i = kBlockTokens - 1; i >= 0; --i) {
        set(k_columns, C + i, c, to * k.get(i, c));
        to *= a.get(i, c);
      }
    }
  }

  // Of the thread's channel, or of channel c.
  DEV float whole_of(int block) const { return whole_of(block, thread_index() % 32); }
  DEV float whole_of(int block, int c) const { return whole[block * kSlabChannels + c]; }
  DEV float before(int block, int c) const { return product(0, block, c); }
  DEV float behind(int block, int c) const { return product(block + 1, kBlocks, c); }

  // The rows of the decayed tiles for a block that meets another, which comes before it.
  DEV static int row_of_later(int later, int earlier) {
    return kTwice && later == 3 && earlier < 2 ? C : later * kBlockTokens;
  }
  DEV static int row_of_earlier(int later, int earlier) {
    return kTwice && earlier == 0 && later > 1 ? C : earlier * kBlockTokens;
  }

 private:
  // Rows of a token, decayed from where `from` is 1. Returns what that is behind it.
  DEV float set_rows(int row, int token, int c, float from) const {
    const float after = from * a.get(token, c);
    set(q_rows, row, c, after * q.get(token, c));
    set(k_rows, row, c, (erases ? from : after) * asking().get(token, c));
    return after;
  }
  DEV static void set(const DecayedTile& tile, int row, int c, float x) {
    tile.data[row * DecayedTile::kStride + c] = from_float<Element>(x);
  }
  DEV float product(int first, int end, int c) const {
    float decay = 1;
    for (int block = first; block < end; ++block) decay *= whole_of(block, c);
    return decay;
  }
};

}  // namespace hfla::cuda
