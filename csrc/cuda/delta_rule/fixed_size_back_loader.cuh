// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What the walk back has in shared memory (fixed_size_back_walk.cuh), and who brings it there: a
// step before it is needed. Steps are chunks from the last to the first.
#pragma once

#include "cuda/delta_rule/fixed_size_place.cuh"

namespace hfla::cuda {

// For the warps that go from state to state.
template <int K>
struct BackKeyStage {
  FixedSizeRows<K> k, q;
  KeyUnit unit;
};
// For those that are a step ahead of them.
struct BackRowStage {
  FixedSizeRows<kFixedSizeColumns> dy;
  QueryUnit unit;
};
// What passes between both, of a warp's columns: A'ᵀ dy, as accumulators; f' ∘ dy and W, as
// operands.
struct BackStage {
  static constexpr int kSums = kFixedSizeTokens / 8, kOperands = kFixedSizeTokens / 16;
  static constexpr int kWords = (kSums + 2 * kOperands) * 32;  // of a warp's lanes
  static constexpr int kBytes = kFixedSizeColumns / 16 * kWords * int(sizeof(LaneWords));
  LaneWords* words;
  DEV LaneWords& sums(int n) const { return words[n * 32]; }
  DEV LaneWords& rows(int i) const { return words[(kSums + i) * 32]; }
  DEV LaneWords& gradients(int i) const { return words[(kSums + kOperands + i) * 32]; }
};

// Two of each, for steps by turns.
template <int K>
struct BackShared {
  static constexpr int kQAt = FixedSizeRows<K>::kBytes;
  static constexpr int kKeyUnitAt = 2 * kQAt;
  static constexpr int kRowsAt = kKeyUnitAt + KeyUnit::kBytes;
  static constexpr int kQueryUnitAt = kRowsAt + FixedSizeRows<kFixedSizeColumns>::kBytes;
  static constexpr int kPassedAt = kQueryUnitAt + QueryUnit::kBytes;
  static constexpr int kStageBytes = kPassedAt + BackStage::kBytes;
  static constexpr int kBytes = 2 * kStageBytes;

  DEV static char* stage(int step) { return shared_memory() + step % 2 * kStageBytes; }
  DEV static BFloat16* rows(char* at) { return reinterpret_cast<BFloat16*>(at); }

  DEV static BackKeyStage<K> keys(int step) {
    char* const at = stage(step);
    return {{rows(at)}, {rows(at + kQAt)}, {at + kKeyUnitAt}};
  }
  DEV static BackRowStage tokens(int step) {
    char* const at = stage(step);
    return {{rows(at + kRowsAt)}, {at + kQueryUnitAt}};
  }
  // Of the warp, and the other that has its columns.
  DEV static BackStage passed(int step) {
    const int warp = thread_index() / 32 % (kFixedSizeColumns / 16), lane = thread_index() % 32;
    LaneWords* const words = reinterpret_cast<LaneWords*>(stage(step) + kPassedAt);
    return {words + warp * BackStage::kWords + lane};
  }
};

// Starts copies of a step, and keeps nothing in registers from step to step.
template <int K>
class BackLoader {
  static constexpr int kThreads = kFixedSizeThreads / 2;  // the last of a block

 public:
  DEV BackLoader(const FixedSizeDeltaRule& p, const FixedSizePlace& place, CopyGroups& copies)
      : p_(p),
        place_(place),
        copies_(copies),
        thread_(anew(thread_index()) % kThreads),
        head_(anew(place.head)) {}

  DEV void start_keys(int step) {
    const BackKeyStage<K> to = BackShared<K>::keys(step);
    const int chunk = place_.chunks - 1 - step;
    const RowCopies<K, kThreads> rows(thread_);
    start(rows, to.k, p_.k, head_ / int(p_.k_group), chunk, 0);
    start(rows, to.q, p_.q, head_ / int(p_.q_group), chunk, 0);
    const KeyUnit unit = p_.key_unit(place_.first_chunk + chunk, head_);
    start_copies<KeyUnit::kBytes, kThreads>(copies_, to.unit.data, unit.data, thread_);
  }
  DEV void start_rows(int step) {
    const BackRowStage to = BackShared<K>::tokens(step);
    const int chunk = place_.chunks - 1 - step;
    const RowCopies<kFixedSizeColumns, kThreads> rows(thread_);
    if (place_.first_column + rows.column < p_.V) {
      start(rows, to.dy, p_.upstream.dy, head_, chunk, place_.first_column);
    }
    const QueryUnit unit = p_.query_unit(place_.first_chunk + chunk, head_);
    start_copies<QueryUnit::kBytes, kThreads>(copies_, to.unit.data, unit.data, thread_);
  }

 private:
  template <class Copies, class Rows>
  DEV void start(const Copies& rows, const Rows& to, const View& x, int head, int chunk,
                 int column) {
    const BFloat16* const from = place_.rows<const BFloat16>(x, head);
    const int64_t token = chunk * kFixedSizeTokens + rows.row;
    rows.start(copies_, to, from + token * x.time + column + rows.column, x.time,
               place_.tokens_of(chunk));
  }

  const FixedSizeDeltaRule& p_;
  const FixedSizePlace& place_;
  CopyGroups& copies_;
  const int thread_, head_;
};

}  // namespace hfla::cuda
