// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What tokens of a chunk are to each other, all chunks at a time (known_chunk.cuh). A block has a
// chunk and a head, and each of its four warps 16 tokens' rows of Q Kᵀ and K Kᵀ, up to the
// diagonal. Products are of keys and queries as they are in memory, so that they are exact; norms,
// which are the diagonals, decays and strengths are multiplied with them in float32.
#pragma once

#include "cuda/delta_rule/inverse.cuh"
#include "cuda/delta_rule/known_chunk.cuh"

namespace hfla::cuda {

template <int K>
struct KnownPrepareShared {
  static constexpr int C = kKnownTokens;
  using Matrix = Inverse<C>::Matrix;
  KnownRows<K> q, k;
  Matrix n, inverse;           // in place of them, afterwards
  float *decay, *beta;         // (C,)
  float *q_factor, *k_factor;  // (C,): s and r
  float* within;               // (C, 16): from a token of its block, a column, to a token, a row
  int64_t bytes;

  BOTH explicit KnownPrepareShared(SharedCarver carver) {
    SharedCarver again = carver;
    carver.take_tile(q, C);
    carver.take_tile(k, C);
    again.take_tile(n, C);
    again.take_tile(inverse, C);
    if (again.used() > carver.used()) carver.take<char>(again.used() - carver.used());
    decay = carver.take<float>(C);
    beta = carver.take<float>(C);
    q_factor = carver.take<float>(C);
    k_factor = carver.take<float>(C);
    within = carver.take<float>(C * kBlockTokens);
    bytes = carver.used();
  }
};

template <int K>
class KnownPrepare {
  using Operands = Bf16Operands;
  static constexpr int C = kKnownTokens, kBlock = kBlockTokens, kBlocks = Triangle::kBlocks;
  using Block = float[2][4];  // 16 x 16, in the layout of accumulators

 public:
  DEV explicit KnownPrepare(const KnownDeltaRule& p)
      : p_(p),
        shared_(SharedCarver(shared_memory())),
        warp_(thread_index() / 32),
        g_(lane().g),
        t_(lane().t),
        head_(block_index() % p.Hkv),
        chunk_(block_index() / p.Hkv),
        piece_(find_piece(p.pieces, chunk_)),
        key_unit_(p.key_unit(chunk_, head_)),
        query_unit_(p.query_unit(chunk_, head_)) {}

  DEV void run() {
    if (piece_.sequence < 0) return;
    load();
    sync_block();
    multiply_decays();
    multiply_rows();
    keep_factors();
    sync_block();  // all have done with keys and queries
    store_numbers();
    store_scores();
    Inverse<C>::find(shared_.n, shared_.inverse);
    sync_block();
    store_inverse();
  }

 private:
  DEV void load() {
    CopyGroups copies;
    const int tokens = int(piece_.end - piece_.begin);
    const RowCopies<K, kKnownThreads> rows(thread_index());
    const auto start = [&](const KnownRows<K>& to, const View& x, int64_t head) {
      rows.start(copies, to,
                 at_piece<const BFloat16>(x, piece_, head) + rows.row * x.time + rows.column,
                 x.time, tokens);
    };
    start(shared_.q, p_.q, head_ / p_.q_group);
    start(shared_.k, p_.k, head_ / p_.k_group);
    copies.close();
    const int token = thread_index();
    if (token < C) {
      const bool there = token < tokens;
      const float* const g = at_piece<const float>(p_.log_decay, piece_, head_);
      const float* const beta = at_piece<const float>(p_.beta, piece_, head_);
      shared_.decay[token] = there && p_.log_decay.data ? expf(g[token * p_.log_decay.time]) : 1;
      shared_.beta[token] = there && p_.beta.data ? beta[token * p_.beta.time] : 1;
    }
    copies.wait<0>();
  }

  // ---- decays ----

  // A thread has those from its token on.
  DEV void multiply_decays() const {
    const int token = thread_index(), j = token % kBlock;
    if (token >= C) return;
    float decay = 1;
    UNROLL
    for (int i = 0; i < kBlock; ++i) {
      if (i < j) continue;
      if (i > j) decay *= shared_.decay[token - j + i];
      shared_.within[(token - j + i) * kBlock + j] = decay;
    }
  }

  // From before the token's block, and to its end; of a whole block.
  DEV float from(int token) const {
    return shared_.decay[token / kBlock * kBlock] * shared_.within[token * kBlock];
  }
  DEV float to(int token) const {
    return shared_.within[(token | (kBlock - 1)) * kBlock + token % kBlock];
  }
  DEV float of_block(int block) const { return from(block * kBlock + kBlock - 1); }
  DEV float of_blocks(int begin, int end) const {
    float decay = 1;
    UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if (begin <= block && block < end) decay *= of_block(block);
    }
    return decay;
  }

  DEV void store_numbers() const {
    const int token = thread_index(), block = token / kBlock;
    if (token >= C) return;
    const float from = of_blocks(0, block) * this->from(token);
    const float to = of_blocks(block + 1, kBlocks) * this->to(token);
    key_unit_.from()[token] = from * shared_.k_factor[token];
    query_unit_.from()[token] = from * shared_.q_factor[token];
    key_unit_.to()[token] = to * shared_.k_factor[token] * shared_.beta[token];
    if (token == 0) *key_unit_.whole() = of_blocks(0, kBlocks);
  }

  // ---- products ----

  DEV void multiply_rows() {
    const int row = warp_ * kBlock;
    UNROLL
    for (int k = 0; k < K; k += Operands::kDepth) {
      const Operands::A of_q = Operands::load_a(shared_.q, row, k);
      const Operands::A of_k = Operands::load_a(shared_.k, row, k);
      Operands::B b[2];
      UNROLL
      for (int block = 0; block < kBlocks - 1; ++block) {
        if (block >= warp_) continue;
        Operands::load_b_transposed(b, shared_.k, k, block * kBlock);
        add(scores_[block], of_q, b);
        add(keys_[block], of_k, b);
      }
      Operands::load_b_transposed(b, shared_.k, k, row);
      add(own_scores_, of_q, b);
      add(own_keys_, of_k, b);
      if (!p_.normalize_qk) continue;
      Operands::load_b_transposed(b, shared_.q, k, row);
      add(own_queries_, of_q, b);
    }
  }
  DEV static void add(Block& sums, const Operands::A& a, const Operands::B (&b)[2]) {
    Operands::multiply(sums[0], a, b[0]);
    Operands::multiply(sums[1], a, b[1]);
  }

  // From the diagonals, of which a lane in four has two tokens.
  DEV void keep_factors() const {
    if (g_ / 2 != t_) return;
    UNROLL
    for (int half = 0; half < 2; ++half) {
      const int token = warp_ * kBlock + g_ + 8 * half;
      const auto factor = [&](const Block& products) {
        const float* const pair = products[half] + 2 * half;
        const float square = g_ % 2 == 0 ? pair[0] : pair[1];
        return p_.normalize_qk ? 1 / sqrtf(square + float(kNormEps)) : 1;
      };
      shared_.q_factor[token] = factor(own_queries_) * float(p_.scale);
      shared_.k_factor[token] = factor(own_keys_);
    }
  }

  // A' to device memory, N β to shared memory.
  DEV void store_scores() {
    UNROLL
    for (int block = 0; block < kBlocks - 1; ++block) {
      if (block >= warp_) continue;
      const float between = of_blocks(block + 1, warp_);
      store_block(block, scores_[block], keys_[block],
                  [&](int row, int column) { return between * from(row) * to(column); });
    }
    store_block(warp_, own_scores_, own_keys_, [&](int row, int column) {
      return shared_.within[row * kBlock + column % kBlock];
    });
  }

  template <class Decay>
  DEV void store_block(int block, Block& scores, Block& keys, Decay between) const {
    UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = row_of(i), column = block * kBlock + 8 * tile + 2 * t_ + i % 2;
        const float decay = between(row, column) * shared_.k_factor[column] * shared_.beta[column];
        scores[tile][i] = row < column ? 0 : decay * shared_.q_factor[row] * scores[tile][i];
        keys[tile][i] = row <= column ? 0 : decay * shared_.k_factor[row] * keys[tile][i];
      }
    }
    query_unit_.a().set(warp_, block, scores);
    UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      const int column = block * kBlock + 8 * tile + 2 * t_;
      const float first[2] = {keys[tile][0], keys[tile][1]};
      const float second[2] = {keys[tile][2], keys[tile][3]};
      shared_.n.set_run(row_of(0), column, first);
      shared_.n.set_run(row_of(2), column, second);
    }
  }

  DEV void store_inverse() const {
    UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if (block > warp_) continue;
      Block m;
      UNROLL
      for (int tile = 0; tile < 2; ++tile) {
        UNROLL
        for (int i = 0; i < 4; ++i) {
          m[tile][i] = shared_.inverse.get(row_of(i), block * kBlock + 8 * tile + 2 * t_ + i % 2);
        }
      }
      key_unit_.m().set(warp_, block, m);
    }
  }

  DEV int row_of(int i) const { return warp_ * kBlock + g_ + i / 2 * 8; }

  const KnownDeltaRule& p_;
  const KnownPrepareShared<K> shared_;
  const int warp_, g_, t_;
  const int64_t head_, chunk_;
  const Piece piece_;
  const KeyUnit key_unit_;
  const QueryUnit query_unit_;
  Block scores_[kBlocks - 1] = {}, keys_[kBlocks - 1] = {};
  Block own_scores_ = {}, own_keys_ = {}, own_queries_ = {};
};

template <int K>
KERNEL LAUNCH_BOUNDS(kKnownThreads, 4)
    delta_known_prepare_kernel(const GRID_CONSTANT KnownDeltaRule p) {
  KnownPrepare<K>(p).run();
}

}  // namespace hfla::cuda
