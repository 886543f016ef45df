// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// One call of the emulated kernels.
#pragma once

#include <functional>
#include <string>

#include "kernels/cuda.h"
#include "memory.h"

namespace checked {

// One call on tensors that lie somewhere. Returns whether the emulator let it through.
struct Case {
  std::string name;
  int64_t rows;  // in the batch, that are filled and read
  hfla::DType dtype;
  std::function<bool(Tensors&, int64_t batch)> run;
  bool small = false;  // enough for more ways to run it
};

// With more of the larger cases, which take minutes.
#ifdef CHECK_ALL
constexpr bool kAll = true;
#else
constexpr bool kAll = false;
#endif

constexpr const char* kNames[] = {"f32", "bf16", "f16"};

// Calls function(place) with the workspace that it asks for.
template <class Function>
bool with_workspace(Tensors& tensors, const hfla::CudaDevice& device, Function function) {
  int64_t bytes = 0;
  function(hfla::CudaPlace{device, nullptr, &bytes, nullptr});
  const hfla::CudaPlace place{device, tensors.bytes(bytes > 0 ? bytes : 1), &bytes, nullptr};
  return function(place) == 0;
}

template <class C>
Case make_case(const std::string& name, const C& c, int64_t rows) {
  return {std::string(kNames[int(c.dtype)]) + " " + name, rows, c.dtype,
          [c](Tensors& tensors, int64_t batch) { return run(c, tensors, batch); }};
}

}  // namespace checked
