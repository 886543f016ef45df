// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The kernels of one dtype, as kernels.h names them.
#pragma once

#include "cuda/launch.cuh"

namespace hfla::cuda {

template <class Scalar>
int table_forward(const Problem& p, const ForwardResult& result, const CudaDevice& device,
                  void* workspace, int64_t* workspace_bytes, void* stream) {
  Launcher launcher(workspace, static_cast<Stream>(stream));
  forward<Scalar>(launcher, p, result, device);
  *workspace_bytes = launcher.workspace_bytes();
  return launcher.error();
}

template <class Scalar>
int table_backward(const Problem& p, const BackwardInput& input, const BackwardResult& result,
                   const CudaDevice& device, void* workspace, int64_t* workspace_bytes,
                   void* stream) {
  Launcher launcher(workspace, static_cast<Stream>(stream));
  backward<Scalar>(launcher, p, input, result, device);
  *workspace_bytes = launcher.workspace_bytes();
  return launcher.error();
}

template <class Scalar>
int table_step(const StepProblem& p, void* stream) {
  return step<Scalar>(p, static_cast<Stream>(stream));
}

template <class Scalar>
constexpr CudaKernels kTable = {table_forward<Scalar>, table_backward<Scalar>, table_step<Scalar>};

}  // namespace hfla::cuda
