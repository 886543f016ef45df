// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a walk has in shared memory (fixed_size_walk.cuh), and who brings it there: keys a chunk
// before they are needed, and queries a chunk later, since outputs are a chunk behind.
#pragma once

#include "cuda/delta_rule/fixed_size_place.cuh"

namespace hfla::cuda {

constexpr int kFixedSizeLoaders = kFixedSizeThreads / 2;  // the last threads of a block

template <int K>
struct KeyStage {
  FixedSizeRows<K> k;
  FixedSizeRows<kFixedSizeColumns> v;
  KeyUnit unit;
};
template <int K>
struct QueryStage {
  FixedSizeRows<K> q;
  QueryUnit unit;
};
// What outputs need of a warp's columns: S and E, as operands.
template <int K>
struct StateStage {
  static constexpr int kWords = (K + kFixedSizeTokens) / 16 * 32;  // of a warp's lanes
  static constexpr int kBytes = kFixedSizeColumns / 16 * kWords * int(sizeof(LaneWords));
  LaneWords* words;
  DEV LaneWords& state(int i) const { return words[i * 32]; }
  DEV LaneWords& errors(int i) const { return words[(K / 16 + i) * 32]; }
};

// Two of each, for chunks by turns.
template <int K>
struct FixedSizeShared {
  static constexpr int kVAt = FixedSizeRows<K>::kBytes;
  static constexpr int kKeyUnitAt = kVAt + FixedSizeRows<kFixedSizeColumns>::kBytes;
  static constexpr int kQueriesAt = kKeyUnitAt + KeyUnit::kBytes;
  static constexpr int kQueryUnitAt = kQueriesAt + FixedSizeRows<K>::kBytes;
  static constexpr int kStatesAt = kQueryUnitAt + QueryUnit::kBytes;
  static constexpr int kStageBytes = kStatesAt + StateStage<K>::kBytes;
  static constexpr int kBytes = 2 * kStageBytes;

  DEV static char* stage(int chunk) { return shared_memory() + chunk % 2 * kStageBytes; }
  DEV static BFloat16* rows(char* at) { return reinterpret_cast<BFloat16*>(at); }

  DEV static KeyStage<K> keys(int chunk) {
    char* const at = stage(chunk);
    return {{rows(at)}, {rows(at + kVAt)}, {at + kKeyUnitAt}};
  }
  DEV static QueryStage<K> queries(int chunk) {
    char* const at = stage(chunk);
    return {{rows(at + kQueriesAt)}, {at + kQueryUnitAt}};
  }
  // For the warp, and the other that has its columns.
  DEV static StateStage<K> states(int chunk) {
    const int warp = thread_index() / 32 % (kFixedSizeColumns / 16), lane = thread_index() % 32;
    LaneWords* const words = reinterpret_cast<LaneWords*>(stage(chunk) + kStatesAt);
    return {words + warp * StateStage<K>::kWords + lane};
  }
};

template <int K>
class FixedSizeLoader {
  static constexpr int kThreads = kFixedSizeLoaders;

 public:
  DEV FixedSizeLoader(const FixedSizeDeltaRule& p, const FixedSizePlace& place)
      : p_(p),
        place_(place),
        thread_(thread_index() % kThreads),
        rows_(thread_),
        values_(thread_),
        q_(place.rows<const BFloat16>(p.q, place.head / int(p.q_group)) + rows_.row * p.q.time +
           rows_.column),
        k_(place.rows<const BFloat16>(p.k, place.head / int(p.k_group)) + rows_.row * p.k.time +
           rows_.column),
        v_(place.rows<const BFloat16>(p.v, place.head) + place.first_column +
           values_.row * p.v.time + values_.column),
        key_unit_(p.key_unit(place.first_chunk, place.head).data),
        query_unit_(p.query_unit(place.first_chunk, place.head).data),
        has_values_(place.first_column + values_.column < p.V) {}

  // Of one chunk after the other.
  DEV void start_keys(int chunk) {
    const KeyStage<K> to = FixedSizeShared<K>::keys(chunk);
    const int tokens = place_.tokens_of(chunk);
    rows_.start(copies_, to.k, k_, p_.k.time, tokens);
    if (has_values_) values_.start(copies_, to.v, v_, p_.v.time, tokens);
    start_unit<KeyUnit>(to.unit.data, key_unit_);
    k_ += kFixedSizeTokens * p_.k.time, v_ += kFixedSizeTokens * p_.v.time;
  }
  DEV void start_queries(int chunk) {
    const QueryStage<K> to = FixedSizeShared<K>::queries(chunk);
    rows_.start(copies_, to.q, q_, p_.q.time, place_.tokens_of(chunk));
    start_unit<QueryUnit>(to.unit.data, query_unit_);
    q_ += kFixedSizeTokens * p_.q.time;
  }

  DEV void close() { copies_.close(); }
  // The thread's copies have arrived; after a barrier, those of all.
  DEV void wait() { copies_.wait<0>(); }

 private:
  template <class Unit>
  DEV void start_unit(char* to, const char*& from) {
    start_copies<Unit::kBytes, kThreads>(copies_, to, from, thread_);
    from += p_.Hkv * kFixedSizeUnitBytes;
  }

  const FixedSizeDeltaRule& p_;
  const FixedSizePlace& place_;
  const int thread_;
  const RowCopies<K, kThreads> rows_;
  const RowCopies<kFixedSizeColumns, kThreads> values_;
  const BFloat16 *q_, *k_, *v_;
  const char *key_unit_, *query_unit_;
  const bool has_values_;
  CopyGroups copies_;
};

}  // namespace hfla::cuda
