// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The inner loop of forward and backward: a recurrence over tokens, whose state stays in the
// first-level cache.
//
//     state = decay_i state + write_i values_iᵀ        state: (rows, columns)
//     out_i = stateᵀ read_i
//
// Causal linear attention is this with write = φ(k), values = v, read = φ(q); its gradients are the
// same recurrence with the roles exchanged. On a CPU it beats the chunked form with its matrix
// products: it does the fewest operations, needs no masking within a chunk, and keeps nothing but
// the state. What makes it fast is that a few tokens are folded into a row of the state while it is
// in registers, so that it is loaded and stored once for all of them.
#pragma once

#include "cpu/sequences/blocks.h"
#include "cpu/sequences/staging.h"

namespace hfla::HFLA_ISA {
namespace {

// What a sweep over the tokens does with the state.
enum class Role { write, read, write_and_read };
constexpr bool writes(Role role) { return role != Role::read; }
constexpr bool reads(Role role) { return role != Role::write; }

// The widest block, in vectors, and how many tokens a pass folds into it: so many that the
// registers are full, enough independent sums are under way, and weights and state are not loaded
// too often. Doubles are for comparisons, and have one width only.
template <class Acc>
constexpr int kMaxBlock = sizeof(Acc) == sizeof(double) ? 1
                          : kHasManyRegisters           ? 4
                                                        : 2;

constexpr int tokens_per_pass(int64_t block) {
  return kVectorBytes < 64 && block == kMaxBlock<float> ? 2 : 4;
}
static_assert(kRowMultiple % tokens_per_pass(1) == 0);

// The operands of the recurrence.
template <class Acc>
struct Scan {
  int64_t count;  // of tokens, a multiple of kRowMultiple
  int64_t rows;
  const Acc *read, *write;  // (count, rows), token stride `weight_stride`
  int64_t weight_stride;
  RowArray<const Acc> values;  // (count, columns)
  RowArray<Acc> out;           // (count, columns)
  const Acc* scale;            // (count,) of out; null: 1
  const Acc* decay;            // (count,); null: no decay
  Prefetch prefetch;
};

// Where in a list of prefetches a scan is, in units of 2^-16.
struct Pace {
  uint64_t position, step;
};

// For so many rows of the state, over and over.
HFLA_INLINE Pace pace_of(const Prefetch& prefetch, int64_t rows) {
  return {0, (static_cast<uint64_t>(prefetch.count) << 16) / static_cast<uint64_t>(max(1, rows))};
}

// No further than the second-level cache.
HFLA_INLINE void prefetch_next(const Prefetch& prefetch, Pace& pace) {
  const char* const pair = prefetch.pairs[pace.position >> 16];
  __builtin_prefetch(pair, 0, 2);
  __builtin_prefetch(pair + kCacheLine, 0, 2);
  pace.position += pace.step;
}

// Of the tokens [first, first + tokens) and the block of columns that begins at `column`.
template <int tokens, int block, class Acc>
HFLA_INLINE void store_out(const Scan<Acc>& scan, int64_t first, int64_t column,
                           const Vec<Acc> (&out)[tokens][block]) {
  HFLA_UNROLL
  for (int t = 0; t < tokens; ++t) {
    const Acc scale = scan.scale ? scan.scale[first + t] : Acc(1);
    Acc* const to = scan.out.data + (first + t) * scan.out.stride + column;
    HFLA_UNROLL
    for (int c = 0; c < block; ++c) store(to + c * kLanes<Acc>, out[t][c] * scale);
  }
}

// These tokens and columns.
template <Role role, bool decays, bool prefetches, int tokens, int block, class Acc>
HFLA_INLINE void fold(const Scan<Acc>& scan, int64_t first, int64_t column, Acc* state,
                      Pace& pace) {
  constexpr int64_t W = kLanes<Acc>;
  Vec<Acc> value[tokens][block], out[tokens][block], decay[tokens];
  HFLA_UNROLL
  for (int t = 0; t < tokens; ++t) {
    if constexpr (decays) decay[t] = broadcast(scan.decay[first + t]);
    HFLA_UNROLL
    for (int c = 0; c < block; ++c) {
      if constexpr (writes(role)) {
        value[t][c] = load(scan.values.data + (first + t) * scan.values.stride + column + c * W);
      }
      out[t][c] = Vec<Acc>{};
    }
  }
  const Acc* const write = scan.write + first * scan.weight_stride;
  const Acc* const read = scan.read + first * scan.weight_stride;
  const int64_t stride = scan.weight_stride;
  for (int64_t r = 0; r < scan.rows; ++r, state += block * W) {
    if constexpr (prefetches) prefetch_next(scan.prefetch, pace);
    Vec<Acc> row[block];
    HFLA_UNROLL
    for (int c = 0; c < block; ++c) row[c] = load(state + c * W);
    HFLA_UNROLL
    for (int t = 0; t < tokens; ++t) {
      HFLA_UNROLL
      for (int c = 0; c < block; ++c) {
        if constexpr (decays) row[c] *= decay[t];
        if constexpr (writes(role)) row[c] += write[t * stride + r] * value[t][c];
        if constexpr (reads(role)) out[t][c] += read[t * stride + r] * row[c];
      }
    }
    if constexpr (writes(role)) {
      HFLA_UNROLL
      for (int c = 0; c < block; ++c) store(state + c * W, row[c]);
    }
  }
  if constexpr (reads(role)) store_out(scan, first, column, out);
}

template <Role role, bool decays, bool prefetches, int block, class Acc>
HFLA_NOINLINE void scan_block(const Scan<Acc>& scan, int64_t column, Acc* state) {
  constexpr int tokens = tokens_per_pass(block);
  Pace pace = pace_of(scan.prefetch, scan.count / tokens * scan.rows);
  for (int64_t first = 0; first < scan.count; first += tokens) {
    fold<role, decays, prefetches, tokens, block>(scan, first, column, state, pace);
  }
}

template <bool prefetches, int block, class Acc>
void scan_block(Role role, const Scan<Acc>& scan, int64_t column, Acc* state) {
  constexpr Role both = Role::write_and_read;
  switch (role) {
    case Role::write_and_read:
      return scan.decay ? scan_block<both, true, prefetches, block>(scan, column, state)
                        : scan_block<both, false, prefetches, block>(scan, column, state);
    case Role::write:
      return scan.decay ? scan_block<Role::write, true, prefetches, block>(scan, column, state)
                        : scan_block<Role::write, false, prefetches, block>(scan, column, state);
    case Role::read:
      return scan_block<Role::read, false, prefetches, block>(scan, column, state);
  }
}

// Single vectors are what is left of a head, or a small one: nothing is prefetched for these.
template <int block, class Acc>
void scan_block(Role role, const Scan<Acc>& scan, int64_t column, Acc* state) {
  if constexpr (block > 1) {
    if (scan.prefetch.count > 0) return scan_block<true, block>(role, scan, column, state);
  }
  return scan_block<false, block>(role, scan, column, state);
}

template <class Acc>
void scan(Role role, Scan<Acc> scan, Columns columns, Acc* state) {
  for_each_block<kMaxBlock<Acc>>(Blocks<Acc>{state, scan.rows, columns, kMaxBlock<Acc>},
                                 [&](auto width, int64_t column, Acc* block) {
                                   scan_block<decltype(width)::value>(role, scan, column, block);
                                   scan.prefetch = {};
                                 });
}

}  // namespace
}  // namespace hfla::HFLA_ISA
