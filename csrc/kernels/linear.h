// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The linear layer: y = x weightᵀ + bias.
#pragma once

#include "kernels/common.h"

namespace hfla {

// Everything is of one dtype, and contiguous but for y.
struct LinearProblem {
  int64_t rows, in, out;
  DType dtype;
  const void* x;       // (rows, in)
  const void* weight;  // (out, in)
  const void* bias;    // (out,), optional
  void* y;             // (rows, out), rows of contiguous numbers
  int64_t y_stride;    // numbers, from one row to the next
};

// Rows that an expert multiplies.
struct ExpertRows {
  int64_t expert, begin, end;
};

// Each row of x is multiplied by the weight of its own expert. Everything is contiguous and of one
// dtype.
struct ExpertLinearProblem {
  int64_t in, out;
  DType dtype;
  const void* x;             // (rows, in)
  const void* weight;        // (experts, out, in)
  const void* bias;          // (experts, out), optional
  void* y;                   // (rows, out)
  const ExpertRows* chosen;  // which have rows, each once
  int64_t num_chosen;
};

// Sums are float32, of products in one dtype, which x, weight and y have, or else float32.
struct ManyRowsLinearProblem {
  int64_t rows, in, out;
  DType dtype;  // of products, not f64: float32 that is given is rounded to it
  DType x_dtype, weight_dtype, y_dtype;
  const void* x;       // (rows, in), any strides
  const void* weight;  // (out, in), any strides
  const void* bias;    // (out,) of the weight's dtype, optional, contiguous
  void* y;             // (rows, out), contiguous
  int64_t x_strides[2], weight_strides[2];
};

using LinearOnCpu = Status (*)(const LinearProblem&, const Threads&);
using ManyRowsLinearOnCpu = Status (*)(const ManyRowsLinearProblem&, const Threads&);

// By the `linear` of an instruction set, for few rows of each expert. cpu/expert_linear.cpp
Status expert_linear(LinearOnCpu linear, const ExpertLinearProblem&, const Threads&);

}  // namespace hfla
