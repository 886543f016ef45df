// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Vectors of the compiler's own kind, as wide as the instruction set has them: arithmetic, loads
// and stores from every storage dtype, exp. Arithmetic is in the accumulation type, `Acc`: float,
// or double where the tensors are double.
#pragma once

#include "cpu/isa.h"

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace hfla::HFLA_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;  // SSE2, NEON
#endif

template <class T>
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(T));

template <class T, int64_t lanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(lanes * sizeof(T))));
  typedef T unaligned __attribute__((vector_size(lanes * sizeof(T)), aligned(alignof(T))));
};
template <class T>
using Vec = typename VectorOf<T, kLanes<T>>::type;

template <class V>
using ElementOf = decltype(V{}[0] + 0);

// What a tensor holds. The two halves are only ever converted, so bits are enough.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class Acc>
struct AccTraits;
template <>
struct AccTraits<float> {
  using Int = int32_t;
  using UInt = uint32_t;
};
template <>
struct AccTraits<double> {
  using Int = int64_t;
  using UInt = uint64_t;
};
template <class Acc>
using UIntVec = Vec<typename AccTraits<Acc>::UInt>;

template <class Scalar>
struct AccOfScalar {
  using type = float;
};
template <>
struct AccOfScalar<double> {
  using type = double;
};
template <class Scalar>
using AccOf = typename AccOfScalar<Scalar>::type;

template <class Acc>
HFLA_INLINE Vec<Acc> broadcast(Acc x) {
  return Vec<Acc>{} + x;
}

// `condition` is the result of a comparison of vectors.
template <class Mask, class V>
HFLA_INLINE V select(Mask condition, V yes, V no) {
  return condition ? yes : no;
}

template <class T, int64_t lanes>
HFLA_INLINE T sum_lanes(typename VectorOf<T, lanes>::type x) {
  if constexpr (lanes == 1) {
    return x[0];
  } else {
    typename VectorOf<T, lanes / 2>::type halves[2];
    __builtin_memcpy(halves, &x, sizeof x);
    return sum_lanes<T, lanes / 2>(halves[0] + halves[1]);
  }
}
template <class Acc>
HFLA_INLINE Acc sum(Vec<Acc> x) {
  return sum_lanes<Acc, kLanes<Acc>>(x);
}

// The larger and the smaller of x and a bound; a NaN stays one.
#if defined(__AVX512F__)
// GCC makes a comparison and a blend of the generic form. (Masks of all ones: the unmasked
// intrinsics warn of an uninitialised variable of their own.)
HFLA_INLINE Vec<float> at_least(float bound, Vec<float> x) {
  return (Vec<float>)_mm512_maskz_max_ps(-1, (__m512)broadcast(bound), (__m512)x);
}
HFLA_INLINE Vec<float> at_most(float bound, Vec<float> x) {
  return (Vec<float>)_mm512_maskz_min_ps(-1, (__m512)broadcast(bound), (__m512)x);
}
HFLA_INLINE Vec<double> at_least(double bound, Vec<double> x) {
  return (Vec<double>)_mm512_maskz_max_pd(-1, (__m512d)broadcast(bound), (__m512d)x);
}
HFLA_INLINE Vec<double> at_most(double bound, Vec<double> x) {
  return (Vec<double>)_mm512_maskz_min_pd(-1, (__m512d)broadcast(bound), (__m512d)x);
}
#else
template <class Acc, class V>
HFLA_INLINE V at_least(Acc bound, V x) {
  return select(x < bound, broadcast(bound), x);
}
template <class Acc, class V>
HFLA_INLINE V at_most(Acc bound, V x) {
  return select(x > bound, broadcast(bound), x);
}
#endif

// x in the first `count` lanes, zero in the others: also where x is NaN.
template <class Acc>
HFLA_INLINE Vec<Acc> first_lanes(int64_t count, Vec<Acc> x) {
  Vec<Acc> lane;
  for (int64_t i = 0; i < kLanes<Acc>; ++i) lane[i] = static_cast<Acc>(i);
  return select(lane < static_cast<Acc>(count), x, Vec<Acc>{});
}

// ---- storage ----

// Sixteen-bit patterns, as many as there are lanes of float.
using HalfBits = typename VectorOf<uint16_t, kLanes<float>>::type;

// Through a vector type, not memcpy: a memcpy might change anything, for all that the compiler
// knows.
template <class T, int64_t lanes = kLanes<T>>
HFLA_INLINE typename VectorOf<T, lanes>::type load_lanes(const T* from) {
  return *reinterpret_cast<const typename VectorOf<T, lanes>::unaligned*>(from);
}
template <class T, int64_t lanes = kLanes<T>>
HFLA_INLINE void store_lanes(T* to, typename VectorOf<T, lanes>::type x) {
  *reinterpret_cast<typename VectorOf<T, lanes>::unaligned*>(to) = x;
}

HFLA_INLINE Vec<float> load(const float* from) { return load_lanes(from); }
HFLA_INLINE Vec<double> load(const double* from) { return load_lanes(from); }
HFLA_INLINE void store(float* to, Vec<float> x) { store_lanes(to, x); }
HFLA_INLINE void store(double* to, Vec<double> x) { store_lanes(to, x); }

HFLA_INLINE HalfBits load_bits(const uint16_t* from) {
  return load_lanes<uint16_t, kLanes<float>>(from);
}
HFLA_INLINE void store_bits(uint16_t* to, HalfBits bits) {
  store_lanes<uint16_t, kLanes<float>>(to, bits);
}

HFLA_INLINE Vec<float> load(const BFloat16* from) {
  return (Vec<float>)(__builtin_convertvector(load_bits(&from->bits), UIntVec<float>) << 16);
}

// To nearest, ties to even; a NaN stays one.
HFLA_INLINE void store(BFloat16* to, Vec<float> x) {
  const UIntVec<float> bits = (UIntVec<float>)x;
  const UIntVec<float> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const UIntVec<float> nan = (bits >> 16) | 0x40;
  store_bits(&to->bits, __builtin_convertvector(select(x == x, rounded, nan), HalfBits));
}

HFLA_INLINE Vec<float> load(const Float16* from) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_maskz_cvtph_ps(-1, (__m256i)load_bits(&from->bits));
#elif defined(__F16C__)
  return (Vec<float>)_mm256_cvtph_ps((__m128i)load_bits(&from->bits));
#else
  const UIntVec<float> bits = __builtin_convertvector(load_bits(&from->bits), UIntVec<float>);
  const UIntVec<float> magnitude = (bits & 0x7fff) << 13;
  // The exponent's bias differs by 112; multiplying also makes subnormals normal.
  const Vec<float> scaled = (Vec<float>)magnitude * 0x1p112f;
  const UIntVec<float> inf_or_nan = magnitude | 0x7f800000;
  const UIntVec<float> result = select(magnitude >= 0x0f800000, inf_or_nan, (UIntVec<float>)scaled);
  return (Vec<float>)(result | ((bits & 0x8000) << 16));
#endif
}

// To nearest, ties to even; too large becomes inf; a NaN stays one.
HFLA_INLINE void store(Float16* to, Vec<float> x) {
#if defined(__AVX512F__)
  const __m256i half =
      _mm512_maskz_cvtps_ph(-1, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  const __m128i half = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const UIntVec<float> bits = (UIntVec<float>)x;
  const UIntVec<float> magnitude = bits & 0x7fffffff;
  // Adding 0.5 leaves a subnormal half's bits, rounded, at the bottom of the float's mantissa.
  const UIntVec<float> subnormal = (UIntVec<float>)((Vec<float>)magnitude + 0.5f) - 0x3f000000;
  const UIntVec<float> normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  UIntVec<float> result = select(magnitude < (113 << 23), subnormal, normal);
  result = select(magnitude >= (143 << 23), UIntVec<float>{} + 0x7c00, result);
  result = select(magnitude > 0x7f800000, UIntVec<float>{} + 0x7e00, result);
  const HalfBits half = __builtin_convertvector(result | ((bits & 0x80000000) >> 16), HalfBits);
#endif
  store_bits(&to->bits, (HalfBits)half);
}

// A vector's worth of elements, `stride` apart and `count` of them; the other lanes are zero.
template <class Scalar>
HFLA_INLINE Vec<AccOf<Scalar>> load_some(const Scalar* from, int64_t stride, int64_t count) {
  Scalar lanes[kLanes<AccOf<Scalar>>] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = from[i * stride];
  return load(lanes);
}

template <class Scalar>
HFLA_INLINE void store_some(Scalar* to, int64_t stride, int64_t count, Vec<AccOf<Scalar>> x) {
  Scalar lanes[kLanes<AccOf<Scalar>>];
  store(lanes, x);
  for (int64_t i = 0; i < count; ++i) to[i * stride] = lanes[i];
}

// Calls body(c, count) for the columns [begin, end), a vector at a time. Inlined, it does not have
// to ask for the count but at the end.
template <class Acc, class Body>
HFLA_INLINE void for_each_vector(int64_t begin, int64_t end, Body body) {
  int64_t c = begin;
  for (; c + kLanes<Acc> <= end; c += kLanes<Acc>) body(c, kLanes<Acc>);
  if (c < end) body(c, end - c);
}

template <class Scalar>
HFLA_INLINE Vec<AccOf<Scalar>> load_vector(const Scalar* from, int64_t stride, int64_t c,
                                           int64_t count) {
  if (stride == 1 && count == kLanes<AccOf<Scalar>>) return load(from + c);
  return load_some(from + c * stride, stride, count);
}

template <class Scalar>
HFLA_INLINE void store_vector(Scalar* to, int64_t stride, int64_t c, int64_t count,
                              Vec<AccOf<Scalar>> x) {
  if (stride == 1 && count == kLanes<AccOf<Scalar>>) return store(to + c, x);
  store_some(to + c * stride, stride, count, x);
}

// ---- exp ----

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

// As exp below, where x is not above kInfAbove.
template <class V>
HFLA_INLINE V bounded_exp(V x) {
  using Acc = ElementOf<V>;
  using C = Exp<Acc>;
  x = at_least(C::kZeroBelow, x);
  const V rounded_n = x * Acc(1.4426950408889634) + C::kRound;
  const V n = rounded_n - C::kRound;
  const V r = x - n * C::kLn2High - n * C::kLn2Low;
  V p = broadcast<Acc>(C::kPolynomial[0]);
  HFLA_UNROLL
  for (unsigned i = 1; i < sizeof(C::kPolynomial) / sizeof(Acc); ++i) p = p * r + C::kPolynomial[i];
  return scale_by_power<Acc>((p * r + Acc(1)) * r + Acc(1), n, rounded_n);
}

// Within 2 ulp; exp(-inf) = 0, exp(inf) = inf, and NaN stays NaN.
template <class V>
HFLA_INLINE V exp(V x) {
  return bounded_exp(at_most(Exp<ElementOf<V>>::kInfAbove, x));
}

}  // namespace
}  // namespace hfla::HFLA_ISA
