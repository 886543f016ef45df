// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "cuda/table.cuh"

const hfla::CudaKernels hfla::cuda_kernels_bf16 = hfla::cuda::kTable<hfla::cuda::BFloat16>;
