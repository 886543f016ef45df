// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What tokens of a chunk are to each other, all chunks at a time (fixed_size_chunk.cuh). A block
// has a chunk and a head, and each of its four warps 16 tokens' rows of Q Kᵀ and K Kᵀ, up to the
// diagonal. Products are of keys and queries as they are in memory, so that they are exact; norms,
// which are the diagonals, decays and strengths are multiplied with them in float32.
#pragma once

#include "cuda/delta_rule/fixed_size_decays.cuh"
#include "cuda/delta_rule/inverse.cuh"

namespace hfla::cuda {

template <int K>
struct FixedSizePrepareShared {
  static constexpr int C = kFixedSizeTokens;
  using Matrix = Inverse<C>::Matrix;
  FixedSizeRows<K> q, k;
  Matrix n, inverse;  // in place of them, afterwards
  FixedSizeDecays decays;
  float* beta;             // (C,)
  float *q_norm, *k_norm;  // (C,): what q and k are multiplied with, but for the scale
  int64_t bytes;

  BOTH explicit FixedSizePrepareShared(SharedCarver carver) {
    SharedCarver again = carver;
    carver.take_tile(q, C);
    carver.take_tile(k, C);
    again.take_tile(n, C);
    again.take_tile(inverse, C);
    if (again.used() > carver.used()) carver.take<char>(again.used() - carver.used());
    decays.decay = carver.take<float>(C);
    decays.within = carver.take<float>(FixedSizeDecays::kWithin);
    beta = carver.take<float>(C);
    q_norm = carver.take<float>(C);
    k_norm = carver.take<float>(C);
    bytes = carver.used();
  }
};

template <int K, bool backward>
class FixedSizePrepare {
  using Operands = Bf16Operands;
  static constexpr int C = kFixedSizeTokens, kBlock = kBlockTokens, kBlocks = Triangle::kBlocks;
  using Block = float[2][4];  // 16 x 16, in the layout of accumulators

 public:
  DEV explicit FixedSizePrepare(const FixedSizeDeltaRule& p)
      : p_(p),
        shared_(SharedCarver(shared_memory())),
        warp_(thread_index() / 32),
        g_(lane().g),
        t_(lane().t),
        head_(int(block_index()) % int(p.Hkv)),
        chunk_(int(block_index()) / int(p.Hkv)),
        piece_(find_piece(p.pieces, chunk_)),
        key_unit_(p.key_unit(chunk_, head_)),
        query_unit_(p.query_unit(chunk_, head_)) {}

  DEV void run() {
    if (piece_.sequence < 0) return;
    load();
    sync_block();
    shared_.decays.multiply(thread_index());
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
    const RowCopies<K, kFixedSizeThreads> rows(thread_index());
    const auto start = [&](const FixedSizeRows<K>& to, const View& x, int64_t head) {
      rows.start(copies, to,
                 at_piece<const BFloat16>(x, piece_, head) + rows.row * x.time + rows.column,
                 x.time, tokens);
    };
    start(shared_.q, p_.q, head_ / int(p_.q_group));
    start(shared_.k, p_.k, head_ / int(p_.k_group));
    copies.close();
    const int token = thread_index();
    if (token < C) {
      const bool there = token < tokens;
      const float* const g = at_piece<const float>(p_.log_decay, piece_, head_);
      const float* const beta = at_piece<const float>(p_.beta, piece_, head_);
      shared_.decays.decay[token] =
          there && p_.log_decay.data ? expf(g[token * p_.log_decay.time]) : 1;
      shared_.beta[token] = there && p_.beta.data ? beta[token * p_.beta.time] : 1;
    }
    copies.wait<0>();
  }

  DEV void store_numbers() const {
    const int token = thread_index();
    if (token >= C) return;
    const FixedSizeDecays& decays = shared_.decays;
    const float from = decays.from_begin(token), to = decays.to_end(token);
    const float q_norm = shared_.q_norm[token], k_norm = shared_.k_norm[token];
    key_unit_.from()[token] = from * k_norm;
    query_unit_.from()[token] = from * q_norm * float(p_.scale);
    key_unit_.to()[token] = to * k_norm * shared_.beta[token];
    if (token == 0) *key_unit_.whole() = decays.whole();
    if (!backward) return;
    const TokenUnit unit = p_.token_unit(chunk_, head_);
    unit.decay()[token] = decays.decay[token], unit.beta()[token] = shared_.beta[token];
    unit.q_norm()[token] = q_norm, unit.k_norm()[token] = k_norm;
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
      shared_.q_norm[token] = factor(own_queries_);
      shared_.k_norm[token] = factor(own_keys_);
    }
  }

  // A' to device memory, N β to shared memory.
  DEV void store_scores() {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(2 * half);
      q_rows_[half] = shared_.q_norm[row] * float(p_.scale), k_rows_[half] = shared_.k_norm[row];
    }
    UNROLL
    for (int block = 0; block < kBlocks - 1; ++block) {
      if (block < warp_) store_block<false>(block, scores_[block], keys_[block]);
    }
    store_block<true>(warp_, own_scores_, own_keys_);
  }

  template <bool own>
  DEV void store_block(int block, Block& scores, Block& keys) const {
    float decays[2][4];
    shared_.decays.template find_pairs<own>(decays, warp_, block);
    UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      UNROLL
      for (int side = 0; side < 2; ++side) {
        const int column = block * kBlock + 8 * tile + 2 * t_ + side;
        const float of_column = shared_.k_norm[column] * shared_.beta[column];
        UNROLL
        for (int i = side; i < 4; i += 2) {
          const int row = row_of(i);
          const float decay = decays[tile][i] * of_column;
          scores[tile][i] = row < column ? 0 : decay * q_rows_[i / 2] * scores[tile][i];
          keys[tile][i] = row <= column ? 0 : decay * k_rows_[i / 2] * keys[tile][i];
        }
      }
    }
    query_unit_.a().template set<backward>(warp_, block, scores);
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
      key_unit_.m().template set<backward>(warp_, block, m);
    }
  }

  DEV int row_of(int i) const { return warp_ * kBlock + g_ + i / 2 * 8; }

  const FixedSizeDeltaRule& p_;
  const FixedSizePrepareShared<K> shared_;
  const int warp_, g_, t_, head_, chunk_;
  const Piece piece_;
  const KeyUnit key_unit_;
  const QueryUnit query_unit_;
  Block scores_[kBlocks - 1] = {}, keys_[kBlocks - 1] = {};
  Block own_scores_ = {}, own_keys_ = {}, own_queries_ = {};
  float q_rows_[2], k_rows_[2];  // what the lane's two rows are multiplied with
};

template <int K, bool backward>
KERNEL LAUNCH_BOUNDS(kFixedSizeThreads, 4)
    delta_fixed_size_prepare_kernel(const GRID_CONSTANT FixedSizeDeltaRule p) {
  FixedSizePrepare<K, backward>(p).run();
}

}  // namespace hfla::cuda
