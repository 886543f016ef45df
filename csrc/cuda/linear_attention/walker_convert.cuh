// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
//
// Convert: makes operands of a chunk's rows, in place, and sums of its decays. Feature maps and
// denominators are applied, absent tokens are zeros, and what the loader has not copied is fetched.
#pragma once

#include "cuda/linear_attention/walker.cuh"

namespace hfla::cuda {

// By the first warp, every lane C / 32 tokens.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::sum_decays() {
  if (!decay_.sums || warp_ != 0) return;
  constexpr int kEach = C / 32;
  const int lane = thread_index();
  double own[kEach], sum = 0;
  int own_resets[kEach], resets = 0;
  UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int token = lane * kEach + i;
    const float g = present(token) ? shared_.log_decays(visit_.read_stage)[token] : 0;
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
  DecaySum* const sums = shared_.decays();
  UNROLL
  for (int i = 0; i < kEach; ++i) {
    const double total = sum + own[i];
    const float high = float(total);
    sums[lane * kEach + i + 1] = {high, float(total - high), resets + own_resets[i]};
  }
  if (lane == 0) sums[0] = {0, 0, 0};
}

template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::convert() {
  const bool all_present = !p_.key_mask && tokens_of(visit_.chunk) == C;
  for_each_tile(visit_, [&](Which which) { convert_tile(which, all_present); });
  if (kTilesN > kTilesC && has(visit_, Which::values)) set_normalizer_columns();
  if (has_extra_rows()) set_extra_columns();
  if (Fixed::kFinds && has(visit_, Which::y)) find_extra_column();
}

template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::convert_tile(Which which, bool all_present) {
  if constexpr (Fixed::kIsFixed) {
    const bool is_mapped = which == Which::of  ? Fixed::kHasSecond
                           : which == Which::y ? false
                                               : (which == Which::values) == Fixed::kIsGradient;
    const bool is_operand = !is_mapped || (Fixed::kMap == FeatureMap::identity && !divides(which));
    if (!is_operand) convert_whole_runs<Fixed::kMap>(which);
    if (!all_present && !is_read(which)) erase_absent(which);
  } else {
    const FeatureMap map = shared_.source(which).map;
    const bool is_operand = std::is_same_v<Scalar, Element> && all_present && !divides(which) &&
                            map == FeatureMap::identity;
    if (!is_operand) {
      with_map(map, [&](auto map) { convert_whole_runs<decltype(map)::value>(which); });
    }
    fetch_other_runs(which);
  }
}

template <class Scalar, class S, class Fixed>
template <FeatureMap map>
DEV void Walker<Scalar, S, Fixed>::convert_whole_runs(Which which) {
  const int stage = stage_of(which, visit_), stride = stride_of(which);
  const bool divides = this->divides(which);
  const float* const dens = shared_.dens(stage);
  OwnRuns at(0, whole_runs(which));
  Element* to = shared_.tile(which, stage) + at.token * stride + at.column;
  UNROLL_BY(Fixed::kIsFixed ? kOwnRuns : 2)
  for (int i = 0; has_run(i, at.token, C); ++i, at.token += at.step, to += at.step * stride) {
    const Run<Scalar, kRun> run = *reinterpret_cast<const Run<Scalar, kRun>*>(raw(to));
    float x[kRun];
    UNROLL
    for (int i = 0; i < kRun; ++i) x[i] = apply<Scalar, map>(run.get(i));
    if (divides) {
      const float scale = reciprocal<Scalar>(dens[at.token]);
      UNROLL
      for (int i = 0; i < kRun; ++i) x[i] *= scale;
    }
    auto operands = make_run<Element>(x);
    // Where no token is, there may be anything.
    if (!Fixed::kIsFixed && !present(at.token)) operands = {};
    *reinterpret_cast<Run<Element, kRun>*>(to) = operands;
  }
}

// Zeros in whole runs past the end: in a fixed-size walk's last chunk alone.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::erase_absent(Which which) {
  OwnRuns at(0, whole_runs(which));
  const int stage = stage_of(which, visit_), stride = stride_of(which);
  NO_UNROLL
  for (; at.token < C; at.token += at.step) {
    if (present(at.token)) continue;
    Element* const to = shared_.tile(which, stage) + at.token * stride + at.column;
    *reinterpret_cast<Run<Element, kRun>*>(to) = {};
  }
}

// Zeros of columns past the end; and number by number what is next to the end, and tensors whose
// rows are not aligned or not contiguous.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::fetch_other_runs(Which which) {
  const Source<Scalar>& from = shared_.source(which);
  OwnRuns at(from.whole, from.width / kRun - from.whole);
  Element* to = shared_.tile(which, stage_of(which, visit_)) + at.token * stride_of(which);
  const int begin = at.column, end = begin + kRun;
  const bool has_extra = from.extra < end && begin < from.extra + ExtraColumns::kCount;
  NO_UNROLL
  for (; at.token < C; at.token += at.step, to += at.step * stride_of(which)) {
    if (!present(at.token) || (begin >= from.columns && !has_extra)) {
      *reinterpret_cast<Run<Element, kRun>*>(to + begin) = {};
      continue;
    }
    NO_UNROLL
    for (int c = begin; c < end; ++c) to[c] = from_float<Element>(element(which, at.token, c));
  }
}

template <class Scalar, class S, class Fixed>
DEV float Walker<Scalar, S, Fixed>::element(Which which, int token, int c) const {
  const Source<Scalar>& from = shared_.source(which);
  const int stage = stage_of(which, visit_);
  if (c < from.columns) {
    const int64_t row = (offset_of(visit_.chunk) + token) * from.time + visit_.writer * from.writer;
    const float x = apply<Scalar>(from.map, to_float(from.x[row + c * from.dim]));
    return divides(which) ? x * reciprocal<Scalar>(shared_.dens(stage)[token]) : x;
  }
  const int i = c - from.extra;
  if (i < 0 || i >= ExtraColumns::kCount) return 0;
  return extra_element(which, from.den_grad ? shared_.den_grads(stage)[token] : 1, i);
}
template <class Scalar, class S, class Fixed>
DEV float Walker<Scalar, S, Fixed>::extra_element(Which which, float x, int i) {
  return which == Which::read ? ExtraColumns::read<Operands>(x, i)
                              : ExtraColumns::write<Operands>(x, i);
}

// Behind this block's columns of values: ones, where there is a normaliser.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::set_normalizer_columns() {
  if (thread_index() >= C) return;
  for (int c = 0; c < 8; c += kRun) {
    float x[kRun] = {};
    if (c == 0 && has_normalizer()) x[0] = present(thread_index()) ? 1 : 0;
    shared_.values(visit_.write_stage).set_run(thread_index(), S::kColumns + c, x);
  }
}

// Behind the columns of what is read and written, the extra ones and zeros.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::set_extra_columns() {
  static_assert(!Fixed::kIsGradient || 2 * C <= S::kThreads);
  const Which which = thread_index() < C ? Which::read : Which::write;
  const int token = thread_index() % C;
  if (thread_index() >= 2 * C || !has(visit_, which)) return;
  if (Fixed::kFinds && which == Which::read) return;
  const float* const den_grad = rows_of(which).den_grad;
  float x = 0;
  if (present(token)) x = den_grad ? shared_.den_grads(stage_of(which, visit_))[token] : 1;
  set_extra(which, token, x);
}
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::set_extra(Which which, int token, float x) {
  float first[kRun] = {};
  UNROLL
  for (int i = 0; i < ExtraColumns::kCount; ++i) first[i] = extra_element(which, x, i);
  Element* const to =
      shared_.tile(which, stage_of(which, visit_)) + token * stride_of(which) + kStateRows;
  *reinterpret_cast<Run<Element, kRun>*>(to) = make_run<Element>(first);
  *reinterpret_cast<Run<Element, kRun>*>(to + kRun) = {};
}

// -⟨read, y⟩ of every token, whose runs some neighbours have. Each then has one of their tokens.
template <class Scalar, class S, class Fixed>
DEV void Walker<Scalar, S, Fixed>::find_extra_column() {
  const OwnRuns at(0, whole_runs(Which::y));
  const auto read = read_tile();
  const auto y = shared_.y(visit_.read_stage);
  const int own = at.column / kRun;
  float found = 0;
  UNROLL
  for (int i = 0; i < kOwnRuns; ++i) {
    const int token = at.token + i * at.step;
    const auto a = *reinterpret_cast<const Run<Element, kRun>*>(read.at(token, at.column));
    const auto b = *reinterpret_cast<const Run<Scalar, kRun>*>(y.at(token, at.column));
    float sum = 0;
    UNROLL
    for (int e = 0; e < kRun; ++e) sum -= a.get(e) * b.get(e);
    UNROLL
    for (int lanes = 1; lanes < S::kColumns / kRun; lanes *= 2) sum += shuffle_xor(sum, lanes);
    if (i == own) found = sum;
  }
  const int token = at.token + own * at.step;
  if (own >= kOwnRuns) return;
  set_extra(Which::read, token, present(token) ? found : 0);
  if (!present(token)) return;
  *advance(p_.found + place_.den, offset_of(visit_.chunk) + token, p_.Hq) = found;
}

}  // namespace hfla::cuda
