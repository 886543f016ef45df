// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Where torch wants CUDA work to go.
#pragma once

#include "torch/shim.h"

namespace hfla {

// Makes a device the current one for as long as it lives.
class CudaContext {
 public:
  explicit CudaContext(int32_t device_index);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  void* stream() const { return stream_; }  // a cudaStream_t

 private:
  DeviceGuardHandle guard_;
  void* stream_;
};

}  // namespace hfla
