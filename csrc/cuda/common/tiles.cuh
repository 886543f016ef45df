// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Matrices in shared memory.
#pragma once

#include <type_traits>

#include "cuda/common/numbers.h"

namespace hfla::cuda {

// Neighbours that are loaded or stored at once.
template <class T, int count>
struct alignas(sizeof(T) * count < 16 ? sizeof(T) * count : 16) Run {
  T x[count];
};

template <class T, int count>  // an even one
DEV Run<T, count> make_run(const float (&x)[count]) {
  Run<T, count> run;
  UNROLL
  for (int i = 0; i < count; i += 2) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const uint32_t pair = to_bf16_pair(x[i], x[i + 1]);
      run.x[i].bits = uint16_t(pair), run.x[i + 1].bits = uint16_t(pair >> 16);
    } else {
      run.x[i] = from_float<T>(x[i]), run.x[i + 1] = from_float<T>(x[i + 1]);
    }
  }
  return run;
}

// A matrix in shared memory. Rows are an odd number of 16 bytes long, so that eight neighbours'
// runs are in different banks.
template <class Element, int rows, int columns>
struct Tile {
  static constexpr int kUnit = 16 / int(sizeof(Element));
  static constexpr int kStride = kUnit * ((columns + kUnit - 1) / kUnit | 1);
  static constexpr int kBytes = rows * kStride * int(sizeof(Element));
  Element* data;
  DEV float get(int r, int c) const { return to_float(data[r * kStride + c]); }
  DEV const Element* at(int r, int c) const { return data + r * kStride + c; }
  // Neighbours, from a multiple of count on.
  template <int count>
  DEV void set_run(int r, int c, const float (&x)[count]) {
    *reinterpret_cast<Run<Element, count>*>(data + r * kStride + c) = make_run<Element>(x);
  }
};

}  // namespace hfla::cuda
