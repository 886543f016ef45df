// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The operands of tensor cores.
//
// A warp multiplies a (16, kDepth) by b (kDepth, 8) into c (16, 8). Lane 4 g + t holds
//     c[0], c[1]: row g,     columns 2 t, 2 t + 1
//     c[2], c[3]: row g + 8, likewise
// and parts of a and b that the loaders below fetch from a tile in shared memory (tiles.cuh), or
// from its transpose. Column i of load_a_transposed is row i of the tile, times a weight if
// `weighted`; the weights that a lane needs are those of columns column_of_a(0), column_of_a(1),
// ... Several b, of columns that follow, are loaded by one call.
//
// A product is added to c, or, if it is the first, is c.
//
// held(x) is what an operand has of x, and sums that are to be kept to the full need kPartsOfSums.
//
// Each kind also makes an operand a of accumulators, for a product of products without a way
// through shared memory. It may permute the depth, as load_b_for_accumulators then does with b.
#pragma once

#include "cuda/common/scalar_types.h"

namespace hfla::cuda {

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
  static constexpr int kPartsOfSums = 2;
  DEV static float held(float x) { return to_float(from_float<BFloat16>(x)); }

  template <class Tile>
  DEV static A load_a(const Tile& tile, int row, int k) {
    const int lane = thread_index() % 32;
    A a;
    load_matrices<false>(a.x, tile.at(row + lane % 16, k + lane / 16 * 8));
    return a;
  }
  static constexpr int kColumnsOfA = 4;
  DEV static int column_of_a(int i) { return 2 * (thread_index() % 4) + i % 2 + i / 2 * 8; }
  template <class Tile>
  DEV static A load_a_transposed(const Tile& tile, int row, int k, bool weighted,
                                 const float (&weights)[kColumnsOfA]) {
    const int lane = thread_index() % 32;
    A a;
    load_matrices<true>(a.x, tile.at(k + lane % 8 + lane / 16 * 8, row + lane / 8 % 2 * 8));
    if (!weighted) return a;
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const float low = bits_to_float(a.x[i] << 16), high = bits_to_float(a.x[i] & 0xffff0000u);
      a.x[i] = to_bf16_pair(weights[i / 2 * 2] * low, weights[i / 2 * 2 + 1] * high);
    }
    return a;
  }
  template <int count, class Tile>
  DEV static void load_b(B (&b)[count], const Tile& tile, int k, int column) {
    const int lane = thread_index() % 32;
    load_each<true>(b, tile.at(k + lane % 16, column), lane / 16 * 8);
  }
  template <int count, class Tile>
  DEV static void load_b_transposed(B (&b)[count], const Tile& tile, int k, int column) {
    const int lane = thread_index() % 32;
    load_each<false>(b, tile.at(column + lane % 8, k + lane / 8 % 2 * 8),
                     lane / 16 * 8 * tile.kStride);
  }
  DEV static A from_accumulators(const float (*c)[4]) {  // kDepth / 8 of them
    return {{to_bf16_pair(c[0][0], c[0][1]), to_bf16_pair(c[0][2], c[0][3]),
             to_bf16_pair(c[1][0], c[1][1]), to_bf16_pair(c[1][2], c[1][3])}};
  }
  template <int count, class Tile>
  DEV static void load_b_for_accumulators(B (&b)[count], const Tile& tile, int k, int column) {
    load_b(b, tile, k, column);
  }
  DEV static void multiply(float (&c)[4], const A& a, const B& b, bool first = false) {
    if (first) c[0] = c[1] = c[2] = c[3] = 0;
    mma_bf16(c, a.x, b.x);
  }

 private:
  // One, or two by one load: the upper lanes' rows are `further` elements on.
  template <bool transposed>
  DEV static void load_each(B (&b)[1], const Element* row, int) {
    load_matrices<transposed>(b[0].x, row);
  }
  template <bool transposed>
  DEV static void load_each(B (&b)[2], const Element* row, int further) {
    uint32_t x[4];
    load_matrices<transposed>(x, row + further);
    b[0] = {{x[0], x[1]}}, b[1] = {{x[2], x[3]}};
  }
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
  static constexpr int kPartsOfSums = parts == 1 ? 2 : 1;
  DEV static float held(float x) {
    uint32_t bits[parts][1];
    split<1>({x}, bits);
    float sum = 0;
    UNROLL
    for (int part = 0; part < parts; ++part) sum += bits_to_float(bits[part][0]);
    return sum;
  }
  template <class Tile>
  DEV static A load_a(const Tile& tile, int row, int k) {
    const auto [g, t] = lane();
    A a;
    split<4>({tile.get(row + g, k + t), tile.get(row + g + 8, k + t), tile.get(row + g, k + t + 4),
              tile.get(row + g + 8, k + t + 4)},
             a.x);
    return a;
  }
  static constexpr int kColumnsOfA = 2;
  DEV static int column_of_a(int i) { return thread_index() % 4 + 4 * i; }
  template <class Tile>
  DEV static A load_a_transposed(const Tile& tile, int row, int k, bool weighted,
                                 const float (&weights)[kColumnsOfA]) {
    const auto [g, t] = lane();
    const float near = weighted ? weights[0] : 1, far = weighted ? weights[1] : 1;
    A a;
    split<4>({near * tile.get(k + t, row + g), near * tile.get(k + t, row + g + 8),
              far * tile.get(k + t + 4, row + g), far * tile.get(k + t + 4, row + g + 8)},
             a.x);
    return a;
  }
  template <int count, class Tile>
  DEV static void load_b(B (&b)[count], const Tile& tile, int k, int column) {
    const auto [g, t] = lane();
    UNROLL
    for (int i = 0; i < count; ++i) {
      const int c = column + 8 * i + g;
      split<2>({tile.get(k + t, c), tile.get(k + t + 4, c)}, b[i].x);
    }
  }
  template <int count, class Tile>
  DEV static void load_b_transposed(B (&b)[count], const Tile& tile, int k, int column) {
    const auto [g, t] = lane();
    UNROLL
    for (int i = 0; i < count; ++i) {
      const int c = column + 8 * i + g;
      split<2>({tile.get(c, k + t), tile.get(c, k + t + 4)}, b[i].x);
    }
  }
  DEV static A from_accumulators(const float (*c)[4]) {
    A a;
    split<4>({c[0][0], c[0][2], c[0][1], c[0][3]}, a.x);
    return a;
  }
  template <int count, class Tile>
  DEV static void load_b_for_accumulators(B (&b)[count], const Tile& tile, int k, int column) {
    const auto [g, t] = lane();
    UNROLL
    for (int i = 0; i < count; ++i) {
      const int c = column + 8 * i + g;
      split<2>({tile.get(k + 2 * t, c), tile.get(k + 2 * t + 1, c)}, b[i].x);
    }
  }
  DEV static void multiply(float (&c)[4], const A& a, const B& b, bool first = false) {
    if (first) c[0] = c[1] = c[2] = c[3] = 0;
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
