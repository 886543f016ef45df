// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Products of values of 4 bits with x, for as many outputs at once as a vector has floats.
//
// A unit is eight words of four values. A vector is made of parts of 128 bits, each with a unit of
// an output of its own, four outputs after the part before: so four vectors have a unit of all.
//
// Values become integers of 16 bits, as x is. With AVX512-VNNI, which adds up products of bytes, of
// which one has a sign, values stay bytes, and x is two bytes, the upper one with its sign: that
// takes as many products, but half the instructions for values.
#pragma once

#include "cpu/dense/quantized_shorts.h"

namespace hfla::HFLA_ISA {
namespace {

struct Nibbles {
  static constexpr int32_t kLift = 8;
#if defined(__AVX512VNNI__)
  static constexpr int kVectors = 2;  // of a unit: first the lower value of each byte

  // The upper bytes of both vectors' inputs, then the lower ones.
  static void store_unit(const int32_t* integers, int16_t* to) {
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(to);
    for (int64_t i = 0; i < kUnit; ++i) {
      const uint32_t integer = static_cast<uint32_t>(integers[i % 16 * 2 + i / 16]);
      bytes[i] = static_cast<uint8_t>(integer >> 8);
      bytes[kUnit + i] = static_cast<uint8_t>(integer);
    }
  }
#else
  static constexpr int kVectors = 4;  // of a unit: the i-th has the i-th value of each word

  static void store_unit(const int32_t* integers, int16_t* to) {
    HFLA_UNROLL
    for (int64_t i = 0; i < kUnit; ++i) to[i] = static_cast<int16_t>(integers[4 * (i % 8) + i / 8]);
  }
#endif
};

using NibbleWords = Vec<uint16_t>;

// Units of outputs that are `stride` bytes apart.
HFLA_INLINE NibbleWords load_nibbles(const int8_t* from, [[maybe_unused]] int64_t stride) {
  NibbleWords words;
#if defined(__AVX512F__)
  const auto unit = [&](int i) HFLA_INLINE_LAMBDA {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride));
  };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(unit(0)), unit(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(unit(2)), unit(3), 1);
  words = (NibbleWords)_mm512_maskz_inserti64x4(-1, _mm512_castsi256_si512(low), high, 1);
#elif defined(__AVX2__)
  const auto unit = [&](int i) HFLA_INLINE_LAMBDA {
    return _mm256_broadcastsi128_si256(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride)));
  };
  words = (NibbleWords)_mm256_blend_epi32(unit(0), unit(1), 0xf0);
#else
  __builtin_memcpy(&words, from, sizeof words);
#endif
  return words;
}

// The i-th vector. Values from -8 to 7 become those from 0 to 15.
HFLA_INLINE Shorts nibbles_of(NibbleWords words, int i) {
#if defined(__AVX512VNNI__)
  return (Shorts)(((i == 0 ? words : words >> 4) ^ 0x0808) & 0x0f0f);
#else
  if (i == 3) return (Shorts)((words ^ 0x8888) >> 12);
  return (Shorts)(((words ^ 0x8888) >> (4 * i)) & 15);
#endif
}

// 128 bits, in each part.
HFLA_INLINE Shorts broadcast_part(const int16_t* from) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_maskz_broadcast_i32x4(
      -1, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (Shorts)_mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  return load_lanes<int16_t>(from);
#endif
}

// Of values and x.
struct NibbleSums {
#if defined(__AVX512VNNI__)
  Ints upper{}, lower{};  // of x's bytes

  HFLA_INLINE void add(Shorts values, const int16_t* x, int i) {
    const __m512i bytes = (__m512i)values;
    const __m512i upper_x = (__m512i)broadcast_part(x + 8 * i);
    const __m512i lower_x = (__m512i)broadcast_part(x + 8 * (2 + i));
    upper = (Ints)_mm512_dpbusd_epi32((__m512i)upper, bytes, upper_x);
    lower = (Ints)_mm512_dpbusd_epi32((__m512i)lower, lower_x, bytes);
  }
  HFLA_INLINE Ints total() const { return (upper << 8) + lower; }
#else
  Ints sum{};

  // The i-th vector's values and a unit of x.
  HFLA_INLINE void add(Shorts values, const int16_t* x, int i) {
    sum = add_pairs(sum, values, broadcast_part(x + 8 * i));
  }
  HFLA_INLINE Ints total() const { return sum; }
#endif
};

// In each part the sums of the four vectors' parts there.
HFLA_INLINE Ints sums_of_parts(const NibbleSums (&sums)[4]) {
  const Ints x[4] = {sums[0].total(), sums[1].total(), sums[2].total(), sums[3].total()};
#if defined(__AVX512F__)
  const auto pairs = [](Ints a, Ints b) HFLA_INLINE_LAMBDA {
    return (Ints)_mm512_maskz_unpacklo_epi32(-1, (__m512i)a, (__m512i)b) +
           (Ints)_mm512_maskz_unpackhi_epi32(-1, (__m512i)a, (__m512i)b);
  };
  const __m512i low = (__m512i)pairs(x[0], x[1]), high = (__m512i)pairs(x[2], x[3]);
  return (Ints)_mm512_maskz_unpacklo_epi64(-1, low, high) +
         (Ints)_mm512_maskz_unpackhi_epi64(-1, low, high);
#elif defined(__AVX2__)
  const auto pairs = [](Ints a, Ints b) HFLA_INLINE_LAMBDA {
    return (Ints)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b) +
           (Ints)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
  };
  const __m256i low = (__m256i)pairs(x[0], x[1]), high = (__m256i)pairs(x[2], x[3]);
  return (Ints)_mm256_unpacklo_epi64(low, high) + (Ints)_mm256_unpackhi_epi64(low, high);
#else
  Ints result;
  for (int i = 0; i < 4; ++i) result[i] = x[i][0] + x[i][1] + x[i][2] + x[i][3];
  return result;
#endif
}

}  // namespace
}  // namespace hfla::HFLA_ISA
