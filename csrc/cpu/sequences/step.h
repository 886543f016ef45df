// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// One token for every batch row: what the steps of all recurrences share.
#pragma once

#include "cpu/common/memory.h"
#include "cpu/common/tasks.h"
#include "cpu/common/vec.h"

namespace hfla::HFLA_ISA {
namespace {

// Where a head's numbers begin, in a tensor with one token for every batch row.
template <class T>
HFLA_INLINE T* token_row(const View& view, int64_t batch, int64_t head) {
  return static_cast<T*>(view.data) + batch * view.batch + head * view.head;
}

// The slot with the state of a batch row; -1: it has none, or its token is padding.
template <class Problem>
HFLA_INLINE int64_t slot_of(const Problem& p, int64_t batch) {
  if (p.key_mask && !p.key_mask[batch]) return -1;
  return p.slots.state_indices ? p.slots.state_indices[batch] : batch;
}

// Whether a state would grow, of those that a step is about to change: found before it changes any,
// so that whoever catches the error still has the states of before. log_decay has `channels`
// numbers for each of `heads`.
template <class Acc, class Problem>
bool has_positive_log_decay(const Problem& p, const Threads& threads, int64_t heads,
                            int64_t channels) {
  if (!p.log_decay.data) return false;
  bool found = false;
  const int64_t tasks = p.B * heads;
  const int64_t workers = workers_for(threads, tasks * channels);
  run_tasks(threads, workers, tasks, [&](int64_t, int64_t i) {
    const int64_t batch = i / heads;
    if (slot_of(p, batch) < 0) return;
    const Acc* const from = token_row<const Acc>(p.log_decay, batch, i % heads);
    Vec<Acc> largest{};
    for_each_vector<Acc>(0, channels, [&](int64_t c, int64_t count) {
      const Vec<Acc> log_decay = load_vector(from, p.log_decay.dim, c, count);
      largest = select(log_decay > largest, log_decay, largest);
    });
    if (sum<Acc>(largest) > 0) __atomic_store_n(&found, true, __ATOMIC_RELAXED);
  });
  return found;
}

// What a row's state was before the token: `state` itself, or in the same place of `before`.
template <class Acc>
HFLA_INLINE const Acc* before_or(const Acc* state, const void* states, const void* before) {
  return before ? static_cast<const Acc*>(before) + (state - static_cast<const Acc*>(states))
                : state;
}

// The state of padding, which stays as it was.
template <class Acc>
HFLA_INLINE void keep_state(const Acc* from, Acc* state, int64_t count) {
  if (from != state) __builtin_memcpy(state, from, sizeof(Acc) * static_cast<size_t>(count));
}

// Where the columns are that come after `block` vectors of them from c on, in a state (K, V): the
// next ones, or the first of the next head. They are fetched meanwhile, row by row: a row of these
// is too short for the processor to foresee the others.
template <int block, class Acc>
HFLA_INLINE const Acc* next_columns(const Acc* state, int64_t c, int64_t K, int64_t V) {
  constexpr int64_t W = kLanes<Acc>;
  return c + 2 * block * W <= V ? state + c + block * W : state + K * V;
}
template <int block, class Acc>
HFLA_INLINE void fetch_row(const Acc* row) {
  HFLA_UNROLL
  for (int line = 0; line < block * kVectorBytes; line += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(row) + line);
  }
}

// Calls step(scratch, batch, head) for all heads of states. Every worker has one Scratch, which is
// made of a Carver and the problem. Returns whether there was memory for them.
template <class Scratch, class Problem, class Step>
HFLA_INLINE bool for_each_state(const Problem& p, const Threads& threads, Step step) {
  const int64_t tasks = p.B * p.Hkv;
  const int64_t workers = workers_for(threads, tasks * p.K * p.V);
  const int64_t bytes_each = bytes_needed<Scratch>(p);
  const Buffer buffer(workers * bytes_each);
  if (!buffer.data()) return false;
  run_tasks(threads, workers, tasks, [&](int64_t worker, int64_t i) {
    Carver carver(buffer.data() + worker * bytes_each);
    Scratch scratch(carver, p);
    step(scratch, i / p.Hkv, i % p.Hkv);
  });
  return true;
}

}  // namespace
}  // namespace hfla::HFLA_ISA
