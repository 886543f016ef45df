// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Products of values of 4 bits with x, for as many outputs at once as a vector has floats.
//
// A unit is four words of eight values. Words of outputs that follow each other come to lie in the
// lanes of a vector, so that an input is the same in all lanes, and nothing is to be added up
// across them.
//
// Values become integers of 16 bits, as x is, and are multiplied in pairs. With AVX512-VNNI, which
// adds up products of four bytes, of which one has a sign, values become bytes, and x is two bytes,
// the upper one with its sign: as many products, but half the instructions for values.
#pragma once

#include "cpu/dense/quantized_shorts.h"

namespace hfla::HFLA_ISA {
namespace {

struct Nibbles : IntegerFormat {
  static constexpr int32_t kLift = 8;
#if defined(__AVX512VNNI__)
  static constexpr int kParts = 2;  // of a word: first the lower value of each byte

  // Four bytes for each part and word: first all upper bytes, then the lower ones.
  static HFLA_INLINE void store_unit(const int32_t* integers, int16_t* to) {
    const __m512i begin = _mm512_loadu_si512(integers), end = _mm512_loadu_si512(integers + 16);
    const auto every_other = [&](Ints places) HFLA_INLINE_LAMBDA {
      return (Ints)_mm512_maskz_permutex2var_epi32(-1, begin, (__m512i)places, end);
    };
    const Ints even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const Ints values[] = {every_other(even), every_other(even + 1)};
    const auto store_bytes = [&](int i, Ints x) HFLA_INLINE_LAMBDA {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i,
                       _mm512_maskz_cvtepi32_epi8(-1, (__m512i)x));
    };
    HFLA_UNROLL
    for (int i = 0; i < kParts; ++i) {
      store_bytes(i, values[i] >> 8);
      store_bytes(kParts + i, values[i]);
    }
  }
#else
  static constexpr int kParts = 4;  // of a word: the i-th has the i-th value of each half

  // Two integers for each part and word.
  static HFLA_INLINE void store_unit(const int32_t* integers, int16_t* to) {
    HFLA_UNROLL
    for (int64_t i = 0; i < kUnit; ++i) to[i] = static_cast<int16_t>(integers[4 * (i % 8) + i / 8]);
  }
#endif
};

constexpr int kUnitWords = 4;
using Words = Bits;

// ---- parts of 128 bits: what the first two or the last two words, or the halves, of both are ----

#if defined(__AVX512F__)
HFLA_INLINE Words first_words(Words a, Words b) {
  return (Words)_mm512_maskz_unpacklo_epi32(-1, (__m512i)a, (__m512i)b);
}
HFLA_INLINE Words last_words(Words a, Words b) {
  return (Words)_mm512_maskz_unpackhi_epi32(-1, (__m512i)a, (__m512i)b);
}
HFLA_INLINE Words first_halves(Words a, Words b) {
  return (Words)_mm512_maskz_unpacklo_epi64(-1, (__m512i)a, (__m512i)b);
}
HFLA_INLINE Words last_halves(Words a, Words b) {
  return (Words)_mm512_maskz_unpackhi_epi64(-1, (__m512i)a, (__m512i)b);
}
#elif defined(__AVX2__)
HFLA_INLINE Words first_words(Words a, Words b) {
  return (Words)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b);
}
HFLA_INLINE Words last_words(Words a, Words b) {
  return (Words)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
}
HFLA_INLINE Words first_halves(Words a, Words b) {
  return (Words)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
}
HFLA_INLINE Words last_halves(Words a, Words b) {
  return (Words)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
}
#else
// The compiler has an instruction for each.
HFLA_INLINE Words first_words(Words a, Words b) { return Words{a[0], b[0], a[1], b[1]}; }
HFLA_INLINE Words last_words(Words a, Words b) { return Words{a[2], b[2], a[3], b[3]}; }
HFLA_INLINE Words first_halves(Words a, Words b) { return Words{a[0], a[1], b[0], b[1]}; }
HFLA_INLINE Words last_halves(Words a, Words b) { return Words{a[2], a[3], b[2], b[3]}; }
#endif

// Parts that are `stride` bytes apart.
HFLA_INLINE Words load_parts(const int8_t* from, [[maybe_unused]] int64_t stride) {
  Words parts;
#if defined(__AVX512F__)
  const auto part = [&](int i) HFLA_INLINE_LAMBDA {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride));
  };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(part(0)), part(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(part(2)), part(3), 1);
  parts = (Words)_mm512_maskz_inserti64x4(-1, _mm512_castsi256_si512(low), high, 1);
#elif defined(__AVX2__)
  const auto part = [&](int i) HFLA_INLINE_LAMBDA {
    return _mm256_broadcastsi128_si256(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride)));
  };
  parts = (Words)_mm256_blend_epi32(part(0), part(1), 0xf0);
#else
  __builtin_memcpy(&parts, from, sizeof parts);
#endif
  return parts;
}

// The words of a unit of W outputs that are `row_bytes` apart, each of its own output in each lane.
// Values from -8 to 7 become those from 0 to 15.
HFLA_INLINE void load_words(const int8_t* from, int64_t row_bytes, Words (&words)[kUnitWords]) {
  Words units[4];  // of every fourth output
  HFLA_UNROLL
  for (int i = 0; i < 4; ++i) units[i] = load_parts(from + i * row_bytes, 4 * row_bytes);
  const Words first = first_words(units[0], units[1]), first_too = first_words(units[2], units[3]);
  const Words last = last_words(units[0], units[1]), last_too = last_words(units[2], units[3]);
  words[0] = first_halves(first, first_too);
  words[1] = last_halves(first, first_too);
  words[2] = first_halves(last, last_too);
  words[3] = last_halves(last, last_too);
  HFLA_UNROLL
  for (int i = 0; i < kUnitWords; ++i) words[i] ^= 0x88888888;
}

// The i-th part of a word's values.
HFLA_INLINE Shorts nibbles_of(Words words, int i) {
#if defined(__AVX512VNNI__)
  return (Shorts)((i == 0 ? words : words >> 4) & 0x0f0f0f0f);
#else
  const Vec<uint16_t> halves = (Vec<uint16_t>)words;
  return (Shorts)(i == 3 ? halves >> 12 : (halves >> (4 * i)) & 15);
#endif
}

// Of a row of x with W outputs.
struct NibbleSums {
#if defined(__AVX512VNNI__)
  Ints upper{}, lower{};  // of x's bytes

  HFLA_INLINE void add(Shorts values, const int16_t* x, int part, int word) {
    const int at = kUnitWords * part + word;
    const __m512i bytes = (__m512i)values;
    const __m512i upper_x = (__m512i)broadcast_word(x, at);
    const __m512i lower_x = (__m512i)broadcast_word(x, kUnitWords * Nibbles::kParts + at);
    upper = (Ints)_mm512_dpbusd_epi32((__m512i)upper, bytes, upper_x);
    lower = (Ints)_mm512_dpbusd_epi32((__m512i)lower, lower_x, bytes);
  }
  HFLA_INLINE Ints total() const { return (upper << 8) + lower; }
#else
  Ints sum{};

  // A part of a word's values, and a unit of x.
  HFLA_INLINE void add(Shorts values, const int16_t* x, int part, int word) {
    sum = add_pairs(sum, values, (Shorts)broadcast_word(x, kUnitWords * part + word));
  }
  HFLA_INLINE Ints total() const { return sum; }
#endif

 private:
  static HFLA_INLINE Ints broadcast_word(const int16_t* x, int at) {
    int32_t word;
    __builtin_memcpy(&word, x + 2 * at, sizeof word);
    return word - Ints{};
  }
};

}  // namespace
}  // namespace hfla::HFLA_ISA
