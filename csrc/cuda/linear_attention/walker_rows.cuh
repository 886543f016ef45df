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

// What a chunk reads and writes with, of one query head where these are per query. One loop for all
// three tiles: with a branch for every feature map, its code is long.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::load_tiles(int64_t writer_head, bool first_writer) {
  const Which begin = p_.reads && first_writer ? Which::read : Which::write;
  const Which end = p_.writes || p_.causal ? Which::end : Which::write;
  NO_UNROLL
  for (Which which = begin; which < end; which = Which(int(which) + 1)) {
    const Source from = make_source(which, writer_head);
    with_map(from.map, [&](auto map) { load_whole_runs<decltype(map)::value>(from); });
    load_other_runs(from);
  }
  if (first_writer && end == Which::end) load_normalizer_columns();
}

template <class Scalar, class S>
DEV typename Walker<Scalar, S>::Source Walker<Scalar, S>::make_source(Which which,
                                                                      int64_t writer_head) const {
  const bool is_values = which == Which::values;
  const Rows& rows = which == Which::read ? p_.read : is_values ? p_.values : p_.write;
  const int64_t head = which == Which::read                ? place_.head
                       : is_values && !p_.values.per_query ? place_.kv_head
                                                           : writer_head;
  const int64_t begin = is_values ? place_.column_block * S::kColumns : row_begin_;
  const int64_t left = rows.columns - begin, token = place_.piece.batch * p_.T + chunk_;

  Source from;
  from.to = is_values              ? shared_.values.data
            : which == Which::read ? shared_.read.data
                                   : shared_.write.data;
  from.stride = is_values ? shared_.values.kStride : shared_.read.kStride;
  from.width = is_values ? S::kColumns : (rows_here() + 15) / 16 * 16;
  from.columns = int(!rows.x.data || left < 0 ? 0 : left < from.width ? left : from.width);
  const bool has_extra = !is_values && rows.x.data && rows.extra != Extra::none;
  from.extra = has_extra && left >= 0 && left < from.width ? int(left) : -1;
  from.time = rows.x.time, from.dim = rows.x.dim;
  from.x = static_cast<const Scalar*>(rows.x.data) + place_.piece.batch * rows.x.batch +
           chunk_ * rows.x.time + head * rows.x.head + begin * rows.x.dim;
  from.den = rows.den ? rows.den + token * p_.Hq + head : nullptr;
  from.den_grad = rows.den_grad ? rows.den_grad + token * p_.Hq + head : nullptr;
  from.map = rows.map;
  from.wide =
      from.dim == 1 && from.time % kRun == 0 && reinterpret_cast<uintptr_t>(from.x) % 16 == 0;
  return from;
}

template <class Scalar, class S>
DEV bool Walker<Scalar, S>::has_whole_run(const Source& from, const OwnRuns& at) const {
  return !at.done() && from.wide && at.column() + kRun <= from.columns && shared_.present[at.token];
}

// The runs that the tensor has all of, for tokens that are there.
template <class Scalar, class S>
template <FeatureMap map>
DEV void Walker<Scalar, S>::load_whole_runs(const Source& from) {
  OwnRuns loading(0, from.width / kRun);
  while (!loading.done()) {
    OwnRuns storing = loading;
    Run<Scalar, kRun> runs[kAhead] = {};
    float dens[kAhead] = {};
    bool whole[kAhead];
    UNROLL
    for (int a = 0; a < kAhead; ++a, loading.next()) {
      whole[a] = has_whole_run(from, loading);
      if (!whole[a]) continue;
      runs[a] = *reinterpret_cast<const Run<Scalar, kRun>*>(from.x + loading.token * from.time +
                                                            loading.column());
      if (map == FeatureMap::identity && from.den) dens[a] = from.den[loading.token * p_.Hq];
    }
    UNROLL
    for (int a = 0; a < kAhead; ++a, storing.next()) {
      if (!whole[a]) continue;
      float x[kRun];
      UNROLL
      for (int i = 0; i < kRun; ++i) x[i] = apply<Scalar, map>(runs[a].get(i));
      if (map == FeatureMap::identity && from.den) {
        const float scale = reciprocal<Scalar>(dens[a]);
        UNROLL
        for (int i = 0; i < kRun; ++i) x[i] *= scale;
      }
      *reinterpret_cast<Run<Element, kRun>*>(from.to + storing.token * from.stride +
                                             storing.column()) = make_run<Element>(x);
    }
  }
}

// All others: zeros of absent tokens and of columns past the end; and number by number what is next
// to the end, and tensors whose rows are not aligned or not contiguous.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::load_other_runs(const Source& from) {
  const bool all_present = !p_.key_mask && chunk_ + C <= place_.piece.end;
  const int first = from.wide && all_present ? from.columns / kRun : 0;
  const int count = from.width / kRun - first;
  if (count == 0) return;
  NO_UNROLL
  for (OwnRuns at(first, count); !at.done(); at.next()) {
    if (has_whole_run(from, at)) continue;
    const int begin = at.column(), end = begin + kRun;
    Element* const to = from.to + at.token * from.stride;
    const bool has_extra = begin <= from.extra && from.extra < end;
    if (!shared_.present[at.token] || (begin >= from.columns && !has_extra)) {
      *reinterpret_cast<Run<Element, kRun>*>(to + begin) = {};
      continue;
    }
    NO_UNROLL
    for (int c = begin; c < end; ++c) to[c] = from_float<Element>(element(from, at.token, c));
  }
}

template <class Scalar, class S>
DEV float Walker<Scalar, S>::element(const Source& from, int token, int c) const {
  if (c < from.columns) {
    const float x = apply<Scalar>(from.map, to_float(from.x[token * from.time + c * from.dim]));
    return from.den ? x * reciprocal<Scalar>(from.den[token * p_.Hq]) : x;
  }
  if (c != from.extra) return 0;
  return from.den_grad ? from.den_grad[token * p_.Hq] : 1;
}

// Behind this block's columns of values: ones, where there is a normaliser.
template <class Scalar, class S>
DEV void Walker<Scalar, S>::load_normalizer_columns() {
  for (int token = thread_index(); token < C; token += S::kThreads) {
    for (int c = 0; c < 8; c += kRun) {
      float x[kRun] = {};
      if (c == 0 && has_normalizer()) x[0] = shared_.present[token] ? 1 : 0;
      shared_.values.set_run(token, S::kColumns + c, x);
    }
  }
}

}  // namespace hfla::cuda
