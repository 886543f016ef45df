// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The dtypes of tensors on the device.
#pragma once

#include <type_traits>

#include "cuda/common/device.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#else
#include <cmath>
#include <cstring>
#endif

namespace hfla::cuda {

struct BFloat16 {
  uint16_t bits;
};

#if defined(__CUDACC__)
using Float16 = __half;
DEV float half_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
DEV uint32_t to_half_pair(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
#else
using Float16 = _Float16;
inline float half_to_float(uint16_t bits) {
  Float16 x;
  std::memcpy(&x, &bits, sizeof x);
  return static_cast<float>(x);
}
inline uint32_t to_half_pair(float low, float high) {
  const Float16 pair[2] = {static_cast<Float16>(low), static_cast<Float16>(high)};
  uint32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return bits;
}
#endif

DEV float to_float(float x) { return x; }
DEV float to_float(BFloat16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
DEV float to_float(Float16 x) { return static_cast<float>(x); }

// Rounded to the nearest, ties to even.
template <class Scalar>
DEV Scalar from_float(float x) {
  return static_cast<Scalar>(x);
}
template <>
DEV BFloat16 from_float<BFloat16>(float x) {
  return {to_bf16(x)};
}

// Registers have 32 bits, a word: one float, or two of the others, the first in the low half.
template <class Scalar>
using Word = std::conditional_t<sizeof(Scalar) == 4, Scalar, uint32_t>;
template <class Scalar>
constexpr int kPerWord = 4 / int(sizeof(Scalar));

template <class Scalar>
DEV float get(Word<Scalar> word, int i) {
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    return bits_to_float(i ? word & 0xffff0000u : word << 16);
  } else if constexpr (std::is_same_v<Scalar, Float16>) {
    return half_to_float(uint16_t(i ? word >> 16 : word));
  } else {
    return word;
  }
}

template <class Scalar>
DEV Word<Scalar> make_word(const float* x) {
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    return to_bf16_pair(x[0], x[1]);
  } else if constexpr (std::is_same_v<Scalar, Float16>) {
    return to_half_pair(x[0], x[1]);
  } else {
    return x[0];
  }
}

}  // namespace hfla::cuda
