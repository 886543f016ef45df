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
  // 16, 8 or 4 bytes, aligned.
  template <int bytes = 16>
  DEV void copy(void* to, const void* from) {
    static_assert(bytes == 16 || bytes == 8 || bytes == 4);
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    if constexpr (bytes == 16) {  // past the first-level cache, as only these can
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(address), "l"(from)
                   : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(address), "l"(from),
                   "n"(bytes)
                   : "memory");
    }
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
  template <int bytes = 16>
  void copy(void* to, const void* from) {
    static_assert(bytes == 16 || bytes == 8 || bytes == 4);
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes != 0) {
      emulator::machine().error = "a copy that is not aligned";
    }
    {
      const emulator::Unwatched here;
      ++emulator::machine().counts.copies;
      emulator::machine().counts.wide_copies += bytes == 16;
    }
    std::memset(to, emulator::kPoison, bytes);
    open_.push_back({to, from, [](void* to, const void* from) { std::memcpy(to, from, bytes); }});
  }
  void close() {
    groups_.push_back(std::move(open_));
    open_.clear();
  }
  template <int newest>
  void wait(int line = __builtin_LINE()) {
    if (line == emulator::machine().missing_wait) return;
    while (groups_.size() > size_t(newest)) {
      for (const Copy& copy : groups_.front()) copy.arrive(copy.to, copy.from);
      groups_.erase(groups_.begin());
    }
  }

 private:
  struct Copy {
    void* to;
    const void* from;
    void (*arrive)(void* to, const void* from);
  };
  std::vector<std::vector<Copy> > groups_;
  std::vector<Copy> open_;
};

#endif

}  // namespace hfla::cuda
