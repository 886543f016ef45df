// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// One pass over a block of a state's columns, which stays in the first-level cache:
//
//     state = d ∘ state + Σ_i write_i value_iᵀ        state: (rows, width vectors)
//     sum_j = stateᵀ read_j
//
// It writes what one block of tokens leaves, and reads for the next one: 3 multiply-adds per
// element of the state and token with the delta rule, 2 without.
#pragma once

#include "cpu/delta_rule/weights.h"

namespace hfla::HFLA_ISA {
namespace {

// How often in a tile of rows memory is asked for what comes next: often enough for all of it.
constexpr int kPrefetchesPerTile = kVectorBytes < 64 ? 2 : 4;

// Where in a list of prefetches the passes over a block of columns are, in units of 2^-12.
struct Pace {
  const char* const* pairs;
  uint32_t position, step;
};

// For one of `parts` blocks of columns: its share of the list, over so many tiles.
HFLA_INLINE Pace share_of(const Prefetch& prefetch, int64_t part, int64_t parts, int64_t tiles) {
  static const char nothing[kPairBytes] = {};
  static const char* const nowhere[] = {nothing};
  const int64_t share = prefetch.count / parts;
  if (share == 0) return {nowhere, 0, 0};
  return {prefetch.pairs + part * share, 0,
          static_cast<uint32_t>((share << 12) / (kPrefetchesPerTile * tiles))};
}

// Where nothing is prefetched.
struct NoPace {};
HFLA_INLINE void prefetch_some(NoPace) {}

// No further than the second-level cache.
HFLA_INLINE void prefetch_some(Pace& pace) {
  HFLA_UNROLL
  for (int i = 0; i < kPrefetchesPerTile; ++i, pace.position += pace.step) {
    const char* const pair = pace.pairs[pace.position >> 12];
    __builtin_prefetch(pair, 0, 2);
    __builtin_prefetch(pair + kCacheLine, 0, 2);
  }
}

// What a state decays by: nothing, one number, or one for every row or column.
enum class Shrink { none, whole, rows, columns };

// Of a state whose rows are channels.
constexpr Shrink shrink_of(Decays decays) {
  return decays == Decays::none       ? Shrink::none
         : decays == Decays::per_head ? Shrink::whole
                                      : Shrink::rows;
}

// The weights of one pass: pointers to places in tiles of so many numbers, one for every vector of
// rows.
template <class Acc>
struct PassWeights {
  const Acc *write, *read;
  const Acc* decay;  // of rows, in the tiles of the tokens that write; or of the block's columns
  Acc whole;
};

// A row is read from while the next one is updated: else its reads would wait for its chain of
// multiply-adds, and fill the processor's scheduler.
template <int writes, int reads, int width, int64_t tile_size, Shrink shrink, class Acc,
          class AnyPace>
HFLA_INLINE void pass(int64_t rows, PassWeights<Acc> at, Acc* state,
                      const Vec<Acc> (&value)[writes ? writes : 1][width],
                      Vec<Acc> (&sum)[reads ? reads : 1][width], AnyPace& pace) {
  constexpr int64_t W = kLanes<Acc>;
  constexpr bool overlaps = writes > 0 && reads > 0;
  constexpr int steps = writes > reads ? writes : reads;
  Vec<Acc> last[width];
  HFLA_UNROLL
  for (int c = 0; c < width; ++c) {
    last[c] = Vec<Acc>{};
    HFLA_UNROLL
    for (int j = 0; j < reads; ++j) sum[j][c] = Vec<Acc>{};
  }
  const Acc* of_last = at.read;
  const auto update = [&](int64_t r) HFLA_INLINE_LAMBDA {
    Vec<Acc> row[width];
    HFLA_UNROLL
    for (int c = 0; c < width; ++c) {
      row[c] = load(state + c * W);
      if constexpr (writes && shrink == Shrink::whole) row[c] *= at.whole;
      if constexpr (writes && shrink == Shrink::rows) row[c] *= at.decay[r];
      if constexpr (writes && shrink == Shrink::columns) row[c] *= load(at.decay + c * W);
    }
    HFLA_UNROLL
    for (int i = 0; i < steps; ++i) {
      HFLA_UNROLL
      for (int c = 0; i < writes && c < width; ++c) row[c] += at.write[i * W + r] * value[i][c];
      HFLA_UNROLL
      for (int j = 0; overlaps && j < reads; ++j) {
        if (j * writes / max(reads, 1) != i) continue;
        HFLA_UNROLL
        for (int c = 0; c < width; ++c) sum[j][c] += of_last[j * W] * last[c];
      }
    }
    HFLA_UNROLL
    for (int c = 0; writes > 0 && c < width; ++c) store(state + c * W, row[c]);
    HFLA_UNROLL
    for (int j = 0; !overlaps && j < reads; ++j) {
      HFLA_UNROLL
      for (int c = 0; c < width; ++c) sum[j][c] += at.read[j * W + r] * row[c];
    }
    HFLA_UNROLL
    for (int c = 0; c < width; ++c) last[c] = row[c];
    of_last = at.read + r;
    state += width * W;
  };
  for (int64_t first = 0; first < rows; first += W) {
    prefetch_some(pace);
    if (first + W <= rows) {
      for (int64_t r = 0; r < W; ++r) update(r);
    } else {
      for (int64_t r = 0; r < rows - first; ++r) update(r);
    }
    at.write += tile_size, at.read += tile_size;
    if constexpr (shrink == Shrink::rows) at.decay += tile_size;
  }
  HFLA_UNROLL
  for (int j = 0; overlaps && j < reads; ++j) {
    HFLA_UNROLL
    for (int c = 0; c < width; ++c) sum[j][c] += of_last[j * W] * last[c];
  }
}

}  // namespace
}  // namespace hfla::HFLA_ISA
