// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The kernel that walks.
#pragma once

#include "cuda/linear_attention/walker.cuh"
#include "cuda/linear_attention/walker_convert.cuh"
#include "cuda/linear_attention/walker_loader.cuh"
#include "cuda/linear_attention/walker_out.cuh"
#include "cuda/linear_attention/walker_products.cuh"

namespace hfla::cuda {

template <class Scalar, class S, class Fixed>
KERNEL LAUNCH_BOUNDS(S::kThreads, S::kBlocks) walk_kernel(const GRID_CONSTANT Walk p) {
  Walker<Scalar, S, Fixed>(p).run();
}

}  // namespace hfla::cuda
