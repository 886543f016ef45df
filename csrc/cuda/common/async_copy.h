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

// 16 bytes, aligned.
DEV void copy_in_group(void* to, const void* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(address), "l"(from) : "memory");
}
DEV void close_group() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int newest>
DEV void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(newest) : "memory");
}

#else

// Emulated, a copy arrives as late as it may, and until then there is NaN where it goes to.
namespace emulator {

struct Copies {
  struct Copy {
    void* to;
    const void* from;
  };
  int64_t block = -1;
  std::vector<std::vector<Copy> > groups;
  std::vector<Copy> open;
};

inline Copies& copies_of_this_thread() {
  static Copies of_threads[kMaxThreads];
  Copies& copies = of_threads[machine().current];
  if (copies.block != machine().block) copies = {machine().block, {}, {}};
  return copies;
}

}  // namespace emulator

inline void copy_in_group(void* to, const void* from) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 != 0) {
    emulator::machine().error = "a copy that is not aligned";
  }
  std::memset(to, emulator::kPoison, 16);
  emulator::copies_of_this_thread().open.push_back({to, from});
}
inline void close_group() {
  emulator::Copies& copies = emulator::copies_of_this_thread();
  copies.groups.push_back(std::move(copies.open));
  copies.open.clear();
}
template <int newest>
void wait_for_groups() {
  auto& groups = emulator::copies_of_this_thread().groups;
  while (groups.size() > size_t(newest)) {
    for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
    groups.erase(groups.begin());
  }
}

#endif

}  // namespace hfla::cuda
