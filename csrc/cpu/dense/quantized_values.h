// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// How values of 8 and of 4 bits become floats, without moving them: the order in which they come is
// that in which x is made to lie.
#pragma once

#include "cpu/common/vec.h"
#include "kernels/quantized_linear.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kUnit = 32;  // values that are unpacked together
constexpr int64_t W = kLanes<float>;
constexpr int kVectors = kUnit / W;  // of a unit

using Floats = Vec<float>;
using Ints = Vec<int32_t>;
using Bits = Vec<uint32_t>;

// ---- what a unit of values is, and how it becomes floats ----

struct FloatFormat {
  static constexpr int64_t kBlock = int64_t{1} << 40;  // a whole group
  static constexpr bool kIsRounded = false;
  using Input = float;
  using Lift = float;
  using Sum = Floats;
  static constexpr int kInputs = W;  // of a vector

  static HFLA_INLINE Floats multiply_add(Floats sum, Floats values, const float* x) {
    return sum + values * load(x);
  }
};

// A unit is 32 values as they are, read a vector's worth at a time; or where no instruction makes
// bytes wider, two vectors of words of four values, which are shifted to their place, and x lies in
// that order.
struct EightBits : FloatFormat {
  static constexpr int64_t kBytes = kUnit;

#if defined(__AVX2__)
  using Unit = const int8_t*;

  static HFLA_INLINE Unit load(const int8_t* from) { return from; }

  static HFLA_INLINE Floats values(Unit unit, int i) {
#if defined(__AVX512F__)
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(unit + i * W));
    return __builtin_convertvector((Ints)_mm512_maskz_cvtepi8_epi32(-1, values), Floats);
#else
    const __m128i values = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(unit + i * W));
    return __builtin_convertvector((Ints)_mm256_cvtepi8_epi32(values), Floats);
#endif
  }

  static void store_unit(const float (&x)[kUnit], float* to) { __builtin_memcpy(to, x, sizeof x); }
#else
  struct Unit {
    Ints words[2];
  };

  static HFLA_INLINE Unit load(const int8_t* from) {
    static_assert(W == 4);
    Unit unit;
    __builtin_memcpy(&unit, from, sizeof unit);
    return unit;
  }

  static HFLA_INLINE Floats values(const Unit& unit, int i) {
    return __builtin_convertvector((unit.words[i / 4] << (24 - 8 * (i % 4))) >> 24, Floats);
  }

  static void store_unit(const float (&x)[kUnit], float* to) {
    for (int64_t i = 0; i < kUnit; ++i) *to++ = x[16 * (i / 16) + 4 * (i % 4) + i / 4 % 4];
  }
#endif

  static constexpr bool is_lifted(int64_t) { return false; }
  static constexpr float kLift = 0;
  static Floats lift(int) { return Floats{}; }
};

// A unit is four words of eight values. Every four lanes have all four words, and each lane one of
// its eight values: nothing is moved within a vector, nor shifted, for x lies in this order, too,
// and is divided by what a value's place in the word multiplies it by. To make the values
// nonnegative, 8 is added to all but the highest one, which has the word's sign.
struct FourBits : FloatFormat {
  using Unit = Bits;
  static constexpr int64_t kBytes = kUnit / 2;
  static constexpr int64_t kCopies = W / 4;

  static HFLA_INLINE Unit load(const int8_t* from) { return four_words(from) ^ 0x08888888u; }

  static HFLA_INLINE Floats values(Unit unit, int i) {
    return __builtin_convertvector((Ints)(unit & mask(i)), Floats);
  }

  static constexpr int64_t in_word(int64_t i, int64_t lane) { return i + kVectors * (lane / 4); }
  static void store_unit(const float (&x)[kUnit], float* to) {
    HFLA_UNROLL
    for (int64_t i = 0; i < kUnit; ++i) {
      const int64_t place = in_word(i / W, i % W);  // of a value in its word
      *to++ = x[8 * (i % 4) + place] / static_cast<float>(1 << 4 * place);
    }
  }
  static constexpr bool is_lifted(int64_t place) { return place % 8 != 7; }
  static constexpr float kLift = 8;
  // What values() are too large by.
  static HFLA_INLINE Floats lift(int i) {
    return __builtin_convertvector((Ints)(0x08888888u & mask(i)), Floats);
  }

  static HFLA_INLINE Bits four_words(const int8_t* from) {
#if defined(__AVX512F__)
    // Of all lanes: the unmasked intrinsic warns of an uninitialised variable of its own.
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Bits)_mm512_maskz_broadcast_i32x4(-1, words);
#elif defined(__AVX2__)
    return (Bits)_mm256_broadcastsi128_si256(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Bits words;
    static_assert(sizeof words == 16);
    __builtin_memcpy(&words, from, sizeof words);
    return words;
#endif
  }

 private:
  static HFLA_INLINE Bits mask(int i) {
    Bits result{};
    HFLA_UNROLL
    for (int lane = 0; lane < W; ++lane) result[lane] = 0xfu << (4 * in_word(i, lane));
    return result;
  }
};

// ---- numbers of groups ----

HFLA_INLINE Floats load_number_vector(const int8_t* from, int64_t stride, int64_t count) {
#if defined(__AVX2__)
  if (stride == 1 && count == W) return EightBits::values(from, 0);
#endif
  Floats result{};
  for (int64_t i = 0; i < count; ++i) result[i] = from[i * stride];
  return result;
}

template <class Number>
HFLA_INLINE Floats load_number_vector(const Number* from, int64_t stride, int64_t count) {
  return load_vector(from, stride, 0, count);
}

template <class Number>
void store_numbers_of(const Number* from, const int64_t (&strides)[2], int64_t rows,
                      int64_t columns, float* to, int64_t to_stride) {
  for (int64_t row = 0; row < rows; ++row, from += strides[0], to += to_stride) {
    for_each_vector<float>(0, columns, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
      store(to + c, load_number_vector(from + c * strides[1], strides[1], count));
    });
  }
}

// body(data), of the numbers' type.
template <class Body>
HFLA_INLINE void with_numbers(const GroupNumbers& numbers, Body body) {
  switch (numbers.type) {
    case NumberType::f32:
      return body(static_cast<const float*>(numbers.data));
    case NumberType::bf16:
      return body(static_cast<const BFloat16*>(numbers.data));
    case NumberType::f16:
      return body(static_cast<const Float16*>(numbers.data));
    case NumberType::i8:
      return body(static_cast<const int8_t*>(numbers.data));
  }
  __builtin_unreachable();
}

// A matrix from `offset` on as floats, zeros behind each row up to a whole vector; all zeros where
// there are no numbers.
inline void store_numbers(const GroupNumbers& numbers, int64_t offset, const int64_t (&strides)[2],
                          int64_t rows, int64_t columns, float* to, int64_t to_stride) {
  if (numbers.data == nullptr) {
    __builtin_memset(to, 0, sizeof(float) * static_cast<size_t>(rows * to_stride));
    return;
  }
  with_numbers(numbers, [&](const auto* data) {
    store_numbers_of(data + offset, strides, rows, columns, to, to_stride);
  });
}

}  // namespace
}  // namespace hfla::HFLA_ISA
