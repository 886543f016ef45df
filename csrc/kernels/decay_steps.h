// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// steps = softplus(x + bias) and log_decay = -exp(A_log) steps, as Mamba-2 and its kin forget.
#pragma once

#include "kernels/common.h"

namespace hfla {

struct DecayStepsProblem {
  int64_t rows, columns;
  int64_t row_stride;                    // of x, in elements
  int64_t group;                         // columns that share a number of A_log
  DType dtype;                           // of x: no double
  bool rounds;                           // bias, sums and steps to dtype; else none of them
  bool has_float_bias, has_float_A_log;  // else they are of x's dtype
  const void* x;                         // (rows, columns)
  const void* bias;                      // (columns,)
  const void* A_log;                     // (columns / group,)
  float* steps;                          // (rows, columns), as log_decay
  float* log_decay;
};

using DecayStepsOnCpu = Status (*)(const DecayStepsProblem&, const Threads&);

}  // namespace hfla
