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
// per channel, or summed over channels. With an erase key p, as it asks before the decay,
// from_{i-1} and between_{i-1,j} are in m_i, p_i is in the place of k_i beside P_ij, dk = p, and
// the gradient of what asks is -m; k_i ∘ m_i is no part of dg_i, and dg_{i+1} - p_{i+1} ∘ m_{i+1}
// is in the place of dg_{i+1}. As a_i is in p_i where there is no b, p_i ∘ m_i is part of dg_i
// there. So no sum goes further than a chunk. Where a decay is 0, so is its gradient, exactly, and
// the sum starts afresh.
//
// A block has a chunk and a head, and goes over 32 channels at a time (tokens.cuh), for each over
// 32 columns of values at a time.
#pragma once

#include "cuda/delta_rule/token_gradients_base.cuh"

namespace hfla::cuda {

template <class Scalar, bool erases>
class TokenGradients : TokenGradientsBase<Scalar, erases> {
  using Base = TokenGradientsBase<Scalar, erases>;
  using Base::C, Base::kBlock, Base::p_, Base::shared_, Base::warp_, Base::lane_, Base::head_,
      Base::piece_;
  using typename Base::Element, typename Base::OwnChannel;
  using Operands = typename Chunk<Scalar>::Operands;
  static constexpr bool kTwice = Slab<Scalar, erases>::kTwice;
  static constexpr int kTiles = kSlabChannels / 8;
  using Sums = float[kTiles][4];  // of a warp's tokens, by 32 channels

 public:
  DEV explicit TokenGradients(const DeltaRuleChunks& p) : Base(p) {}

  DEV void run() {
    if (piece_.sequence < 0) return;
    load_token_numbers<Scalar>(p_, piece_, head_, shared_.numbers);
    if (thread_index() < C) {
      shared_.head_sums[thread_index()] = shared_.beta_dots[thread_index()] = 0;
      if (erases) shared_.head_asks[thread_index()] = 0;
    }
    if (thread_index() == 0) *shared_.head_end = 0;
    sync_block();
    find_scores();
    for (int64_t first = 0; first < p_.K; first += kSlabChannels) visit_channels(first);
    sync_block();
    if (p_.gradients.dbeta.data) this->store_numbers(p_.gradients.dbeta, shared_.beta_dots);
    if (p_.gradients.dlog_decay.data && !p_.decay_per_channel) this->store_head_decays();
  }

 private:
  // ---- dA and P ----

  // What others read of them they read after another barrier.
  DEV void find_scores() const {
    float da[C / 8][4] = {}, p[C / 8][4] = {};
    for (int64_t column = 0; column < p_.V; column += kSlabColumns) {
      this->load_columns(column, true);
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
    const Slab<Scalar, erases>& slab = shared_.slab;
    slab.load(p_, piece_, head_, first, shared_.numbers);
    slab.decay_block();
    sync_block();
    slab.decay_to_the_middle();
    Sums of_q = {}, of_m = {}, of_p = {};
    for (int64_t column = 0; column < p_.V; column += kSlabColumns) {
      this->load_columns(column, false);
      this->load_states(first, column);
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
    for (int i = 0; i < kBlock; ++i) {  // dq is now the part of the decay's gradient, m what asks
      const int token = warp_ * kBlock + i;
      const float read = slab.q.get(token, lane_) * dq[i], key = slab.k.get(token, lane_);
      if constexpr (erases) {
        const float asked = slab.erase.get(token, lane_) * m[i];
        dq[i] = read - key * p[i] - (p_.add_along.data ? 0 : asked);
        m[i] = p_.add_along.data ? asked : 0;
      } else {
        dq[i] = read - key * (p[i] + m[i]);
      }
    }
    if (p_.decay_per_channel) {
      this->store_channel_decays(first, dq, m);
    } else {
      this->add_head_decays(dq, m);
    }
  }

  // What a warp's tokens have of earlier blocks' keys, and `sums` of the state before all, but for
  // the decay within their block.
  template <class Weights>
  DEV void meet_earlier(Sums& sums, const Weights& weights) const {
    const auto add = [&](Sums& to, int earlier) {
      const int row = Slab<Scalar, erases>::row_of_earlier(warp_, earlier);
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
      const int row = Slab<Scalar, erases>::row_of_later(later, warp_);
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
    const Slab<Scalar, erases>& slab = shared_.slab;
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
    const Slab<Scalar, erases>& slab = shared_.slab;
    const int first = warp_ * kBlock;
    const auto weight = [&](const auto& tile, int i, int j) {
      return tile.get(first + i, first + j);
    };
    float from = 1, to = 1;
    UNROLL
    for (int i = 0; i < kBlock; ++i) {
      if (erases) m[i] *= from;
      from *= slab.a.get(first + i, lane_);
      dq[i] *= from;
      if (!erases) m[i] *= from;
    }
    UNROLL
    for (int j = kBlock - 1; j >= 0; --j) {
      p[j] *= to;
      to *= slab.a.get(first + j, lane_);
    }
    // Weights above the diagonal are zero. Pairs come one by one, and not all at once: there are
    // registers for the sums alone.
    NO_UNROLL
    for (int j = 0; j < kBlock; ++j) {
      float key = slab.k.get(first + j, lane_);
      UNROLL
      for (int i = 0; i < kBlock; ++i) {
        if (erases) m[i] += weight(shared_.p, i, j) * key;
        if (i > j) key *= slab.a.get(first + i, lane_);
        dq[i] += weight(shared_.da, i, j) * key;
        if (!erases) m[i] += weight(shared_.p, i, j) * key;
      }
    }
    NO_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      float query = slab.q.get(first + i, lane_), key = slab.asking().get(first + i, lane_);
      UNROLL
      for (int j = kBlock - 1; j >= 0; --j) {
        if (j < i) {
          const float decay = slab.a.get(first + j + 1, lane_);
          query *= decay;
          if (!erases || j + 1 < i) key *= decay;
        }
        p[j] += weight(shared_.da, i, j) * query - weight(shared_.p, i, j) * key;
      }
    }
  }

  DEV void store(int64_t channel, const OwnChannel& dq, const OwnChannel& m,
                 const OwnChannel& p) const {
    if (channel + lane_ >= p_.K) return;
    UNROLL
    for (int i = 0; i < kBlock; ++i) {
      const int step = warp_ * kBlock + i;
      const int64_t t = piece_.begin + this->token_of(step);
      if (t >= piece_.end) continue;
      if constexpr (erases) {
        if (p_.part_of(step) == 0) store_erasing(channel, step, m[i], p[i]);
        if (p_.part_of(step) != p_.steps() - 1) continue;
      }
      const int64_t at = ((piece_.batch * p_.T + t) * p_.Hkv + head_) * p_.K + channel + lane_;
      p_.dq[at] = dq[i];
      p_.dk[at] = erases ? p[i] : p[i] - m[i];
    }
  }
  DEV void store_erasing(int64_t channel, int step, float m, float p) const {
    const auto store = [&](const View& to, float x) {
      const int64_t at = p_.token_of(step) * to.time + (channel + lane_) * to.dim;
      at_piece<float>(to, piece_, head_)[at] = x;
    };
    const bool along = p_.add_along.data;
    store(p_.gradients.derase_key, along ? m : -shared_.slab.a.get(step, lane_) * m);
    if (along) store(p_.gradients.dadd_along, p);
  }
};

template <class Scalar, bool erases>
KERNEL LAUNCH_BOUNDS(Chunk<Scalar>::kThreads, 2)
    delta_token_gradients_kernel(const GRID_CONSTANT DeltaRuleChunks p) {
  TokenGradients<Scalar, erases>(p).run();
}

}  // namespace hfla::cuda
