// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The half of a walk's warps that go from state to state (known_walk.cuh).
#pragma once

#include "cuda/delta_rule/known_loader.cuh"
#include "cuda/delta_rule/known_tokens.cuh"

namespace hfla::cuda {

template <int K, bool keep_errors>
class KnownStates {
  using Operands = Bf16Operands;
  using Shared = KnownShared<K>;

 public:
  DEV KnownStates(const KnownDeltaRule& p, const KnownPlace& place)
      : p_(p),
        place_(place),
        t_(lane().t),
        part_(thread_index() / 32 * 16),
        column_(place.first_column + part_ + lane().g),
        there_(place.first_column + part_ < p.V) {}

  DEV void load() {
    if (!there_) return;
    const float* const from = static_cast<const float*>(p_.initial_state);
    UNROLL
    for (int n = 0; n < K / 8; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) state_[n][i] = from ? from[in_states(n, i)] : 0;
    }
  }
  DEV void store() const {
    if (!there_) return;
    float* const to = static_cast<float*>(p_.result.state);
    UNROLL
    for (int n = 0; n < K / 8; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) to[in_states(n, i)] = state_[n][i];
    }
  }

  // Leaves S and E to outputs, and has S' afterwards.
  DEV void visit(int chunk) {
    if (!there_) return;
    const KeyStage<K> keys = Shared::keys(chunk);
    const StateStage<K> shown = Shared::states(chunk);
    KnownValues values = {}, errors = {};
    KnownOperands a;
    UNROLL
    for (int k = 0; k < K; k += Operands::kDepth) {
      const Operands::A state = Operands::from_accumulators(state_ + k / 8);
      show(shown.state(k / 16), state);
      add_state(values, keys.k, k, state);
    }
    subtract_from_v(keys, values);
    make_operands(a, values);
    add_triangle(errors, keys.unit.m(), a);
    if (keep_errors) keep(errors, chunk);
    make_operands(a, errors);
    UNROLL
    for (int i = 0; i < kKnownTokens / 16; ++i) show(shown.errors(i), a[i]);
    scale(errors, keys.unit.to());
    make_operands(a, errors);
    write_state(keys, a);
  }

 private:
  DEV static void show(LaneWords& to, const Operands::A& a) {
    to = {{a.x[0], a.x[1], a.x[2], a.x[3]}};
  }

  // values = V - f ∘ values.
  DEV void subtract_from_v(const KeyStage<K>& keys, KnownValues& values) const {
    const int lane = thread_index() % 32;
    UNROLL
    for (int n = 0; n < kKnownTokens / 8; n += 2) {
      uint32_t v[4];  // of tiles n and n + 1, columns g and g + 8
      load_matrices<true>(v, keys.v.at(8 * n + lane % 8 + lane / 16 * 8, part_ + lane / 8 % 2 * 8));
      UNROLL
      for (int tile = 0; tile < 2; ++tile) {
        const auto f = numbers_of(keys.unit.from(), n + tile);
        UNROLL
        for (int i = 0; i < 4; ++i) {
          float& x = values[n + tile][i];
          x = get<BFloat16>(v[2 * tile + i / 2], i % 2) - f.get(i % 2) * x;
        }
      }
    }
  }

  // S' = from_C S + Kᵀ a.
  DEV void write_state(const KeyStage<K>& keys, const KnownOperands& a) {
    const float whole = *keys.unit.whole();
    UNROLL
    for (int n = 0; n < K / 8; n += 2) {
      float sums[2][4] = {};
      UNROLL
      for (int i = 0; i < kKnownTokens / 16; ++i) {
        Operands::B b[2];
        Operands::load_b(b, keys.k, 16 * i, 8 * n);
        Operands::multiply(sums[0], a[i], b[0]);
        Operands::multiply(sums[1], a[i], b[1]);
      }
      UNROLL
      for (int i = 0; i < 8; ++i) {
        float& x = state_[n + i / 4][i % 4];
        x = whole * x + sums[i / 4][i % 4];
      }
    }
  }

  DEV void keep(const KnownValues& errors, int chunk) const {
    const int64_t time = p_.result.errors.time;
    float* const row = place_.rows<float>(p_.result.errors, place_.head) + column_;
    UNROLL
    for (int n = 0; n < kKnownTokens / 8; ++n) {
      UNROLL
      for (int i = 0; i < 2; ++i) {
        const int token = kKnownTokens * chunk + 8 * n + 2 * t_ + i;
        if (token >= place_.tokens) continue;
        row[token * time] = errors[n][i], row[token * time + 8] = errors[n][2 + i];
      }
    }
  }

  // Element i of tile n.
  DEV int64_t in_states(int n, int i) const {
    const int64_t channel = 8 * n + 2 * t_ + i % 2;
    return ((place_.sequence * p_.Hkv + place_.head) * K + channel) * p_.V + column_ + i / 2 * 8;
  }

  const KnownDeltaRule& p_;
  const KnownPlace& place_;
  const int t_, part_;  // the warp's first column, of the block's
  const int64_t column_;
  const bool there_;
  float state_[K / 8][4];
};

}  // namespace hfla::cuda
