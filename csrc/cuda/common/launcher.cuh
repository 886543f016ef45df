// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Launches of kernels one after the other, in a workspace that the caller provides.
#pragma once

#include "cuda/common/device.h"

namespace hfla::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Hands out consecutive, aligned arrays; starting from null it only measures.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  float* take(int64_t count) {
    float* const array = base_ ? reinterpret_cast<float*>(base_ + used_) : nullptr;
    used_ += ceil_div(count * int64_t(sizeof(float)), kAlignment) * kAlignment;
    return array;
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 256;
  char* base_;
  int64_t used_ = 0;
};

// Launches in order until one fails. Without a workspace it launches nothing, and only measures.
class Launcher {
 public:
  Launcher(void* workspace, Stream stream)
      : carver_(workspace), measuring_(!workspace), stream_(stream) {}

  float* take(int64_t count) { return carver_.take(count); }
  int64_t workspace_bytes() const { return carver_.used(); }
  int error() const { return error_; }

  template <class Kernel, class Arguments>
  void run(Kernel kernel, int64_t blocks, int threads, int64_t shared_bytes,
           const Arguments& arguments) {
    if (measuring_ || error_) return;
    error_ = launch(kernel, blocks, threads, shared_bytes, stream_, arguments);
  }

 private:
  Carver carver_;
  const bool measuring_;
  const Stream stream_;
  int error_ = 0;
};

}  // namespace hfla::cuda
