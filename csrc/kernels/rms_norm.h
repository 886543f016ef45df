// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = weight x / sqrt(mean(x²) + eps) for each row of x.
#pragma once

#include "kernels/common.h"

namespace hfla {

// Everything is contiguous, and of one dtype but for inverse_rms.
struct RmsNormProblem {
  int64_t rows, columns;
  DType dtype;
  double eps;
  const void* x;       // (rows, columns)
  const void* weight;  // (columns,)
};

struct RmsNormResult {
  void* y;            // (rows, columns); x / rms is rounded to dtype before it is multiplied
  void* inverse_rms;  // (rows,) acc, optional
};

struct RmsNormGradients {
  const void* dy;           // (rows, columns)
  const void* inverse_rms;  // (rows,) acc, as forward gave it
  void* dx;                 // (rows, columns)
  void* dweight;            // (columns,)
};

struct RmsNormOnCpu {
  Status (*forward)(const RmsNormProblem&, const RmsNormResult&, const Threads&);
  Status (*backward)(const RmsNormProblem&, const RmsNormGradients&, const Threads&);
};

}  // namespace hfla
