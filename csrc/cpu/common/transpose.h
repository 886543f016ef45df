// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The transpose of as many vectors as each has lanes.
#pragma once

#include "cpu/common/vec.h"

#if defined(__has_builtin)
#define HFLA_HAS_SHUFFLES __has_builtin(__builtin_shufflevector)  // GCC 12, Clang
#endif

namespace hfla::HFLA_ISA {
namespace {

template <int... lane>
struct Lanes {};
template <int count, int... lane>
struct FirstLanes : FirstLanes<count - 1, count - 1, lane...> {};
template <int... lane>
struct FirstLanes<0, lane...> {
  using type = Lanes<lane...>;
};
template <class T>
using AllLanes = typename FirstLanes<static_cast<int>(kLanes<T>)>::type;

// Exchanges the upper right and the lower left of each square of 2 x distance lanes, of whose rows
// two are given.
template <int distance, class V, int... lane>
HFLA_INLINE void exchange(V& upper, V& lower, Lanes<lane...>) {
  const V u = upper, l = lower;
#if HFLA_HAS_SHUFFLES
  constexpr int W = sizeof...(lane);
  upper = __builtin_shufflevector(u, l, (lane & distance ? W + lane - distance : lane)...);
  lower = __builtin_shufflevector(u, l, (lane & distance ? W + lane : lane + distance)...);
#else
  ((upper[lane] = lane & distance ? l[lane - distance] : u[lane]), ...);
  ((lower[lane] = lane & distance ? l[lane] : u[lane + distance]), ...);
#endif
}

template <int distance = 1>
HFLA_INLINE void transpose(Vec<float> (&rows)[kLanes<float>]) {
  HFLA_UNROLL
  for (int i = 0; i < kLanes<float>; ++i) {
    if (!(i & distance)) exchange<distance>(rows[i], rows[i + distance], AllLanes<float>{});
  }
  if constexpr (2 * distance < kLanes<float>) transpose<2 * distance>(rows);
}

}  // namespace
}  // namespace hfla::HFLA_ISA
