// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Tasks for the caller's threads.
#pragma once

#include "cpu/common/isa.h"
#include "cpu/common/subnormals.h"

namespace hfla::HFLA_ISA {
namespace {

// The threads for numbers that decay, if they do. Many become too small to be normal then, and
// Intel's processors take up to thirty times as long with such.
HFLA_INLINE Threads for_decays(Threads threads, bool decays) {
  threads.subnormals_become_zero = decays;
  return threads;
}

// How many threads so many multiplications, or numbers, are worth.
HFLA_INLINE int64_t workers_for(const Threads& threads, int64_t work) {
  return work < threads.serial_work ? 1 : max(1, threads.count);
}

// Tasks that follow each other, of which anybody takes the next one.
struct alignas(kCacheLine) TaskRange {
  int64_t next, end;
};

// Calls task(worker, i) for every i in [0, count). Each worker begins with a range of its own,
// where one task's memory mostly follows the last one's, and goes on with what others have not
// begun. No result depends on who does what.
template <class Task>
void run_tasks(const Threads& threads, int64_t workers, int64_t count, Task task) {
  constexpr int64_t kMostRanges = 64;
  struct Context {
    Task& task;
    TaskRange ranges[kMostRanges];
    int64_t num_ranges;
    bool subnormals_become_zero;
  } context{
      task, {}, min(kMostRanges, max(1, min(workers, count))), threads.subnormals_become_zero};
  for (int64_t i = 0; i < context.num_ranges; ++i) {
    context.ranges[i] = {count * i / context.num_ranges, count * (i + 1) / context.num_ranges};
  }
  const auto body = [](void* opaque, int64_t begin, int64_t end) {
    Context& shared = *static_cast<Context*>(opaque);
    const SubnormalsBecomeZero mode(shared.subnormals_become_zero);
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i = 0; i < shared.num_ranges; ++i) {
        TaskRange& range = shared.ranges[(worker + i) % shared.num_ranges];
        int64_t next;
        while ((next = __atomic_fetch_add(&range.next, 1, __ATOMIC_RELAXED)) < range.end) {
          shared.task(worker, next);
        }
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
