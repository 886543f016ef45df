// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The gradients of q, k, β and the decay, all chunks at a time, from what the walks left: S before
// every chunk, dS' after it, E, and W = dv. In the words of token_gradients.cuh, but that rows of q
// and k are as they are in memory, multiplied with s and r only afterwards, and that p stands for
// the gradient of β k, of which β's follows where it is 0, too:
//
//     dA = tril(dy Eᵀ)   X_ij = s_i dA_ij between_ij r_j     P = W Eᵀ below the diagonal
//                        Y_ij = r_i  P_ij between_ij r_j
//     a_i = s_i from_i S dy_i  + Σ_{j≤i} X_ij β_j k_j              is s dq
//     b_i = r_i from_i S W_i   + Σ_{j<i} Y_ij β_j k_j              is r m
//     c_j = r_j to_j   dS' E_j + Σ_{i≥j} X_ij q_i - Σ_{i>j} Y_ij k_i   is r p
//     d = β c - b        dβ_j = ⟨k_j, c_j⟩
//     dg_i = dg_{i+1} + ⟨q_i, a_i⟩ - ⟨k_i, β_i c_i + b_i⟩
//
// and after the last token Σ S' ∘ dS' = from_C Σ S ∘ dS' + Σ_j β_j ⟨k_j, r_j to_j dS' E_j⟩.
// Through the norm, with r of q and k each, x' = a - r² ⟨a, q⟩ q and d - r² ⟨d, k⟩ k.
//
// A block has a chunk and a head, a warp 16 of its tokens and half of the channels. Columns of
// values come 32 at a time, in a ring.
#pragma once

#include "cuda/delta_rule/fixed_size_decays.cuh"
#include "cuda/delta_rule/fixed_size_tokens.cuh"

namespace hfla::cuda {

constexpr int kFixedSizeGradientThreads = 256;

// 32 columns, or 16.
template <int K>
struct GradientStage {
  static constexpr int kColumns = 32, kBlocks = kColumns / 16;
  using Rows = FixedSizeRows<kColumns>;
  static constexpr int kStateWords = kBlocks * K / 16 * 32;
  static constexpr int kStateBytes = kStateWords * int(sizeof(LaneWords));
  static constexpr int kBytes = 2 * kStateBytes + 3 * Rows::kBytes;
  LaneWords *state, *gradient;
  Rows dy, w, errors;

  DEV explicit GradientStage(char* at)
      : state(reinterpret_cast<LaneWords*>(at)),
        gradient(state + kStateWords),
        dy{reinterpret_cast<BFloat16*>(gradient + kStateWords)},
        w{dy.data + Rows::kBytes / 2},
        errors{w.data + Rows::kBytes / 2} {}
};

// Numbers of a token in the gradients of β and the decay, of half of the channels.
struct alignas(16) TokenDots {
  float qa, kb, kc, kc_of_state;
};

template <int K>
struct GradientShared {
  static constexpr int C = kFixedSizeTokens, kStages = 3;
  using Weights = Tile<BFloat16, C, C>;
  FixedSizeRows<K> q, k;
  char* stages;
  Weights x, y;                    // in place of stages, afterwards: X and Y times β
  Weights x_of_write, y_of_write;  // X and -Y
  TokenUnit numbers;
  float* within;
  TokenDots* dots;    // (2, C), by halves of the channels
  float* state_dots;  // (warps,): parts of Σ S ∘ dS'
  int64_t bytes;

  BOTH explicit GradientShared(SharedCarver carver) {
    carver.take_tile(q, C);
    carver.take_tile(k, C);
    SharedCarver again = carver;
    stages = carver.take<char>(kStages * GradientStage<K>::kBytes);
    again.take_tile(x, C);
    again.take_tile(y, C);
    again.take_tile(x_of_write, C);
    again.take_tile(y_of_write, C);
    static_assert(kStages * GradientStage<K>::kBytes >= 4 * Weights::kBytes);
    numbers.data = carver.take<float>(TokenUnit::kBytes / int64_t(sizeof(float)));
    within = carver.take<float>(FixedSizeDecays::kWithin);
    dots = carver.take<TokenDots>(2 * C);
    state_dots = carver.take<float>(kFixedSizeGradientThreads / 32);
    bytes = carver.used();
  }
};

template <int K>
class FixedSizeTokenGradients {
  using Operands = Bf16Operands;
  using Shared = GradientShared<K>;
  using Stage = GradientStage<K>;
  static constexpr int C = kFixedSizeTokens, kBlock = kBlockTokens, kBlocks = C / kBlock;
  static constexpr int kThreads = kFixedSizeGradientThreads, kChannels = K / 2;
  using Scores = float[2][2][4];         // 16 x 16, of every second block of columns
  using Sums = float[kChannels / 8][4];  // of the warp's tokens and channels

 public:
  DEV explicit FixedSizeTokenGradients(const FixedSizeDeltaRule& p)
      : p_(p),
        shared_(SharedCarver(shared_memory())),
        decays_{shared_.numbers.decay(), shared_.within},
        group_(thread_index() / 32 % kBlocks),
        half_(thread_index() / 32 / kBlocks),
        row_(group_ * kBlock),
        channel_(half_ * kChannels),
        head_(int(block_index()) % int(p.Hkv)),
        chunk_(int(block_index()) / int(p.Hkv)),
        piece_(find_piece(p.pieces, chunk_)),
        tokens_(int(piece_.end - piece_.begin)) {}

  DEV void run() {
    if (piece_.sequence < 0 || tokens_ <= 0) return;
    const int slabs = int((p_.V + Stage::kColumns - 1) / Stage::kColumns);
    start_rows();
    UNROLL
    for (int slab = 0; slab < Shared::kStages - 1; ++slab) start_slab(slab, slabs);
    NO_UNROLL
    for (int slab = 0; slab < slabs; ++slab) {
      copies_.wait<Shared::kStages - 2>();
      sync_block();
      start_slab(slab + Shared::kStages - 1, slabs);
      visit_slab(stage(slab), p_.V - slab * Stage::kColumns > kBlock);
    }
    decays_.multiply(thread_index());
    sync_block();  // all have done with the stages
    store_weights();
    scale_by_decays();
    TokenDots dots[2] = {};
    for_each_pair(shared_.k, [&](int half, const float* k, int i, int n) {
      dots[half].kc_of_state += k[0] * c_[n][i] + k[1] * c_[n][i + 1];
    });
    sync_block();
    meet_earlier();
    meet_later();
    store_dots(dots);
    sync_block();
    store_gradients();
    if (thread_index() < 32) store_numbers();
  }

 private:
  // ---- loads ----

  DEV Stage stage(int slab) const {
    return Stage(shared_.stages + slab % Shared::kStages * Stage::kBytes);
  }

  // Queries, keys and numbers; they arrive with the first columns.
  DEV void start_rows() {
    const RowCopies<K, kThreads> rows(thread_index());
    const auto start = [&](const FixedSizeRows<K>& to, const View& x, int64_t head) {
      rows.start(copies_, to,
                 at_piece<const BFloat16>(x, piece_, head) + rows.row * x.time + rows.column,
                 x.time, tokens_);
    };
    start(shared_.q, p_.q, head_ / int(p_.q_group));
    start(shared_.k, p_.k, head_ / int(p_.k_group));
    start_copies<TokenUnit::kBytes, kThreads>(copies_, shared_.numbers.data,
                                              p_.token_unit(chunk_, head_).data, thread_index());
  }

  DEV void start_slab(int slab, int slabs) {
    if (slab < slabs) {
      const Stage to = stage(slab);
      const RowCopies<Stage::kColumns, kThreads> rows(thread_index());
      const int64_t column = int64_t(slab) * Stage::kColumns;
      const bool is_whole = p_.V - column > kBlock;
      const auto start = [&](LaneWords* words, LaneWords* all) {
        const LaneWords* const from = p_.state_words<K>(all, chunk_, head_, column);
        UNROLL
        for (int i = 0; i < Stage::kStateWords; i += kThreads) {
          const int at = i + thread_index();
          if (is_whole || at < Stage::kStateWords / 2) copies_.copy(words + at, from + at);
        }
      };
      start(to.state, p_.states);
      start(to.gradient, p_.state_gradients);
      if (is_whole || rows.column < kBlock) {
        const int64_t c = column + rows.column;
        const View &dy = p_.upstream.dy, &w = p_.gradients.dv;
        rows.start(copies_, to.dy,
                   at_piece<const BFloat16>(dy, piece_, head_) + rows.row * dy.time + c, dy.time,
                   tokens_);
        rows.start(copies_, to.w,
                   at_piece<const BFloat16>(w, piece_, head_) + rows.row * w.time + c, w.time,
                   tokens_);
        rows.start(copies_, to.errors, p_.errors_of(chunk_, head_) + rows.row * p_.V + c, p_.V, C);
      }
    }
    copies_.close();
  }

  // ---- products over columns ----

  DEV void visit_slab(const Stage& from, bool is_whole) {
    UNROLL
    for (int block = 0; block < Stage::kBlocks; ++block) {
      if (block > 0 && !is_whole) break;
      const int column = block * kBlock;
      const Operands::A dy = Operands::load_a(from.dy, row_, column);
      const Operands::A w = Operands::load_a(from.w, row_, column);
      const Operands::A errors = Operands::load_a(from.errors, row_, column);
      UNROLL
      for (int i = 0; i < 2; ++i) {
        if (half_ + 2 * i > group_) continue;
        Operands::B b[2];
        Operands::load_b_transposed(b, from.errors, column, (half_ + 2 * i) * kBlock);
        add(of_y_[i], dy, b);
        add(of_w_[i], w, b);
      }
      // Every block of S and dS' is met by four warps, of which one multiplies the two.
      const bool meets = group_ == block;
      UNROLL
      for (int n = 0; n < kChannels / 16; ++n) {
        const int at = (block * (K / 16) + half_ * (kChannels / 16) + n) * 32 + thread_index() % 32;
        const LaneWords s = from.state[at], d = from.gradient[at];
        const Operands::B of_s[2] = {{{s.x[0], s.x[1]}}, {{s.x[2], s.x[3]}}};
        const Operands::B of_d[2] = {{{d.x[0], d.x[1]}}, {{d.x[2], d.x[3]}}};
        UNROLL
        for (int i = 0; i < 2; ++i) {
          Operands::multiply(a_[2 * n + i], dy, of_s[i]);
          Operands::multiply(b_[2 * n + i], w, of_s[i]);
          Operands::multiply(c_[2 * n + i], errors, of_d[i]);
        }
        if (meets) add(states_, {{s.x[0], s.x[2], s.x[1], s.x[3]}}, of_d);
      }
    }
  }
  DEV static void add(float (&sums)[2][4], const Operands::A& a, const Operands::B (&b)[2]) {
    Operands::multiply(sums[0], a, b[0]);
    Operands::multiply(sums[1], a, b[1]);
  }

  // ---- products over tokens ----

  DEV void store_weights() {
    const TokenUnit& numbers = shared_.numbers;
    const auto [g, t] = lane();
    float q_rows[2], k_rows[2];
    UNROLL
    for (int half = 0; half < 2; ++half) {
      q_rows[half] = numbers.q_norm()[row_ + g + 8 * half] * float(p_.scale);
      k_rows[half] = numbers.k_norm()[row_ + g + 8 * half];
    }
    UNROLL
    for (int n = 0; n < 2; ++n) {
      const int block = half_ + 2 * n;
      if (block > group_) continue;
      float decays[2][4];
      if (block < group_) decays_.template find_pairs<false>(decays, group_, block);
      if (block == group_) decays_.template find_pairs<true>(decays, group_, block);
      UNROLL
      for (int tile = 0; tile < 2; ++tile) {
        const int column = block * kBlock + 8 * tile + 2 * t;
        const auto norms = two_of(numbers.k_norm() + column),
                   beta = two_of(numbers.beta() + column);
        UNROLL
        for (int half = 0; half < 2; ++half) {
          const int row = row_ + g + 8 * half;
          float x[2], y[2];
          UNROLL
          for (int i = 0; i < 2; ++i) {
            const float decay = decays[tile][2 * half + i] * norms.get(i);
            const float of_x = decay * q_rows[half] * of_y_[n][tile][2 * half + i];
            const float of_y = decay * k_rows[half] * of_w_[n][tile][2 * half + i];
            x[i] = row < column + i ? 0 : of_x, y[i] = row <= column + i ? 0 : of_y;
          }
          shared_.x_of_write.template set_run<2>(row, column, x);
          shared_.y_of_write.template set_run<2>(row, column, {-y[0], -y[1]});
          UNROLL
          for (int i = 0; i < 2; ++i) x[i] *= beta.get(i), y[i] *= beta.get(i);
          shared_.x.template set_run<2>(row, column, x);
          shared_.y.template set_run<2>(row, column, y);
        }
      }
    }
  }
  DEV static Run<float, 2> two_of(const float* x) {
    return *reinterpret_cast<const Run<float, 2>*>(x);
  }

  // What came of states, by the decays and norms of the lane's two tokens.
  DEV void scale_by_decays() {
    const TokenUnit& numbers = shared_.numbers;
    const float before = decays_.of_blocks(0, group_);
    const float behind = decays_.of_blocks(group_ + 1, kBlocks);
    UNROLL
    for (int half = 0; half < 2; ++half) {
      const int token = row_ + lane().g + 8 * half;
      const float k_norm = numbers.k_norm()[token], from = before * decays_.from(token);
      const float of_a = from * numbers.q_norm()[token] * float(p_.scale);
      const float of_b = from * k_norm, of_c = behind * decays_.to(token) * k_norm;
      UNROLL
      for (int n = 0; n < kChannels / 8; ++n) {
        UNROLL
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          a_[n][i] *= of_a, b_[n][i] *= of_b, c_[n][i] *= of_c;
        }
      }
    }
  }

  DEV void meet_earlier() {
    UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if (block > group_) break;
      const Operands::A x = Operands::load_a(shared_.x, row_, block * kBlock);
      const Operands::A y = Operands::load_a(shared_.y, row_, block * kBlock);
      UNROLL
      for (int n = 0; n < kChannels / 8; n += 2) {
        Operands::B k[2];
        Operands::load_b(k, shared_.k, block * kBlock, channel_ + 8 * n);
        UNROLL
        for (int i = 0; i < 2; ++i) {
          Operands::multiply(a_[n + i], x, k[i]);
          Operands::multiply(b_[n + i], y, k[i]);
        }
      }
    }
  }

  DEV void meet_later() {
    UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      if (block < group_) continue;
      const Operands::A x = load_a_transposed<Operands>(shared_.x_of_write, row_, block * kBlock);
      const Operands::A y = load_a_transposed<Operands>(shared_.y_of_write, row_, block * kBlock);
      UNROLL
      for (int n = 0; n < kChannels / 8; n += 2) {
        Operands::B q[2], k[2];
        Operands::load_b(q, shared_.q, block * kBlock, channel_ + 8 * n);
        Operands::load_b(k, shared_.k, block * kBlock, channel_ + 8 * n);
        UNROLL
        for (int i = 0; i < 2; ++i) {
          Operands::multiply(c_[n + i], x, q[i]);
          Operands::multiply(c_[n + i], y, k[i]);
        }
      }
    }
  }

  // ---- results ----

  // Calls visit(half, the two numbers of `rows`, i, n) for elements i and i + 1 of all tiles n: of
  // the lane's first token, or (half 1) its second.
  template <class Visit>
  DEV void for_each_pair(const FixedSizeRows<K>& rows, Visit visit) const {
    UNROLL
    for (int n = 0; n < kChannels / 8; n += 2) {
      const Operands::A words = Operands::load_a(rows, row_, channel_ + 8 * n);
      UNROLL
      for (int word = 0; word < 4; ++word) {
        const float x[2] = {get<BFloat16>(words.x[word], 0), get<BFloat16>(words.x[word], 1)};
        visit(word % 2, x, word % 2 * 2, n + word / 2);
      }
    }
  }

  DEV void store_dots(TokenDots (&dots)[2]) const {
    for_each_pair(shared_.q, [&](int half, const float* q, int i, int n) {
      dots[half].qa += q[0] * a_[n][i] + q[1] * a_[n][i + 1];
    });
    for_each_pair(shared_.k, [&](int half, const float* k, int i, int n) {
      dots[half].kb += k[0] * b_[n][i] + k[1] * b_[n][i + 1];
      dots[half].kc += k[0] * c_[n][i] + k[1] * c_[n][i + 1];
    });
    const auto [g, t] = lane();
    UNROLL
    for (int half = 0; half < 2; ++half) {
      TokenDots& x = dots[half];
      for (int lanes = 1; lanes < 4; lanes *= 2) {
        x.qa += shuffle_xor(x.qa, lanes), x.kb += shuffle_xor(x.kb, lanes);
        x.kc += shuffle_xor(x.kc, lanes);
        x.kc_of_state += shuffle_xor(x.kc_of_state, lanes);
      }
      if (t == 0) shared_.dots[half_ * C + row_ + g + 8 * half] = x;
    }
    // The diagonals, of which a lane in four has two elements.
    float sum = g / 2 != t   ? 0
                : g % 2 == 0 ? states_[0][0] + states_[1][2]
                             : states_[0][1] + states_[1][3];
    for (int lanes = 1; lanes < 32; lanes *= 2) sum += shuffle_xor(sum, lanes);
    if (thread_index() % 32 == 0) shared_.state_dots[thread_index() / 32] = sum;
  }

  DEV TokenDots dots_of(int token) const {
    const TokenDots x = shared_.dots[token], y = shared_.dots[C + token];
    return {x.qa + y.qa, x.kb + y.kb, x.kc + y.kc, x.kc_of_state + y.kc_of_state};
  }

  DEV void store_gradients() {
    const TokenUnit& numbers = shared_.numbers;
    const float through = p_.normalize_qk ? -1 : 0;
    float of_q[2], of_k[2], beta[2];
    UNROLL
    for (int half = 0; half < 2; ++half) {
      const int token = row_ + lane().g + 8 * half;
      const TokenDots dots = dots_of(token);
      const float q_norm = numbers.q_norm()[token], k_norm = numbers.k_norm()[token];
      beta[half] = numbers.beta()[token];
      of_q[half] = through * q_norm * q_norm * dots.qa;
      of_k[half] = through * k_norm * k_norm * (beta[half] * dots.kc - dots.kb);
    }
    for_each_pair(shared_.q, [&](int half, const float* q, int i, int n) {
      a_[n][i] += of_q[half] * q[0], a_[n][i + 1] += of_q[half] * q[1];
    });
    for_each_pair(shared_.k, [&](int half, const float* k, int i, int n) {
      c_[n][i] = beta[half] * c_[n][i] - b_[n][i] + of_k[half] * k[0];
      c_[n][i + 1] = beta[half] * c_[n][i + 1] - b_[n][i + 1] + of_k[half] * k[1];
    });
    store(p_.gradients.dq, p_.q_group, p_.dq, a_);
    store(p_.gradients.dk, p_.k_group, p_.dk, c_);
  }

  // To the result, or, for a head that shares its row with others, where they are summed up.
  DEV void store(const View& result, int64_t group, float* shared, const Sums& x) const {
    const int first = row_ + lane().g, c = channel_ + 2 * lane().t;
    if (shared) {
      const int64_t time = piece_.batch * p_.T + piece_.begin + first;
      store_rows(shared + (time * p_.Hkv + head_) * K + c, p_.Hkv * K,
                 [&](float* to, int n, int i) {
                   *reinterpret_cast<Run<float, 2>*>(to + 8 * n) = {{x[n][i], x[n][i + 1]}};
                 });
    } else {
      BFloat16* const row = at_piece<BFloat16>(result, piece_, head_ / int(group));
      store_rows(row + first * result.time + c, result.time, [&](BFloat16* to, int n, int i) {
        *reinterpret_cast<uint32_t*>(to + 8 * n) = to_bf16_pair(x[n][i], x[n][i + 1]);
      });
    }
  }
  // Calls visit(row, n, i) for elements i and i + 1 of all tiles n, of the lane's two tokens.
  template <class T, class Visit>
  DEV void store_rows(T* row, int64_t stride, Visit visit) const {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      if (row_ + lane().g + 8 * half >= tokens_) return;
      UNROLL
      for (int n = 0; n < kChannels / 8; ++n) visit(row, n, 2 * half);
      row += 8 * stride;
    }
  }

  // Gradients of β and the decay, which a warp sums up from the last token on, two to a lane. Where
  // a decay is 0 the sum starts afresh.
  DEV void store_numbers() const {
    const int lane = thread_index() % 32;
    float x[2], end = 0, sum = 0;
    bool is_reset[2], was_reset = false;
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const int token = C - 1 - 2 * lane - i;
      const TokenDots dots = dots_of(token);
      const float beta = shared_.numbers.beta()[token];
      store_number(p_.gradients.dbeta, token, dots.kc);
      end += beta * dots.kc_of_state;
      x[i] = dots.qa - beta * dots.kc - dots.kb;
      is_reset[i] = shared_.numbers.decay()[token] == 0;
      sum = is_reset[i] ? 0 : sum + x[i];
      was_reset = was_reset || is_reset[i];
    }
    const View& to = p_.gradients.dlog_decay;
    if (!to.data) return;
    for (int lanes = 1; lanes < 32; lanes *= 2) end += shuffle_xor(end, lanes);
    float of_states = 0;
    UNROLL
    for (int warp = 0; warp < kThreads / 32; ++warp) of_states += shared_.state_dots[warp];
    end += decays_.whole() * of_states;
    // Of all lanes up to this one.
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const float before = shuffle_up(sum, lanes);
      const int reset_before = shuffle_up(int(was_reset), lanes);
      if (lane < lanes) continue;
      if (!was_reset) sum += before;
      was_reset = was_reset || reset_before;
    }
    const float before = shuffle_up(sum, 1);
    const int reset_before = shuffle_up(int(was_reset), 1);
    sum = lane == 0 ? end : reset_before ? before : before + end;
    UNROLL
    for (int i = 0; i < 2; ++i) {
      sum = is_reset[i] ? 0 : sum + x[i];
      store_number(to, C - 1 - 2 * lane - i, sum);
    }
  }
  DEV void store_number(const View& to, int token, float x) const {
    if (!to.data || token >= tokens_) return;
    at_piece<float>(to, piece_, head_)[token * to.time] = x;
  }

  const FixedSizeDeltaRule& p_;
  const Shared shared_;
  const FixedSizeDecays decays_;
  const int group_, half_, row_, channel_;  // the warp's tokens and channels, and the first of each
  const int head_, chunk_;
  const Piece piece_;
  const int tokens_;
  CopyGroups copies_;
  Scores of_y_ = {}, of_w_ = {};
  Sums a_ = {}, b_ = {}, c_ = {};
  float states_[2][4] = {};  // S ∘ dS', summed up in its diagonals
};

template <int K>
KERNEL LAUNCH_BOUNDS(kFixedSizeGradientThreads, 1)
    delta_fixed_size_token_gradients_kernel(const GRID_CONSTANT FixedSizeDeltaRule p) {
  FixedSizeTokenGradients<K>(p).run();
}

}  // namespace hfla::cuda
