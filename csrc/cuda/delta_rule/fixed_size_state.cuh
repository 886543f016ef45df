// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a warp keeps of a state in registers: some channels of 16 columns, transposed, in the layout
// of accumulators.
#pragma once

#include "cuda/delta_rule/fixed_size_place.cuh"
#include "cuda/delta_rule/fixed_size_tokens.cuh"

namespace hfla::cuda {

// sums (16 columns, 16 channels) += what tokens write into channels from `channel` on.
template <class Rows>
DEV void add_written(float (&sums)[2][4], const Rows& rows, int channel,
                     const FixedSizeOperands& a) {
  UNROLL
  for (int i = 0; i < kFixedSizeTokens / 16; ++i) {
    Bf16Operands::B b[2];
    Bf16Operands::load_b(b, rows, 16 * i, channel);
    Bf16Operands::multiply(sums[0], a[i], b[0]);
    Bf16Operands::multiply(sums[1], a[i], b[1]);
  }
}

template <int channels>
class FixedSizeState {
 public:
  // `column` is of the block's.
  DEV FixedSizeState(const FixedSizeDeltaRule& p, const FixedSizePlace& place, int channel,
                     int column)
      : p_(p), place_(place), channel_(channel), column_(column) {}

  // From and to arrays (rows, Hv, K, V); null is zeros, and nowhere.
  DEV void load(const void* states) {
    const float* const from = static_cast<const float*>(states);
    for_each([&](float& x, int64_t at) { x = from ? from[at] : 0; });
  }
  DEV void store(void* states) {
    float* const to = static_cast<float*>(states);
    if (to) for_each([&](float& x, int64_t at) { to[at] = x; });
  }

  DEV Bf16Operands::A operand(int channel) const {
    return Bf16Operands::from_accumulators(x_ + channel / 8);
  }
  // Of 16 channels, as operand b of products over columns: words 0 and 1 for the first 8.
  DEV static LaneWords transposed(const Bf16Operands::A& a) {
    return {{transpose_matrix(a.x[0]), transpose_matrix(a.x[1]), transpose_matrix(a.x[2]),
             transpose_matrix(a.x[3])}};
  }

  // S' = decay S + what add(sums, channel) adds for 16 channels.
  template <class Add>
  DEV void go_on(float decay, Add add) {
    UNROLL
    for (int n = 0; n < channels / 8; n += 2) {
      float sums[2][4] = {};
      add(sums, 8 * n);
      UNROLL
      for (int i = 0; i < 8; ++i) {
        float& x = x_[n + i / 4][i % 4];
        x = decay * x + sums[i / 4][i % 4];
      }
    }
  }

 private:
  template <class Visit>
  DEV void for_each(Visit visit) {
    const int64_t row = (anew(place_.sequence) * p_.Hkv + place_.head) * p_.K + channel_;
    const int64_t first = (row + 2 * lane().t) * p_.V + place_.first_column + column_ + lane().g;
    UNROLL
    for (int n = 0; n < channels / 8; ++n) {
      UNROLL
      for (int i = 0; i < 4; ++i) visit(x_[n][i], first + (8 * n + i % 2) * p_.V + i / 2 * 8);
    }
  }

  const FixedSizeDeltaRule& p_;
  const FixedSizePlace& place_;
  const int channel_, column_;
  float x_[channels / 8][4];
};

}  // namespace hfla::cuda
