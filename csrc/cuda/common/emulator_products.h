// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The emulator's tensor cores. Sums inside of mma are truncated, not rounded, as theirs are
// (truncated_sum).
#pragma once

#include "cuda/common/emulator.h"

namespace hfla::cuda {
namespace emulator {

OF_EMULATOR float bf16_half(uint32_t pair, int high) {
  const uint32_t bits = high ? pair & 0xffff0000u : pair << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

OF_EMULATOR float tf32_part(uint32_t bits) {
  bits &= 0xffffe000u;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// c plus products as the tensor cores of an A100 sum them up, after the model in arXiv 2512.07004
// (those of an H100 take twice as many at a time and one bit more): all are aligned to the largest,
// what is below one bit after float's last is cut off before the sum, and so is the sum's end.
OF_EMULATOR float truncated_sum(float c, const double* products, int count) {
  double largest = std::fabs(double(c)), sum = c;
  for (int k = 0; k < count; ++k) {
    sum += products[k];
    const double size = std::fabs(products[k]);
    if (size > largest) largest = size;
  }
  if (!std::isfinite(sum) || largest == 0) return float(sum);
  uint64_t exponent;
  std::memcpy(&exponent, &largest, sizeof exponent);
  constexpr uint64_t kBitsBelow = 23 + 1, kOne = uint64_t(1) << 52;
  exponent = exponent / kOne - kBitsBelow;  // of the last bit that counts
  const auto power_of_two = [](uint64_t biased) {
    const uint64_t bits = biased * kOne;
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  };
  const double last = power_of_two(exponent), scale = power_of_two(2 * 1023 - exponent);
  int64_t units = int64_t(c * scale);
  for (int k = 0; k < count; ++k) units += int64_t(products[k] * scale);
  const double total = double(units) * last;
  uint64_t bits;
  std::memcpy(&bits, &total, sizeof bits);
  bits &= ~((uint64_t(1) << 29) - 1);  // a float's 23 bits of 52
  double truncated;
  std::memcpy(&truncated, &bits, sizeof truncated);
  return float(truncated);
}

// c += products in groups of `at_once`.
OF_EMULATOR void add_products(float& c, const double* products, int count, int at_once) {
  for (int k = 0; k < count; k += at_once) c = truncated_sum(c, products + k, at_once);
}

}  // namespace emulator

template <bool transposed, int count>
void load_matrices(uint32_t (&x)[count], const void* row, int line = __builtin_LINE()) {
  const int lane = thread_index() % emulator::kWarp;
  emulator::Exchange mine{};
  std::memcpy(mine.a, row, sizeof mine.a);
  const emulator::Unwatched here;
  ++emulator::machine().counts.operand_loads;
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) emulator::machine().error = "a row not aligned";
  const emulator::Exchange* all = emulator::exchange(mine, line);
  const auto element = [&](int matrix, int r, int c) {
    uint16_t bits;
    std::memcpy(&bits, reinterpret_cast<const char*>(all[8 * matrix + r].a) + 2 * c, 2);
    return uint32_t(bits);
  };
  for (int m = 0; m < count; ++m) {
    const int g = lane / 4, t = lane % 4;
    x[m] = transposed ? element(m, 2 * t, g) | element(m, 2 * t + 1, g) << 16
                      : element(m, g, 2 * t) | element(m, g, 2 * t + 1) << 16;
  }
}

inline uint32_t transpose_matrix(uint32_t x, int line = __builtin_LINE()) {
  const emulator::Unwatched here;
  ++emulator::machine().counts.shuffles;
  const int lane = thread_index() % emulator::kWarp, g = lane / 4, t = lane % 4;
  const emulator::Exchange* all = emulator::exchange({{x}, {}, 0}, line);
  const auto element = [&](int r, int c) { return all[4 * r + c / 2].a[0] >> c % 2 * 16 & 0xffff; };
  return element(2 * t, g) | element(2 * t + 1, g) << 16;
}

OF_EMULATOR void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                          int line = __builtin_LINE()) {
  const emulator::Unwatched here;
  ++emulator::machine().counts.products;
  const int lane = thread_index() % emulator::kWarp;
  const emulator::Exchange* all =
      emulator::exchange({{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, 0}, line);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    double products[16];
    for (int k = 0; k < 16; ++k) {
      const int quad = k % 8 / 2;
      const uint32_t pair_a = all[row % 8 * 4 + quad].a[row / 8 + 2 * (k / 8)];
      const uint32_t pair_b = all[column * 4 + quad].b[k / 8];
      products[k] = double(emulator::bf16_half(pair_a, k % 2)) * emulator::bf16_half(pair_b, k % 2);
    }
    emulator::add_products(c[i], products, 16, 8);
  }
}

OF_EMULATOR void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                          int line = __builtin_LINE()) {
  const emulator::Unwatched here;
  ++emulator::machine().counts.products;
  const int lane = thread_index() % emulator::kWarp;
  const emulator::Exchange* all =
      emulator::exchange({{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, 0}, line);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    double products[8];
    for (int k = 0; k < 8; ++k) {
      const uint32_t of_a = all[row % 8 * 4 + k % 4].a[row / 8 + 2 * (k / 4)];
      const uint32_t of_b = all[column * 4 + k % 4].b[k / 4];
      products[k] = double(emulator::tf32_part(of_a)) * emulator::tf32_part(of_b);
    }
    emulator::add_products(c[i], products, 8, 4);
  }
}

}  // namespace hfla::cuda
