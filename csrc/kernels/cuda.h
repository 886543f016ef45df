// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The kernels of all ops that have CUDA kernels, one table per dtype.
#pragma once

#include "kernels/delta_rule.h"
#include "kernels/linear_attention.h"

namespace hfla {

struct CudaKernels {
  const LinearAttentionOnCuda* linear_attention;
  const DeltaRuleOnCuda* delta_rule;
};

// Null for a dtype that CUDA kernels don't have, which is float64.
const CudaKernels* cuda_kernels(DType dtype);

// A device as it is, and a cudaError_t in words.
int cuda_device(int32_t index, CudaDevice* device);
const char* cuda_error_text(int error);

}  // namespace hfla
