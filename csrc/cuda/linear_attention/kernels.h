// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Linear attention's kernels, a file per dtype.
#pragma once

#include "kernels/linear_attention.h"

namespace hfla::cuda {

extern const LinearAttentionOnCuda linear_attention_f32, linear_attention_bf16,
    linear_attention_f16;

}  // namespace hfla::cuda
