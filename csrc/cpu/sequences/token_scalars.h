// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Tensors that have one number per token and head, as decays, for the rows of a segment.
#pragma once

#include "cpu/common/exp.h"
#include "cpu/sequences/traversal.h"

namespace hfla::HFLA_ISA {
namespace {

// The numbers, `absent` where the tensor or the token is none.
template <class Acc>
void stage_token_scalars(const Segment& segment, const View& view, Acc absent, Acc* to) {
  for_each_row<const Acc>(
      segment, view, RowsPer::token,
      [&](int64_t row, int64_t, int64_t, const Acc* from) { to[row] = *from; },
      [&](int64_t row) { to[row] = absent; });
}

// e^log_decay for every row, 1 where nothing is forgotten, and, where it is wanted, log_decay.
// Returns false if a decay would grow.
template <class Acc>
bool stage_decay(const Segment& segment, const View& log_decay, Acc* decay,
                 Acc* logarithm = nullptr) {
  stage_token_scalars<Acc>(segment, log_decay, 0, decay);
  if (logarithm) __builtin_memcpy(logarithm, decay, sizeof(Acc) * segment.padded_rows());
  bool valid = true;
  for (int64_t row = 0; row < segment.padded_rows(); ++row) valid &= !(decay[row] > 0);
  for (int64_t row = 0; row < segment.padded_rows(); row += kLanes<Acc>) {
    store(decay + row, exp(load(decay + row)));
  }
  return valid;
}

// e^g is 0 below, and sums and differences of such g are no infinities and no NaN.
template <class Acc>
HFLA_INLINE Acc bounded_log_decay(Acc log_decay) {
  return log_decay < -1e4 ? Acc(-1e4) : log_decay;
}

template <class Acc>
HFLA_INLINE double sum_of_log_decays(int64_t rows, const Acc* log_decay) {
  double sum = 0;
  for (int64_t row = 0; row < rows; ++row) sum += bounded_log_decay(log_decay[row]);
  return sum;
}

// Whether a state in a slot would grow: found before any changes, so that whoever catches the error
// still has the states of before. log_decay has `channels` numbers for a head.
template <class Acc>
HFLA_NOINLINE bool has_positive_log_decay(const Sequences& p, const SequenceSlots& slots,
                                          const View& log_decay, int64_t channels,
                                          const Threads& threads) {
  if (!log_decay.data) return false;
  bool found = false;
  const int64_t numbers = p.B * p.T * p.Hkv * channels;
  const int64_t workers = workers_for(threads, numbers);
  run_tasks(threads, workers, p.num_sequences * p.Hkv, [&](int64_t, int64_t i) {
    const Piece piece = whole_sequence(p, i / p.Hkv);
    if (slot_of(slots, piece.sequence) < 0) return;
    const bool* const keep = p.key_mask ? p.key_mask + piece.batch * p.T : nullptr;
    const Acc* const from = static_cast<const Acc*>(log_decay.data) +
                            piece.batch * log_decay.batch + i % p.Hkv * log_decay.head;
    Vec<Acc> largest{};
    for (int64_t time = piece.begin; time < piece.end; ++time) {
      if (keep && !keep[time]) continue;
      for_each_vector<Acc>(0, channels, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
        const Vec<Acc> x = load_vector(from + time * log_decay.time, log_decay.dim, c, count);
        largest = select(x > largest, x, largest);
      });
    }
    if (sum<Acc>(largest) > 0) __atomic_store_n(&found, true, __ATOMIC_RELAXED);
  });
  return found;
}

}  // namespace
}  // namespace hfla::HFLA_ISA
