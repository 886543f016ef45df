// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// How values of 8 bits become integers of 16, without moving them: the order in which they come is
// that in which x is made to lie. Products of these, added in pairs.
#pragma once

#include "cpu/dense/quantized_values.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hfla::HFLA_ISA {
namespace {

using Shorts = Vec<int16_t>;
constexpr int64_t kShorts = kLanes<int16_t>;
constexpr int kShortVectors = kUnit / kShorts;  // of a unit

// sum + a b, of which each lane gets the products of two neighbours.
HFLA_INLINE Ints add_pairs(Ints sum, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__)
  return sum + (Ints)_mm512_maskz_madd_epi16(-1, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return sum + (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const Ints x = (Ints)a, y = (Ints)b;
  return sum + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

// Sums of products of so many integers fit into 32 bits, and one large input spoils few others'
// accuracy.
constexpr int64_t kBlock = 256;

// Of products of integers, whatever their values' bits.
struct IntegerFormat {
  static constexpr int64_t kBlock = ::hfla::HFLA_ISA::kBlock;
  static constexpr bool kIsRounded = true;
  using Input = int16_t;
  using Lift = int32_t;
};

// A unit is 32 values as they are; or where no instruction makes bytes wider, words of two, which
// are shifted to their place.
struct EightBitShorts : IntegerFormat {
  using Sum = Ints;
  static constexpr int kInputs = kShorts;  // of a vector
  static constexpr int32_t kLift = 0;
  static constexpr int64_t kBytes = kUnit;
  using Unit = const int8_t*;

  static HFLA_INLINE Unit load(const int8_t* from) { return from; }

#if defined(__AVX2__)
  static HFLA_INLINE Shorts values(Unit unit, int i) {
#if defined(__AVX512F__)
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit));
    return (Shorts)_mm512_maskz_cvtepi8_epi16(-1, values);
#else
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(unit + i * kShorts));
    return (Shorts)_mm256_cvtepi8_epi16(values);
#endif
  }

  static HFLA_INLINE void store_unit(const int32_t* integers, int16_t* to) {
    HFLA_UNROLL
    for (int64_t i = 0; i < kUnit; ++i) to[i] = static_cast<int16_t>(integers[i]);
  }
#else
  static HFLA_INLINE Shorts values(Unit unit, int i) {
    Shorts words;
    __builtin_memcpy(&words, unit + i / 2 * kVectorBytes, sizeof words);
    return (i % 2 == 0 ? words << 8 : words) >> 8;
  }

  static void store_unit(const int32_t* integers, int16_t* to) {
    for (int64_t i = 0; i < kUnit; ++i) {
      const int64_t vector = i / kShorts, lane = i % kShorts;
      const int64_t place = vector / 2 * kVectorBytes + 2 * lane + vector % 2;
      to[i] = static_cast<int16_t>(integers[place]);
    }
  }
#endif

  static HFLA_INLINE Ints multiply_add(Ints sum, Shorts values, const int16_t* x) {
    return add_pairs(sum, values, load_lanes<int16_t>(x));
  }
};

}  // namespace
}  // namespace hfla::HFLA_ISA
