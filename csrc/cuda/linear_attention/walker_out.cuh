// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a chunk of a walk writes: out, or its product with the derivative of a feature map.
#pragma once

#include "cuda/linear_attention/walker.cuh"

namespace hfla::cuda {

template <class Scalar, class S>
DEV void Walker<Scalar, S>::store_out() {
  const bool last = rows_left_ <= R;
  if (p_.partial) {
    UNROLL
    for (int half = 0; half < 2; ++half) add_partial(16 * warp_ + g_ + 8 * half, half, last);
    if (!last) return;
  }
  UNROLL
  for (int half = 0; half < 2; ++half) {  // rows g and g + 8 of the warp's strip
    const int token = 16 * warp_ + g_ + 8 * half;
    const Outs outs = make_outs(token);
    const bool present = this->present(token);
    // In the normaliser's tile the first lane of four has the column.
    const float den = shuffle(out_[kTilesN - 1][2 * half], thread_index() % 32 / 4 * 4) + p_.eps;
    const float scale = p_.divide ? 1 / den : 1;
    Pair pairs[kTilesN - 1];
    float dot = make_pairs(pairs, outs, half, scale, present);
    dot += store_others(outs, half, scale, present);
    store_pairs(outs, pairs);
    store_sums(outs, token, den, dot);
  }
}

// out = what earlier walks have come to, and this one.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::add_partial(int token, int half, bool last) {
  float* const row =
      p_.partial + (block_index() * p_.pieces.length + chunk_ - place_.piece.begin + token) * N;
  UNROLL
  for (int n = 0; n < kTilesN; ++n) {
    UNROLL
    for (int i = 0; i < 2; ++i) {
      float& x = out_[n][2 * half + i];
      float& sum = row[8 * n + 2 * t_ + i];
      if (row_begin_ > 0) x += sum;
      if (!last) sum = x;
    }
  }
}

template <class Scalar, class S>
DEV typename Walker<Scalar, S>::Outs Walker<Scalar, S>::make_outs(int token) const {
  const int64_t begin = place_.column_block * S::kColumns, t = chunk_ + token;
  const auto row = [&](const View& v) {
    return static_cast<Scalar*>(v.data) + place_.piece.batch * v.batch + t * v.time +
           place_.head * v.head + begin * v.dim;
  };
  const View& of = p_.of.x;
  Outs outs{row(p_.out), of.data ? row(of) : nullptr, int(p_.values.columns - begin), false, false};
  if (outs.columns > S::kColumns) outs.columns = S::kColumns;
  outs.there = t < place_.piece.end;
  constexpr uintptr_t kPair = 2 * sizeof(Scalar);
  outs.wide = p_.out.dim == 1 && reinterpret_cast<uintptr_t>(outs.out) % kPair == 0 &&
              (!outs.of || (of.dim == 1 && reinterpret_cast<uintptr_t>(outs.of) % kPair == 0));
  return outs;
}

// A row of out. Returns the row's part of dots.
template <class Scalar, class S>
DEV float Walker<Scalar, S>::make_pairs(Pair (&pairs)[kTilesN - 1], const Outs& outs, int half,
                                        float scale, bool present) const {
  if (outs.of) {
    return with_map(p_.of.map, [&](auto map) {
      return make_gradients<decltype(map)::value>(pairs, outs, half, present);
    });
  }
  UNROLL
  for (int n = 0; n < kTilesN - 1; ++n) {
    float x[2];
    UNROLL
    for (int i = 0; i < 2; ++i) x[i] = present ? scale * out_[n][2 * half + i] : 0;
    pairs[n] = make_run<Scalar>(x);
  }
  return 0;
}

// By the feature map's argument, of what out_ is the gradient by its value.
template <class Scalar, class S>
template <FeatureMap map>
DEV float Walker<Scalar, S>::make_gradients(Pair (&pairs)[kTilesN - 1], const Outs& outs, int half,
                                            bool present) const {
  float dot = 0;
  UNROLL
  for (int n = 0; n < kTilesN - 1; ++n) {
    const bool counts = present && outs.has_pair(8 * n + 2 * t_);
    const Pair of = *copied_of(n, half);
    float x[2];
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const float argument = of.get(i), gradient = out_[n][2 * half + i];
      dot += counts ? gradient * apply<Scalar, map>(argument) : 0;
      x[i] = counts ? gradient * derivative<Scalar, map>(argument) : 0;
    }
    pairs[n] = make_run<Scalar>(x);
  }
  return dot;
}

template <class Scalar, class S>
DEV void Walker<Scalar, S>::store_pairs(const Outs& outs, const Pair (&pairs)[kTilesN - 1]) const {
  UNROLL
  for (int n = 0; n < kTilesN - 1; ++n) {
    const int c = 8 * n + 2 * t_;
    if (outs.has_pair(c)) *reinterpret_cast<Pair*>(outs.out + c) = pairs[n];
  }
}

// What there is one of for a whole row.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::store_sums(const Outs& outs, int token, float den, float dot) const {
  const int64_t row = place_.piece.batch * p_.T + chunk_ + token;
  if (p_.divide && outs.there && place_.column_block == 0 && t_ == 0) {
    p_.den[row * p_.Hq + place_.head] = den;
  }
  if (!p_.dots) return;
  dot += shuffle_xor(dot, 1);
  dot += shuffle_xor(dot, 2);
  if (t_ == 0 && outs.there) {
    p_.dots[(place_.column_block * p_.num_tokens + row) * p_.num_heads() + place_.head] = dot;
  }
}

// What is not in pairs: an odd last column, and rows that are not aligned or not contiguous.
template <class Scalar, class S>
DEV float Walker<Scalar, S>::store_others(const Outs& outs, int half, float scale, bool present) {
  float dot = 0;
  if (!outs.there || (outs.wide && outs.columns % 2 == 0)) return dot;
  NO_UNROLL
  for (int n = outs.wide ? outs.columns / 8 : 0; n < kTilesN - 1; ++n) {
    NO_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int c = 8 * n + 2 * t_ + i;
      if (c >= outs.columns || outs.has_pair(c - i)) continue;
      float x = picked_out(n, 2 * half + i) * scale;
      if (outs.of && present) {
        const float argument = to_float(outs.of[c * p_.of.x.dim]);
        dot += x * apply<Scalar>(p_.of.map, argument);
        x *= with_map(p_.of.map,
                      [&](auto map) { return derivative<Scalar, decltype(map)::value>(argument); });
      }
      outs.out[c * p_.out.dim] = from_float<Scalar>(present ? x : 0);
    }
  }
  return dot;
}

// out_[n][i] for indices that are not constant, where an array in registers has none.
template <class Scalar, class S>
DEV float Walker<Scalar, S>::picked_out(int n, int i) const {
  float x = 0;
  UNROLL
  for (int m = 0; m < kTilesN - 1; ++m) {
    UNROLL
    for (int j = 0; j < 4; ++j) x = m == n && j == i ? out_[m][j] : x;
  }
  return x;
}

}  // namespace hfla::cuda
