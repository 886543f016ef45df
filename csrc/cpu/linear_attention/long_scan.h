// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// The scan of scan.h for sequences of many tokens, whose sums do not drift.
//
// A float that adds up token by token rounds equal summands all alike: a million of them are off by
// a percent, where nothing is forgotten. So tokens are summed up in three levels, each of few
// summands: those of a chunk, from zero and in registers; the chunks of a window; and the windows,
// in double. Within a chunk no token waits for the state of the one before,
//
//     out_t = D_t stateᵀ read_t + Σ_{s ≤ t} d_ts ⟨read_t, write_s⟩ values_s,
//     state = D_n state + Σ_s d_ns write_s values_sᵀ,
//
// where d_ts is the decay of the tokens after s up to t, and D_t that of all up to t. Decays are
// summed as logarithms, for e^-1e-6 as a float is off by three percent of what it forgets.
#pragma once

#include "cpu/common/exp.h"
#include "cpu/common/sums_of_lanes.h"
#include "cpu/linear_attention/scan.h"
#include "cpu/sequences/token_scalars.h"

namespace hfla::HFLA_ISA {
namespace {

// With fewer tokens the plain scan is up to a third faster.
HFLA_INLINE bool is_long(const Plan& plan) { return plan.longest > kLongSequence; }
constexpr int64_t kLevels = 4;  // floats of Sums for a number

constexpr int64_t kChunk = 16;
constexpr int64_t kWindow = 256;  // rows, about
constexpr int kTile = 4;          // tokens, or rows of the state, that are computed together
static_assert(kTile == kRowMultiple && kChunk % kTile == 0);

// Numbers that tokens are added to, in any layout.
template <class Acc>
struct Sums {
  Acc* now;
  Acc* recent;      // what the window's tokens add
  double* settled;  // what was before the window, as it was before; null, as `recent`, where tokens
                    // are few

  Sums(Carver& carver, int64_t count, bool is_long)
      : now(carver.take<Acc>(count)),
        recent(is_long ? carver.take<Acc>(count) : nullptr),
        settled(is_long ? carver.take<double>(count) : nullptr) {}

  Sums from(int64_t offset) const {
    Sums rest = *this;
    rest.now += offset;
    if (recent) rest.recent += offset;
    if (recent) rest.settled += offset;
    return rest;
  }
};

// Begins from what is in `now`.
template <class Acc>
void begin_sums(int64_t count, Sums<Acc> sums) {
  if (!sums.recent) return;
  for (int64_t i = 0; i < count; ++i) sums.settled[i] = sums.now[i];
  __builtin_memset(sums.recent, 0, sizeof(Acc) * count);
}

// Ends a window, of which `decay` is left.
template <class Acc>
HFLA_NOINLINE void settle_sums(int64_t count, double decay, Sums<Acc> sums) {
  for (int64_t i = 0; i < count; ++i) {
    sums.settled[i] = decay * sums.settled[i] + sums.recent[i];
    sums.now[i] = static_cast<Acc>(sums.settled[i]);
    sums.recent[i] = 0;
  }
}

// How far a head's window is.
struct Window {
  int64_t rows;
  double log_decay;

  // log_decay_of: (more,) or null.
  template <class Acc>
  void add(int64_t more, const Acc* log_decay_of) {
    rows += more;
    if (log_decay_of) log_decay += sum_of_log_decays(more, log_decay_of);
  }
};

// Calls settle(the window's decay) at its end, or earlier if `now`.
template <class Settle>
HFLA_INLINE void end_window(Window& window, bool now, Settle settle) {
  if (window.rows < (now ? 1 : kWindow)) return;
  settle(exp(broadcast(window.log_decay))[0]);
  window = {0, 0};
}

// What the chunks of a segment are weighted with.
template <class Acc>
struct ChunkWeights {
  Acc* late;    // (rows, stride) write, decayed up to its chunk's end
  Acc* before;  // (rows,) D
  Acc* scores;  // (rows, kChunk)

  ChunkWeights(Carver& carver, int64_t rows, int64_t stride, bool is_long)
      : late(carver.take<Acc>(is_long * rows * stride)),
        before(carver.take<Acc>(is_long * rows)),
        scores(carver.take<Acc>(is_long * rows * kChunk)) {}
};

// scores[t][s] = ⟨read_t, write_s⟩, of tiles of `rows` numbers.
template <class Acc>
HFLA_INLINE void score_tile(const Scan<Acc>& scan, int64_t t0, int64_t s0, Acc* scores) {
  constexpr int64_t W = kLanes<Acc>;
  const Acc* const read = scan.read + t0 * scan.weight_stride;
  const Acc* const write = scan.write + s0 * scan.weight_stride;
  Vec<Acc> dots[kTile][kTile] = {};
  const auto add = [&](int64_t r, auto row) HFLA_INLINE_LAMBDA {
    Vec<Acc> w[kTile];
    HFLA_UNROLL
    for (int s = 0; s < kTile; ++s) w[s] = row(write + s * scan.weight_stride + r);
    HFLA_UNROLL
    for (int t = 0; t < kTile; ++t) {
      const Vec<Acc> x = row(read + t * scan.weight_stride + r);
      HFLA_UNROLL
      for (int s = 0; s < kTile; ++s) dots[t][s] += x * w[s];
    }
  };
  int64_t r = 0;
  for (; r + W <= scan.rows; r += W)
    add(r, [](const Acc* from) HFLA_INLINE_LAMBDA { return load(from); });
  if (r < scan.rows) {  // what is behind the last number may be anything
    add(r, [&](const Acc* from)
               HFLA_INLINE_LAMBDA { return first_lanes<Acc>(scan.rows - r, load(from)); });
  }
  for_sums_of_lanes<Acc>(
      dots, [&](int t, int s, Acc sum) HFLA_INLINE_LAMBDA { scores[t * kChunk + s] = sum; });
}

// d_ts of a chunk's tokens, and D_t.
template <class Acc>
HFLA_INLINE void decay_chunk(int64_t tokens, const Acc* log_decay, Acc (&d)[kChunk * kChunk],
                             Acc* before) {
  Acc sum = 0, sums[kChunk * kChunk] = {}, sums_before[kChunk] = {};
  for (int64_t t = 0; t < tokens; ++t) sums_before[t] = sum += log_decay[t];
  for (int64_t s = 0; s < tokens; ++s) {
    sum = 0;
    for (int64_t t = s + 1; t < tokens; ++t) sums[t * kChunk + s] = sum += log_decay[t];
  }
  constexpr int64_t W = kLanes<Acc>;
  for (int64_t i = 0; i < kChunk * kChunk; i += W) store(d + i, exp(load(sums + i)));
  for (int64_t t = 0; t < tokens; ++t) before[t] = exp(broadcast(sums_before[t]))[0];
}

// log_decay: (count,) or null.
template <class Acc>
HFLA_NOINLINE void weigh_chunks(Role role, const Scan<Acc>& scan, const Acc* log_decay,
                                ChunkWeights<Acc> to) {
  for (int64_t first = 0; first < scan.count; first += kChunk) {
    const int64_t tokens = min(kChunk, scan.count - first);
    Acc* const scores = to.scores + first * kChunk;
    for (int64_t t0 = 0; reads(role) && t0 < tokens; t0 += kTile) {
      for (int64_t s0 = 0; s0 <= t0; s0 += kTile)
        score_tile(scan, first + t0, first + s0, scores + t0 * kChunk + s0);
    }
    if (!log_decay) {
      for (int64_t t = 0; t < tokens; ++t) to.before[first + t] = 1;
      continue;
    }
    Acc d[kChunk * kChunk], bounded[kChunk];
    for (int64_t t = 0; t < tokens; ++t) bounded[t] = bounded_log_decay(log_decay[first + t]);
    decay_chunk(tokens, bounded, d, to.before + first);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t s = 0; reads(role) && s <= t; ++s) scores[t * kChunk + s] *= d[t * kChunk + s];
      const Acc decay = d[(tokens - 1) * kChunk + t];
      const int64_t row = (first + t) * scan.weight_stride;
      for (int64_t r = 0; r < scan.rows; r += kLanes<Acc>)
        store(to.late + row + r, decay * load(scan.write + row + r));
    }
  }
}

// out of kTile tokens from `first` on, of the chunk that begins at `chunk`.
template <bool prefetches, int block, class Acc>
HFLA_INLINE void read_tile(const Scan<Acc>& scan, const ChunkWeights<Acc>& weights, int64_t chunk,
                           int64_t first, int64_t column, const Acc* state, Pace& pace) {
  constexpr int64_t W = kLanes<Acc>;
  Vec<Acc> out[kTile][block] = {};
  const int64_t stride = scan.weight_stride;
  const Acc* const read = scan.read + first * stride;
  for (int64_t r = 0; r < scan.rows; ++r, state += block * W) {
    if constexpr (prefetches) prefetch_next(scan.prefetch, pace);
    Vec<Acc> row[block];
    HFLA_UNROLL
    for (int c = 0; c < block; ++c) row[c] = load(state + c * W);
    HFLA_UNROLL
    for (int t = 0; t < kTile; ++t) {
      HFLA_UNROLL
      for (int c = 0; c < block; ++c) out[t][c] += read[t * stride + r] * row[c];
    }
  }
  HFLA_UNROLL
  for (int t = 0; t < kTile; ++t) {
    HFLA_UNROLL
    for (int c = 0; c < block; ++c) out[t][c] *= weights.before[first + t];
  }
  const Acc* const scores = weights.scores + first * kChunk;
  const Acc* values = scan.values.data + chunk * scan.values.stride + column;
  for (int64_t s = chunk; s < first; ++s, values += scan.values.stride) {
    HFLA_UNROLL
    for (int c = 0; c < block; ++c) {
      const Vec<Acc> value = load(values + c * W);
      HFLA_UNROLL
      for (int t = 0; t < kTile; ++t) out[t][c] += scores[t * kChunk + s - chunk] * value;
    }
  }
  HFLA_UNROLL
  for (int s = 0; s < kTile; ++s, values += scan.values.stride) {
    HFLA_UNROLL
    for (int c = 0; c < block; ++c) {
      const Vec<Acc> value = load(values + c * W);
      HFLA_UNROLL
      for (int t = s; t < kTile; ++t) out[t][c] += scores[t * kChunk + first + s - chunk] * value;
    }
  }
  store_out(scan, first, column, out);
}

// `rows` rows of the state from r on, after the `tokens` tokens of a chunk.
template <int rows, int block, class Acc>
HFLA_INLINE void write_tile(const Scan<Acc>& scan, const Acc* late, int64_t chunk, int64_t tokens,
                            Acc keep, int64_t r, int64_t column, Acc* now, Acc* recent) {
  constexpr int64_t W = kLanes<Acc>;
  Vec<Acc> sum[rows][block] = {};
  late += chunk * scan.weight_stride + r;
  const Acc* values = scan.values.data + chunk * scan.values.stride + column;
  for (int64_t t = 0; t < tokens; ++t, late += scan.weight_stride, values += scan.values.stride) {
    HFLA_UNROLL
    for (int c = 0; c < block; ++c) {
      const Vec<Acc> value = load(values + c * W);
      HFLA_UNROLL
      for (int i = 0; i < rows; ++i) sum[i][c] += late[i] * value;
    }
  }
  HFLA_UNROLL
  for (int i = 0; i < rows; ++i) {
    HFLA_UNROLL
    for (int c = 0; c < block; ++c) {
      const int64_t at = ((r + i) * block + c) * W;
      store(now + at, keep * load(now + at) + sum[i][c]);
      store(recent + at, keep * load(recent + at) + sum[i][c]);
    }
  }
}

template <bool prefetches, int block, class Acc>
HFLA_NOINLINE void scan_long_block(Role role, const Scan<Acc>& scan,
                                   const ChunkWeights<Acc>& weights, int64_t column, Acc* now,
                                   Acc* recent) {
  const Acc* const late = scan.decay ? weights.late : scan.write;
  Pace pace = pace_of(scan.prefetch, scan.count / kTile * scan.rows);
  for (int64_t chunk = 0; chunk < scan.count; chunk += kChunk) {
    const int64_t tokens = min(kChunk, scan.count - chunk);
    for (int64_t first = chunk; reads(role) && first < chunk + tokens; first += kTile)
      read_tile<prefetches, block>(scan, weights, chunk, first, column, now, pace);
    const Acc keep = weights.before[chunk + tokens - 1];
    int64_t r = 0;
    for (; r + kTile <= scan.rows; r += kTile)
      write_tile<kTile, block>(scan, late, chunk, tokens, keep, r, column, now, recent);
    for (; r < scan.rows; ++r)
      write_tile<1, block>(scan, late, chunk, tokens, keep, r, column, now, recent);
  }
}

// A scan that writes.
template <class Acc>
void scan_long(Role role, Scan<Acc> scan, const ChunkWeights<Acc>& weights, Columns columns,
               Sums<Acc> state) {
  for_each_block<kMaxBlock<Acc>>(
      Blocks<Acc>{state.now, scan.rows, columns, kMaxBlock<Acc>},
      [&](auto its_width, int64_t column, Acc* now) {
        constexpr int width = decltype(its_width)::value;
        Acc* const recent = state.recent + (now - state.now);
        if (width > 1 && scan.prefetch.count > 0) {
          scan_long_block<(width > 1), width>(role, scan, weights, column, now, recent);
        } else {
          scan_long_block<false, width>(role, scan, weights, column, now, recent);
        }
        scan.prefetch = {};
      });
}

// As scan_normalizer, of a scan that writes. dots: (count,).
template <class Acc>
HFLA_NOINLINE void scan_long_normalizer(Role role, const Scan<Acc>& scan,
                                        const ChunkWeights<Acc>& weights, Sums<Acc> z, Acc* dots) {
  const Acc* const late = scan.decay ? weights.late : scan.write;
  const int64_t stride = scan.weight_stride;
  for (int64_t chunk = 0; chunk < scan.count; chunk += kChunk) {
    const int64_t tokens = min(kChunk, scan.count - chunk);
    const Acc keep = weights.before[chunk + tokens - 1];
    Vec<Acc> terms[kChunk] = {};
    for (int64_t c = 0; c < scan.rows; c += kLanes<Acc>) {
      const Vec<Acc> now = load(z.now + c);
      Vec<Acc> added{};
      for (int64_t t = 0; t < tokens; ++t) {
        if (reads(role)) terms[t] += load(scan.read + (chunk + t) * stride + c) * now;
        added += load(late + (chunk + t) * stride + c);
      }
      store(z.now + c, keep * now + added);
      store(z.recent + c, keep * load(z.recent + c) + added);
    }
    for (int64_t t = 0; reads(role) && t < tokens; ++t) {
      const Acc* const scores = weights.scores + (chunk + t) * kChunk;
      Acc dot = weights.before[chunk + t] * sum<Acc>(terms[t]);
      for (int64_t s = 0; s <= t; ++s) dot += scores[s];
      dots[chunk + t] = dot;
    }
  }
}

}  // namespace
}  // namespace hfla::HFLA_ISA
