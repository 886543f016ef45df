// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What goes from chunk to chunk, in the words of known_chunk.cuh. A block has a sequence, a head
// and 64 columns of its state; each of its four warps has 16 of them, and needs no other for a
// chunk. It computes all transposed, columns before tokens and channels, so that accumulators are
// operands of the next product as they are: the state stays in registers, and so does all that
// follows from it.
#pragma once

#include "cuda/delta_rule/known_loader.cuh"

namespace hfla::cuda {

template <int K>
class KnownWalk {
  using Operands = Bf16Operands;
  using Stage = KnownStage<K>;
  static constexpr int C = kKnownTokens, kBlocks = KnownUnits::kBlocks;
  using Tokens = float[C / 8][4];  // 16 columns of all tokens
  using OfTokens = Operands::A[kBlocks];

 public:
  DEV explicit KnownWalk(const KnownDeltaRule& p)
      : p_(p),
        g_(lane().g),
        t_(lane().t),
        part_(thread_index() / 32 * 16),
        first_column_(block_index() % column_blocks(p) * kKnownColumns),
        head_(block_index() / column_blocks(p) % p.Hkv),
        sequence_(block_index() / column_blocks(p) / p.Hkv),
        chunks_(p.pieces.num_pieces(sequence_)),
        loader_(p, sequence_, head_, first_column_) {}

  DEV void run() {
    const bool has_columns = first_column_ + part_ < p_.V;
    if (chunks_ > 0) loader_.start(0);
    if (has_columns) load_state();
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      loader_.wait();
      sync_block();
      if (chunk + 1 < chunks_) loader_.start(chunk + 1);
      if (has_columns) visit(loader_.stage(chunk), chunk);
    }
    if (has_columns) store_state();
  }

 private:
  DEV static int64_t column_blocks(const KnownDeltaRule& p) {
    return (p.V + kKnownColumns - 1) / kKnownColumns;
  }

  // ---- the state ----

  // The element i of tile n.
  DEV int64_t in_states(int n, int i) const {
    const int64_t channel = 8 * n + 2 * t_ + i % 2;
    return ((sequence_ * p_.Hkv + head_) * K + channel) * p_.V + first_column_ + part_ + g_ +
           i / 2 * 8;
  }
  DEV void load_state() {
    const float* const from = static_cast<const float*>(p_.initial_state);
    UNROLL
    for (int n = 0; n < K / 8; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) state_[n][i] = from ? from[in_states(n, i)] : 0;
    }
  }
  DEV void store_state() const {
    float* const to = static_cast<float*>(p_.result.state);
    UNROLL
    for (int n = 0; n < K / 8; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) to[in_states(n, i)] = state_[n][i];
    }
  }

  // ---- a chunk ----

  DEV void visit(const Stage& chunk, int64_t index) {
    Tokens values = {}, out = {};
    read_state(chunk, values, out);
    subtract_from_values(chunk, values);
    find_errors(chunk, values);
    if (p_.result.errors.data) store_errors(values, index);
    scale(out, chunk.units.from_of_queries());
    add_triangle(out, chunk.units.a(), values);
    store(out, index);
    scale(values, chunk.units.to_of_keys());
    write_state(chunk, values);
  }

  // of_keys = K S, of_queries = Q S.
  DEV void read_state(const Stage& chunk, Tokens& of_keys, Tokens& of_queries) const {
    UNROLL
    for (int k = 0; k < K; k += Operands::kDepth) {
      const Operands::A state = Operands::from_accumulators(state_ + k / 8);
      UNROLL
      for (int n = 0; n < C / 8; n += 2) {
        Operands::B b[2];
        Operands::load_b_transposed(b, chunk.k, k, 8 * n);
        Operands::multiply(of_keys[n], state, b[0]);
        Operands::multiply(of_keys[n + 1], state, b[1]);
        Operands::load_b_transposed(b, chunk.q, k, 8 * n);
        Operands::multiply(of_queries[n], state, b[0]);
        Operands::multiply(of_queries[n + 1], state, b[1]);
      }
    }
  }

  // values = V - f ∘ values.
  DEV void subtract_from_values(const Stage& chunk, Tokens& values) const {
    const int lane = thread_index() % 32;
    UNROLL
    for (int n = 0; n < C / 8; n += 2) {
      uint32_t v[4];  // of tiles n and n + 1, columns g and g + 8
      load_matrices<true>(v,
                          chunk.v.at(8 * n + lane % 8 + lane / 16 * 8, part_ + lane / 8 % 2 * 8));
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const auto f = numbers(chunk.units.from_of_keys(), n + i / 2);
        float* const x = values[n + i / 2] + i % 2 * 2;
        x[0] = get<BFloat16>(v[i], 0) - f.get(0) * x[0];
        x[1] = get<BFloat16>(v[i], 1) - f.get(1) * x[1];
      }
    }
  }

  // values = M values.
  DEV static void find_errors(const Stage& chunk, Tokens& values) {
    Tokens errors = {};
    add_triangle(errors, chunk.units.m(), values);
    UNROLL
    for (int n = 0; n < C / 8; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) values[n][i] = errors[n][i];
    }
  }

  // sums += a lower triangle times values.
  DEV static void add_triangle(Tokens& sums, const TriangleBlock* triangle, const Tokens& values) {
    OfTokens a;
    make_operands(a, values);
    UNROLL
    for (int row = 0; row < kBlocks; ++row) {
      UNROLL
      for (int column = 0; column <= row; ++column) {
        const TriangleBlock b = triangle[KnownUnits::at(row, column)];
        Operands::multiply(sums[2 * row], a[column], b.first());
        Operands::multiply(sums[2 * row + 1], a[column], b.second());
      }
    }
  }

  // S' = from_C S + Kᵀ values.
  DEV void write_state(const Stage& chunk, const Tokens& values) {
    OfTokens a;
    make_operands(a, values);
    const float whole = *chunk.units.whole();
    UNROLL
    for (int n = 0; n < K / 8; n += 2) {
      float sums[2][4] = {};
      UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        Operands::B b[2];
        Operands::load_b(b, chunk.k, block * kBlockTokens, 8 * n);
        Operands::multiply(sums[0], a[block], b[0]);
        Operands::multiply(sums[1], a[block], b[1]);
      }
      UNROLL
      for (int i = 0; i < 8; ++i) {
        float& x = state_[n + i / 4][i % 4];
        x = whole * x + sums[i / 4][i % 4];
      }
    }
  }

  DEV static void make_operands(OfTokens& a, const Tokens& values) {
    UNROLL
    for (int i = 0; i < kBlocks; ++i) a[i] = Operands::from_accumulators(values + 2 * i);
  }

  // ---- tokens ----

  // Of the thread's two in a tile.
  DEV Run<float, 2> numbers(const float* of_tokens, int tile) const {
    return *reinterpret_cast<const Run<float, 2>*>(of_tokens + 8 * tile + 2 * t_);
  }
  DEV void scale(Tokens& values, const float* of_tokens) const {
    UNROLL
    for (int n = 0; n < C / 8; ++n) {
      const auto factors = numbers(of_tokens, n);
      UNROLL
      for (int i = 0; i < 4; ++i) values[n][i] *= factors.get(i % 2);
    }
  }

  // The warp's columns of a chunk's first token.
  template <class T>
  DEV T* row_of(const View& view, int64_t index) const {
    const int64_t batch = p_.pieces.cu_seqlens ? 0 : sequence_;
    const int64_t t = p_.pieces.sequence_begin(sequence_) + index * C;
    return static_cast<T*>(view.data) + batch * view.batch + t * view.time + head_ * view.head +
           first_column_ + part_;
  }

  // By pairs of columns, for which tiles are transposed.
  DEV void store(const Tokens& values, int64_t index) const {
    BFloat16* row = row_of<BFloat16>(p_.result.y, index) + g_ * p_.result.y.time + 2 * t_;
    const int tokens = loader_.tokens_of(index);
    UNROLL
    for (int n = 0; n < C / 8; ++n, row += 8 * p_.result.y.time) {
      const uint32_t low = transpose_matrix(to_bf16_pair(values[n][0], values[n][1]));
      const uint32_t high = transpose_matrix(to_bf16_pair(values[n][2], values[n][3]));
      if (8 * n + g_ >= tokens) continue;
      *reinterpret_cast<uint32_t*>(row) = low;
      *reinterpret_cast<uint32_t*>(row + 8) = high;
    }
  }

  DEV void store_errors(const Tokens& values, int64_t index) const {
    float* row = row_of<float>(p_.result.errors, index) + g_;
    const int tokens = loader_.tokens_of(index);
    UNROLL
    for (int n = 0; n < C / 8; ++n) {
      UNROLL
      for (int i = 0; i < 2; ++i) {
        const int token = 8 * n + 2 * t_ + i;
        if (token >= tokens) continue;
        float* const to = row + token * p_.result.errors.time;
        to[0] = values[n][i], to[8] = values[n][2 + i];
      }
    }
  }

  const KnownDeltaRule& p_;
  const int g_, t_, part_;  // the warp's first column, of the block's
  const int64_t first_column_, head_, sequence_, chunks_;
  KnownLoader<K> loader_;
  float state_[K / 8][4];
};

template <int K>
KERNEL LAUNCH_BOUNDS(kKnownThreads, 2)
    delta_known_outputs_kernel(const GRID_CONSTANT KnownDeltaRule p) {
  KnownWalk<K>(p).run();
}

}  // namespace hfla::cuda
