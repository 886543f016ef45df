// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a chunk of a walk writes: out, or its product with the derivative of a feature map.
#pragma once

#include "cuda/linear_attention/walker.cuh"

namespace hfla::cuda {

template <class Scalar, class S>
DEV void Walker<Scalar, S>::store_out() {
  const bool last = rows_left_ <= R;
  UNROLL
  for (int half = 0; half < 2; ++half) {  // rows g and g + 8 of the warp's strip
    const int token = 16 * warp_ + g_ + 8 * half;
    finish_before();  // one half's addresses are enough for the registers
    if (p_.partial) add_partial(token, half, last);
    if (!last) continue;
    // In the normaliser's tile the first lane of four has the column.
    const float den = shuffle(out_[kTilesN - 1][2 * half], thread_index() % 32 / 4 * 4) + p_.eps;
    float dot = 0;
    const int64_t t = chunk_ + token;
    if (t < place_.piece.end) {
      const bool present = shared_.present[token];
      const Outs outs = make_outs(t);
      const float scale = p_.divide ? 1 / den : 1;
      UNROLL
      for (int n = 0; n < kTilesN - 1; ++n) {
        const float pair[2] = {out_[n][2 * half] * scale, out_[n][2 * half + 1] * scale};
        store_pair(outs, 8 * n + 2 * t_, pair, present, dot);
      }
      if (p_.divide && place_.column_block == 0 && t_ == 0) {
        p_.den[(place_.piece.batch * p_.T + t) * p_.Hq + place_.head] = den;
      }
    }
    if (!p_.dots) continue;
    dot += shuffle_xor(dot, 1);
    dot += shuffle_xor(dot, 2);
    if (t_ == 0 && t < place_.piece.end) {
      const int64_t row = place_.column_block * p_.num_tokens + place_.piece.batch * p_.T + t;
      p_.dots[row * p_.num_heads() + place_.head] = dot;
    }
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
DEV typename Walker<Scalar, S>::Outs Walker<Scalar, S>::make_outs(int64_t t) const {
  const int64_t begin = place_.column_block * S::kColumns;
  const auto row = [&](const View& v) {
    return static_cast<Scalar*>(v.data) + place_.piece.batch * v.batch + t * v.time +
           place_.head * v.head + begin * v.dim;
  };
  const View& of = p_.of.x;
  Outs outs{row(p_.out), of.data ? row(of) : nullptr, int(p_.values.columns - begin), false};
  constexpr uintptr_t kPair = 2 * sizeof(Scalar);
  outs.wide = p_.out.dim == 1 && reinterpret_cast<uintptr_t>(outs.out) % kPair == 0 &&
              (!outs.of || (of.dim == 1 && reinterpret_cast<uintptr_t>(outs.of) % kPair == 0));
  return outs;
}

// Columns c and c + 1 of out, if it has them.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::store_pair(const Outs& outs, int c, const float (&x)[2], bool present,
                                       float& dot) {
  if (outs.wide && c + 1 < outs.columns) {
    float result[2] = {x[0], x[1]};
    if (outs.of) {
      const auto of = *reinterpret_cast<const Run<Scalar, 2>*>(outs.of + c);
      UNROLL
      for (int i = 0; i < 2; ++i) result[i] = gradient(to_float(of.x[i]), x[i], present, dot);
    }
    UNROLL
    for (int i = 0; i < 2; ++i) result[i] = present ? result[i] : 0;
    *reinterpret_cast<Run<Scalar, 2>*>(outs.out + c) = make_run<Scalar>(result);
    return;
  }
  UNROLL
  for (int i = 0; i < 2; ++i) {
    if (c + i >= outs.columns) continue;
    float result = x[i];
    if (outs.of) {
      result = gradient(to_float(outs.of[(c + i) * p_.of.x.dim]), x[i], present, dot);
    }
    outs.out[(c + i) * p_.out.dim] = from_float<Scalar>(present ? result : 0);
  }
}

// By the feature map's argument, of what is the gradient by its value.
template <class Scalar, class S>
DEV float Walker<Scalar, S>::gradient(float argument, float x, bool present, float& dot) const {
  if (present) dot += x * apply<Scalar>(p_.of.map, argument);
  return x * derivative<Scalar>(p_.of.map, argument);
}

}  // namespace hfla::cuda
