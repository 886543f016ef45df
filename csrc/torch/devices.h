// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// From an op to the kernels of the device where its tensors are.
#pragma once

#include <type_traits>

#include "kernels/cpu.h"
#include "kernels/cuda.h"
#include "torch/checks.h"
#include "torch/cuda/context.h"

namespace hfla {

// What the CUDA kernels were compiled for, such as "sm_90, compute_80"; empty without any.
// setup.py defines HFLA_WITH_CUDA so where it found nvcc.
#ifdef HFLA_WITH_CUDA
constexpr const char* kCudaBuilt = HFLA_WITH_CUDA;
#else
constexpr const char* kCudaBuilt = "";
#endif

// The threads that torch has for this process, or, where this one works in a team, those.
Threads torch_threads();

// Of the instruction set that was chosen, for tensors of a dtype.
const CpuKernels& cpu(DType dtype);

// Raises what a kernel found.
void check_status(Status status);

#ifdef HFLA_WITH_CUDA

inline void check_cuda(int error) {
  if (error)
    fail("CUDA says: ", cuda_error_text(error), " (kernels of this build: ", kCudaBuilt, ")");
}

// The first call for a dtype loads all its kernels onto the current device: whatever is called next
// may be captured in a graph.
void load_once(const CudaKernels& kernels, Device device, DType dtype);

// Calls on_cuda(kernels, stream); or on_cuda(kernels, place), first to ask how large a workspace
// has to be. torch keeps the memory for others on this stream as soon as the tensor is gone.
template <class OnCuda>
void run_on_cuda(Device device, DType dtype, OnCuda on_cuda) {
  const CudaKernels& kernels = *cuda_kernels(dtype);
  const CudaContext context(device.index);
  load_once(kernels, device, dtype);
  if constexpr (std::is_invocable_v<OnCuda, const CudaKernels&, void*>) {
    check_cuda(on_cuda(kernels, context.stream()));
  } else {
    int64_t bytes = 0;
    CudaPlace place{{}, nullptr, &bytes, context.stream()};
    check_cuda(cuda_device(device.index, &place.device));
    check_cuda(on_cuda(kernels, place));
    Tensor workspace = Tensor::empty(aoti_torch_dtype_uint8(), {bytes + 1}, device);
    place.workspace = workspace.mutable_data();
    check_cuda(on_cuda(kernels, place));
  }
}

#endif

// Calls on_cpu(kernels, threads), or what run_on_cuda says.
template <class OnCpu, class OnCuda>
void run([[maybe_unused]] Device device, DType dtype, OnCpu on_cpu,
         [[maybe_unused]] OnCuda on_cuda) {
#ifdef HFLA_WITH_CUDA
  if (is_cuda(device)) return run_on_cuda(device, dtype, on_cuda);
#endif
  check_status(on_cpu(cpu(dtype), torch_threads()));
}

}  // namespace hfla
