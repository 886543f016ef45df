// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The dtypes that CUDA kernels have, and the kernels of all ops for each.

#include "cuda/delta_rule/kernels.h"

#include "cuda/linear_attention/kernels.h"
#include "kernels/cuda.h"

namespace hfla {

const CudaKernels* cuda_kernels(DType dtype) {
  static const CudaKernels f32{&cuda::linear_attention_f32, &cuda::delta_rule_f32},
      bf16{&cuda::linear_attention_bf16, &cuda::delta_rule_bf16},
      f16{&cuda::linear_attention_f16, &cuda::delta_rule_f16};
  switch (dtype) {
    case DType::f32:
      return &f32;
    case DType::bf16:
      return &bf16;
    case DType::f16:
      return &f16;
    case DType::f64:
      return nullptr;
  }
  __builtin_unreachable();
}

}  // namespace hfla
