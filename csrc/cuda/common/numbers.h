// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The dtypes of tensors on the device.
#pragma once

#include "cuda/common/device.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#else
#include <cmath>
#endif

namespace hfla::cuda {

struct BFloat16 {
  uint16_t bits;
};

#if defined(__CUDACC__)
using Float16 = __half;
#else
using Float16 = _Float16;
#endif

DEV float to_float(float x) { return x; }
DEV float to_float(BFloat16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
DEV float to_float(Float16 x) { return static_cast<float>(x); }

// Rounded to the nearest, ties to even.
template <class Scalar>
DEV Scalar from_float(float x) {
  return static_cast<Scalar>(x);
}
template <>
DEV BFloat16 from_float<BFloat16>(float x) {
  return {to_bf16(x)};
}

}  // namespace hfla::cuda
