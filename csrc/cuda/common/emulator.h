// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The vocabulary of device.h for a host compiler: a block of threads as fibers on one CPU thread.
//
// Between two barriers a GPU may run the threads of a block in any order. The emulator runs each as
// far as it can before the next, in an order that `schedule` chooses: 0 ascending, 1 descending
// (warps, and the lanes of a warp), else shuffled anew, with that seed, after every barrier. Where
// a barrier is missing between a write and a read of shared memory by different threads, ascending
// or descending order puts the read before the write; it then sees what was there before, at first
// NaN.
//
// Reported as an error: threads of a block that wait at different barriers, or wait while others
// have ended; the same for collective operations of a warp; writes beyond the end of shared memory;
// more shared memory than the device has; a launch of a kernel that was not loaded before.
//
// Sums inside of mma are truncated, not rounded, as tensor cores do it (truncated_sum).
//
// Not emulated: the memory hierarchy, and several blocks at once.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#define KERNEL static void
#define GRID_CONSTANT
#define DEV inline
#define BOTH inline
#define UNROLL
#define NO_UNROLL
#define UNROLL_BY(count)
#define LAUNCH_BOUNDS(threads, blocks)

namespace hfla::cuda {
namespace emulator {

constexpr int kWarp = 32, kMaxThreads = 1024;
constexpr size_t kStackBytes = 128 << 10;

enum class FiberState { runnable, at_block_barrier, in_warp_operation, ended };

struct Fiber {
  ucontext_t start;
  jmp_buf resume;
  std::unique_ptr<char[]> stack;
  FiberState state = FiberState::ended;
  bool started = false;
  int line = 0;  // of the barrier or collective operation at which it waits
};

// What a lane shows to the others in a collective operation. Two sets in turn: a lane may be at the
// next operation while another still reads of the last one, but it can't be two ahead.
struct Exchange {
  uint32_t a[4], b[2];
  double value;
};

struct Machine {
  std::deque<Fiber> fibers;  // whose addresses don't change
  jmp_buf scheduler;
  std::function<void()> body;
  Exchange exchange[2][kMaxThreads];
  int turn[kMaxThreads];
  std::vector<char> shared;
  int64_t shared_bytes = 0;
  int current = 0;
  int64_t block = 0;
  // Set by tests.
  unsigned schedule = 0;
  int missing_barrier = 0;   // the line of a barrier that is left out
  int missing_in_warp = -1;  // by this warp; -1: by all
  int64_t most_shared_bytes = INT64_MAX;
  std::set<void*> loaded;   // set by load
  int64_t most_blocks = 0;  // of a launch
  std::string error;
};

inline Machine& machine() {
  static Machine instance;
  return instance;
}

inline void leave(FiberState state, int line) {
  Machine& m = machine();
  Fiber& fiber = m.fibers[m.current];
  fiber.state = state;
  fiber.line = line;
  if (!_setjmp(fiber.resume)) _longjmp(m.scheduler, 1);
}

// A fiber outlives its thread, to run one of the next block.
inline void fiber_main() {
  for (;;) {
    machine().body();
    leave(FiberState::ended, 0);
  }
}

inline void make_fibers(int threads) {
  Machine& m = machine();
  while (m.fibers.size() < size_t(threads)) {
    Fiber& fiber = m.fibers.emplace_back();
    fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
  }
}

// Lets a thread run until it leaves. Only the first time needs a system call.
inline void run(int i) {
  Machine& m = machine();
  m.current = i;
  if (_setjmp(m.scheduler)) return;
  Fiber& fiber = m.fibers[i];
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

// One block, from start to end. Returns an error or an empty string.
inline std::string run_block(int threads) {
  Machine& m = machine();
  make_fibers(threads);
  for (int i = 0; i < threads; ++i) m.fibers[i].state = FiberState::runnable, m.turn[i] = 0;

  std::mt19937 random(m.schedule);
  const int num_warps = (threads + kWarp - 1) / kWarp;
  std::vector<int> warps(num_warps), lanes(kWarp);
  std::iota(warps.begin(), warps.end(), 0);
  std::iota(lanes.begin(), lanes.end(), 0);
  if (m.schedule == 1) {
    std::reverse(warps.begin(), warps.end());
    std::reverse(lanes.begin(), lanes.end());
  }

  const auto in_state = [&](int begin, int end, FiberState state) {
    return std::count_if(m.fibers.begin() + begin, m.fibers.begin() + end,
                         [&](const Fiber& f) { return f.state == state; });
  };
  const auto same_line = [&](int begin, int end) {
    return std::all_of(m.fibers.begin() + begin, m.fibers.begin() + end,
                       [&](const Fiber& f) { return f.line == m.fibers[begin].line; });
  };

  for (;;) {
    if (m.schedule > 1) std::shuffle(warps.begin(), warps.end(), random);
    for (const int warp : warps) {
      const int begin = warp * kWarp, end = std::min(threads, begin + kWarp);
      for (;;) {
        if (m.schedule > 1) std::shuffle(lanes.begin(), lanes.end(), random);
        for (const int lane : lanes) {
          const int i = begin + lane;
          if (i >= end || m.fibers[i].state != FiberState::runnable) continue;
          run(i);
        }
        const int64_t waiting = in_state(begin, end, FiberState::in_warp_operation);
        if (waiting == 0) break;
        if (waiting < kWarp || !same_line(begin, end)) {
          return "the lanes of a warp part at a collective operation";
        }
        for (int i = begin; i < end; ++i) m.fibers[i].state = FiberState::runnable;
      }
    }
    if (in_state(0, threads, FiberState::ended) == threads) return "";
    if (in_state(0, threads, FiberState::at_block_barrier) < threads || !same_line(0, threads)) {
      return "the threads of a block part at a barrier";
    }
    for (int i = 0; i < threads; ++i) m.fibers[i].state = FiberState::runnable;
  }
}

// Gives `mine` to the warp and returns what all its lanes gave.
inline const Exchange* exchange(const Exchange& mine, int line) {
  Machine& m = machine();
  const int i = m.current;
  Exchange* const slots = m.exchange[m.turn[i] ^= 1];
  slots[i] = mine;
  leave(FiberState::in_warp_operation, line);
  return slots + i / kWarp * kWarp;
}

inline float bf16_half(uint32_t pair, int high) {
  const uint32_t bits = high ? pair & 0xffff0000u : pair << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float tf32_part(uint32_t bits) {
  bits &= 0xffffe000u;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// c plus products as the tensor cores of an A100 sum them up, after the model in arXiv 2512.07004
// (those of an H100 take twice as many at a time and one bit more): all are aligned to the largest,
// what is below one bit after float's last is cut off before the sum, and so is the sum's end.
inline float truncated_sum(float c, const double* products, int count) {
  double largest = std::fabs(double(c)), sum = c;
  for (int k = 0; k < count; ++k) {
    sum += products[k];
    largest = std::max(largest, std::fabs(products[k]));
  }
  if (!std::isfinite(sum) || largest == 0) return float(sum);
  uint64_t exponent;
  std::memcpy(&exponent, &largest, sizeof exponent);
  constexpr uint64_t kBitsBelow = 23 + 1, kOne = uint64_t(1) << 52;
  exponent = exponent / kOne - kBitsBelow;  // of the last bit that counts
  const auto power_of_two = [](uint64_t biased) {
    const uint64_t bits = biased * kOne;
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  };
  const double last = power_of_two(exponent), scale = power_of_two(2 * 1023 - exponent);
  int64_t units = int64_t(c * scale);
  for (int k = 0; k < count; ++k) units += int64_t(products[k] * scale);
  const double total = double(units) * last;
  uint64_t bits;
  std::memcpy(&bits, &total, sizeof bits);
  bits &= ~((uint64_t(1) << 29) - 1);  // a float's 23 bits of 52
  double truncated;
  std::memcpy(&truncated, &bits, sizeof truncated);
  return float(truncated);
}

// c += products in groups of `at_once`.
inline void add_products(float& c, const double* products, int count, int at_once) {
  for (int k = 0; k < count; k += at_once) c = truncated_sum(c, products + k, at_once);
}

// The guard after the end of shared memory.
constexpr int64_t kGuardBytes = 4096;
constexpr char kPoison = char(0xff);

}  // namespace emulator

inline int thread_index() { return emulator::machine().current; }
inline int64_t block_index() { return emulator::machine().block; }
inline char* shared_memory() { return emulator::machine().shared.data(); }

inline void sync_block(int line = __builtin_LINE()) {
  const emulator::Machine& m = emulator::machine();
  if (line == m.missing_barrier &&
      (m.missing_in_warp == -1 || m.missing_in_warp == thread_index() / emulator::kWarp)) {
    return;
  }
  emulator::leave(emulator::FiberState::at_block_barrier, line);
}

template <class T>
T shuffle(T value, int lane, int line = __builtin_LINE()) {
  return static_cast<T>(emulator::exchange({{}, {}, double(value)}, line)[lane].value);
}
template <class T>
T shuffle_up(T value, int lanes, int line = __builtin_LINE()) {
  const int from = thread_index() % emulator::kWarp - lanes;
  const emulator::Exchange* all = emulator::exchange({{}, {}, double(value)}, line);
  return from < 0 ? value : static_cast<T>(all[from].value);
}
template <class T>
T shuffle_xor(T value, int lanes, int line = __builtin_LINE()) {
  const int from = thread_index() % emulator::kWarp ^ lanes;
  return static_cast<T>(emulator::exchange({{}, {}, double(value)}, line)[from].value);
}

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float fast_exp(float x) { return std::exp(x); }
inline float fast_reciprocal(float x) { return 1 / x; }

// Rounded to the nearest, ties to even.
inline uint16_t to_bf16(float x) {
  if (x != x) return 0x7fff;
  const uint32_t bits = float_to_bits(x);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t to_bf16_pair(float low, float high) {
  return to_bf16(low) | uint32_t(to_bf16(high)) << 16;
}

template <bool transposed, int count>
void load_matrices(uint32_t (&x)[count], const void* row, int line = __builtin_LINE()) {
  const int lane = thread_index() % emulator::kWarp;
  emulator::Exchange mine{};
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) emulator::machine().error = "a row not aligned";
  std::memcpy(mine.a, row, sizeof mine.a);
  const emulator::Exchange* all = emulator::exchange(mine, line);
  const auto element = [&](int matrix, int r, int c) {
    uint16_t bits;
    std::memcpy(&bits, reinterpret_cast<const char*>(all[8 * matrix + r].a) + 2 * c, 2);
    return uint32_t(bits);
  };
  for (int m = 0; m < count; ++m) {
    const int g = lane / 4, t = lane % 4;
    x[m] = transposed ? element(m, 2 * t, g) | element(m, 2 * t + 1, g) << 16
                      : element(m, g, 2 * t) | element(m, g, 2 * t + 1) << 16;
  }
}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                     int line = __builtin_LINE()) {
  const int lane = thread_index() % emulator::kWarp;
  const emulator::Exchange* all =
      emulator::exchange({{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, 0}, line);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    double products[16];
    for (int k = 0; k < 16; ++k) {
      const int quad = k % 8 / 2;
      const uint32_t pair_a = all[row % 8 * 4 + quad].a[row / 8 + 2 * (k / 8)];
      const uint32_t pair_b = all[column * 4 + quad].b[k / 8];
      products[k] = double(emulator::bf16_half(pair_a, k % 2)) * emulator::bf16_half(pair_b, k % 2);
    }
    emulator::add_products(c[i], products, 16, 8);
  }
}

inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                     int line = __builtin_LINE()) {
  const int lane = thread_index() % emulator::kWarp;
  const emulator::Exchange* all =
      emulator::exchange({{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, 0}, line);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    double products[8];
    for (int k = 0; k < 8; ++k) {
      const uint32_t of_a = all[row % 8 * 4 + k % 4].a[row / 8 + 2 * (k / 4)];
      const uint32_t of_b = all[column * 4 + k % 4].b[k / 4];
      products[k] = double(emulator::tf32_part(of_a)) * emulator::tf32_part(of_b);
    }
    emulator::add_products(c[i], products, 8, 4);
  }
}

using Stream = void*;

template <class... Parameters>
int load(void (*kernel)(Parameters...)) {
  emulator::machine().loaded.insert(reinterpret_cast<void*>(kernel));
  return 0;
}

// It is NaN again, lest a kernel reads of it what another left there.
inline void forget(void* memory, int64_t bytes) {
  std::memset(memory, emulator::kPoison, size_t(bytes));
}

// Runs all blocks, one after another. Returns 0, or 1 with machine().error set.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes, Stream,
           const Arguments&... arguments) {
  emulator::Machine& m = emulator::machine();
  if (blocks == 0) return 0;
  m.most_blocks = std::max(m.most_blocks, blocks);
  if (!m.loaded.count(reinterpret_cast<void*>(kernel))) m.error = "a kernel that was not loaded";
  if (shared_bytes > m.most_shared_bytes) m.error = "more shared memory than the device has";
  m.body = [&] { kernel(arguments...); };
  for (m.block = 0; m.block < blocks && m.error.empty(); ++m.block) {
    m.shared.assign(size_t(shared_bytes + emulator::kGuardBytes), emulator::kPoison);
    const std::string error = emulator::run_block(threads);
    if (m.error.empty()) m.error = error;
    for (int64_t i = shared_bytes; i < int64_t(m.shared.size()) && m.error.empty(); ++i) {
      if (m.shared[i] != emulator::kPoison) m.error = "a write beyond the end of shared memory";
    }
  }
  if (m.error.empty()) return 0;
  m.fibers.clear();  // they are somewhere inside of the kernel
  return 1;
}

}  // namespace hfla::cuda
