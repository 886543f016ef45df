// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The linear layer: y = x weightᵀ + bias.
#pragma once

#include "kernels/common.h"

namespace hfla {

// Everything is contiguous and of one dtype.
struct LinearProblem {
  int64_t rows, in, out;
  DType dtype;
  const void* x;       // (rows, in)
  const void* weight;  // (out, in)
  const void* bias;    // (out,), optional
  void* y;             // (rows, out)
};

// Sums are float32.
struct ManyRowsLinearProblem {
  int64_t rows, in, out;
  DType dtype;         // not f64
  const void* x;       // (rows, in), any strides
  const void* weight;  // (out, in), any strides
  const void* bias;    // (out,), optional, contiguous
  void* y;             // (rows, out), contiguous
  int64_t x_strides[2], weight_strides[2];
};

using LinearOnCpu = Status (*)(const LinearProblem&, const Threads&);
using ManyRowsLinearOnCpu = Status (*)(const ManyRowsLinearProblem&, const Threads&);

}  // namespace hfla
