// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a task of the selective scan works on: a block of channels, which lie in the lanes of
// vectors, of one sequence after the other, a tile of tokens at a time.
//
// A tile is staged as rows of Acc, of its real tokens only: padding is not even read. Within a
// tile, a sum of the state is taken through all tokens before the next one's turn, so that it stays
// in a register.
#pragma once

#include "cpu/sequences/long_sums.h"
#include "cpu/sequences/staging.h"
#include "kernels/selective_scan.h"

namespace hfla::HFLA_ISA {
namespace {

constexpr int64_t kBlockChannels = 64;
constexpr int64_t kTileTokens = 16;

HFLA_INLINE int64_t channel_blocks(int64_t C) { return ceil_div(C, kBlockChannels); }

HFLA_INLINE Channels channel_block(int64_t C, int64_t block) {
  const int64_t begin = block * kBlockChannels;
  return {begin, min(kBlockChannels, C - begin)};
}

// The real tokens of a tile.
struct TileTokens {
  int64_t batch, begin, end;  // all of them
  int64_t count;
  int64_t times[kTileTokens];
};

HFLA_INLINE TileTokens tile_tokens(const SelectiveScanProblem& p, const Span& span, int64_t tile) {
  TileTokens tokens{span.batch, span.begin + tile * kTileTokens, 0, 0, {}};
  tokens.end = min(span.end, tokens.begin + kTileTokens);
  const bool* const keep = p.key_mask ? p.key_mask + span.batch * p.T : nullptr;
  for (int64_t time = tokens.begin; time < tokens.end; ++time) {
    if (!keep || keep[time]) tokens.times[tokens.count++] = time;
  }
  return tokens;
}

// The tokens' rows (count, kBlockChannels) of a tensor (B, T, C), zeros up to a whole vector.
template <class Scalar>
void stage_channels(const View& view, const TileTokens& tokens, Channels channels,
                    AccOf<Scalar>* to) {
  const Scalar* const from =
      static_cast<const Scalar*>(view.data) + tokens.batch * view.batch + channels.begin * view.dim;
  for (int64_t i = 0; i < tokens.count; ++i) {
    load_row(from + tokens.times[i] * view.time, view.dim, 0, channels.count,
             to + i * kBlockChannels);
  }
}

// Transposed, (N, kTileTokens), of a tensor (B, T, N). `row` has room for N, padded.
template <class Scalar>
void stage_sums(const View& view, const TileTokens& tokens, int64_t N, AccOf<Scalar>* row,
                AccOf<Scalar>* to) {
  const Scalar* const from = static_cast<const Scalar*>(view.data) + tokens.batch * view.batch;
  for (int64_t i = 0; i < tokens.count; ++i) {
    load_row(from + tokens.times[i] * view.time, view.dim, 0, N, row);
    for (int64_t n = 0; n < N; ++n) to[n * kTileTokens + i] = row[n];
  }
}

// Rows (N, kBlockChannels) of a contiguous (C, N), and back; zeros in unused lanes.
template <class Acc>
void stage_transposed(const void* data, Channels channels, int64_t N, Acc* to) {
  const Acc* const from = static_cast<const Acc*>(data) + channels.begin * N;
  for (int64_t n = 0; n < N; ++n) {
    Acc* const row = to + n * kBlockChannels;
    for (int64_t c = 0; c < channels.count; ++c) row[c] = from[c * N + n];
    for (int64_t c = channels.count; c < channels.padded<Acc>(); ++c) row[c] = 0;
  }
}

template <class Acc>
void write_transposed(const Acc* from, Channels channels, int64_t N, void* data) {
  Acc* const to = static_cast<Acc*>(data) + channels.begin * N;
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t c = 0; c < channels.count; ++c) to[c * N + n] = from[n * kBlockChannels + c];
  }
}

// A row of states (rows, C, N); null where there are none.
template <class Acc>
HFLA_INLINE Acc* state_of(const void* states, const SelectiveScanSizes& p, const Span& span) {
  if (!states) return nullptr;
  return const_cast<Acc*>(static_cast<const Acc*>(states)) + span.sequence * p.C * p.N;
}

// A state, or a gradient of one, as rows (N, kBlockChannels).
template <class Acc>
void stage_state(const void* states, const SelectiveScanSizes& p, const Span& span,
                 Channels channels, Acc* to) {
  if (states) {
    stage_transposed(state_of<Acc>(states, p, span), channels, p.N, to);
  } else {
    __builtin_memset(to, 0, sizeof(Acc) * static_cast<size_t>(p.N * kBlockChannels));
  }
}

// The block's rows of real tokens, to a contiguous (B, T, C), and zeros for the padding.
template <class Scalar>
void write_channels(const AccOf<Scalar>* from, const SelectiveScanProblem& p,
                    const TileTokens& tokens, Channels channels, void* data) {
  using Acc = AccOf<Scalar>;
  Scalar* const base = static_cast<Scalar*>(data) + tokens.batch * p.T * p.C + channels.begin;
  int64_t i = 0;
  for (int64_t time = tokens.begin; time < tokens.end; ++time) {
    Scalar* const to = base + time * p.C;
    if (i < tokens.count && tokens.times[i] == time) {
      const Acc* const row = from + i++ * kBlockChannels;
      for_each_vector<Acc>(0, channels.count, [&](int64_t c, int64_t count) HFLA_INLINE_LAMBDA {
        store_vector(to, 1, c, count, load(row + c));
      });
    } else {
      __builtin_memset(to, 0, sizeof(Scalar) * static_cast<size_t>(channels.count));
    }
  }
}

// Staged: what both directions read of a tile, and the channels' own numbers.
template <class Scalar>
struct ScanRows {
  using Acc = AccOf<Scalar>;
  Acc *A, *D;         // (N, kBlockChannels), (kBlockChannels,)
  Acc *state, *rest;  // (N, kBlockChannels); rest: of long sequences, what state has lost
  Acc *x, *dt, *dx;   // (kTileTokens, kBlockChannels); dx: dt x
  Acc* dts;           // (kBlockChannels,): the tile's sum of dt
  Acc *write, *read;  // (N, kTileTokens)
  Acc* row;           // (N,)

  ScanRows(Carver& carver, const SelectiveScanSizes& p)
      : A(carver.take<Acc>(p.N * kBlockChannels)),
        D(carver.take<Acc>(kBlockChannels)),
        state(carver.take<Acc>(p.N * kBlockChannels)),
        rest(carver.take<Acc>(p.N * kBlockChannels)),
        x(carver.take<Acc>(kTileTokens * kBlockChannels)),
        dt(carver.take<Acc>(kTileTokens * kBlockChannels)),
        dx(carver.take<Acc>(kTileTokens * kBlockChannels)),
        dts(carver.take<Acc>(kBlockChannels)),
        write(carver.take<Acc>(p.N * kTileTokens)),
        read(carver.take<Acc>(p.N * kTileTokens)),
        row(carver.take<Acc>(round_up(p.N, kLanes<Acc>))) {}

  void stage_block(const SelectiveScanProblem& p, Channels channels) {
    stage_transposed(p.A, channels, p.N, A);
    if (p.D) {
      stage_transposed(p.D, channels, 1, D);
    } else {
      __builtin_memset(D, 0, sizeof(Acc) * kBlockChannels);
    }
  }

  void stage_tile(const SelectiveScanProblem& p, const TileTokens& tokens, Channels channels) {
    stage_channels<Scalar>(p.x, tokens, channels, x);
    stage_channels<Acc>(p.dt, tokens, channels, dt);
    stage_sums<Scalar>(p.write, tokens, p.N, row, write);
    stage_sums<Scalar>(p.read, tokens, p.N, row, read);
    for (int64_t c = 0; c < channels.padded<Acc>(); c += kLanes<Acc>) {
      Vec<Acc> sum{};
      for (int64_t i = 0; i < tokens.count; ++i) {
        const int64_t at = i * kBlockChannels + c;
        store(dx + at, load(dt + at) * load(x + at));
        sum += load(dt + at);
      }
      store(dts + c, sum);
    }
  }

  void begin_state(const SelectiveScanProblem& p, const Span& span, Channels channels) {
    stage_state(p.initial_state, p, span, channels, state);
    __builtin_memset(rest, 0, sizeof(Acc) * static_cast<size_t>(p.N * kBlockChannels));
  }
};

// A sum of the state, and the tile's tokens that it is taken through: through each, or, of long
// sequences, at the end, with what they add from zero. Tokens come in either order.
template <bool is_long, class Acc>
struct TileSum {
  Vec<Acc> now, added{};

  HFLA_INLINE void decay(Vec<Acc> left) {
    now *= left;
    if constexpr (is_long) added *= left;
  }
  HFLA_INLINE void add(Vec<Acc> x) {
    now += x;
    if constexpr (is_long) added += x;
  }
  // `exponent` is of the whole tile; sum: what it was before.
  HFLA_INLINE void store_after(Vec<Acc> exponent, Acc* sum, Acc* rest) {
    if constexpr (is_long) {
      const Decay<Vec<Acc>> whole(exponent);
      Vec<Acc> lost = load(rest);
      now = load(sum);
      decay_and_add(now, lost, whole.left, whole.lost, added);
      store(rest, lost);
    }
    store(sum, now);
  }
};

// Calls body(n, c) for every sum and every vector of channels.
template <class Acc, class Body>
HFLA_INLINE void for_each_sum(int64_t N, Channels channels, Body body) {
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t c = 0; c < channels.padded<Acc>(); c += kLanes<Acc>) body(n, c);
  }
}

}  // namespace
}  // namespace hfla::HFLA_ISA
