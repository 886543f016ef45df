// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a chunk of a walk writes: out, or its product with the derivative of a feature map.
#pragma once

#include "cuda/linear_attention/walker.cuh"

namespace hfla::cuda {

template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::store_out() {
  const bool last = rows_left_ <= R;
  if (!Fixed::kIsFixed && p_.partial) {
    UNROLL
    for (int half = 0; half < 2; ++half) add_partial(16 * warp_ + g_ + 8 * half, half, last);
    if (!last) return;
  }
  UNROLL
  for (int half = 0; half < 2; ++half) {  // rows g and g + 8 of the warp's strip
    const int token = 16 * warp_ + g_ + 8 * half;
    const Outs outs = make_outs(token);
    const bool present = this->present(token);
    float den = 1;
    if (kTilesN > kTilesC && p_.divide) {
      // In the normaliser's tile the first lane of four has the column.
      den = shuffle(out_[kTilesN - 1][2 * half], thread_index() % 32 / 4 * 4) + p_.eps;
    } else if (p_.read.den) {
      den = shared_.dens(visit_.read_stage)[token];
    }
    const float scale = reciprocal<Scalar>(den);
    Pair pairs[kTilesC];
    float dot = make_pairs(pairs, outs, half, scale, present);
    if (!Fixed::kIsFixed) dot += store_others(outs, half, scale, present);
    store_pairs(outs, pairs);
    store_sums(outs, token, den, dot);
  }
}

// out = what earlier walks have come to, and this one.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::add_partial(int token, int half, bool last) {
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

// Of a fixed-size walk, which has nothing that is not in pairs.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::store_second() {
  UNROLL
  for (int half = 0; half < 2; ++half) {
    Pair pairs[kTilesC];
    make_plain_pairs(pairs, half, 1, true);
    store_pairs(make_outs(16 * warp_ + g_ + 8 * half, p_.second, place_.second), pairs);
  }
}

template <class Scalar, class S, class Fixed>
DEV typename Walker<Scalar, S, Fixed>::Outs Walker<Scalar, S, Fixed>::make_outs(
    int token, const View& out, int64_t begin_of_out) const {
  const int64_t t = offset_of(visit_.chunk) + token;
  const Source<Scalar>& of = shared_.source(Which::of);
  const int begin = column_of(0);
  Outs outs{advance(static_cast<Scalar*>(out.data) + begin_of_out, t, out.time) + begin * out.dim,
            is_gradient() ? of.x + t * of.time + begin * of.dim : nullptr,
            int(p_.values.columns - place_.column_block * S::kColumns) - begin, false, false};
  if (outs.columns > S::kPartColumns) outs.columns = S::kPartColumns;
  outs.there = token < tokens_of(visit_.chunk);
  constexpr uintptr_t kPair = 2 * sizeof(Scalar);
  outs.wide = out.dim == 1 && reinterpret_cast<uintptr_t>(outs.out) % kPair == 0 &&
              (!outs.of || (of.dim == 1 && reinterpret_cast<uintptr_t>(outs.of) % kPair == 0));
  return outs;
}

// A row of out. Returns the row's part of dots.
template <class Scalar, class S, class Fixed>
DEV float Walker<Scalar, S, Fixed>::make_pairs(Pair (&pairs)[kTilesC], const Outs& outs, int half,
                                               float scale, bool present) const {
  if constexpr (Fixed::kIsGradient) {
    return make_gradients<Fixed::kMap>(pairs, outs, half, scale, present);
  } else if (is_gradient()) {
    return with_map(p_.of.map, [&](auto map) {
      return make_gradients<decltype(map)::value>(pairs, outs, half, scale, present);
    });
  } else {
    make_plain_pairs(pairs, half, scale, present);
    return 0;
  }
}
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::make_plain_pairs(Pair (&pairs)[kTilesC], int half, float scale,
                                                    bool present) const {
  UNROLL
  for (int n = 0; n < kTilesC; ++n) {
    float x[2];
    UNROLL
    for (int i = 0; i < 2; ++i) {
      x[i] = Fixed::kIsFixed || present ? scale * out_[n][2 * half + i] : 0;
    }
    pairs[n] = make_run<Scalar>(x);
  }
}

// By the feature map's argument, of what out_ is the gradient by its value.
template <class Scalar, class S, class Fixed>
template <FeatureMap map>
DEV float Walker<Scalar, S, Fixed>::make_gradients(Pair (&pairs)[kTilesC], const Outs& outs,
                                                   int half, float scale, bool present) const {
  float dot = 0;
  UNROLL
  for (int n = 0; n < kTilesC; ++n) {
    const bool counts = Fixed::kIsFixed || (present && outs.has_pair(8 * n + 2 * t_));
    const Pair of = pair_of(n, half);
    float x[2];
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const float argument = of.get(i), gradient = scale * out_[n][2 * half + i];
      if constexpr (Fixed::kHasSecond) {  // where it is mapped by now
        x[i] = gradient * derivative_of_value<map>(argument);
        continue;
      }
      dot += counts ? gradient * apply<Scalar, map>(argument) : 0;
      x[i] = counts ? gradient * derivative<Scalar, map>(argument) : 0;
    }
    pairs[n] = make_run<Scalar>(x);
  }
  return dot;
}

// What the pair is the gradient of.
template <class Scalar, class S, class Fixed>
DEV typename Walker<Scalar, S, Fixed>::Pair Walker<Scalar, S, Fixed>::pair_of(int n,
                                                                              int half) const {
  if constexpr (Fixed::kIsGradient) {
    const auto tile = shared_.of(visit_.read_stage);
    return *reinterpret_cast<const Pair*>(
        tile.at(16 * warp_ + g_ + 8 * half, column_of(n) + 2 * t_));
  } else {
    return *copied_of(n, half);
  }
}

template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::store_pairs(const Outs& outs,
                                               const Pair (&pairs)[kTilesC]) const {
  Pair* const to = reinterpret_cast<Pair*>(outs.out) + t_;
  UNROLL
  for (int n = 0; n < kTilesC; ++n) {
    if (outs.has_pair(8 * n + 2 * t_)) to[4 * n] = pairs[n];
  }
}

// What there is one of for a whole row.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::store_sums(const Outs& outs, int token, float den,
                                              float dot) const {
  const bool has_den = kTilesN > kTilesC && p_.divide && place_.column_block == 0 && part() == 0;
  if (has_den && outs.there && t_ == 0) {
    *advance(p_.den + place_.den, offset_of(visit_.chunk) + token, p_.Hq) = den;
  }
  if (Fixed::kIsFixed || !p_.dots) return;  // of decays
  const int64_t row = place_.piece.batch * p_.T + chunk_ + token;
  dot += shuffle_xor(dot, 1);
  dot += shuffle_xor(dot, 2);
  if (t_ == 0 && outs.there) {
    p_.dots[(place_.column_block * p_.num_tokens + row) * p_.num_heads() + place_.head] = dot;
  }
}

// What is not in pairs: an odd last column, and rows that are not aligned or not contiguous.
template <class Scalar, class S, class Fixed>
DEV float Walker<Scalar, S, Fixed>::store_others(const Outs& outs, int half, float scale,
                                                 bool present) {
  float dot = 0;
  if (!outs.there || (outs.wide && outs.columns % 2 == 0)) return dot;
  NO_UNROLL
  for (int n = outs.wide ? outs.columns / 8 : 0; n < kTilesC; ++n) {
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
template <class Scalar, class S, class Fixed>
DEV float Walker<Scalar, S, Fixed>::picked_out(int n, int i) const {
  float x = 0;
  UNROLL
  for (int m = 0; m < kTilesC; ++m) {
    UNROLL
    for (int j = 0; j < 4; ++j) x = m == n && j == i ? out_[m][j] : x;
  }
  return x;
}

}  // namespace hfla::cuda
