// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "cuda/table.cuh"

const hfla::CudaKernels hfla::cuda_kernels_f32 = hfla::cuda::kTable<float>;
