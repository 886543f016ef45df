// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Backward, all chunks at a time: the gradients of q, k, β and the decay, from what the walks left:
// S before every chunk, dS' after it, and D, of which W = β D. With the letters of chunk.cuh,
//
//     dA = tril(dy Uᵀ)      P = W Uᵀ below the diagonal, which is -dN
//     dq_i = from_i ∘ S dy_i   + Σ_{j≤i} dA_ij between_ij ∘ k_j
//     m_i  = from_i ∘ S W_i    + Σ_{j<i} P_ij  between_ij ∘ k_j
//     p_j  = to_j   ∘ dS' U_j  + Σ_{i≥j} dA_ij between_ij ∘ q_i - Σ_{i>j} P_ij between_ij ∘ k_i
//     dk = p - m            dβ_i = ⟨E_i, D_i⟩
//     dg_i = dg_{i+1} + q_i ∘ dq_i - k_i ∘ (p_i + m_i),   after the last token Σ_columns S' ∘ dS'
//
// per channel, or summed over channels. So no sum goes further than a chunk. Where a decay is 0, so
// is its gradient, exactly, and the sum starts afresh.
//
// A block has a chunk and a head, and goes over 32 channels at a time (tokens.cuh), for each over
// 32 columns of values at a time.
#pragma once

#include "cuda/delta_rule/tokens.cuh"

namespace hfla::cuda {

constexpr int kSlabColumns = 32;

template <class Scalar>
struct TokenGradientsShared {
  static constexpr int C = Chunk<Scalar>::C, kBlocks = Chunk<Scalar>::kBlocks;
  using Element = typename Chunk<Scalar>::Element;
  TokenNumbers numbers;
  Slab<Scalar> slab;
  Tile<Element, C, C> da, p;
  Tile<Element, C, kSlabColumns> dy, w, u;                     // of 32 columns
  Tile<Element, kSlabChannels, kSlabColumns> state, gradient;  // S and dS', of 32 channels
  FloatRows rows;     // in place of dy and w, when these are no longer needed
  float* end_dots;    // (32,): Σ_columns S' ∘ dS'
  float* sums;        // (blocks, 32): a block's part of the decay's gradient
  float* resets;      // (blocks, 32): 1 if the sum starts afresh in the block
  float* head_sums;   // (C,): a token's part, of all channels
  float* beta_dots;   // (C,)
  float* head_end;    // (1,): end_dots of all channels
  int64_t bytes;

  BOTH explicit TokenGradientsShared(SharedCarver carver) : numbers(carver, C), slab(carver) {
    carver.take_tile(da, C);
    carver.take_tile(p, C);
    SharedCarver again = carver;
    carver.take_tile(dy, C);
    carver.take_tile(w, C);
    rows.data = again.take<float>(C * FloatRows::kStride);
    if (again.used() > carver.used()) carver.take<char>(again.used() - carver.used());
    carver.take_tile(u, C);
    carver.take_tile(state, kSlabChannels);
    carver.take_tile(gradient, kSlabChannels);
    end_dots = carver.take<float>(kSlabChannels);
    sums = carver.take<float>(kBlocks * kSlabChannels);
    resets = carver.take<float>(kBlocks * kSlabChannels);
    head_sums = carver.take<float>(C);
    beta_dots = carver.take<float>(C);
    head_end = carver.take<float>(1);
    bytes = carver.used();
  }
};

template <class Scalar>
class TokenGradients {
  using Operands = typename Chunk<Scalar>::Operands;
  using Element = typename Chunk<Scalar>::Element;
  using Shared = TokenGradientsShared<Scalar>;
  static constexpr int C = Chunk<Scalar>::C, kBlocks = Chunk<Scalar>::kBlocks;
  static constexpr int kThreads = Chunk<Scalar>::kThreads, kBlock = kBlockTokens;
  static constexpr bool kTwice = Slab<Scalar>::kTwice;
  static constexpr int kTiles = kSlabChannels / 8;
  using Sums = float[kTiles][4];     // of a warp's tokens, by 32 channels
  using OwnChannel = float[kBlock];  // of a warp's tokens, for the lane's channel

 public:
  DEV explicit TokenGradients(const DeltaRuleChunks& p)
      : p_(p),
        shared_(SharedCarver(shared_memory())),
        warp_(thread_index() / 32),
        lane_(thread_index() % 32),
        head_(block_index() % p.Hkv),
        chunk_(block_index() / p.Hkv),
        piece_(find_piece(p.pieces, chunk_)) {}

  DEV void run() {
    if (piece_.sequence < 0) return;
    load_token_numbers<Scalar>(p_, piece_, head_, shared_.numbers);
    if (thread_index() < C) {
      shared_.head_sums[thread_index()] = shared_.beta_dots[thread_index()] = 0;
    }
    if (thread_index() == 0) *shared_.head_end = 0;
    sync_block();
    find_scores();
    for (int64_t first = 0; first < p_.K; first += kSlabChannels) visit_channels(first);
    sync_block();
    if (p_.gradients.dbeta.data) store_numbers(p_.gradients.dbeta, shared_.beta_dots);
    if (p_.gradients.dlog_decay.data && !p_.decay_per_channel) store_head_decays();
  }

 private:
  // ---- loads of 32 columns ----

  // dy, W and U. Adds to beta_dots if `first_time`.
  DEV void load_columns(int64_t column, bool first_time) const {
    const int64_t c = column + lane_;
    const Scalar* const dy = at_piece<const Scalar>(p_.upstream.dy, piece_, head_);
    const Scalar* const v = at_piece<const Scalar>(p_.v, piece_, head_);
    const float* const errors = at_piece<const float>(p_.upstream.errors, piece_, head_);
    const float* const d =
        p_.write_gradients +
        ((piece_.batch * p_.T + piece_.begin) * p_.Hkv + head_) * p_.V;
    UNROLL_BY(4)
    for (int token = warp_; token < C; token += kBlocks) {
      const bool there = c < p_.V && p_.present(piece_, token);
      float of_y = 0, of_write = 0, error = 0;
      if (there) {
        if (p_.upstream.dy.data) {
          of_y = to_float(dy[token * p_.upstream.dy.time + c * p_.upstream.dy.dim]);
        }
        of_write = d[token * p_.Hkv * p_.V + c];
        error = p_.delta ? errors[token * p_.upstream.errors.time + c * p_.upstream.errors.dim]
                         : to_float(v[token * p_.v.time + c * p_.v.dim]);
      }
      const float beta = shared_.numbers.beta[token];
      set(shared_.dy, token, of_y);
      set(shared_.w, token, beta * of_write);
      set(shared_.u, token, beta * error);
      if (!first_time) continue;
      float dot = error * of_write;
      for (int lanes = 16; lanes > 0; lanes /= 2) dot += shuffle_xor(dot, lanes);
      if (lane_ == 0) shared_.beta_dots[token] += dot;
    }
  }

  // S and dS' of 32 channels; adds to end_dots, which start with the first columns.
  DEV void load_states(int64_t channel, int64_t column) const {
    const int64_t size = p_.K * p_.V, here = p_.chunk_and_head(chunk_, head_);
    const int64_t last =
        p_.pieces.first_piece(piece_.sequence) + p_.pieces.num_pieces(piece_.sequence) - 1;
    const float* const states = p_.states + here * size;
    const float* const gradients = p_.state_gradients + here * size;
    const float* const after =
        chunk_ == last ? static_cast<const float*>(p_.upstream.state) +
                             p_.chunk_and_head(piece_.sequence, head_) * size
                       : states + p_.Hkv * size;
    const int64_t c = column + lane_;
    UNROLL_BY(4)
    for (int i = warp_; i < kSlabChannels; i += kBlocks) {
      const int64_t at = (channel + i) * p_.V + c;
      const bool there = channel + i < p_.K && c < p_.V;
      const float gradient = there ? gradients[at] : 0;
      set(shared_.state, i, there ? states[at] : 0);
      set(shared_.gradient, i, gradient);
      float dot = there ? after[at] * gradient : 0;
      for (int lanes = 16; lanes > 0; lanes /= 2) dot += shuffle_xor(dot, lanes);
      if (lane_ == 0) shared_.end_dots[i] = (column == 0 ? 0 : shared_.end_dots[i]) + dot;
    }
  }

  template <class Tile>
  DEV void set(const Tile& tile, int row, float x) const {
    tile.data[row * Tile::kStride + lane_] = from_float<Element>(x);
  }

  // ---- dA and P ----

  DEV void find_scores() const {
    float da[C / 8][4] = {}, p[C / 8][4] = {};
    for (int64_t column = 0; column < p_.V; column += kSlabColumns) {
      load_columns(column, true);
      sync_block();
      add_columns(da, shared_.dy, shared_.u);
      if (p_.delta) add_columns(p, shared_.w, shared_.u);
      sync_block();
    }
    const auto [g, t] = lane();
    UNROLL
    for (int n = 0; n < C / 8; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = warp_ * kBlock + g + i / 2 * 8, column = 8 * n + 2 * t + i % 2;
        const int at = row * decltype(shared_.p)::kStride + column;
        shared_.da.data[at] = from_float<Element>(row >= column ? da[n][i] : 0);
        shared_.p.data[at] = from_float<Element>(row > column ? p[n][i] : 0);
      }
    }
    sync_block();
  }

  // sums += the warp's rows of a, times bᵀ, of 32 columns.
  template <int n, class TileA, class TileB>
  DEV void add_columns(float (&sums)[n][4], const TileA& a, const TileB& b) const {
    add_product<Operands>(
        sums, kSlabColumns, [&](int k) { return Operands::load_a(a, warp_ * kBlock, k); },
        [&](auto& of_b, int k, int c) { Operands::load_b_transposed(of_b, b, k, c); });
  }

  // ---- 32 channels ----

  DEV void visit_channels(int64_t first) const {
    const Slab<Scalar>& slab = shared_.slab;
    slab.load(p_, piece_, head_, first, shared_.numbers);
    slab.decay_block();
    sync_block();
    slab.decay_to_the_middle();
    Sums of_q = {}, of_m = {}, of_p = {};
    for (int64_t column = 0; column < p_.V; column += kSlabColumns) {
      load_columns(column, false);
      load_states(first, column);
      sync_block();
      add_columns(of_q, shared_.dy, shared_.state);
      if (p_.delta) add_columns(of_m, shared_.w, shared_.state);
      add_columns(of_p, shared_.u, shared_.gradient);
      sync_block();
    }
    meet_earlier(of_q, shared_.da);
    if (p_.delta) meet_earlier(of_m, shared_.p);
    meet_later(of_p);
    OwnChannel dq, m, p;
    exchange(of_q, dq);
    exchange(of_m, m);
    exchange(of_p, p);
    meet_own_block(dq, m, p);
    store(first, dq, m, p);
    if (!p_.gradients.dlog_decay.data) return;
    UNROLL
    for (int i = 0; i < kBlock; ++i) {  // dq is now the part of the decay's gradient
      const int token = warp_ * kBlock + i;
      dq[i] = slab.q.get(token, lane_) * dq[i] - slab.k.get(token, lane_) * (p[i] + m[i]);
    }
    if (p_.decay_per_channel) {
      store_channel_decays(first, dq);
    } else {
      add_head_decays(dq);
    }
  }

  // What a warp's tokens have of earlier blocks' keys, and `sums` of the state before all, but for
  // the decay within their block.
  template <class Weights>
  DEV void meet_earlier(Sums& sums, const Weights& weights) const {
    const auto add = [&](Sums& to, int earlier) {
      const int row = Slab<Scalar>::row_of_earlier(warp_, earlier);
      add_product<Operands>(
          to, kBlock,
          [&](int k) { return Operands::load_a(weights, warp_ * kBlock, earlier * kBlock + k); },
          [&](auto& b, int k, int c) { Operands::load_b(b, shared_.slab.k_columns, row + k, c); });
    };
    Sums near = {}, far = {};
    if (warp_ % 2 == 1) add(near, warp_ - 1);
    if (kTwice && warp_ >= 2) add(far, 0), add(far, 1);
    join(sums, near, far, warp_ == 3 ? 2 : -1, true);
  }

  // What a warp's keys have of later blocks' rows, and `sums` of the gradient after all.
  DEV void meet_later(Sums& sums) const {
    const auto add = [&](Sums& to, int later, const auto& weights, const auto& rows) {
      const int row = Slab<Scalar>::row_of_later(later, warp_);
      add_product<Operands>(
          to, kBlock,
          [&](int k) {
            return load_a_transposed<Operands>(weights, warp_ * kBlock, later * kBlock + k);
          },
          [&](auto& b, int k, int c) { Operands::load_b(b, rows, row + k, c); });
    };
    const auto add_both = [&](Sums& to, int later) {
      add(to, later, shared_.da, shared_.slab.q_rows);
      if (!p_.delta) return;
      Sums taken = {};
      add(taken, later, shared_.p, shared_.slab.k_rows);
      UNROLL
      for (int n = 0; n < kTiles; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) to[n][i] -= taken[n][i];
      }
    };
    Sums near = {}, far = {};
    if (warp_ % 2 == 0) add_both(near, warp_ + 1);
    if (kTwice && warp_ < 2) add_both(far, 2), add_both(far, 3);
    join(sums, near, far, warp_ == 0 ? 1 : -1, false);
  }

  // sums = near + far decayed over a block (-1: none) + sums decayed over all blocks on this side.
  DEV void join(Sums& sums, const Sums& near, const Sums& far, int over, bool before) const {
    const Slab<Scalar>& slab = shared_.slab;
    UNROLL
    for (int n = 0; n < kTiles; ++n) {
      UNROLL
      for (int side = 0; side < 2; ++side) {
        const int c = 8 * n + 2 * lane().t + side;
        const float of_far = kTwice && over >= 0 ? slab.whole_of(over, c) : 1;
        const float of_all = before ? slab.before(warp_, c) : slab.behind(warp_, c);
        UNROLL
        for (int i = side; i < 4; i += 2) {
          sums[n][i] = near[n][i] + of_far * far[n][i] + of_all * sums[n][i];
        }
      }
    }
  }

  // From the layout of products to that of channels.
  DEV void exchange(const Sums& sums, OwnChannel& own) const {
    const auto [g, t] = lane();
    UNROLL
    for (int n = 0; n < kTiles; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) {
        shared_.rows.at(warp_ * kBlock + g + i / 2 * 8, 8 * n + 2 * t + i % 2) = sums[n][i];
      }
    }
    sync_block();
    UNROLL
    for (int i = 0; i < kBlock; ++i) own[i] = shared_.rows.get(warp_ * kBlock + i, lane_);
    sync_block();
  }

  // Decays what came from outside of the block within it, and adds what comes from inside.
  DEV void meet_own_block(OwnChannel& dq, OwnChannel& m, OwnChannel& p) const {
    const Slab<Scalar>& slab = shared_.slab;
    const int first = warp_ * kBlock;
    const auto weight = [&](const auto& tile, int i, int j) { return tile.get(first + i, first + j); };
    float from = 1, to = 1;
    UNROLL
    for (int i = 0; i < kBlock; ++i) {
      from *= slab.a.get(first + i, lane_);
      dq[i] *= from, m[i] *= from;
    }
    UNROLL
    for (int j = kBlock - 1; j >= 0; --j) {
      p[j] *= to;
      to *= slab.a.get(first + j, lane_);
    }
    UNROLL
    for (int j = 0; j < kBlock; ++j) {
      float key = slab.k.get(first + j, lane_);
      dq[j] += weight(shared_.da, j, j) * key;
      UNROLL
      for (int i = j + 1; i < kBlock; ++i) {
        key *= slab.a.get(first + i, lane_);
        dq[i] += weight(shared_.da, i, j) * key;
        m[i] += weight(shared_.p, i, j) * key;
      }
    }
    UNROLL
    for (int i = 0; i < kBlock; ++i) {
      float query = slab.q.get(first + i, lane_), key = slab.k.get(first + i, lane_);
      p[i] += weight(shared_.da, i, i) * query;
      UNROLL
      for (int j = i - 1; j >= 0; --j) {
        const float decay = slab.a.get(first + j + 1, lane_);
        query *= decay, key *= decay;
        p[j] += weight(shared_.da, i, j) * query - weight(shared_.p, i, j) * key;
      }
    }
  }

  DEV void store(int64_t channel, const OwnChannel& dq, const OwnChannel& m,
                 const OwnChannel& p) const {
    if (channel + lane_ >= p_.K) return;
    UNROLL
    for (int i = 0; i < kBlock; ++i) {
      const int64_t t = piece_.begin + warp_ * kBlock + i;
      if (t >= piece_.end) continue;
      const int64_t at =
          ((piece_.batch * p_.T + t) * p_.Hkv + head_) * p_.K + channel + lane_;
      p_.dq[at] = dq[i];
      p_.dk[at] = p[i] - m[i];
    }
  }

  // ---- the decay's gradient ----

  DEV void store_channel_decays(int64_t channel, const OwnChannel& parts) const {
    const Slab<Scalar>& slab = shared_.slab;
    const int first = warp_ * kBlock, own = warp_ * kSlabChannels + lane_;
    float sum = 0, reset = 0;
    UNROLL
    for (int i = kBlock - 1; i >= 0; --i) {
      sum += parts[i];
      if (slab.a.get(first + i, lane_) == 0) sum = 0, reset = 1;
    }
    shared_.sums[own] = sum, shared_.resets[own] = reset;
    sync_block();
    sum = shared_.end_dots[lane_];
    for (int block = kBlocks - 1; block > warp_; --block) {
      const int at = block * kSlabChannels + lane_;
      sum = shared_.sums[at] + (shared_.resets[at] != 0 ? 0 : sum);
    }
    const View& to = p_.gradients.dlog_decay;
    float* const rows = at_piece<float>(to, piece_, head_) + (channel + lane_) * to.dim;
    UNROLL
    for (int i = kBlock - 1; i >= 0; --i) {
      const int token = first + i;
      sum += parts[i];
      if (slab.a.get(token, lane_) == 0) sum = 0;
      if (channel + lane_ < p_.K && piece_.begin + token < piece_.end) {
        rows[token * to.time] = p_.present(piece_, token) ? sum : 0;
      }
    }
  }

  DEV void add_head_decays(const OwnChannel& parts) const {
    UNROLL
    for (int i = 0; i < kBlock; ++i) {
      float sum = parts[i];
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
      if (lane_ == 0) shared_.head_sums[warp_ * kBlock + i] += sum;
    }
    float end = shared_.end_dots[lane_];
    for (int lanes = 16; lanes > 0; lanes /= 2) end += shuffle_xor(end, lanes);
    if (thread_index() == 0) *shared_.head_end += end;
  }

  DEV void store_head_decays() const {
    if (thread_index() == 0) {
      float sum = *shared_.head_end;
      for (int token = C - 1; token >= 0; --token) {
        sum += shared_.head_sums[token];
        if (shared_.slab.a.get(token, 0) == 0) sum = 0;
        shared_.head_sums[token] = sum;
      }
    }
    sync_block();
    store_numbers(p_.gradients.dlog_decay, shared_.head_sums);
  }

  DEV void store_numbers(const View& to, const float* numbers) const {
    const int token = thread_index();
    if (token >= C || piece_.begin + token >= piece_.end) return;
    at_piece<float>(to, piece_, head_)[token * to.time] =
        p_.present(piece_, token) ? numbers[token] : 0;
  }

  const DeltaRuleChunks& p_;
  const Shared shared_;
  const int warp_, lane_;
  const int64_t head_, chunk_;
  const Piece piece_;
};

template <class Scalar>
KERNEL LAUNCH_BOUNDS(Chunk<Scalar>::kThreads, 2)
    delta_token_gradients_kernel(const GRID_CONSTANT DeltaRuleChunks p) {
  TokenGradients<Scalar>(p).run();
}

}  // namespace hfla::cuda
