// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Which lane has which element of a tensor core's operands, as NVIDIA publishes it, against what
// the kernels load (operands.cuh) and the emulator multiplies.
#pragma once

#include <cstdio>
#include <vector>

#include "cuda/common/operands.cuh"
#include "cuda/common/tiles.cuh"
#include "memory.h"

namespace checked {

using namespace hfla::cuda;

// Where element `value` of a lane is: a sum of strides, by lane % 4, lane / 4, and the bits of
// `value` from the last on. A place is row + kRows * column of A and C, and column + kColumns * row
// of B.
//
// The numbers are worked out from the formulas of the PTX ISA 8.7, 9.7.14.5, "Matrix Fragments for
// mma.m16n8k16" with .bf16 and "... mma.m16n8k8" with .tf32; for A of the first, with
// g = lane >> 2 and t = lane % 4,
//     row = g for a_i with 0 <= i < 2 or 4 <= i < 6, else g + 8
//     column = 2 t + (i & 1) for i < 4, else 2 t + (i & 1) + 8
// and are those that CuTe's MMA_Traits have as layouts of threads and values: of
// SM80_16x8x16_F32BF16BF16F32_TN and of SM80_16x8x8_F32TF32TF32F32_TN.
struct Published {
  const char* name;
  int values;
  int of_lane_mod_4, of_lane_div_4;
  int of_bit[3];
  int at(int lane, int value) const {
    int place = lane % 4 * of_lane_mod_4 + lane / 4 * of_lane_div_4;
    for (int bit = 0; bit < 3; ++bit) place += (value >> bit & 1) * of_bit[bit];
    return place;
  }
};
constexpr Published kBf16A{"a of bf16", 8, 32, 1, {16, 8, 128}};
constexpr Published kBf16B{"b of bf16", 4, 16, 1, {8, 64, 0}};
constexpr Published kTf32A{"a of tf32", 4, 16, 1, {8, 64, 0}};
constexpr Published kTf32B{"b of tf32", 2, 8, 1, {32, 0, 0}};
constexpr Published kC{"c", 4, 32, 1, {16, 8, 0}};

constexpr int kRows = 16, kColumns = 8;

template <class Operands>
struct Layouts;
template <>
struct Layouts<Bf16Operands> {
  static constexpr Published a = kBf16A, b = kBf16B;
};
template <int parts>
struct Layouts<Tf32Operands<parts>> {
  static constexpr Published a = kTf32A, b = kTf32B;
};

// Value i of a lane's part of an operand.
inline float value_of(const uint32_t* registers, const Bf16Operands&, int i) {
  return bits_to_float(i % 2 ? registers[i / 2] & 0xffff0000u : registers[i / 2] << 16);
}
template <int parts>
float value_of(const uint32_t* registers, const Tf32Operands<parts>&, int i) {
  return bits_to_float(registers[i]);
}
inline const uint32_t* registers_of(const uint32_t* x) { return x; }
template <int n>
const uint32_t* registers_of(const uint32_t (*x)[n]) {
  return x[0];  // the higher part of two has whole numbers up to 2048
}

// What a lane found wrong first.
struct Findings {
  const char* of = nullptr;
  int value = 0;
  float got = 0, wanted = 0;
  void note(const char* name, int i, float x, float published) {
    if (of || x == published) return;
    of = name, value = i, got = x, wanted = published;
  }
};

// A tile in which every number says where it is, up to 2048, and its transpose; their operands; and
// the product of two such, read by the published layout of c.
template <class Operands>
KERNEL LAUNCH_BOUNDS(32, 1) fragment_kernel(Findings* of_lanes) {
  using Element = typename Operands::Element;
  using L = Layouts<typename Operands::Kind>;
  constexpr int kDepth = Operands::kDepth;
  const int lane = thread_index();
  Findings* const findings = of_lanes + lane;
  const typename Operands::Kind kind{};
  const auto row_of_a = [&](int i) { return L::a.at(lane, i) % kRows; };
  const auto depth_of_a = [&](int i) { return L::a.at(lane, i) / kRows; };
  const auto column_of_b = [&](int i) { return L::b.at(lane, i) % kColumns; };
  const auto depth_of_b = [&](int i) { return L::b.at(lane, i) / kColumns; };

  // Twice 16 by 16: whole numbers up to 255, which bf16 has. The second is the first's transpose.
  using Square = Tile<Element, 16, 16>;
  Square tile{reinterpret_cast<Element*>(shared_memory())};
  Square transposed{reinterpret_cast<Element*>(shared_memory() + Square::kBytes)};
  const auto number = [](int r, int c) { return float(16 * r + c); };
  for (int e = lane; e < 256; e += 32) {
    const int r = e / 16, c = e % 16;
    tile.data[r * Square::kStride + c] = from_float<Element>(number(r, c));
    transposed.data[c * Square::kStride + r] = from_float<Element>(number(r, c));
  }
  sync_block();

  const float ones[Operands::kColumnsOfA] = {};
  const auto a = Operands::load_a(tile, 0, 0);
  const auto same_a = Operands::load_a_transposed(transposed, 0, 0, false, ones);
  for (int i = 0; i < L::a.values; ++i) {
    const float wanted = number(row_of_a(i), depth_of_a(i));
    findings->note("load_a", i, value_of(registers_of(a.x), kind, i), wanted);
    findings->note("load_a_transposed", i, value_of(registers_of(same_a.x), kind, i), wanted);
  }
  typename Operands::B b[2], same_b[2], one_b[1];
  Operands::load_b(b, tile, 0, 0);
  Operands::load_b_transposed(same_b, transposed, 0, 0);
  Operands::load_b(one_b, tile, 0, 8);
  for (int i = 0; i < L::b.values; ++i) {
    for (int n = 0; n < 2; ++n) {
      const float wanted = number(depth_of_b(i), column_of_b(i) + kColumns * n);
      const auto value = [&](const auto& x) { return value_of(registers_of(x.x), kind, i); };
      findings->note("load_b", i, value(b[n]), wanted);
      findings->note("load_b_transposed", i, value(same_b[n]), wanted);
      if (n == 1) findings->note("load_b of one", i, value(one_b[0]), wanted);
    }
  }

  // a (16, kDepth) b (kDepth, 8): exact in float, and different for every element of c.
  float c[4] = {};
  Operands::multiply(c, a, b[0]);
  for (int i = 0; i < 4; ++i) {
    const int row = kC.at(lane, i) % kRows, column = kC.at(lane, i) / kRows;
    float wanted = 0;
    for (int k = 0; k < kDepth; ++k) wanted += number(row, k) * number(k, column);
    findings->note("multiply", i, c[i], wanted);
  }

  // The same with a from accumulators, which may permute the depth, but alike on both sides.
  float from[kDepth / 8][4];
  for (int n = 0; n < kDepth / 8; ++n) {
    for (int i = 0; i < 4; ++i) {
      from[n][i] = number(kC.at(lane, i) % kRows, kC.at(lane, i) / kRows + kColumns * n);
    }
  }
  typename Operands::B again[2];
  Operands::load_b_for_accumulators(again, tile, 0, 0);
  float product[4] = {};
  Operands::multiply(product, Operands::from_accumulators(from), again[0]);
  for (int i = 0; i < 4; ++i) findings->note("from_accumulators", i, product[i], c[i]);
}

template <class Operands>
struct Checked : Operands {
  using Kind = Operands;
};

// What is not as published, or "".
template <class Operands>
std::string wrong_fragment() {
  Findings findings[32], *const of_lanes = findings;
  load(fragment_kernel<Operands>);
  const int64_t bytes = 2 * Tile<typename Operands::Element, 16, 16>::kBytes;
  if (launch(fragment_kernel<Operands>, 1, 32, bytes, nullptr, of_lanes)) {
    return emulator::machine().error;
  }
  for (int lane = 0; lane < 32; ++lane) {
    const Findings& f = findings[lane];
    if (!f.of) continue;
    char text[160];
    std::snprintf(text, sizeof text, "%s: value %d of lane %d is %g, not %g as published", f.of,
                  f.value, lane, double(f.got), double(f.wanted));
    return text;
  }
  return "";
}

}  // namespace checked
