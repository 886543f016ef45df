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

using LinearOnCpu = Status (*)(const LinearProblem&, const Threads&);

}  // namespace hfla
