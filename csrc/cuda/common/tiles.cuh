// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Matrices in shared memory.
#pragma once

#include "cuda/common/scalar_types.h"

namespace hfla::cuda {

// Neighbours that are loaded or stored at once. They are kept as words: a compiler puts each in a
// register of its own, where it would unpack elements of two bytes as soon as they are loaded.
template <class T, int count>
struct alignas(sizeof(T) * count < 16 ? sizeof(T) * count : 16) Run {
  static constexpr int kWords = count / kPerWord<T>;
  Word<T> words[kWords];
  DEV float get(int i) const { return cuda::get<T>(words[i / kPerWord<T>], i % kPerWord<T>); }
};

template <class T, int count>  // an even one
DEV Run<T, count> make_run(const float (&x)[count]) {
  Run<T, count> run;
  UNROLL
  for (int i = 0; i < run.kWords; ++i) run.words[i] = make_word<T>(x + i * kPerWord<T>);
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
  DEV void set_run(int r, int c, const float (&x)[count]) const {
    *reinterpret_cast<Run<Element, count>*>(data + r * kStride + c) = make_run<Element>(x);
  }
};

}  // namespace hfla::cuda
