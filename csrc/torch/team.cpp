// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.

#include "torch/team.h"

#include <algorithm>
#include <thread>

namespace hfla {
namespace {

constexpr int64_t kMostThreads = 0xffff;

thread_local Team* current_team = nullptr;

// Waits a little: at first without leaving the processor, then by letting others have it.
class Patience {
 public:
  void wait() {
    if (++waits_ > kWaitsAwake) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }

 private:
  static constexpr int64_t kWaitsAwake = 2000;  // some 50 us
  int64_t waits_ = 0;
};

uint64_t parts_of(uint64_t offer) { return offer >> 16 & 0xffff; }
uint64_t taken_of(uint64_t offer) { return offer & 0xffff; }

}  // namespace

Team* Team::current() { return current_team; }

void Team::run(const Threads& threads, WeightPrefetch& prefetch, void (*work)(void*),
               void* context) {
  struct Shared {
    Team team;
    void (*work)(void*);
    void* context;
  } shared{Team(std::min(threads.count, kMostThreads), prefetch), work, context};
  const auto body = [](void* opaque, int64_t begin, int64_t) {
    auto& [team, work, context] = *static_cast<Shared*>(opaque);
    if (begin > 0) return team.serve(begin);
    current_team = &team;  // the first part is the caller's
    work(context);
    current_team = nullptr;
    team.is_over_.store(true, std::memory_order_release);
  };
  threads.parallel_for(shared.team.count_, body, &shared);
}

void Team::parallel_for(int64_t n, Body body, void* context) {
  current_team->do_together(n, body, context);
}

void Team::do_together(int64_t parts, Body body, void* context) {
  body_ = body;
  context_ = context;
  parts_done_.store(0, std::memory_order_relaxed);
  const uint64_t loop = (offer_.load(std::memory_order_relaxed) >> 32) + 1;
  offer_.store(loop << 32 | uint64_t(parts) << 16, std::memory_order_release);
  while (take_part()) continue;
  for (Patience patience; parts_done_.load(std::memory_order_acquire) < parts;) {
    if (!prefetch_.ask(0)) patience.wait();
  }
}

void Team::serve(int64_t worker) {
  for (Patience patience; !is_over_.load(std::memory_order_acquire);) {
    if (take_part()) {
      patience = Patience();
    } else if (!prefetch_.ask(worker)) {
      patience.wait();
    }
  }
}

// Does one that nobody has taken; whether there was any.
bool Team::take_part() {
  uint64_t offer = offer_.load(std::memory_order_relaxed);
  do {
    if (taken_of(offer) >= parts_of(offer)) return false;
  } while (!offer_.compare_exchange_weak(offer, offer + 1, std::memory_order_acquire,
                                         std::memory_order_relaxed));
  const auto part = int64_t(taken_of(offer));
  body_(context_, part, part + 1);
  parts_done_.fetch_add(1, std::memory_order_release);
  return true;
}

}  // namespace hfla
