// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Loader: starts the copies of what a visit reads, from device memory to where its tiles are. A run
// of 16 bytes that a tensor has whole goes there as it is, for walker_convert.cuh to make operands
// of in place; all other numbers that one fetches itself. Nothing here waits for what it copies.
#pragma once

#include "cuda/linear_attention/walker.cuh"

namespace hfla::cuda {

template <class Scalar, class S, class Fixed>
DEV Source<Scalar> Walker<Scalar, S, Fixed>::make_source(Which which) const {
  const bool is_read = this->is_read(which);
  const bool is_values = which != Which::read && which != Which::write;
  const Rows& rows = rows_of(which);
  const bool by_writer = !is_read && rows.per_query;
  const int64_t head = is_read     ? place_.head
                       : by_writer ? place_.kv_head * p_.group()
                                   : place_.kv_head;
  const int64_t begin = is_values ? place_.column_block * S::kColumns : row_begin_;
  const int64_t left = rows.columns - begin;
  const int64_t row = (place_.piece.batch * p_.T + place_.piece.begin) * p_.Hq + head;

  Source<Scalar> from{};
  from.width = is_values ? S::kColumns : (rows_here() + 15) / 16 * 16;
  from.columns = int(!rows.x.data || left < 0 ? 0 : left < from.width ? left : from.width);
  const bool has_extra = !is_values && rows.x.data && rows.extra != Extra::none;
  const int64_t extra = ExtraColumns::begin(rows.columns) - begin;
  from.extra = has_extra && extra >= 0 && extra < from.width ? int(extra) : kNoColumn;
  from.time = rows.x.time, from.dim = rows.x.dim;
  from.writer = by_writer ? rows.x.head : 0, from.writer_of_den = by_writer;
  from.x = static_cast<const Scalar*>(rows.x.data) + place_.piece.batch * rows.x.batch +
           place_.piece.begin * rows.x.time + head * rows.x.head + begin * rows.x.dim;
  from.den = rows.den ? rows.den + row : nullptr;
  from.den_grad = rows.den_grad ? rows.den_grad + row : nullptr;
  from.map = rows.map;
  const bool aligned = from.dim == 1 && from.time % kRun == 0 && from.writer % kRun == 0 &&
                       reinterpret_cast<uintptr_t>(from.x) % 16 == 0;
  from.whole = aligned ? from.columns / kRun : 0;
  return from;
}

template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::start(const Visit& visit) {
  static_assert(C <= S::kThreads);
  if (visit.chunk < place_.chunks) {
    const int token = thread_index(), tokens = tokens_of(visit.chunk);
    const int64_t t = place_.piece.begin + offset_of(visit.chunk) + token;
    const bool in_mask = !Fixed::kIsFixed && token < tokens && p_.key_mask;
    const bool masked = in_mask && !p_.key_mask[place_.piece.batch * p_.T + t];
    for_each_tile(visit, [&](Which which) { copy_rows(which, visit, tokens); });
    if (!Fixed::kIsFixed && visit.writer == 0) {
      if (p_.log_decay.data && token < tokens) {
        const float* const log_decay = static_cast<const float*>(p_.log_decay.data) +
                                       place_.piece.batch * p_.log_decay.batch +
                                       t * p_.log_decay.time + place_.kv_head * p_.log_decay.head;
        copies_.template copy<4>(shared_.log_decays(visit.read_stage) + token, log_decay);
      }
      if (token < C) shared_.present(visit.read_stage)[token] = token < tokens && !masked;
    }
  }
  copies_.close();
}

template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::copy_rows(Which which, const Visit& visit, int tokens) {
  const Source<Scalar>& from = shared_.source(which);
  const int64_t offset = offset_of(visit.chunk);
  const int stage = stage_of(which, visit), stride = stride_of(which);
  // What a fixed-size walk has as an argument needs no memory to keep it.
  const int64_t time = Fixed::kIsFixed ? rows_of(which).x.time : from.time;
  OwnRuns at(0, whole_runs(which));
  const Scalar* x = advance(from.x + at.column, offset + at.token, time);
  x += visit.writer * from.writer;
  Element* to = shared_.tile(which, stage) + at.token * stride + at.column;
  UNROLL_BY(4)
  for (int i = 0; has_run(i, at.token, tokens);
       ++i, at.token += at.step, x = advance(x, at.step, time), to += at.step * stride) {
    if (at.token < tokens) copies_.copy(raw(to), x);
  }
  const bool has_den = rows_of(which).den && (divides(which) || which == Which::read);
  const bool has_den_grad = rows_of(which).den_grad && may_have_den_grad(which);
  if ((!has_den && !has_den_grad) || thread_index() >= tokens) return;
  const auto copy = [&](float* to, const float* x) {
    x = advance(x, offset + thread_index(), p_.Hq);
    x = advance(x, visit.writer, from.writer_of_den);
    copies_.template copy<4>(to + thread_index(), x);
  };
  if (has_den) copy(shared_.dens(stage), from.den);
  if (has_den_grad) copy(shared_.den_grads(stage), from.den_grad);
}

// What the thread's part of out is the gradient of, pair by pair, for store_out.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::start_of() {
  UNROLL
  for (int half = 0; half < 2; ++half) {
    const Outs outs = make_outs(16 * warp_ + g_ + 8 * half);
    UNROLL
    for (int n = 0; n < kTilesC; ++n) {
      const int c = 8 * n + 2 * t_;
      if (outs.has_pair(c)) copies_.template copy<sizeof(Pair)>(copied_of(n, half), outs.of + c);
    }
  }
  copies_.close();
}

// Where the state was. No other thread looks there.
template <class Scalar, class S, class Fixed>
DEV typename Walker<Scalar, S, Fixed>::Pair* Walker<Scalar, S, Fixed>::copied_of(int n,
                                                                                 int half) const {
  static_assert(C * S::kColumns * sizeof(Scalar) <= decltype(shared_.state())::kBytes);
  Pair* const pairs = reinterpret_cast<Pair*>(shared_.state().data);
  return pairs + (half * kTilesC + n) * S::kThreads + thread_index();
}

}  // namespace hfla::cuda
