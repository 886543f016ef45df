// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Threads that stay together over many short loops.
//
// torch's threads part after each loop, and to call them again takes longer than many a product of
// one token. In a team they wait for the next loop where they are, awake, as long as the work
// lasts, and ask for what it is going to read meanwhile.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/common.h"
#include "torch/weight_prefetch.h"

namespace hfla {

class Team {
 public:
  // Calls work(context) on this thread, which has a team of the caller's threads meanwhile, as many
  // as `prefetch` has workers. `work` must not throw.
  static void run(const Threads& threads, WeightPrefetch& prefetch, void (*work)(void* context),
                  void* context);

  // The one that this thread works with, or null.
  static Team* current();

  Threads threads() const {
    Threads threads{count_, parallel_for};
    threads.serial_work = kSerialWork;
    return threads;
  }

 private:
  using Body = void (*)(void* context, int64_t begin, int64_t end);

  static constexpr int64_t kSerialWork = 8192;  // a loop takes a microsecond or two

  Team(int64_t count, WeightPrefetch& prefetch) : count_(count), prefetch_(prefetch) {}

  static void parallel_for(int64_t n, Body body, void* context);
  // Parts are taken by who has time: a thread that is late is not waited for.
  void do_together(int64_t parts, Body body, void* context);
  void serve(int64_t worker);
  bool take_part();

  // What there is to do: the number of the loop, its parts, and how many of them are taken, in 32,
  // 16 and 16 bits. A thread that takes a part changes it, so that nobody is a loop behind.
  alignas(64) std::atomic<uint64_t> offer_{0};
  alignas(64) std::atomic<int64_t> parts_done_{0};
  std::atomic<bool> is_over_{false};
  const int64_t count_;
  WeightPrefetch& prefetch_;
  Body body_ = nullptr;
  void* context_ = nullptr;
};

}  // namespace hfla
