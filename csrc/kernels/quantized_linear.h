// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The linear layer with a weight in 8 or 4 bits: y = x weightᵀ + bias.
//
// The inputs of each output are in groups of consecutive ones, which share a scale s and a zero
// point z. A weight of the quantised value q is (q - z) s in 8 bits, and q s + z in 4.
#pragma once

#include "kernels/common.h"

namespace hfla {

enum class NumberType : int32_t { f32, bf16, f16, i8 };

// An array (out, groups) read through its strides.
struct GroupNumbers {
  const void* data;  // null: all are 0
  NumberType type;
  int64_t out_stride, group_stride;
};

// x, bias and y are contiguous and of one dtype, f32, bf16 or f16.
struct QuantizedLinearProblem {
  int64_t rows, in, out;
  int64_t group;  // inputs in one; divides `in`, and is even with 4 bits
  int64_t bits;   // 8 or 4
  DType dtype;
  const void* x;       // (rows, in)
  const void* weight;  // int8 (out, in), or (out, in / 2) with the earlier value in the low bits
  GroupNumbers scale, zero;
  const void* bias;  // (out,), optional
  void* y;           // (rows, out)
};

using QuantizedLinearOnCpu = Status (*)(const QuantizedLinearProblem&, const Threads&);

}  // namespace hfla
