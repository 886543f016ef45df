// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Vectors of the compiler's own kind, as wide as the instruction set has them: arithmetic, loads
// and stores from every storage dtype. Arithmetic is in the accumulation type, `Acc`.
#pragma once

#include "cpu/common/dtypes.h"

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

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kHasManyRegisters = true;  // 32, of vectors
#else
constexpr bool kHasManyRegisters = false;  // 16
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

// x - 0 is x; x + 0 is not, for a zero of x may be negative, so that compilers add it.
template <class Acc>
HFLA_INLINE Vec<Acc> broadcast(Acc x) {
  return x - Vec<Acc>{};
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

// The upper halves of these bits are x in bfloat16: to nearest, ties to even; a NaN stays one.
HFLA_INLINE UIntVec<float> bfloat16_above(Vec<float> x) {
  const UIntVec<float> bits = (UIntVec<float>)x;
  return select(x == x, bits + 0x7fff + ((bits >> 16) & 1), bits | 0x400000);
}

HFLA_INLINE void store(BFloat16* to, Vec<float> x) {
  store_bits(&to->bits, __builtin_convertvector(bfloat16_above(x) >> 16, HalfBits));
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

// x as it is after it was stored.
template <class Scalar>
HFLA_INLINE Vec<AccOf<Scalar>> rounded(Vec<AccOf<Scalar>> x) {
  Scalar lanes[kLanes<AccOf<Scalar>>];
  store(lanes, x);
  return load(lanes);
}
template <>
HFLA_INLINE Vec<float> rounded<BFloat16>(Vec<float> x) {
  return (Vec<float>)(bfloat16_above(x) & 0xffff0000);
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

}  // namespace
}  // namespace hfla::HFLA_ISA
