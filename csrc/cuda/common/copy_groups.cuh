// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Copies from device memory to shared memory that go on while the thread does something else. They
// come in groups: what a thread starts belongs to the group that it closes next, and it waits for
// all its groups but the newest few. Other threads may read what was copied after a barrier that
// follows the wait.
#pragma once

#include "cuda/common/device.h"

#if !defined(__CUDACC__)
#include <cstring>
#include <vector>
#endif

namespace hfla::cuda {

#if defined(__CUDACC__)

// A thread's groups.
struct CopyGroups {
  // 16 bytes, aligned.
  DEV void copy(void* to, const void* from) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(address), "l"(from)
                 : "memory");
  }
  DEV void close() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
  template <int newest>
  DEV void wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(newest) : "memory");
  }
};

#else

// Emulated, a copy arrives as late as it may, and until then there is NaN where it goes to.
class CopyGroups {
 public:
  void copy(void* to, const void* from) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 != 0) {
      emulator::machine().error = "a copy that is not aligned";
    }
    std::memset(to, emulator::kPoison, 16);
    open_.push_back({to, from});
  }
  void close() {
    groups_.push_back(std::move(open_));
    open_.clear();
  }
  template <int newest>
  void wait() {
    while (groups_.size() > size_t(newest)) {
      for (const auto& [to, from] : groups_.front()) std::memcpy(to, from, 16);
      groups_.erase(groups_.begin());
    }
  }

 private:
  struct Copy {
    void* to;
    const void* from;
  };
  std::vector<std::vector<Copy> > groups_;
  std::vector<Copy> open_;
};

#endif

}  // namespace hfla::cuda
