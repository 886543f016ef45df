// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Tasks for the caller's threads.
#pragma once

#include "cpu/common/isa.h"
#include "cpu/common/subnormals.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kSerialWork = 65536;  // floats; with less, waking threads takes longer than that

// The threads for numbers that decay, if they do. Many become too small to be normal then, and
// Intel's processors take up to thirty times as long with such.
HFLA_INLINE Threads for_decays(Threads threads, bool decays) {
  threads.subnormals_become_zero = decays;
  return threads;
}

// Calls task(worker, i) for every i in [0, count). Workers take the next task when they are done
// with one; no result depends on which of them that is.
template <class Task>
void run_tasks(const Threads& threads, int64_t workers, int64_t count, Task task) {
  struct Context {
    Task& task;
    int64_t count, next;
    bool subnormals_become_zero;
  } context{task, count, 0, threads.subnormals_become_zero};
  const auto body = [](void* opaque, int64_t begin, int64_t end) {
    Context& shared = *static_cast<Context*>(opaque);
    const SubnormalsBecomeZero mode(shared.subnormals_become_zero);
    for (int64_t worker = begin; worker < end; ++worker) {
      int64_t i;
      while ((i = __atomic_fetch_add(&shared.next, 1, __ATOMIC_RELAXED)) < shared.count) {
        shared.task(worker, i);
      }
    }
  };
  workers = min(workers, count);
  if (workers <= 1) {
    body(&context, 0, 1);
  } else {
    threads.parallel_for(workers, body, &context);
  }
}

}  // namespace
}  // namespace hfla::HFLA_ISA
