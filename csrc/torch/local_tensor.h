// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Tensors that never leave this library: what operations of a recording make for each other. To
// make one of torch's and to hand it on takes longer than many operations of one token do.
//
// A class Tensor (torch/shim.h) may hold one of these in place of a handle of torch's; ops don't
// see the difference. None of them leaves the thread that made it.
#pragma once

#include <cstddef>
#include <cstdint>

struct AtenTensorOpaque;

namespace hfla {

struct LocalTensor {
  static constexpr int64_t kMaxDim = 8;

  int64_t references;
  LocalTensor* base;         // which this one is a view of, or null
  AtenTensorOpaque* torchs;  // torch's tensor, which this one is, or null
  bool owns_torchs;
  char* memory;    // where there is no torchs; of a view it is null
  int64_t offset;  // of a view, in bytes, from the base's first number
  int64_t dim;
  const int64_t *sizes, *strides;  // torch's, or those below
  int32_t dtype;
  int32_t memory_kind;  // of what this lies in
  int64_t own_sizes[kMaxDim], own_strides[kMaxDim];

  const void* data() const;
  void* mutable_data();
  bool is_contiguous() const;

  // What it is for torch, which the caller owns. torch's tensor on the memory of this one keeps it.
  AtenTensorOpaque* to_torch();

  void add_reference() { ++references; }
  void remove_reference() {
    if (--references == 0) destroy();
  }

  // ---- each with one reference, the caller's ----

  // A contiguous one on the CPU, not initialised; null where torch is to make it: no recording runs
  // on this thread, or what it makes now leaves the library, or it is large.
  static LocalTensor* empty(int64_t dim, const int64_t* sizes, const int64_t* strides,
                            int32_t dtype);
  // torch's tensor, which is on the CPU and outlives this one, unless this one is to own it.
  static LocalTensor* of_torch(AtenTensorOpaque* tensor, bool owns);
  // Keeps its base. Of up to kMaxDim dimensions.
  static LocalTensor* view(LocalTensor* base, int64_t dim, const int64_t* sizes,
                           const int64_t* strides, int64_t offset);

 private:
  void destroy();
};

// While there is one, results of this thread's ops are local tensors, but where `are_made` says no.
class LocalResults {
 public:
  LocalResults();
  ~LocalResults();
  LocalResults(const LocalResults&) = delete;
  LocalResults& operator=(const LocalResults&) = delete;

  bool are_made = true;

 private:
  LocalResults* const outer_;
};

}  // namespace hfla
