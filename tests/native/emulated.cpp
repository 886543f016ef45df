// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The CUDA kernels, emulated, for tests/native/test_cuda_kernels.py to call through ctypes.

#include "cuda/table.cuh"

namespace {

const hfla::CudaKernels& kernels(hfla::DType dtype) {
  switch (dtype) {
    case hfla::DType::bf16:
      return hfla::cuda::kTable<hfla::cuda::BFloat16>;
    case hfla::DType::f16:
      return hfla::cuda::kTable<hfla::cuda::Float16>;
    default:
      return hfla::cuda::kTable<float>;
  }
}

}  // namespace

extern "C" {

// For a comparison with the structures as Python declares them.
int64_t size_of_problems() {
  return sizeof(hfla::Problem) + sizeof(hfla::ForwardResult) + sizeof(hfla::BackwardInput) +
         sizeof(hfla::BackwardResult) + sizeof(hfla::StepProblem) + sizeof(hfla::CudaDevice);
}

void set_schedule(unsigned schedule) { hfla::cuda::emulator::machine().schedule = schedule; }

// Leaves out a barrier, in one warp or (-1) all.
void set_missing_barrier(int line, int warp) {
  hfla::cuda::emulator::machine().missing_barrier = line;
  hfla::cuda::emulator::machine().missing_in_warp = warp;
}

// The error of the last call that failed.
const char* emulator_error() {
  static std::string error;
  error.swap(hfla::cuda::emulator::machine().error);
  hfla::cuda::emulator::machine().error.clear();
  return error.c_str();
}

int forward(const hfla::Problem* p, const hfla::ForwardResult* result,
            const hfla::CudaDevice* device, void* workspace, int64_t* workspace_bytes) {
  return kernels(p->dtype).forward(*p, *result, *device, workspace, workspace_bytes, nullptr);
}

int backward(const hfla::Problem* p, const hfla::BackwardInput* input,
             const hfla::BackwardResult* result, const hfla::CudaDevice* device, void* workspace,
             int64_t* workspace_bytes) {
  return kernels(p->dtype).backward(*p, *input, *result, *device, workspace, workspace_bytes,
                                    nullptr);
}

int step(const hfla::StepProblem* p) { return kernels(p->dtype).step(*p, nullptr); }
}
