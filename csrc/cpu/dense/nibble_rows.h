// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Products of values of 4 bits with one row of x, for W outputs, along their rows of values.
//
// For one row, to bring words of outputs into the lanes of a vector (quantized_nibbles.h) takes as
// many instructions as to multiply by them. Here a chunk of four units of one output is a vector as
// it lies, or two of AVX2. The four sums of each unit are added up for four outputs at a time, and
// come to lie with one output in each lane; they are the same integers.
//
// Values are bytes, and x is two bytes, the upper one with its sign.
#pragma once

#include "cpu/common/memory.h"
#include "cpu/dense/quantized_nibbles.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kChunkUnits = 4;

// Lines of the cache that are asked for meanwhile, some of them with each chunk.
struct Lines {
  const char* next;
  int64_t step;  // bytes from one to the next
  int64_t count;
};

// The lanes of each part of 128 bits of four vectors, added up: one next to the other.
HFLA_INLINE Words add_up_parts(const Words (&x)[4]) {
  const Words first = first_words(x[0], x[1]) + last_words(x[0], x[1]);
  const Words last = first_words(x[2], x[3]) + last_words(x[2], x[3]);
  return first_halves(first, last) + last_halves(first, last);
}

#if defined(__AVX512VNNI__)

constexpr bool kWalksAlongRows = true;

// Two parts of 128 bits of a, then two of b, by the places in `order`.
template <int order>
HFLA_INLINE __m512i parts_of(__m512i a, __m512i b) {
  return _mm512_maskz_shuffle_i32x4(-1, a, b, order);
}

// The i-th part of the n-th vector becomes the n-th of the i-th.
HFLA_INLINE void transpose_parts(__m512i (&x)[4]) {
  constexpr int kFirst = 0x44, kLast = 0xee, kEven = 0x88, kOdd = 0xdd;
  const __m512i first = parts_of<kFirst>(x[0], x[1]), first_too = parts_of<kFirst>(x[2], x[3]);
  const __m512i last = parts_of<kLast>(x[0], x[1]), last_too = parts_of<kLast>(x[2], x[3]);
  x[0] = parts_of<kEven>(first, first_too);
  x[1] = parts_of<kOdd>(first, first_too);
  x[2] = parts_of<kEven>(last, last_too);
  x[3] = parts_of<kOdd>(last, last_too);
}

// A row of x, from units as Nibbles::store_unit made them to chunks: of each of the four kinds of
// bytes that a unit has, those of four units. Behind the last unit are zeros.
inline void store_chunks(const int16_t* integers, int64_t units, Ints* to) {
  for (int64_t unit = 0; unit < units; unit += kChunkUnits, to += 4) {
    __m512i chunk[4] = {};
    const int64_t count = min(kChunkUnits, units - unit);
    for (int64_t i = 0; i < count; ++i) {
      chunk[i] = _mm512_loadu_si512(integers + (unit + i) * kUnit);
    }
    transpose_parts(chunk);
    HFLA_UNROLL
    for (int i = 0; i < 4; ++i) to[i] = (Ints)chunk[i];
  }
}

// Four sums of each unit of a chunk: values, lifted to be from 0 to 15, with upper and lower bytes.
HFLA_INLINE __m512i multiply_chunk(__m512i values, const __m512i (&x)[4]) {
  const __m512i nibbles = (__m512i)(Bits{} + 0x0f0f0f0f), lift = (__m512i)(Bits{} + 0x88888888);
  const auto lifted = [&](__m512i x) HFLA_INLINE_LAMBDA {
    constexpr int kXorThenAnd = 0x28;
    return _mm512_maskz_ternarylogic_epi32(-1, x, lift, nibbles, kXorThenAnd);
  };
  const __m512i even = lifted(values), odd = lifted((__m512i)((Bits)values >> 4));
  __m512i sum = _mm512_dpbusd_epi32(__m512i{}, even, x[0]);
  sum = (__m512i)((Ints)_mm512_dpbusd_epi32(sum, odd, x[1]) << 8);
  sum = _mm512_dpbusd_epi32(sum, x[2], even);
  return _mm512_dpbusd_epi32(sum, x[3], odd);
}

// The sums of the units, one or more, of W outputs, whose rows are `row_bytes` apart: (units, W),
// up to a whole chunk.
//
// Meanwhile it asks for the same places of outputs that are `bytes_ahead` behind these, so that all
// come as long before they are read, and for `lines`, between them. The next chunk it asks for
// once more, of the first-level cache: a load from the second one would wait behind all that is
// asked for of memory.
HFLA_INLINE void sum_units(const int8_t* weight, int64_t row_bytes, const Ints* x, int64_t units,
                           int64_t bytes_ahead, Lines lines, int32_t* to) {
  static_assert(W == 16);
  const int64_t lines_of_chunk = ceil_div(lines.count, ceil_div(units, kChunkUnits));
  // next_chunk: bytes from this one to it, behind the last one of a row in the next outputs.
  const auto sum_chunk = [&](__mmask64 bytes, int64_t next_chunk) HFLA_INLINE_LAMBDA {
    for (int64_t i = 0; i < lines_of_chunk; ++i, lines.next += lines.step) ask_for(lines.next);
    const __m512i inputs[4] = {(__m512i)x[0], (__m512i)x[1], (__m512i)x[2], (__m512i)x[3]};
    __m512i sums[4];
    HFLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      Words of_outputs[4];
      HFLA_UNROLL
      for (int o = 0; o < 4; ++o) {
        const int8_t* from = weight + (4 * i + o) * row_bytes;
        ask_for(from + bytes_ahead);
        ask_for_soon(from + next_chunk);
        of_outputs[o] = (Words)multiply_chunk(_mm512_maskz_loadu_epi8(bytes, from), inputs);
      }
      sums[i] = (__m512i)add_up_parts(of_outputs);
    }
    transpose_parts(sums);
    HFLA_UNROLL
    for (int i = 0; i < 4; ++i) store_lanes(to + i * W, (Ints)sums[i]);
    weight += kCacheLine;
    x += 4;
    to += 4 * W;
  };
  const int64_t back = (units - 1) / kChunkUnits * kCacheLine;  // from a row's last chunk
  for (; units > kChunkUnits; units -= kChunkUnits) sum_chunk(~__mmask64{}, kCacheLine);
  sum_chunk(~__mmask64{} >> (kCacheLine - units * kUnit / 2), W * row_bytes - back);
}

#elif defined(__AVX2__) && !defined(__AVX512F__)

constexpr bool kWalksAlongRows = true;
constexpr int64_t kHalfUnits = 2, kHalfVectors = 4;  // of half a chunk, which a vector holds

// As above, for each half of a chunk.
inline void store_chunks(const int16_t* integers, int64_t units, Ints* to) {
  const int64_t padded = round_up(units, kChunkUnits);
  __builtin_memset(to, 0, static_cast<size_t>(padded * kUnit) * sizeof *integers);
  for (int64_t unit = 0; unit < units; ++unit, integers += kUnit) {
    auto* const bytes = reinterpret_cast<int8_t*>(to + unit / kHalfUnits * kHalfVectors) +
                        unit % kHalfUnits * (kUnit / 2);
    // Of Nibbles::kParts, the first and third are those of even inputs, in turn.
    HFLA_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      const auto part = [&](int i) HFLA_INLINE_LAMBDA {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(integers + 8 * (odd + i)));
      };
      const auto store_bytes = [&](int vector, __m128i x) HFLA_INLINE_LAMBDA {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + vector * kVectorBytes), x);
      };
      const __m128i begin = _mm_unpacklo_epi16(part(0), part(2));
      const __m128i end = _mm_unpackhi_epi16(part(0), part(2)), low = _mm_set1_epi16(255);
      store_bytes(odd, _mm_packs_epi16(_mm_srai_epi16(begin, 8), _mm_srai_epi16(end, 8)));
      store_bytes(2 + odd, _mm_packus_epi16(_mm_and_si128(begin, low), _mm_and_si128(end, low)));
    }
  }
}

// Four sums of each of two units. No sum of two products is too large for 16 bits: values are at
// most 15, bytes of x 255 without a sign.
HFLA_INLINE Words multiply_half(__m256i values, const __m256i (&x)[kHalfVectors]) {
  const __m256i nibbles = _mm256_set1_epi8(15), lift = _mm256_set1_epi8(-0x78);
  const __m256i lifted = _mm256_xor_si256(values, lift);
  const __m256i even = _mm256_and_si256(lifted, nibbles);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(lifted, 4), nibbles);
  const __m256i upper =
      _mm256_add_epi16(_mm256_maddubs_epi16(even, x[0]), _mm256_maddubs_epi16(odd, x[1]));
  const __m256i lower =
      _mm256_add_epi16(_mm256_maddubs_epi16(x[2], even), _mm256_maddubs_epi16(x[3], odd));
  return (Words)_mm256_add_epi32(_mm256_madd_epi16(upper, _mm256_set1_epi16(256)),
                                 _mm256_madd_epi16(lower, _mm256_set1_epi16(1)));
}

// As above.
HFLA_INLINE void sum_units(const int8_t* weight, int64_t row_bytes, const Ints* x, int64_t units,
                           int64_t bytes_ahead, Lines lines, int32_t* to) {
  static_assert(W == 8);
  const int64_t lines_of_chunk = ceil_div(lines.count, ceil_div(units, kChunkUnits));
  const auto sum_chunk = [&](const int8_t* rows, int64_t stride) HFLA_INLINE_LAMBDA {
    for (int64_t i = 0; i < lines_of_chunk; ++i, lines.next += lines.step) ask_for(lines.next);
    HFLA_UNROLL
    for (int64_t o = 0; o < W; ++o) ask_for(weight + o * row_bytes + bytes_ahead);
    for (int half = 0; half < 2; ++half) {
      __m256i inputs[kHalfVectors];
      HFLA_UNROLL
      for (int i = 0; i < kHalfVectors; ++i) inputs[i] = (__m256i)x[i];
      Words sums[2];
      HFLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        Words of_outputs[4];
        HFLA_UNROLL
        for (int o = 0; o < 4; ++o) {
          const int8_t* const from = rows + (4 * i + o) * stride + half * kVectorBytes;
          of_outputs[o] =
              multiply_half(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), inputs);
        }
        sums[i] = add_up_parts(of_outputs);
      }
      const __m256i a = (__m256i)sums[0], b = (__m256i)sums[1];
      store_lanes(to, (Ints)_mm256_permute2x128_si256(a, b, 0x20));
      store_lanes(to + W, (Ints)_mm256_permute2x128_si256(a, b, 0x31));
      x += kHalfVectors;
      to += kHalfUnits * W;
    }
    weight += kCacheLine;
  };
  for (; units >= kChunkUnits; units -= kChunkUnits) sum_chunk(weight, row_bytes);
  if (units > 0) {
    int8_t last[W * kCacheLine] = {};
    for (int64_t o = 0; o < W; ++o) {
      __builtin_memcpy(last + o * kCacheLine, weight + o * row_bytes,
                       static_cast<size_t>(units * kUnit / 2));
    }
    sum_chunk(last, kCacheLine);
  }
}

#else

// Elsewhere values take more instructions than words do to be moved.
constexpr bool kWalksAlongRows = false;
inline void store_chunks(const int16_t*, int64_t, Ints*) {}
inline void sum_units(const int8_t*, int64_t, const Ints*, int64_t, int64_t, Lines, int32_t*) {}

#endif

}  // namespace
}  // namespace hfla::HFLA_ISA
