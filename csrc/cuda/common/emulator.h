// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The vocabulary of device.h for a host compiler: a block of threads as fibers on one CPU thread.
//
// Between two barriers a GPU may run the threads of a block in any order. The emulator runs each as
// far as it can before the next, in an order that `schedule` chooses: 0 ascending, 1 descending
// (warps, and the lanes of a warp), else shuffled anew, with that seed, after every barrier. Where
// a barrier is missing between a write and a read of shared memory by different threads, ascending
// or descending order puts the read before the write; it then sees what was there before, at first
// NaN. Compiled with -fsanitize=thread, it finds the race itself (races.h), between blocks, too.
// Blocks come in the same order: ascending, descending, or shuffled.
//
// Reported as an error: threads of a block that wait at different barriers, or wait while others
// have ended; the same for collective operations of a warp; writes beyond the end of shared memory;
// more shared memory than the device has; a launch of a kernel that was not loaded before.
//
// emulator_products.h has the tensor cores.
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
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/common/races.h"

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
constexpr size_t kStackBytes = kFindsRaces ? 512 << 10 : 128 << 10;
// For races between blocks, which nothing orders: the threads of a block are others than those of
// the one before. Those of every second are the same, and known to come one after the other.
constexpr int kSets = kFindsRaces ? 2 : 1;

enum class FiberState { runnable, at_block_barrier, in_warp_operation, ended };

struct Fiber {
  jmp_buf resume;
  std::unique_ptr<char[]> stack;
  FiberState state = FiberState::ended;
  bool started = false;
  int line = 0;  // of the barrier or collective operation at which it waits
  Identity identity = new_identity();
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  ~Fiber() { end(&line); }
  // Ends what it is at: in leave(), called from where it was not watched already. What it did is
  // done before what comes after a later take_order(order).
  void end(void* order) { end_identity(identity, started ? 2 : 0, order); }
  // To be run from its start the next time, as another thread on the same stack.
  void start_anew(void* order) {
    if (!started) return;
    end(order);
    identity = new_identity();
    started = false;
  }
};

// Those of this block.
struct Fibers {
  std::deque<Fiber> sets[kSets];  // whose addresses don't change
  int set = 0;
  Fiber& operator[](size_t i) { return sets[set][i]; }
  std::deque<Fiber>::iterator begin() { return sets[set].begin(); }
  size_t size() const { return sets[set].size(); }
  Fiber& emplace_back() { return sets[set].emplace_back(); }
  // Somewhere inside of a kernel, in which a fault was found. What they did is done before whatever
  // comes next: else every kernel after it would seem to have a race.
  void abandon_all() {
    char order;
    for (std::deque<Fiber>& fibers : sets) {
      for (Fiber& fiber : fibers) fiber.start_anew(&order);
    }
    take_order(&order);
  }
};

// What the threads of a kernel have done, each of them counted.
struct Counts {
  int64_t barriers = 0, shuffles = 0, products = 0, operand_loads = 0;
  int64_t copies = 0, wide_copies = 0;  // asynchronous, of any size and of 16 bytes
};

// A barrier in a kernel's source.
struct Barrier {
  void* kernel;
  const char* file;
  int line;
  bool operator<(const Barrier& other) const {
    return std::tie(kernel, file, line) < std::tie(other.kernel, other.file, other.line);
  }
};

// What a lane shows to the others in a collective operation. Two sets in turn: a lane may be at the
// next operation while another still reads of the last one, but it can't be two ahead.
struct Exchange {
  uint32_t a[4], b[2];
  double value;
};

struct Machine {
  Fibers fibers;
  jmp_buf scheduler;
  std::function<void()> body;
  Exchange exchange[2][kMaxThreads];
  int turn[kMaxThreads];
  std::vector<char> shared[kSets];
  int64_t shared_bytes = 0;
  int current = 0;
  int64_t block = 0;
  void* kernel = nullptr;
  Identity scheduler_identity = nullptr;
  char begun, ended[kSets][2], at_barrier[kSets][2];  // addresses of orders, used by turns
  int barriers_passed = 0, blocks_of_set[kSets] = {};
  // Set by tests.
  unsigned schedule = 0;
  int missing_barrier = 0;   // the line of a barrier that is left out
  int missing_in_warp = -1;  // by this warp; -1: by all
  int missing_wait = 0;      // the line of a wait for copies that is left out (copy_groups.cuh)
  Barrier missing{};         // one that is left out by all, of one kernel
  int64_t most_shared_bytes = INT64_MAX;
  int64_t last_part = 1;        // only the last of so many parts of a launch's blocks is run
  const char* found = nullptr;  // what a check from outside has found: the block ends
  // Is told of a launch, and says whether it is to be run.
  std::function<bool(int64_t blocks, int threads, int64_t shared_bytes)> on_launch;
  std::set<void*> loaded;   // set by load
  int64_t most_blocks = 0;  // of a launch
  std::set<void*> launched;
  Counts counts;
  std::map<Barrier, int64_t> passed;  // by the first threads of blocks
  std::string error;
};

inline Machine& machine() {
  static Machine instance;
  return instance;
}

inline void leave(FiberState state, int line) {
  const Unwatched here;
  Machine& m = machine();
  Fiber& fiber = m.fibers[m.current];
  fiber.state = state;
  fiber.line = line;
  if (_setjmp(fiber.resume)) return;
  become(m.scheduler_identity);
  _longjmp(m.scheduler, 1);
}

// A fiber outlives its thread, to run one of the next block.
inline void fiber_main() {
  const Unwatched here;
  Machine& m = machine();
  for (;;) {
    // Those of the set's last block have ended, and are not those of this one that end early.
    const int set = m.fibers.set, block = m.blocks_of_set[set];
    take_order(&m.begun);
    take_order(&m.ended[set][(block + 1) % 2]);
    {
      const Watched body;
      m.body();
    }
    give_order(&m.ended[set][block % 2]);
    leave(FiberState::ended, 0);
  }
}

inline void make_fibers(int threads) {
  Machine& m = machine();
  while (m.fibers.size() < size_t(threads)) {
    Fiber& fiber = m.fibers.emplace_back();
    fiber.stack.reset(new char[kStackBytes]);
  }
}

// Lets a thread run until it leaves. Only the first time needs a system call.
inline void run(int i) {
  Machine& m = machine();
  m.current = i;
  if (_setjmp(m.scheduler)) return;
  Fiber& fiber = m.fibers[i];
  if (fiber.started) {
    become(fiber.identity);
    _longjmp(fiber.resume, 1);
  }
  fiber.started = true;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = fiber.stack.get();
  start.uc_stack.ss_size = kStackBytes;
  start.uc_link = nullptr;
  makecontext(&start, fiber_main, 0);
  become(fiber.identity);
  setcontext(&start);
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
          if (m.found) return m.found;
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
    ++m.barriers_passed;
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

// The guard after the end of shared memory.
constexpr int64_t kGuardBytes = 4096;
constexpr char kPoison = char(0xff);

}  // namespace emulator

inline int thread_index() { return emulator::machine().current; }
inline int64_t block_index() { return emulator::machine().block; }
inline char* shared_memory() {
  emulator::Machine& m = emulator::machine();
  return m.shared[m.fibers.set].data();
}

inline void sync_block(int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  const emulator::Unwatched here;
  emulator::Machine& m = emulator::machine();
  const emulator::Barrier barrier{m.kernel, file, line};
  if (thread_index() == 0) ++m.passed[barrier];
  ++m.counts.barriers;
  const emulator::Barrier& missing = m.missing;
  if (line == missing.line && file == missing.file && m.kernel == missing.kernel) return;
  if (line == m.missing_barrier &&
      (m.missing_in_warp == -1 || m.missing_in_warp == thread_index() / emulator::kWarp)) {
    return;
  }
  // By turns, lest one that waits for this barrier is after one that has gone on to the next.
  void* const order = &m.at_barrier[m.fibers.set][m.barriers_passed % 2];
  emulator::give_order(order);
  emulator::leave(emulator::FiberState::at_block_barrier, line);
  emulator::take_order(order);
}

template <class T>
T shuffle(T value, int lane, int line = __builtin_LINE()) {
  const emulator::Unwatched here;
  ++emulator::machine().counts.shuffles;
  return static_cast<T>(emulator::exchange({{}, {}, double(value)}, line)[lane].value);
}
template <class T>
T shuffle_up(T value, int lanes, int line = __builtin_LINE()) {
  const emulator::Unwatched here;
  ++emulator::machine().counts.shuffles;
  const int from = thread_index() % emulator::kWarp - lanes;
  const emulator::Exchange* all = emulator::exchange({{}, {}, double(value)}, line);
  return from < 0 ? value : static_cast<T>(all[from].value);
}
template <class T>
T shuffle_xor(T value, int lanes, int line = __builtin_LINE()) {
  const emulator::Unwatched here;
  ++emulator::machine().counts.shuffles;
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

inline int anew(int x) { return x; }
inline uint64_t multiply_wide(uint32_t a, uint32_t b) { return uint64_t(a) * b; }

inline float fast_exp(float x) { return std::exp(x); }
inline float fast_reciprocal(float x) { return 1 / x; }
inline float fast_reciprocal_root(float x) { return 1 / std::sqrt(x); }

// Rounded to the nearest, ties to even.
inline uint16_t to_bf16(float x) {
  if (x != x) return 0x7fff;
  const uint32_t bits = float_to_bits(x);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t to_bf16_pair(float low, float high) {
  return to_bf16(low) | uint32_t(to_bf16(high)) << 16;
}

using Stream = void*;

template <class... Parameters>
int load(void (*kernel)(Parameters...)) {
  emulator::machine().loaded.insert(reinterpret_cast<void*>(kernel));
  return 0;
}

// It is NaN again, lest a kernel reads of it what another left there; but for what is so large that
// it can only be sparse.
inline void forget(void* memory, int64_t bytes) {
  if (bytes < int64_t(1) << 32) std::memset(memory, emulator::kPoison, size_t(bytes));
}

namespace emulator {

// The blocks of a launch that are run, in order.
inline std::vector<int64_t> order_of_blocks(int64_t blocks) {
  const Machine& m = machine();
  const int64_t first = blocks - blocks / m.last_part;
  std::vector<int64_t> order(size_t(blocks - first));
  std::iota(order.begin(), order.end(), first);
  if (m.schedule == 1) std::reverse(order.begin(), order.end());
  if (m.schedule > 1) std::shuffle(order.begin(), order.end(), std::mt19937(m.schedule));
  return order;
}

// Returns an error or an empty string.
inline std::string run_blocks(int64_t blocks, int threads, int64_t shared_bytes) {
  Machine& m = machine();
  std::string error;
  for (const int64_t block : order_of_blocks(blocks)) {
    m.block = block;
    m.fibers.set = (m.fibers.set + 1) % kSets;
    ++m.blocks_of_set[m.fibers.set];
    std::vector<char>& shared = m.shared[m.fibers.set];
    shared.assign(size_t(shared_bytes + kGuardBytes), kPoison);
    give_order(&m.begun);
    error = run_block(threads);
    if (error.empty()) error = m.error;
    for (int64_t i = shared_bytes; i < int64_t(shared.size()) && error.empty(); ++i) {
      if (shared[i] != kPoison) error = "a write beyond the end of shared memory";
    }
    if (!error.empty()) break;
  }
  for (auto& of_set : m.ended) {
    for (char& ended : of_set) take_order(&ended);
  }
  return error;
}

}  // namespace emulator

// Runs all blocks, one after another. Returns 0, or 1 with machine().error set.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes, Stream,
           const Arguments&... arguments) {
  emulator::Machine& m = emulator::machine();
  if (blocks == 0) return 0;
  m.most_blocks = std::max(m.most_blocks, blocks);
  m.launched.insert(m.kernel = reinterpret_cast<void*>(kernel));
  if (!m.loaded.count(m.kernel)) m.error = "a kernel that was not loaded";
  if (shared_bytes > m.most_shared_bytes) m.error = "more shared memory than the device has";
  if (!m.error.empty()) return 1;
  if (m.on_launch && !m.on_launch(blocks, threads, shared_bytes)) return 0;
  m.body = [&] { kernel(arguments...); };
  {
    const emulator::Unwatched here;
    m.scheduler_identity = emulator::identity();
    m.error = emulator::run_blocks(blocks, threads, shared_bytes);
    if (!m.error.empty()) m.fibers.abandon_all();
  }
  return m.error.empty() ? 0 : 1;
}

}  // namespace hfla::cuda
