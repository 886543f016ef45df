// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// y = x scale + the sines, then the cosines, of each token's position at half as many frequencies.
#pragma once

#include "kernels/common.h"

namespace hfla {

// Everything is contiguous. Both summands are rounded to dtype before they are added.
struct SinusoidsProblem {
  int64_t tokens, columns;
  int64_t positions;  // how many there are; token t has number t % positions
  DType dtype;
  double scale;
  const void* x;             // (tokens, columns)
  const int64_t* position;   // (positions,)
  const float* frequencies;  // (columns / 2,)
  void* y;                   // (tokens, columns)
};

using SinusoidsOnCpu = Status (*)(const SinusoidsProblem&);

}  // namespace hfla
