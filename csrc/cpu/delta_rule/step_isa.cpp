// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// One token, with the state updated in place, or made of another. With a = e^g:
//
//     u = β (v - Sᵀ (a ∘ k)), or β v without delta
//     y = Sᵀ (a ∘ q) + (kᵀq) u
//     S = a ∘ S + k uᵀ
//
// with an erase key p in the place of k in u; or where what it finds is added along b
//
//     e = Sᵀ p    u = β v    y = Sᵀ (a ∘ q) + (kᵀq) u + (bᵀq) e    S = a ∘ S + k uᵀ + b eᵀ
//
// It moves far more bytes than it computes. A task, a batch row and a head, takes a few vectors of
// columns at a time: it reads them once for both products, and finds them in the cache when it
// updates them. Without delta, u is known before, and once is enough.

#include "cpu/common/exp.h"
#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/delta_rule/kernels.h"
#include "cpu/delta_rule/weights.h"
#include "cpu/sequences/step.h"

namespace hfla::HFLA_ISA {
namespace {

// Columns that are updated together, in vectors; what is read for them stays in registers.
constexpr int kStepBlock = kVectorBytes == 64 ? 8 : 4;

// What a head's token brings, in the accumulation type.
template <class Acc>
struct StepScratch {
  Acc *k, *b, *a, *asking, *decayed_q;  // (K,); asking: a ∘ k or a ∘ p, or p
  Acc *v, *y;                           // (V,)

  StepScratch(Carver& carver, const DeltaRuleStep& p) {
    const int64_t rows = round_up(p.K, kLanes<Acc>), columns = round_up(p.V, kLanes<Acc>);
    k = carver.take<Acc>(rows);
    b = carver.take<Acc>(p.add_along.data ? rows : 0);
    a = carver.take<Acc>(rows);
    asking = carver.take<Acc>(rows);
    decayed_q = carver.take<Acc>(rows);
    v = carver.take<Acc>(columns);
    y = carver.take<Acc>(columns);
  }
};

template <class Scalar>
class Step {
  using Acc = AccOf<Scalar>;
  using Scratch = StepScratch<Acc>;
  static constexpr int64_t W = kLanes<Acc>;

 public:
  Step(const DeltaRuleStep& p, const Threads& threads)
      : p_(p), threads_(for_decays(threads, p.log_decay.data)) {}

  Status run() {
    if (has_positive_log_decay<Acc>(p_, threads_, p_.Hkv, p_.decay_per_channel ? p_.K : 1)) {
      return Status::positive_log_decay;
    }
    const auto body = [&](Scratch& s, int64_t batch, int64_t head) { step(s, batch, head); };
    return for_each_state<Scratch>(p_, threads_, body) ? Status::ok : Status::out_of_memory;
  }

 private:
  void step(Scratch& s, int64_t batch, int64_t head) const {
    const int64_t slot = slot_of(p_, batch);
    if (slot < 0) {
      zero_row(s.y, 0, p_.V);
      if (p_.before) keep_state(before(state_of(batch, head)), state_of(batch, head), p_.K * p_.V);
    } else {
      const Products products = prepare(s, batch, head);
      load_row(token_row<const Scalar>(p_.v, batch, head), p_.v.dim, 0, p_.V, s.v);
      const Acc beta = p_.beta.data ? *token_row<const Acc>(p_.beta, batch, head) : Acc(1);
      Acc* const state = state_of(slot, head);
      const Token token{s, beta, products, before(state), state};
      if (p_.add_along.data) {
        update<true, true>(token);
      } else {
        p_.delta ? update<true, false>(token) : update<false, false>(token);
      }
    }
    Scalar* const to = token_row<Scalar>(p_.y, batch, head);
    for_each_vector<Acc>(0, p_.V, [&](int64_t c, int64_t count) {
      store_vector(to, p_.y.dim, c, count, load(s.y + c));
    });
  }

  Acc* state_of(int64_t slot, int64_t head) const {
    return static_cast<Acc*>(p_.state) + slot * p_.state_slot + head * p_.K * p_.V;
  }
  const Acc* before(const Acc* state) const { return before_or(state, p_.state, p_.before); }

  struct Products {
    Acc kq, bq;  // kᵀq, bᵀq
  };

  // The weights of the rows.
  Products prepare(Scratch& s, int64_t batch, int64_t head) const {
    Acc* const q = s.decayed_q;
    load_row(token_row<const Scalar>(p_.q, batch, head / p_.q_group), p_.q.dim, 0, p_.K, q);
    load_row(token_row<const Scalar>(p_.k, batch, head / p_.k_group), p_.k.dim, 0, p_.K, s.k);
    Acc q_factor, k_factor;
    find_factors<Acc>({q, 0}, 1, p_.K, p_.normalize_qk, static_cast<Acc>(p_.scale), &q_factor);
    find_factors<Acc>({s.k, 0}, 1, p_.K, p_.normalize_qk, 1, &k_factor);
    stage_decays(batch, head, s.a);
    if (p_.add_along.data) {
      load_row(token_row<const Acc>(p_.add_along, batch, head), p_.add_along.dim, 0, p_.K, s.b);
    }
    Vec<Acc> kq{}, bq{};
    for (int64_t r = 0; r < p_.K; r += W) {
      const Vec<Acc> a = load(s.a + r), k = load(s.k + r) * k_factor, x = load(q + r) * q_factor;
      kq += k * x;
      if (p_.add_along.data) bq += load(s.b + r) * x;
      store(s.k + r, k);
      store(s.asking + r, a * k);
      store(s.decayed_q + r, a * x);
    }
    if (p_.erase_key.data) {
      load_row(token_row<const Acc>(p_.erase_key, batch, head), p_.erase_key.dim, 0, p_.K,
               s.asking);
      for (int64_t r = 0; !p_.add_along.data && r < p_.K; r += W) {
        store(s.asking + r, load(s.a + r) * load(s.asking + r));
      }
    }
    return {sum<Acc>(kq), sum<Acc>(bq)};
  }

  // e^log_decay for every row.
  void stage_decays(int64_t batch, int64_t head, Acc* a) const {
    const View& view = p_.log_decay;
    const Acc* const from = view.data ? token_row<const Acc>(view, batch, head) : nullptr;
    Vec<Acc> same = broadcast(Acc(1));
    if (from && !p_.decay_per_channel) same = exp(broadcast(*from));
    for_each_vector<Acc>(0, p_.K, [&](int64_t r, int64_t count) {
      store(a + r, p_.decay_per_channel ? exp(load_vector(from, view.dim, r, count)) : same);
    });
  }

  // One head's token, whatever the column.
  struct Token {
    const Scratch& s;
    Acc beta;
    Products products;
    const Acc* before;  // (K, V)
    Acc* state;         // (K, V)
  };

  template <bool delta, bool along>
  void update(const Token& token) const {
    int64_t c = 0;
    for (; c + kStepBlock * W <= p_.V; c += kStepBlock * W) {
      update_columns<delta, along, kStepBlock, false>(token, c);
    }
    for (; c + W <= p_.V; c += W) update_columns<delta, along, 1, false>(token, c);
    if (c < p_.V) update_columns<delta, along, 1, true>(token, c);
  }

  // The columns from `c` on; partial: fewer than a vector are left.
  template <bool delta, bool along, int block, bool partial>
  void update_columns(const Token& token, int64_t c) const {
    const int64_t K = p_.K, V = p_.V, count = partial ? V - c : W;
    const auto [s, beta, products, from, state] = token;
    const Acc* const next = next_columns<block>(from, c, K, V);
    Vec<Acc> predicted[block] = {}, out[block] = {}, u[block];
    for (int64_t r = 0; delta && r < K; ++r) {
      HFLA_UNROLL
      for (int b = 0; b < block; ++b) {
        const Acc* const at = from + r * V + c + b * W;
        const Vec<Acc> row = partial ? load_some(at, 1, count) : load(at);
        predicted[b] += s.asking[r] * row;
        out[b] += s.decayed_q[r] * row;
      }
    }
    HFLA_UNROLL
    for (int b = 0; b < block; ++b) {
      const Vec<Acc> v = load(s.v + c + b * W);
      u[b] = beta * (delta && !along ? v - predicted[b] : v);
    }
    for (int64_t r = 0; r < K; ++r) {
      fetch_row<block>(next + r * V);
      HFLA_UNROLL
      for (int b = 0; b < block; ++b) {
        const int64_t at = r * V + c + b * W;
        const Vec<Acc> before = partial ? load_some(from + at, 1, count) : load(from + at);
        Vec<Acc> row = before * s.a[r] + s.k[r] * u[b];
        if (along) row += s.b[r] * predicted[b];
        partial ? store_some(state + at, 1, count, row) : store(state + at, row);
        if (!delta) out[b] += s.decayed_q[r] * before;
      }
    }
    HFLA_UNROLL
    for (int b = 0; b < block; ++b) {
      Vec<Acc> y = out[b] + products.kq * u[b];
      if (along) y += products.bq * predicted[b];
      store(s.y + c + b * W, y);
    }
  }

  const DeltaRuleStep& p_;
  const Threads threads_;
};

}  // namespace

Status delta_rule_step(const DeltaRuleStep& problem, const Threads& threads) {
  return with_dtype(problem.dtype,
                    [&](auto scalar) { return Step<decltype(scalar)>(problem, threads).run(); });
}

}  // namespace hfla::HFLA_ISA
