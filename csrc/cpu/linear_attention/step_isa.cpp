// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// One token, with the state updated in place, or made of another:
//
//     S = e^g S + φ(k) vᵀ,   z = e^g z + φ(k),   y = φ(q)ᵀ S / (φ(q)ᵀ z + eps)
//
// It moves far more bytes than it computes, so each task, a batch row and a key-value head, goes
// once over its state in memory; the other query heads of a group then find it in the cache.

#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/linear_attention/feature_maps.h"
#include "cpu/linear_attention/kernels.h"
#include "cpu/sequences/step.h"

namespace hfla::HFLA_ISA {
namespace {

// Columns that are updated together, in vectors; their values and outputs stay in registers.
constexpr int kStepBlock = kVectorBytes == 64 ? 8 : 4;

template <class Acc>
struct StepScratch {
  int64_t k_stride, v_stride;
  Acc *q, *k;  // (group, k_stride), (k_stride,)
  Acc *v, *y;  // (v_stride,), (group, v_stride)
  Acc* scale;  // (group,) what the normaliser multiplies y with

  StepScratch(Carver& carver, const LinearAttentionStep& p)
      : k_stride(round_up(p.K, kLanes<Acc>)), v_stride(round_up(p.V, kLanes<Acc>)) {
    const int64_t group = p.Hq / p.Hkv;
    q = carver.take<Acc>(group * k_stride);
    k = carver.take<Acc>(k_stride);
    v = carver.take<Acc>(v_stride);
    y = carver.take<Acc>(group * v_stride);
    scale = carver.take<Acc>(group);
  }
};

template <class Scalar>
class Step {
  using Acc = AccOf<Scalar>;
  using Scratch = StepScratch<Acc>;
  static constexpr int64_t W = kLanes<Acc>;

 public:
  Step(const LinearAttentionStep& p, const Threads& threads)
      : p_(p), threads_(for_decays(threads, p.log_decay.data)), group_(p.Hq / p.Hkv) {}

  Status run() {
    if (has_positive_log_decay<Acc>(p_, threads_, p_.Hkv, 1)) return Status::positive_log_decay;
    const auto body = [&](Scratch& s, int64_t batch, int64_t head) { step(s, batch, head); };
    return for_each_state<Scratch>(p_, threads_, body) ? Status::ok : Status::out_of_memory;
  }

 private:
  void step(Scratch& s, int64_t batch, int64_t head) const {
    const int64_t slot = slot_of(p_, batch);
    if (slot < 0) {
      __builtin_memset(s.y, 0, sizeof(Acc) * group_ * s.v_stride);
      if (p_.before) keep_states(batch, head);
      return store_outputs(s, batch, head);
    }
    for (int64_t g = 0; g < group_; ++g) {
      load_row(token_row<const Scalar>(p_.q, batch, head * group_ + g), p_.q.dim, 0, p_.K,
               s.q + g * s.k_stride);
    }
    load_row(token_row<const Scalar>(p_.k, batch, head), p_.k.dim, 0, p_.K, s.k);
    load_row(token_row<const Scalar>(p_.v, batch, head), p_.v.dim, 0, p_.V, s.v);
    with_feature_map(p_.feature_map, [&](auto map) {
      for (int64_t g = 0; g < group_; ++g) map_row<Acc>(map, 0, p_.K, s.q + g * s.k_stride);
      map_row<Acc>(map, 0, p_.K, s.k);
    });

    const Acc decay = decay_at(batch, head);
    for (int64_t g = 0; g < group_; ++g) s.scale[g] = 1;
    if (p_.normalize) {
      update_normalizer(s, decay, z_of(slot, head));
      for (int64_t g = 0; p_.den && g < group_; ++g) {
        static_cast<Acc*>(p_.den)[batch * p_.Hq + head * group_ + g] = 1 / s.scale[g];
      }
    }
    update_state(s, decay, kv_of(slot, head));
    store_outputs(s, batch, head);
  }

  Acc* kv_of(int64_t slot, int64_t head) const {
    return static_cast<Acc*>(p_.kv) + slot * p_.kv_slot + head * p_.K * p_.V;
  }
  Acc* z_of(int64_t slot, int64_t head) const {
    return static_cast<Acc*>(p_.z) + slot * p_.z_slot + head * p_.K;
  }

  void keep_states(int64_t row, int64_t head) const {
    Acc* const kv = kv_of(row, head);
    keep_state(before_or(kv, p_.kv, p_.before), kv, p_.K * p_.V);
    if (!p_.normalize) return;
    Acc* const z = z_of(row, head);
    keep_state(before_or(z, p_.z, p_.z_before), z, p_.K);
  }

  Acc decay_at(int64_t batch, int64_t head) const {
    if (!p_.log_decay.data) return 1;
    return exp(broadcast(*token_row<const Acc>(p_.log_decay, batch, head)))[0];
  }

  void update_normalizer(Scratch& s, Acc decay, Acc* z) const {
    const Acc* const before = before_or(z, p_.z, p_.z_before);
    for_each_vector<Acc>(0, p_.K, [&](int64_t c, int64_t count) {
      store_vector(z, 1, c, count, load_vector(before, 1, c, count) * decay + load(s.k + c));
    });
    for (int64_t g = 0; g < group_; ++g) {
      Vec<Acc> dot{};
      for_each_vector<Acc>(0, p_.K, [&](int64_t c, int64_t count) {
        dot += load(s.q + g * s.k_stride + c) * load_vector(z, 1, c, count);
      });
      s.scale[g] = 1 / (sum<Acc>(dot) + static_cast<Acc>(p_.eps));
    }
  }

  void update_state(Scratch& s, Acc decay, Acc* kv) const {
    int64_t c = 0;
    for (; c + kStepBlock * W <= p_.V; c += kStepBlock * W) {
      update_columns<kStepBlock, false>(s, decay, kv, c);
    }
    for (; c + W <= p_.V; c += W) update_columns<1, false>(s, decay, kv, c);
    if (c < p_.V) update_columns<1, true>(s, decay, kv, c);
  }

  // The columns from `c` on; partial: fewer than a vector are left.
  template <int block, bool partial>
  void update_columns(Scratch& s, Acc decay, Acc* kv, int64_t c) const {
    const int64_t count = partial ? p_.V - c : W;
    Vec<Acc> value[block];
    HFLA_UNROLL
    for (int b = 0; b < block; ++b) value[b] = load(s.v + c + b * W);
    const Acc* const before = before_or(kv, p_.kv, p_.before);
    const Acc* const next = next_columns<block>(before, c, p_.K, p_.V);
    for (int64_t g = 0; g < group_; ++g) {
      const Acc* const q = s.q + g * s.k_stride;
      Vec<Acc> out[block] = {};
      for (int64_t r = 0; r < p_.K; ++r) {
        if (g == 0) fetch_row<block>(next + r * p_.V);
        HFLA_UNROLL
        for (int b = 0; b < block; ++b) {
          const int64_t place = r * p_.V + c + b * W;
          Acc* const at = kv + place;
          const Acc* const from = g == 0 ? before + place : at;
          Vec<Acc> state = partial ? load_some(from, 1, count) : load(from);
          if (g == 0) {
            state = state * decay + s.k[r] * value[b];
            partial ? store_some(at, 1, count, state) : store(at, state);
          }
          out[b] += q[r] * state;
        }
      }
      HFLA_UNROLL
      for (int b = 0; b < block; ++b) {
        store(s.y + g * s.v_stride + c + b * W, out[b] * s.scale[g]);
      }
    }
  }

  void store_outputs(const Scratch& s, int64_t batch, int64_t head) const {
    for (int64_t g = 0; g < group_; ++g) {
      Scalar* const to = token_row<Scalar>(p_.y, batch, head * group_ + g);
      for_each_vector<Acc>(0, p_.V, [&](int64_t c, int64_t count) {
        store_vector(to, p_.y.dim, c, count, load(s.y + g * s.v_stride + c));
      });
    }
  }

  const LinearAttentionStep& p_;
  const Threads threads_;
  const int64_t group_;
};

}  // namespace

Status linear_attention_step(const LinearAttentionStep& problem, const Threads& threads) {
  return with_dtype(problem.dtype,
                    [&](auto scalar) { return Step<decltype(scalar)>(problem, threads).run(); });
}

}  // namespace hfla::HFLA_ISA
