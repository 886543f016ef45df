// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The half of a walk's warps that go from state to state (fixed_size_walk.cuh).
#pragma once

#include "cuda/delta_rule/fixed_size_loader.cuh"
#include "cuda/delta_rule/fixed_size_state.cuh"

namespace hfla::cuda {

template <int K, bool keep_errors>
class FixedSizeStates {
  using Operands = Bf16Operands;
  using Shared = FixedSizeShared<K>;

 public:
  DEV FixedSizeStates(const FixedSizeDeltaRule& p, const FixedSizePlace& place)
      : p_(p),
        place_(place),
        part_(thread_index() / 32 * 16),
        there_(place.first_column + part_ < p.V),
        state_(p, place, 0, part_) {}

  DEV void load() {
    if (there_) state_.load(p_.initial_state);
  }
  DEV void store() {
    if (there_) state_.store(p_.result.state);
  }

  // Leaves S and E to outputs, and has S' afterwards.
  DEV void visit(int chunk) {
    if (!there_) return;
    const KeyStage<K> keys = Shared::keys(chunk);
    const StateStage<K> shown = Shared::states(chunk);
    FixedSizeValues values = {}, errors = {};
    FixedSizeOperands a;
    UNROLL
    for (int k = 0; k < K; k += Operands::kDepth) {
      const Operands::A state = state_.operand(k);
      shown.state(k / 16) = words_of(state);
      add_state(values, keys.k, k, state);
    }
    subtract_from_v(keys, values);
    make_operands(a, values);
    add_triangle(errors, keys.unit.m(), a);
    if (keep_errors) keep(errors, chunk);
    make_operands(a, errors);
    UNROLL
    for (int i = 0; i < kFixedSizeTokens / 16; ++i) shown.errors(i) = words_of(a[i]);
    scale(errors, keys.unit.to());
    make_operands(a, errors);
    state_.go_on(*keys.unit.whole(),
                 [&](float (&sums)[2][4], int channel) { add_written(sums, keys.k, channel, a); });
  }

 private:
  // values = V - f ∘ values.
  DEV void subtract_from_v(const KeyStage<K>& keys, FixedSizeValues& values) const {
    const int lane = thread_index() % 32;
    UNROLL
    for (int n = 0; n < kFixedSizeTokens / 8; n += 2) {
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

  DEV void keep(const FixedSizeValues& errors, int chunk) const {
    const int64_t time = p_.result.errors.time;
    const auto [g, t] = lane();
    float* const row =
        place_.rows<float>(p_.result.errors, place_.head) + place_.first_column + part_ + g;
    UNROLL
    for (int n = 0; n < kFixedSizeTokens / 8; ++n) {
      UNROLL
      for (int i = 0; i < 2; ++i) {
        const int token = kFixedSizeTokens * chunk + 8 * n + 2 * t + i;
        if (token >= place_.tokens) continue;
        row[token * time] = errors[n][i], row[token * time + 8] = errors[n][2 + i];
      }
    }
  }

  const FixedSizeDeltaRule& p_;
  const FixedSizePlace& place_;
  const int part_;  // the warp's first column, of the block's
  const bool there_;
  FixedSizeState<K> state_;
};

}  // namespace hfla::cuda
