// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The exponential function, on vectors.
#pragma once

#include "cpu/common/vec.h"

namespace hfla::HFLA_ISA {
namespace {

// exp(x) = 2^n exp(r) with |r| <= log(2) / 2 and exp(r) = 1 + r + r^2 p(r).
template <class Acc>
struct Exp;

template <>
struct Exp<float> {
  static constexpr int kMantissaBits = 23, kBias = 127;
  static constexpr float kZeroBelow = -104, kInfAbove = 89;
  static constexpr float kRound = 0x1.8p23f;  // adding it leaves a rounded integer in the low bits
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  // Minimax for the relative error of exp, which is below 4e-9.
  static constexpr float kPolynomial[] = {0.00138145395f, 0.00836874545f, 0.0416683890f,
                                          0.166665211f, 0.49999994f};
};

template <>
struct Exp<double> {
  static constexpr int kMantissaBits = 52, kBias = 1023;
  static constexpr double kZeroBelow = -746, kInfAbove = 710;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLn2High = 0x1.62e42fee00000p-1, kLn2Low = 0x1.a39ef35793c76p-33;
  // 1 / 13!, ..., 1 / 2!
  static constexpr double kPolynomial[] = {
      1.6059043836821613e-10, 2.0876756987868099e-09, 2.5052108385441719e-08,
      2.7557319223985891e-07, 2.7557319223985893e-06, 2.4801587301587302e-05,
      1.9841269841269841e-04, 1.3888888888888889e-03, 8.3333333333333332e-03,
      4.1666666666666664e-02, 1.6666666666666666e-01, 0.5};
};

// x 2^n for integers n, of which `rounded_n` is kRound more. Right for subnormal results too.
template <class Acc>
HFLA_INLINE Vec<Acc> scale_by_power(Vec<Acc> x, Vec<Acc> n, Vec<Acc> rounded_n) {
#if defined(__AVX512F__)
  (void)rounded_n;
  if constexpr (sizeof(Acc) == sizeof(float)) {
    return (Vec<Acc>)_mm512_maskz_scalef_ps(-1, (__m512)x, (__m512)n);
  } else {
    return (Vec<Acc>)_mm512_maskz_scalef_pd(-1, (__m512d)x, (__m512d)n);
  }
#else
  // 2^n may not be a normal number although x 2^n is one: scale twice.
  using C = Exp<Acc>;
  using Int = typename AccTraits<Acc>::Int;
  (void)n;
  const Vec<Int> power = (Vec<Int>)rounded_n - (Vec<Int>)broadcast<Acc>(C::kRound);
  const Vec<Acc> half_power = (rounded_n - C::kRound) * Acc(0.5) + C::kRound;
  const Vec<Int> first = (Vec<Int>)half_power - (Vec<Int>)broadcast<Acc>(C::kRound);
  const Vec<Int> second = power - first;
  return x * (Vec<Acc>)((first + C::kBias) << C::kMantissaBits) *
         (Vec<Acc>)((second + C::kBias) << C::kMantissaBits);
#endif
}

// x = n log(2) + r, and e^r = 1 + factor r.
template <class V>
struct ReducedExp {
  V rounded_n, r, factor;  // rounded_n: n, and kRound more

  explicit HFLA_INLINE ReducedExp(V x) {
    using Acc = ElementOf<V>;
    using C = Exp<Acc>;
    rounded_n = x * Acc(1.4426950408889634) + C::kRound;
    r = x - n() * C::kLn2High - n() * C::kLn2Low;
    V p = broadcast<Acc>(C::kPolynomial[0]);
    HFLA_UNROLL
    for (unsigned i = 1; i < sizeof(C::kPolynomial) / sizeof(Acc); ++i)
      p = p * r + C::kPolynomial[i];
    factor = p * r + Acc(1);
  }

  HFLA_INLINE V n() const { return rounded_n - Exp<ElementOf<V>>::kRound; }
};

// As exp below, where x is not above kInfAbove.
template <class V>
HFLA_INLINE V bounded_exp(V x) {
  using Acc = ElementOf<V>;
  const ReducedExp<V> of(at_least(Exp<Acc>::kZeroBelow, x));
  return scale_by_power<Acc>(of.factor * of.r + Acc(1), of.n(), of.rounded_n);
}

// Within 2 ulp; exp(-inf) = 0, exp(inf) = inf, and NaN stays NaN.
template <class V>
HFLA_INLINE V exp(V x) {
  return bounded_exp(at_most(Exp<ElementOf<V>>::kInfAbove, x));
}

}  // namespace
}  // namespace hfla::HFLA_ISA
