// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "cuda/linear_attention/table.cuh"

const hfla::LinearAttentionOnCuda hfla::cuda::linear_attention_f32 = hfla::cuda::kTable<float>;
