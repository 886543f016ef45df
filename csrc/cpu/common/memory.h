// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Memory for what kernels keep for a while, and what is asked for before it is read.
#pragma once

#include <new>

#include "cpu/common/isa.h"

namespace hfla::HFLA_ISA {
namespace {

// Null where there is no memory.
class Buffer {
 public:
  explicit Buffer(int64_t bytes)
      : data_(operator new(static_cast<size_t>(bytes), kAlignment, std::nothrow)) {}
  ~Buffer() { operator delete(data_, kAlignment); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  static constexpr std::align_val_t kAlignment{kCacheLine};
  void* data_;
};

// What has fewer may lie in a cache, where asking takes longer than reading.
constexpr int64_t kOutOfCacheBytes = 262144;

// Of the second-level cache: in the first one there is no room for as much as is on its way.
HFLA_INLINE void ask_for(const void* at) { __builtin_prefetch(at, 0, 2); }

// Of the first-level cache, for what is read next.
HFLA_INLINE void ask_for_soon(const void* at) { __builtin_prefetch(at, 0, 3); }

// The same for what is not needed again.
HFLA_INLINE void ask_for_once(const void* at) { __builtin_prefetch(at, 0, 0); }

// Hands out consecutive, aligned arrays; starting from null it only measures.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    T* array = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), kCacheLine);
    return array;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// What a Scratch carves for a shape.
template <class Scratch, class Of>
int64_t bytes_needed(const Of& shape) {
  Carver carver(nullptr);
  Scratch(carver, shape);
  return carver.used();
}

}  // namespace
}  // namespace hfla::HFLA_ISA
