// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The sums of the lanes of several vectors at once, which takes half the instructions that one
// after the other take.
#pragma once

#include "cpu/common/transpose.h"

namespace hfla::HFLA_ISA {
namespace {

// Of each of `count` vectors, the sum that sum() makes of its lanes, in the same order: of vector i
// in lane i * kLanes / count.
template <class T, int count, int distance = kLanes<T> / 2>
HFLA_INLINE Vec<T> sums_of_lanes(const Vec<T> (&x)[count]) {
  static_assert(count == 1 || count <= 2 * distance);
  if constexpr (distance == 0) {
    return x[0];
  } else {
    constexpr int half = max(1, count / 2);
    Vec<T> halves[half];
    HFLA_UNROLL
    for (int i = 0; i < half; ++i) {
      Vec<T> upper = x[i], lower = x[count == 1 ? 0 : i + half];
      exchange<distance>(upper, lower, AllLanes<T>{});
      halves[i] = upper + lower;
    }
    return sums_of_lanes<T, half, distance / 2>(halves);
  }
}

// Calls use(i, j, sum of the lanes of x[i][j]) for all from the one numbered `begin` on.
template <class T, int begin = 0, int rows, int columns, class Use>
HFLA_INLINE void for_sums_of_lanes(const Vec<T> (&x)[rows][columns], Use use) {
  constexpr int W = kLanes<T>, left = rows * columns - begin;
  constexpr int count = left >= 8 && W >= 8 ? 8 : left >= 4 && W >= 4 ? 4 : left >= 2 ? 2 : 1;
  Vec<T> some[count];
  HFLA_UNROLL
  for (int i = 0; i < count; ++i) some[i] = x[(begin + i) / columns][(begin + i) % columns];
  T sums[W];
  store(sums, sums_of_lanes<T>(some));
  HFLA_UNROLL
  for (int i = 0; i < count; ++i) {
    use((begin + i) / columns, (begin + i) % columns, sums[i * W / count]);
  }
  if constexpr (left > count) for_sums_of_lanes<T, begin + count>(x, use);
}

}  // namespace
}  // namespace hfla::HFLA_ISA
