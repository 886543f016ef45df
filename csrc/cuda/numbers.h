// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Numbers on the device: the dtypes of tensors, the feature maps, and the operands of tensor cores.
#pragma once

#include "cuda/device.h"
#include "kernels.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#else
#include <cmath>
#endif

namespace hfla::cuda {

// ---- dtypes ----

struct BFloat16 {
  uint16_t bits;
};

#if defined(__CUDACC__)
using Float16 = __half;
#else
using Float16 = _Float16;
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
  const uint32_t bits = float_to_bits(x);
  if (x != x) return {uint16_t(bits >> 16 | 0x40)};  // rounding could make an infinity of a NaN
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// ---- feature maps ----

// As csrc/cpu/feature_maps.h has them. Comparisons are written so that a NaN goes through.
DEV float apply(FeatureMap map, float x) {
  switch (map) {
    case FeatureMap::elu_plus_one:
      return x > 0 ? x + 1 : expf(x);
    case FeatureMap::relu:
      return x <= 0 ? 0 : x;
    case FeatureMap::relu2:
      return x <= 0 ? 0 : x * x;
    case FeatureMap::silu:
      return x / (1 + expf(-x));
    case FeatureMap::exp:
      return expf(x);
    default:
      return x;
  }
}

DEV float derivative(FeatureMap map, float x) {
  switch (map) {
    case FeatureMap::elu_plus_one:
      return x > 0 ? 1 : expf(x);
    case FeatureMap::relu:
      return x <= 0 ? 0 : 1;
    case FeatureMap::relu2:
      return x <= 0 ? 0 : 2 * x;
    case FeatureMap::silu: {
      const float e = expf(-x), sigmoid = 1 / (1 + e);
      const float rest = e > 1 ? 1 - sigmoid : e * sigmoid;  // 1 - sigmoid, without inf * 0
      return sigmoid * (1 + x * rest);
    }
    case FeatureMap::exp:
      return expf(x);
    default:
      return 1;
  }
}

// A log decay at or below this forgets everything: its exponential is zero in float.
constexpr float kForgetsAll = -104;

// ---- operands of tensor cores ----
//
// A warp multiplies a (16, kDepth) by b (kDepth, 8) into c (16, 8). Lane 4 g + t holds
//     c[0], c[1]: row g,     columns 2 t, 2 t + 1
//     c[2], c[3]: row g + 8, likewise
// and parts of a and b that the loaders below fetch through at(row, column).
//
// Each kind also makes an operand a of accumulators, for a product of products without a way
// through shared memory. It may permute the depth: row k of b then has to be the one that belongs
// to accumulator_column(k).

struct Lane {
  int g, t;
};
DEV Lane lane() { return {thread_index() % 32 / 4, thread_index() % 4}; }

// bf16 in, float out.
struct Bf16Operands {
  using Element = BFloat16;  // in shared memory
  static constexpr int kDepth = 16;
  struct A {
    uint32_t x[4];
  };
  struct B {
    uint32_t x[2];
  };

  DEV static uint32_t pack(float low, float high) {
    return from_float<BFloat16>(low).bits | uint32_t(from_float<BFloat16>(high).bits) << 16;
  }
  template <class At>
  DEV static A load_a(At at) {
    const auto [g, t] = lane();
    return {{pack(at(g, 2 * t), at(g, 2 * t + 1)), pack(at(g + 8, 2 * t), at(g + 8, 2 * t + 1)),
             pack(at(g, 2 * t + 8), at(g, 2 * t + 9)),
             pack(at(g + 8, 2 * t + 8), at(g + 8, 2 * t + 9))}};
  }
  template <class At>
  DEV static B load_b(At at) {
    const auto [g, t] = lane();
    return {{pack(at(2 * t, g), at(2 * t + 1, g)), pack(at(2 * t + 8, g), at(2 * t + 9, g))}};
  }
  DEV static A from_accumulators(const float (*c)[4]) {  // kDepth / 8 of them
    return {{pack(c[0][0], c[0][1]), pack(c[0][2], c[0][3]), pack(c[1][0], c[1][1]),
             pack(c[1][2], c[1][3])}};
  }
  DEV static int accumulator_column(int k) { return k; }
  DEV static void multiply(float (&c)[4], const A& a, const B& b) { mma_bf16(c, a.x, b.x); }
};

// Float in, of which `parts` times 11 bits are used: one for float16 inputs, which have no more, in
// a range in which no state overflows; two for float32. The products of two low parts are left out.
template <int parts>
struct Tf32Operands {
  using Element = float;
  static constexpr int kDepth = 8;
  struct A {
    uint32_t x[parts][4];
  };
  struct B {
    uint32_t x[parts][2];
  };

  template <int n>
  DEV static void split(const float (&values)[n], uint32_t (&x)[parts][n]) {
    UNROLL
    for (int i = 0; i < n; ++i) {
      float rest = values[i];
      UNROLL
      for (int part = 0; part < parts; ++part) {
        // Rounded to 11 bits; for inf and NaN the last bits are already zero or don't matter.
        const uint32_t bits = float_to_bits(rest);
        const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
        x[part][i] = (finite ? bits + 0x1000u : bits) & 0xffffe000u;
        rest = finite ? rest - bits_to_float(x[part][i]) : 0;
      }
    }
  }
  template <class At>
  DEV static A load_a(At at) {
    const auto [g, t] = lane();
    A a;
    split<4>({at(g, t), at(g + 8, t), at(g, t + 4), at(g + 8, t + 4)}, a.x);
    return a;
  }
  template <class At>
  DEV static B load_b(At at) {
    const auto [g, t] = lane();
    B b;
    split<2>({at(t, g), at(t + 4, g)}, b.x);
    return b;
  }
  DEV static A from_accumulators(const float (*c)[4]) {
    A a;
    split<4>({c[0][0], c[0][2], c[0][1], c[0][3]}, a.x);
    return a;
  }
  DEV static int accumulator_column(int k) { return k < 4 ? 2 * k : 2 * (k - 4) + 1; }
  DEV static void multiply(float (&c)[4], const A& a, const B& b) {
    if constexpr (parts == 2) {
      mma_tf32(c, a.x[1], b.x[0]);
      mma_tf32(c, a.x[0], b.x[1]);
    }
    mma_tf32(c, a.x[0], b.x[0]);
  }
};

template <class Scalar>
struct OperandsOf;
template <>
struct OperandsOf<float> {
  using Type = Tf32Operands<2>;
};
template <>
struct OperandsOf<Float16> {
  using Type = Tf32Operands<1>;
};
template <>
struct OperandsOf<BFloat16> {
  using Type = Bf16Operands;
};

}  // namespace hfla::cuda
