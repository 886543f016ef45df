// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include <cuda_runtime_api.h>

#include "kernels/cuda.h"

namespace hfla {
namespace {

int attribute(cudaDeviceAttr which, int32_t index, int64_t* result) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, which, index);
  *result = value;
  return error;
}

}  // namespace

int cuda_device(int32_t index, CudaDevice* device) {
  // Cheap: the runtime keeps what it knows of devices.
  const int error = attribute(cudaDevAttrMultiProcessorCount, index, &device->multiprocessors);
  return error ? error
               : attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index, &device->shared_bytes);
}

const char* cuda_error_text(int error) {
  cudaGetLastError();  // seen now, and not again by another call
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

}  // namespace hfla
