// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Launches of kernels one after the other, in a workspace that the caller provides.
#pragma once

#include "cuda/common/device.h"
#include "kernels/common.h"

namespace hfla::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether runs of 16 bytes are aligned in rows of any token, head and sequence, and 32 bits hold a
// token's stride.
template <class Scalar>
bool has_plain_rows(const View& x) {
  constexpr int64_t kRun = 16 / int64_t(sizeof(Scalar));
  return x.data && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.dim == 1 &&
         x.batch % kRun == 0 && x.time % kRun == 0 && x.head % kRun == 0 &&
         x.time <= INT32_MAX / 16 && x.head <= INT32_MAX / 16;
}
// Hands out consecutive, aligned arrays; starting from null it only measures.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* const array = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += ceil_div(count * int64_t(sizeof(T)), kAlignment) * kAlignment;
    if (used_ > most_) most_ = used_;
    return array;
  }
  // Takes back all that was handed out since used() was this.
  void take_back(int64_t used) {
    if (base_) forget(base_ + used, used_ - used);
    used_ = used;
  }
  int64_t used() const { return used_; }
  int64_t most() const { return most_; }

 private:
  static constexpr int64_t kAlignment = 256;
  char* base_;
  int64_t used_ = 0, most_ = 0;
};

// Launches in order until one fails. Without a workspace it launches nothing, and only measures.
class Launcher {
 public:
  Launcher(void* workspace, Stream stream)
      : carver_(workspace), measuring_(!workspace), stream_(stream) {}

  template <class T = float>
  T* take(int64_t count) {
    return carver_.take<T>(count);
  }
  int64_t workspace_bytes() const { return carver_.most(); }
  int error() const { return error_; }

  template <class Kernel, class Arguments>
  void run(Kernel kernel, int64_t blocks, int threads, int64_t shared_bytes,
           const Arguments& arguments) {
    if (measuring_ || error_) return;
    error_ = launch(kernel, blocks, threads, shared_bytes, stream_, arguments);
  }

  // What is taken while this lives is free for others afterwards: launches come one after the
  // other, so that those before have done with it.
  class Scope {
   public:
    explicit Scope(Launcher& launcher) : carver_(launcher.carver_), used_(carver_.used()) {}
    ~Scope() { carver_.take_back(used_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Carver& carver_;
    const int64_t used_;
  };

 private:
  Carver carver_;
  const bool measuring_;
  const Stream stream_;
  int error_ = 0;
};

// Calls launch_all(launcher), which only measures where there is no workspace.
template <class LaunchAll>
int launch_at(const CudaPlace& place, LaunchAll launch_all) {
  Launcher launcher(place.workspace, static_cast<Stream>(place.stream));
  launch_all(launcher);
  *place.workspace_bytes = launcher.workspace_bytes();
  return launcher.error();
}

// Of all kernels: the first error, or cudaSuccess.
template <class... Kernels>
int load_all(Kernels... kernels) {
  int error = 0;
  ((error = error ? error : load(kernels)), ...);
  return error;
}

}  // namespace hfla::cuda
