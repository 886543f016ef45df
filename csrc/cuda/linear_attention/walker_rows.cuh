// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// What a chunk of a walk reads: decays, and rows of tensors to tiles in shared memory.
#pragma once

#include "cuda/linear_attention/walker.cuh"

namespace hfla::cuda {

// By the first warp, every lane C / 32 tokens.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::load_decays() {
  if (!decay_.sums || warp_ != 0) return;
  constexpr int kEach = C / 32;
  const int lane = thread_index();
  double own[kEach], sum = 0;
  int own_resets[kEach], resets = 0;
  UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int token = lane * kEach + i;
    float g = 0;
    if (shared_.present[token]) {
      g = static_cast<const float*>(p_.log_decay.data)[place_.piece.batch * p_.log_decay.batch +
                                                       (chunk_ + token) * p_.log_decay.time +
                                                       place_.kv_head * p_.log_decay.head];
    }
    const bool reset = g <= kForgetsAll;
    own[i] = sum += reset ? 0 : g;
    own_resets[i] = resets += reset;
  }
  // Now those of the lanes before this one.
  const double all = sum;
  const int all_resets = resets;
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const double more = shuffle_up(sum, lanes);
    const int more_resets = shuffle_up(resets, lanes);
    if (lane >= lanes) sum += more, resets += more_resets;
  }
  sum -= all, resets -= all_resets;
  UNROLL
  for (int i = 0; i < kEach; ++i) {
    const double total = sum + own[i];
    const float high = float(total);
    shared_.decays[lane * kEach + i + 1] = {high, float(total - high), resets + own_resets[i]};
  }
  if (lane == 0) shared_.decays[0] = {0, 0, 0};
}

template <class Scalar, class S>
DEV typename Walker<Scalar, S>::Source Walker<Scalar, S>::make_source(const Rows& rows,
                                                                      int64_t head, int64_t begin,
                                                                      int most) const {
  const View& v = rows.x;
  const Scalar* const x = static_cast<const Scalar*>(v.data) + place_.piece.batch * v.batch +
                          chunk_ * v.time + head * v.head + begin * v.dim;
  const int64_t left = rows.columns - begin;
  Source source{rows,
                x,
                (place_.piece.batch * p_.T + chunk_) * p_.Hq + head,
                int(left < 0      ? 0
                    : left < most ? left
                                  : most),
                -1,
                false};
  if (rows.extra != Extra::none && left >= 0 && left < most) source.extra = int(left);
  if (!v.data) source.columns = 0, source.extra = -1;
  source.wide = v.dim == 1 && v.time % kRun == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  return source;
}

template <class Scalar, class S>
DEV bool Walker<Scalar, S>::has_whole_run(const Source& from, int token, int c) const {
  return token < C && from.wide && c + kRun <= from.columns && shared_.present[token];
}

// Columns [c, c + kRun) of a row, and zeros where it has none: `whole` where it has them all.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::convert_run(float (&to)[kRun], const Source& from,
                                        const Run<Scalar, kRun>& whole, int token, int c) const {
  const bool is_whole = has_whole_run(from, token, c);
  UNROLL
  for (int i = 0; i < kRun; ++i) to[i] = is_whole ? to_float(whole.x[i]) : 0;
  if (!shared_.present[token]) return;
  if (!is_whole) {
    UNROLL
    for (int i = 0; i < kRun; ++i) {
      if (c + i < from.columns) {
        to[i] = to_float(from.x[token * from.rows.x.time + (c + i) * from.rows.x.dim]);
      }
    }
  }
  const int64_t at = from.token0 + token * p_.Hq;
  if (from.rows.den) {
    const float scale = 1 / from.rows.den[at];
    UNROLL
    for (int i = 0; i < kRun; ++i) to[i] *= scale;
  } else {
    apply<Scalar>(from.rows.map, to);
  }
  if (is_whole) return;
  UNROLL
  for (int i = 0; i < kRun; ++i) {
    if (c + i >= from.columns) to[i] = 0;
    if (c + i == from.extra) {
      to[i] = from.rows.extra == Extra::one ? 1 : from.rows.den_grad[at];
    }
  }
}

// The first `columns` of a tile, a multiple of kRun.
template <class Scalar, class S>
template <class T>
DEV void Walker<Scalar, S>::load_tile(T& tile, const Source& from, int columns) {
  const int runs = columns / kRun;
  const int tokens_on = S::kThreads / runs, runs_on = S::kThreads % runs;  // to the next load
  struct Position {
    int token, run;
  };
  const auto next = [&](Position& at) {
    at.token += tokens_on, at.run += runs_on;
    if (at.run >= runs) at.run -= runs, ++at.token;
  };
  Position loading{thread_index() / runs, thread_index() % runs}, converting = loading;
  while (loading.token < C) {
    Run<Scalar, kRun> whole[kAhead];
    UNROLL
    for (int a = 0; a < kAhead; ++a, next(loading)) {
      if (has_whole_run(from, loading.token, loading.run * kRun)) {
        whole[a] = *reinterpret_cast<const Run<Scalar, kRun>*>(
            from.x + loading.token * from.rows.x.time + loading.run * kRun);
      }
    }
    UNROLL
    for (int a = 0; a < kAhead; ++a, next(converting)) {
      if (converting.token >= C) break;
      float x[kRun];
      convert_run(x, from, whole[a], converting.token, converting.run * kRun);
      tile.set_run(converting.token, converting.run * kRun, x);
    }
  }
}

// Columns from `begin` on, as many as the products of this walk use.
template <class Scalar, class S>
template <class T>
DEV void Walker<Scalar, S>::load_rows(T& tile, const Rows& rows, int64_t head, int64_t begin,
                                      int64_t left) {
  const int columns = left < R ? (int(left) + 15) / 16 * 16 : R;
  load_tile(tile, make_source(rows, head, begin, columns), columns);
}

// This block's columns, and the normaliser's behind them.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::load_values(int64_t head) {
  Source from = make_source(p_.values, head, place_.column_block * S::kColumns, S::kColumns);
  from.extra = -1;
  load_tile(shared_.values, from, S::kColumns);
  for (int token = thread_index(); token < C; token += S::kThreads) {
    for (int c = 0; c < 8; c += kRun) {
      float x[kRun] = {};
      if (c == 0 && has_normalizer()) x[0] = shared_.present[token] ? 1 : 0;
      shared_.values.set_run(token, S::kColumns + c, x);
    }
  }
}

}  // namespace hfla::cuda
