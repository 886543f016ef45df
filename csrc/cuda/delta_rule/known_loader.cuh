// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a walk reads of a chunk (known_walk.cuh), on its way to shared memory while the chunk before
// is computed.
#pragma once

#include "cuda/delta_rule/known_chunk.cuh"

namespace hfla::cuda {

constexpr int kKnownStages = 2;

// A chunk in shared memory.
template <int K>
struct KnownStage {
  KnownRows<K> q, k;
  KnownRows<kKnownColumns> v;
  KnownUnits units;

  BOTH explicit KnownStage(SharedCarver carver) {
    carver.take_tile(q, kKnownTokens);
    carver.take_tile(k, kKnownTokens);
    carver.take_tile(v, kKnownTokens);
    units.data = carver.take<char>(KnownUnits::kBytes);
    bytes = carver.used();
  }
  int64_t bytes;
};

template <int K>
class KnownLoader {
 public:
  DEV KnownLoader(const KnownDeltaRule& p, int64_t sequence, int64_t head, int64_t first_column)
      : p_(p),
        head_(head),
        first_piece_(p.pieces.first_piece(sequence)),
        end_(p.pieces.sequence_end(sequence)),
        columns_(int(p.V - first_column < kKnownColumns ? p.V - first_column : kKnownColumns)),
        first_{sequence, p.pieces.cu_seqlens ? 0 : sequence, p.pieces.sequence_begin(sequence), 0},
        q_(at_piece<const BFloat16>(p.q, first_, head / p.q_group)),
        k_(at_piece<const BFloat16>(p.k, first_, head / p.k_group)),
        v_(at_piece<const BFloat16>(p.v, first_, head) + first_column) {}

  // The tokens of a chunk, from the sequence's first on.
  DEV int tokens_of(int64_t chunk) const {
    const int64_t left = end_ - first_.begin - chunk * kKnownTokens;
    return left < kKnownTokens ? int(left) : kKnownTokens;
  }

  DEV void start(int64_t chunk) {
    const KnownStage<K> to = stage(chunk);
    const int64_t first = chunk * kKnownTokens;
    const int tokens = tokens_of(chunk);
    copy_rows<K>(copies_, to.q, q_ + first * p_.q.time, p_.q.time, tokens);
    copy_rows<K>(copies_, to.k, k_ + first * p_.k.time, p_.k.time, tokens);
    copy_rows<kKnownColumns>(copies_, to.v, v_ + first * p_.v.time, p_.v.time, tokens, columns_);
    const KnownUnits units = p_.units_of(first_piece_ + chunk, head_);
    UNROLL
    for (int i = 0; i < (KnownUnits::kBytes / 16 + kKnownThreads - 1) / kKnownThreads; ++i) {
      const int at = 16 * (thread_index() + i * kKnownThreads);
      if (at < KnownUnits::kBytes) copies_.copy(to.units.data + at, units.data + at);
    }
    copies_.close();
  }

  // The thread's copies have arrived; after a barrier, those of all.
  DEV void wait() { copies_.wait<0>(); }

  DEV KnownStage<K> stage(int64_t chunk) const {
    const int64_t bytes = KnownStage<K>(SharedCarver(nullptr)).bytes;
    return KnownStage<K>(SharedCarver(shared_memory() + chunk % kKnownStages * bytes));
  }

 private:
  const KnownDeltaRule& p_;
  const int64_t head_, first_piece_, end_;
  const int columns_;
  const Piece first_;  // where the sequence begins
  const BFloat16 *const q_, *const k_, *const v_;
  CopyGroups copies_;
};

}  // namespace hfla::cuda
